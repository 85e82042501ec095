"""Parts that several transformers share, in the mixed precision of `gpt2`.

Parameters are fp32, matrix products run in the compute dtype, softmax in fp32; the T x T attention matrix is
materialised. No dropout.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import tmojax.jax_setup  # noqa: F401


def attention_context(
    scores: Float[Array, "batch head query key"], value: Float[Array, "batch key head depth"], causal: bool
) -> Float[Array, "batch query width"]:
    """Softmax over scaled scores in fp32, and the weighted sum of the values (Vaswani et al., 2017, equation 1)."""
    batch, tokens, heads, depth = value.shape
    with jax.named_scope("probabilities"):
        scores = scores.astype(jnp.float32) * depth**-0.5
        if causal:
            seen = jnp.tril(jnp.ones((tokens, tokens), bool))
            scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
        probabilities = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    with jax.named_scope("context"):
        return jnp.einsum("bhqk,bkhd->bqhd", probabilities, value).reshape(batch, tokens, heads * depth)


class SelfAttention(nn.Module):
    """Self-attention with the full score matrix; queries, keys and values come from one product."""

    heads: int
    dtype: jnp.dtype
    causal: bool

    @nn.compact
    def __call__(self, x: Float[Array, "batch token width"]) -> Float[Array, "batch token width"]:
        batch, tokens, width = x.shape
        qkv = nn.Dense(3 * width, dtype=self.dtype, name="qkv")(x)
        parts = []
        for index, name in enumerate(("query", "key", "value")):
            with jax.named_scope(name):
                part = jax.lax.slice_in_dim(qkv, index * width, (index + 1) * width, axis=-1)
                parts.append(part.reshape(batch, tokens, self.heads, width // self.heads))
        query, key, value = parts
        with jax.named_scope("scores"):
            scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        return nn.Dense(width, dtype=self.dtype, name="proj")(attention_context(scores, value, self.causal))


class FeedForward(nn.Module):
    """Two dense layers with a GELU between them, in its tanh form or exact."""

    hidden: int
    dtype: jnp.dtype
    tanh_gelu: bool

    @nn.compact
    def __call__(self, x: Float[Array, "batch token width"]) -> Float[Array, "batch token width"]:
        hidden = nn.Dense(self.hidden, dtype=self.dtype, name="fc")(x)
        with jax.named_scope("gelu"):
            hidden = nn.gelu(hidden, approximate=self.tanh_gelu)
        return nn.Dense(x.shape[-1], dtype=self.dtype, name="proj")(hidden)


class PreNormBlock(nn.Module):
    """Pre-normalised transformer block on a fp32 residual stream."""

    heads: int
    hidden: int
    dtype: jnp.dtype
    causal: bool
    tanh_gelu: bool

    @nn.compact
    def __call__(self, x: Float[Array, "batch token width"]) -> Float[Array, "batch token width"]:
        attention = SelfAttention(self.heads, self.dtype, self.causal, name="attn")
        change = attention(nn.LayerNorm(dtype=self.dtype, name="ln1")(x))
        with jax.named_scope("attn.residual"):
            x = x + change
        feed_forward = FeedForward(self.hidden, self.dtype, self.tanh_gelu, name="mlp")
        change = feed_forward(nn.LayerNorm(dtype=self.dtype, name="ln2")(x))
        with jax.named_scope("mlp.residual"):
            return x + change
