"""ConvNeXts in flax at their real sizes (Liu et al., 2022, section 3.5).

Depthwise 7 x 7 convolution, layer normalisation, two dense layers with an exact GELU, layer scale. Activations are in
the compute dtype; statistics are fp32. No stochastic depth.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.models.shapes import Description, classifier
from tmojax.models.transformer import FeedForward

REDUCTION = 32  # 4 in the stem, 2 before each further stage


@dataclass(frozen=True)
class ConvNeXtSize:
    """Blocks of the four stages, channels of the first (each further has twice as many), classes, side of the image."""

    stage1: int = 3
    stage2: int = 3
    stage3: int = 9
    stage4: int = 3
    width: int = 96
    classes: int = 1000
    image: int = 224

    def check(self) -> None:
        if self.image % REDUCTION:
            raise InputError(f"model.image: {self.image} is no multiple of {REDUCTION}; choose one, such as 224")

    def describe(self, batch: int, dtype: jnp.dtype) -> Description:
        return classifier(ConvNeXt(self, dtype), batch, self.image)


CONVNEXT_SIZES = {
    "convnext-tiny": ConvNeXtSize(),
    "convnext-small": ConvNeXtSize(stage3=27),
    "convnext-base": ConvNeXtSize(stage3=27, width=128),
    "convnext-large": ConvNeXtSize(stage3=27, width=192),
}


class Block(nn.Module):
    """Depthwise convolution and feed-forward layers around a shortcut."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "batch row column channel"]) -> Float[Array, "batch row column channel"]:
        channels = x.shape[-1]
        y = nn.Conv(channels, (7, 7), padding=3, feature_group_count=channels, dtype=self.dtype, name="depthwise")(x)
        y = nn.LayerNorm(dtype=self.dtype, name="norm")(y)
        y = FeedForward(4 * channels, self.dtype, tanh_gelu=False, name="mlp")(y)
        scale = self.param("scale", nn.initializers.constant(1e-6), (channels,))
        with jax.named_scope("out"):
            return x + scale.astype(self.dtype) * y


class ConvNeXt(nn.Module):
    """Images to the logits of their classes."""

    size: ConvNeXtSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, image: Float[Array, "batch row column 3"]) -> Float[Array, "batch label"]:
        size = self.size
        x = nn.Conv(size.width, (4, 4), (4, 4), padding="VALID", dtype=self.dtype, name="stem_conv")(image)
        x = nn.LayerNorm(dtype=self.dtype, name="stem_norm")(x)
        for stage, blocks in enumerate((size.stage1, size.stage2, size.stage3, size.stage4), start=1):
            if stage > 1:
                x = nn.LayerNorm(dtype=self.dtype, name=f"down{stage}_norm")(x)
                channels = size.width * 2 ** (stage - 1)
                down = nn.Conv(channels, (2, 2), (2, 2), padding="VALID", dtype=self.dtype, name=f"down{stage}_conv")
                x = down(x)
            for block in range(1, blocks + 1):
                x = Block(self.dtype, name=f"stage{stage}_block{block}")(x)
        with jax.named_scope("pool"):
            x = x.astype(jnp.float32).mean((1, 2))
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        return nn.Dense(size.classes, dtype=self.dtype, name="head")(x)
