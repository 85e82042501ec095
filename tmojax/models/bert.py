"""BERT in flax at its real sizes (Devlin et al., 2019), with both pre-training tasks, in the precision of `gpt2`.

Post-normalised blocks on a fp32 stream, exact GELU, tied decoder of masked tokens, which reads only the masked
positions. All sequences are full: no padding mask. No dropout.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.models.shapes import Description, check_heads, cross_entropy, parameter_shapes
from tmojax.models.transformer import FeedForward, SelfAttention


@dataclass(frozen=True)
class BertSize:
    """Blocks, width, heads, width of the feed-forward part, vocabulary, tokens, and masked tokens of a sequence.

    The model has positions for `positions` tokens, of which a sequence may use fewer.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    hidden: int = 3072
    vocabulary: int = 30522
    positions: int = 512
    sequence: int = 512
    masked: int = 77

    def check(self) -> None:
        check_heads(self.width, self.heads)
        if self.sequence > self.positions:
            raise InputError(
                f"model.sequence: {self.sequence} tokens are more than model.positions {self.positions}; lower it"
            )
        if self.masked > self.sequence:
            raise InputError(
                f"model.masked: {self.masked} tokens are more than model.sequence {self.sequence}; lower it"
            )

    def describe(self, batch: int, dtype: jnp.dtype) -> Description:
        """Mean cross entropy of masked tokens plus that of the next sentence.

        Batch, all int32: `tokens` and `segments` [batch, sequence], `masked` (positions) and `labels` [batch, masked],
        `follows` [batch], 0 or 1.
        """
        module = Bert(self, dtype)

        def loss(params, batch):
            inputs = batch["tokens"], batch["segments"], batch["masked"]
            words, follows = map(jnp.asarray, module.apply({"params": params}, *inputs))
            return cross_entropy(words, batch["labels"]) + cross_entropy(follows, batch["follows"])

        tokens = jax.ShapeDtypeStruct((batch, self.sequence), jnp.int32)
        masked = jax.ShapeDtypeStruct((batch, self.masked), jnp.int32)
        follows = jax.ShapeDtypeStruct((batch,), jnp.int32)
        shapes = {"tokens": tokens, "segments": tokens, "masked": masked, "labels": masked, "follows": follows}
        return loss, parameter_shapes(module, tokens, tokens, masked), shapes


BERT_SIZES = {
    "bert-base": BertSize(),
    "bert-large": BertSize(layers=24, width=1024, heads=16, hidden=4096),
}


class PostNormBlock(nn.Module):
    """Transformer block that normalises after each residual sum."""

    heads: int
    hidden: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "batch token width"]) -> Float[Array, "batch token width"]:
        change = SelfAttention(self.heads, self.dtype, causal=False, name="attn")(x)
        with jax.named_scope("attn.residual"):
            x = x + change
        x = nn.LayerNorm(name="ln1")(x)
        change = FeedForward(self.hidden, self.dtype, tanh_gelu=False, name="mlp")(x)
        with jax.named_scope("mlp.residual"):
            x = x + change
        return nn.LayerNorm(name="ln2")(x)


class Bert(nn.Module):
    """Logits of the masked tokens, and of whether the second sentence follows the first."""

    size: BertSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "batch token"],
        segments: Int[Array, "batch token"],
        masked: Int[Array, "batch place"],
    ) -> tuple[Float[Array, "batch place word"], Float[Array, "batch 2"]]:
        size = self.size
        embed = nn.Embed(size.vocabulary, size.width, dtype=self.dtype, name="word")
        segment = nn.Embed(2, size.width, name="segment")
        position = self.param("position", nn.initializers.normal(0.02), (size.positions, size.width))
        with jax.named_scope("embedding"):
            x = embed(tokens).astype(jnp.float32) + segment(segments) + position[: tokens.shape[1]]
        x = nn.LayerNorm(name="ln")(x)
        for layer in range(size.layers):
            x = PostNormBlock(size.heads, size.hidden, self.dtype, name=f"h{layer}")(x)
        with jax.named_scope("masked"):
            words = jnp.take_along_axis(x, masked[..., None], axis=1)
        words = nn.Dense(size.width, dtype=self.dtype, name="transform")(words)
        with jax.named_scope("transform.gelu"):
            words = nn.gelu(words, approximate=False)
        words = nn.LayerNorm(dtype=self.dtype, name="transform_ln")(words)
        bias = self.param("word_bias", nn.initializers.zeros, (size.vocabulary,))
        with jax.named_scope("logits"):
            words = embed.attend(words) + bias.astype(self.dtype)
        first = nn.Dense(size.width, dtype=self.dtype, name="pooler")(x[:, 0])
        with jax.named_scope("pooler.tanh"):
            first = jnp.tanh(first)
        return words, nn.Dense(2, dtype=self.dtype, name="next_sentence")(first)
