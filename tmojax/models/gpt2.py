"""GPT-2 in flax at its real sizes (Radford et al., 2019), written as mixed-precision training usually has it.

Parameters are fp32; matrix products run in the compute dtype; layer normalisation, the residual stream, softmax and the
cross entropy are fp32; GELU is the tanh form; the T x T attention matrix is materialised; the embedding is tied.
Nothing here allocates: shapes come from `jax.eval_shape`.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

import tmojax.jax_setup  # noqa: F401


@dataclass(frozen=True)
class GPT2Size:
    """Size of a GPT-2: blocks, width of the residual stream, attention heads, vocabulary and context length."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    sequence: int = 1024


class Attention(nn.Module):
    """Causal self-attention with the full score matrix."""

    size: GPT2Size
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "batch token width"]) -> Float[Array, "batch token width"]:
        batch, tokens, width = x.shape
        heads, depth = self.size.heads, width // self.size.heads
        qkv = nn.Dense(3 * width, dtype=self.dtype, name="qkv")(x)
        parts = []
        for index, name in enumerate(("query", "key", "value")):
            with jax.named_scope(name):
                part = jax.lax.slice_in_dim(qkv, index * width, (index + 1) * width, axis=-1)
                parts.append(part.reshape(batch, tokens, heads, depth))
        query, key, value = parts
        with jax.named_scope("scores"):
            scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        with jax.named_scope("probabilities"):
            scores = scores.astype(jnp.float32) * depth**-0.5
            causal = jnp.tril(jnp.ones((tokens, tokens), bool))
            scores = jnp.where(causal, scores, jnp.finfo(jnp.float32).min)
            probabilities = jax.nn.softmax(scores, axis=-1).astype(self.dtype)
        with jax.named_scope("context"):
            context = jnp.einsum("bhqk,bkhd->bqhd", probabilities, value).reshape(batch, tokens, width)
        return nn.Dense(width, dtype=self.dtype, name="proj")(context)


class MLP(nn.Module):
    """Two dense layers with a GELU between them."""

    size: GPT2Size
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "batch token width"]) -> Float[Array, "batch token width"]:
        hidden = nn.Dense(4 * self.size.width, dtype=self.dtype, name="fc")(x)
        with jax.named_scope("gelu"):
            hidden = nn.gelu(hidden, approximate=True)
        return nn.Dense(self.size.width, dtype=self.dtype, name="proj")(hidden)


class Block(nn.Module):
    """Pre-normalised transformer block on a fp32 residual stream."""

    size: GPT2Size
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "batch token width"]) -> Float[Array, "batch token width"]:
        change = Attention(self.size, self.dtype, name="attn")(nn.LayerNorm(dtype=self.dtype, name="ln1")(x))
        with jax.named_scope("attn.residual"):
            x = x + change
        change = MLP(self.size, self.dtype, name="mlp")(nn.LayerNorm(dtype=self.dtype, name="ln2")(x))
        with jax.named_scope("mlp.residual"):
            return x + change


class GPT2(nn.Module):
    """Tokens to logits; the output projection is the transposed token embedding."""

    size: GPT2Size
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens: Int[Array, "batch token"]) -> Float[Array, "batch token vocabulary"]:
        embed = nn.Embed(self.size.vocabulary, self.size.width, dtype=self.dtype, name="wte")
        position = self.param("wpe", nn.initializers.normal(0.01), (self.size.sequence, self.size.width))
        with jax.named_scope("embedding"):
            x = embed(tokens).astype(jnp.float32) + position[: tokens.shape[1]]
        for layer in range(self.size.layers):
            x = Block(self.size, self.dtype, name=f"h{layer}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="lnf")(x)
        with jax.named_scope("logits"):
            return embed.attend(x)


def next_token_loss(model: nn.Module):
    """Return `loss(params, batch)`: mean next-token cross entropy on fp32 logits.

    `batch["tokens"]` is int32 of shape [batch, sequence + 1]; positions 0..T-1 predict positions 1..T.
    """

    def loss(params, batch):
        tokens = batch["tokens"]
        logits = jnp.asarray(model.apply({"params": params}, tokens[:, :-1]))
        with jax.named_scope("loss"):
            return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()

    return loss
