"""Conformer encoders in flax at the sizes of their paper (Gulati et al., 2020, table 1), in the precision of `gpt2`.

Convolutional subsampling by four, then blocks of half a feed-forward layer, self-attention with relative positions,
convolution with batch normalisation (statistics of the batch, running ones left out), half a feed-forward layer. The
loss is the cross entropy of one label per frame: the paper's transducer, a small recurrent network, is left out. Full
utterances, no padding mask; no dropout.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.models.convolution import BatchNorm
from tmojax.models.shapes import Description, check_heads, cross_entropy, parameter_shapes
from tmojax.models.transformer import attention_context

SHORTEST = 7  # what two windows of 3 with stride 2 need


@dataclass(frozen=True)
class ConformerSize:
    """Blocks, width, heads, width of the depthwise kernel, labels, frames (10 ms each) and filters of the input."""

    layers: int = 17
    width: int = 512
    heads: int = 8
    kernel: int = 32
    labels: int = 1024
    frames: int = 1600
    filters: int = 80

    def check(self) -> None:
        check_heads(self.width, self.heads)
        if self.width % 2:
            raise InputError(
                f"model.width: {self.width} is odd, but positions are pairs of sine and cosine; make it even"
            )
        for field, value in (("frames", self.frames), ("filters", self.filters)):
            if value < SHORTEST:
                raise InputError(
                    f"model.{field}: nothing of {value} is left after subsampling; take at least {SHORTEST}"
                )

    def describe(self, batch: int, dtype: jnp.dtype) -> Description:
        """Batch: `frames` fp32 [batch, frame, filter], `labels` int32 [batch, frame after subsampling]."""
        module = Conformer(self, dtype)

        def loss(params, batch):
            return cross_entropy(jnp.asarray(module.apply({"params": params}, batch["frames"])), batch["labels"])

        frames = jax.ShapeDtypeStruct((batch, self.frames, self.filters), jnp.float32)
        steps = ((self.frames - 1) // 2 - 1) // 2
        labels = jax.ShapeDtypeStruct((batch, steps), jnp.int32)
        return loss, parameter_shapes(module, frames), {"frames": frames, "labels": labels}


CONFORMER_SIZES = {
    "conformer-s": ConformerSize(layers=16, width=144, heads=4),
    "conformer-m": ConformerSize(layers=16, width=256, heads=4),
    "conformer-l": ConformerSize(),
}


def relative_positions(steps: int, width: int) -> Float[Array, "distance width"]:
    """Sines and cosines of the distances steps - 1 .. 1 - steps (Vaswani et al., 2017, section 3.5)."""
    distance = jnp.arange(steps - 1, -steps, -1, dtype=jnp.float32)
    angle = distance[:, None] * 10000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    return jnp.concatenate((jnp.sin(angle), jnp.cos(angle)), axis=-1)


def by_key(scores: Float[Array, "batch head query distance"]) -> Float[Array, "batch head query key"]:
    """Scores by distance to scores by key: row q is shifted by q (Dai et al., 2019, appendix B)."""
    batch, heads, steps, distances = scores.shape
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (1, 0)))
    shifted = padded.reshape(batch, heads, distances + 1, steps)[:, :, 1:]
    return shifted.reshape(batch, heads, steps, distances)[..., :steps]


class RelativeAttention(nn.Module):
    """Self-attention whose scores depend on content and distance (Dai et al., 2019, section 3.3)."""

    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch step width"], positions: Float[Array, "distance width"]
    ) -> Float[Array, "batch step width"]:
        width = x.shape[-1]
        heads = (self.heads, width // self.heads)
        query, key, value = (
            nn.Dense(width, dtype=self.dtype, name=name)(x).reshape(*x.shape[:2], *heads) for name in ("q", "k", "v")
        )
        distance = nn.Dense(width, use_bias=False, dtype=self.dtype, name="position")(positions).reshape(-1, *heads)
        content_bias = self.param("content_bias", nn.initializers.zeros, heads).astype(self.dtype)
        distance_bias = self.param("distance_bias", nn.initializers.zeros, heads).astype(self.dtype)
        with jax.named_scope("content_scores"):
            content = jnp.einsum("bqhd,bkhd->bhqk", query + content_bias, key)
        with jax.named_scope("distance_scores"):
            distances = jnp.einsum("bqhd,rhd->bhqr", query + distance_bias, distance)
        with jax.named_scope("probabilities"):
            scores = content + by_key(distances)
        return nn.Dense(width, dtype=self.dtype, name="proj")(attention_context(scores, value, causal=False))


class FeedForward(nn.Module):
    """Two dense layers with a swish between them."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "batch step width"]) -> Float[Array, "batch step width"]:
        width = x.shape[-1]
        hidden = nn.Dense(4 * width, dtype=self.dtype, name="fc")(x)
        with jax.named_scope("swish"):
            hidden = nn.silu(hidden)
        return nn.Dense(width, dtype=self.dtype, name="proj")(hidden)


class ConvolutionPart(nn.Module):
    """Gated dense layer, depthwise convolution over time, batch normalisation, swish, dense layer."""

    kernel: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "batch step width"]) -> Float[Array, "batch step width"]:
        width = x.shape[-1]
        gated = nn.Dense(2 * width, dtype=self.dtype, name="gate")(x)
        with jax.named_scope("glu"):
            gated = nn.glu(gated)
        depthwise = nn.Conv(width, (self.kernel,), feature_group_count=width, dtype=self.dtype, name="depthwise")
        x = BatchNorm(self.dtype, name="bn")(depthwise(gated))
        with jax.named_scope("swish"):
            x = nn.silu(x)
        return nn.Dense(width, dtype=self.dtype, name="proj")(x)


class Block(nn.Module):
    """One Conformer block on a fp32 residual stream."""

    size: ConformerSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch step width"], positions: Float[Array, "distance width"]
    ) -> Float[Array, "batch step width"]:
        def norm(name):
            return nn.LayerNorm(dtype=self.dtype, name=name)(x)

        change = FeedForward(self.dtype, name="ff1")(norm("ff1_norm"))
        with jax.named_scope("ff1.residual"):
            x = x + 0.5 * change
        change = RelativeAttention(self.size.heads, self.dtype, name="attn")(norm("attn_norm"), positions)
        with jax.named_scope("attn.residual"):
            x = x + change
        change = ConvolutionPart(self.size.kernel, self.dtype, name="conv")(norm("conv_norm"))
        with jax.named_scope("conv.residual"):
            x = x + change
        change = FeedForward(self.dtype, name="ff2")(norm("ff2_norm"))
        with jax.named_scope("ff2.residual"):
            x = x + 0.5 * change
        return nn.LayerNorm(name="norm")(x)


class Conformer(nn.Module):
    """Log-mel frames to the logits of one label per four frames."""

    size: ConformerSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, frames: Float[Array, "batch frame filter"]) -> Float[Array, "batch step label"]:
        size = self.size
        x = frames[..., None]
        for index in (1, 2):
            name = f"subsample{index}"
            x = nn.Conv(size.width, (3, 3), (2, 2), padding="VALID", dtype=self.dtype, name=name)(x)
            with jax.named_scope(f"{name}/relu"):
                x = nn.relu(x)
        x = x.reshape(*x.shape[:2], -1)
        x = nn.Dense(size.width, dtype=self.dtype, name="embed")(x).astype(jnp.float32)
        with jax.named_scope("positions"):
            positions = relative_positions(x.shape[1], size.width)
        for layer in range(size.layers):
            x = Block(size, self.dtype, name=f"h{layer}")(x, positions)
        return nn.Dense(size.labels, dtype=self.dtype, name="head")(x)
