"""GPT-2 in flax at its real sizes (Radford et al., 2019), written as mixed-precision training usually has it.

Parameters are fp32; matrix products run in the compute dtype; layer normalisation, the residual stream, softmax and the
cross entropy are fp32; GELU is the tanh form; the T x T attention matrix is materialised; the embedding is tied.
Nothing here allocates: shapes come from `jax.eval_shape`.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import tmojax.jax_setup  # noqa: F401
from tmojax.models.shapes import Description, check_heads, cross_entropy, parameter_shapes
from tmojax.models.transformer import PreNormBlock


@dataclass(frozen=True)
class GPT2Size:
    """Size of a GPT-2: blocks, width of the residual stream, attention heads, vocabulary and context length."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    sequence: int = 1024

    def check(self) -> None:
        check_heads(self.width, self.heads)

    def describe(self, batch: int, dtype: jnp.dtype) -> Description:
        return next_token(GPT2(self, dtype), batch, self.sequence)


GPT2_SIZES = {
    "gpt2": GPT2Size(),
    "gpt2-medium": GPT2Size(layers=24, width=1024, heads=16),
    "gpt2-large": GPT2Size(layers=36, width=1280, heads=20),
    "gpt2-xl": GPT2Size(layers=48, width=1600, heads=25),
}


class GPT2(nn.Module):
    """Tokens to logits; the output projection is the transposed token embedding."""

    size: GPT2Size
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens: Int[Array, "batch token"]) -> Float[Array, "batch token vocabulary"]:
        size = self.size
        embed = nn.Embed(size.vocabulary, size.width, dtype=self.dtype, name="wte")
        position = self.param("wpe", nn.initializers.normal(0.01), (size.sequence, size.width))
        with jax.named_scope("embedding"):
            x = embed(tokens).astype(jnp.float32) + position[: tokens.shape[1]]
        for layer in range(size.layers):
            block = PreNormBlock(size.heads, 4 * size.width, self.dtype, causal=True, tanh_gelu=True, name=f"h{layer}")
            x = block(x)
        x = nn.LayerNorm(dtype=self.dtype, name="lnf")(x)
        with jax.named_scope("logits"):
            return embed.attend(x)


def next_token(model: nn.Module, batch: int, sequence: int) -> Description:
    """Mean next-token cross entropy on fp32 logits.

    `batch["tokens"]` is int32 of shape [batch, sequence + 1]; positions 0..T-1 predict positions 1..T.
    """

    def loss(params, batch):
        tokens = batch["tokens"]
        return cross_entropy(jnp.asarray(model.apply({"params": params}, tokens[:, :-1])), tokens[:, 1:])

    inputs = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    tokens = jax.ShapeDtypeStruct((batch, sequence + 1), jnp.int32)
    return loss, parameter_shapes(model, inputs), {"tokens": tokens}
