"""Llama in flax at its real sizes (Touvron et al., 2023), in the same mixed precision as `gpt2`.

RMS normalisation, rotary positions, SwiGLU, no biases, untied output projection; the T x T attention matrix is
materialised. Nothing here allocates.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.models.gpt2 import next_token
from tmojax.models.shapes import Description, check_heads
from tmojax.models.transformer import attention_context


@dataclass(frozen=True)
class LlamaSize:
    """Size of a Llama: blocks, width, attention heads, width of the feed-forward part, vocabulary, context length."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    hidden: int = 11008
    vocabulary: int = 32000
    sequence: int = 2048

    def check(self) -> None:
        check_heads(self.width, self.heads)
        if self.width // self.heads % 2:
            raise InputError(
                f"model.heads: a head is {self.width // self.heads} wide, but rotary positions need an even width; "
                f"choose another divisor of model.width {self.width}"
            )

    def describe(self, batch: int, dtype: jnp.dtype) -> Description:
        return next_token(Llama(self, dtype), batch, self.sequence)


LLAMA_SIZES = {
    "llama-7b": LlamaSize(),
    "llama-13b": LlamaSize(layers=40, width=5120, heads=40, hidden=13824),
}


def rotate(x: Float[Array, "batch token head depth"]) -> Float[Array, "batch token head depth"]:
    """Rotary position embedding in fp32 (Su et al., 2021, equation 34), halves instead of pairs."""
    tokens, depth = x.shape[1], x.shape[-1]
    frequency = 10000.0 ** (-jnp.arange(0, depth, 2, dtype=jnp.float32) / depth)
    angle = jnp.arange(tokens, dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with the full score matrix."""

    size: LlamaSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "batch token width"]) -> Float[Array, "batch token width"]:
        batch, tokens, width = x.shape
        heads, depth = self.size.heads, width // self.size.heads

        def project(name):
            return nn.Dense(width, use_bias=False, dtype=self.dtype, name=name)(x).reshape(batch, tokens, heads, depth)

        query, key, value = project("q"), project("k"), project("v")
        with jax.named_scope("rotary_q"):
            query = rotate(query)
        with jax.named_scope("rotary_k"):
            key = rotate(key)
        with jax.named_scope("scores"):
            scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        context = attention_context(scores, value, causal=True)
        return nn.Dense(width, use_bias=False, dtype=self.dtype, name="out")(context)


class MLP(nn.Module):
    """SwiGLU: a gated feed-forward layer."""

    size: LlamaSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "batch token width"]) -> Float[Array, "batch token width"]:
        gate = nn.Dense(self.size.hidden, use_bias=False, dtype=self.dtype, name="gate")(x)
        up = nn.Dense(self.size.hidden, use_bias=False, dtype=self.dtype, name="up")(x)
        with jax.named_scope("swiglu"):
            hidden = nn.silu(gate) * up
        return nn.Dense(self.size.width, use_bias=False, dtype=self.dtype, name="down")(hidden)


class Block(nn.Module):
    """Pre-normalised transformer block on a fp32 residual stream."""

    size: LlamaSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "batch token width"]) -> Float[Array, "batch token width"]:
        change = Attention(self.size, self.dtype, name="attn")(nn.RMSNorm(dtype=self.dtype, name="norm1")(x))
        with jax.named_scope("attn.residual"):
            x = x + change
        change = MLP(self.size, self.dtype, name="mlp")(nn.RMSNorm(dtype=self.dtype, name="norm2")(x))
        with jax.named_scope("mlp.residual"):
            return x + change


class Llama(nn.Module):
    """Tokens to logits."""

    size: LlamaSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens: Int[Array, "batch token"]) -> Float[Array, "batch token vocabulary"]:
        embed = nn.Embed(self.size.vocabulary, self.size.width, dtype=self.dtype, name="embed")
        with jax.named_scope("embedding"):
            x = embed(tokens).astype(jnp.float32)
        for layer in range(self.size.layers):
            x = Block(self.size, self.dtype, name=f"h{layer}")(x)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        return nn.Dense(self.size.vocabulary, use_bias=False, dtype=self.dtype, name="logits")(x)
