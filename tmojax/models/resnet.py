"""ResNets of bottleneck blocks in flax at their real sizes (He et al., 2016, table 1).

The stride of a stage is in its first 3 x 3 convolution, not the 1 x 1 before it, as implementations have had it since
the paper. Batch normalisation by the statistics of the batch, running statistics left out.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import tmojax.jax_setup  # noqa: F401
from tmojax.models.convolution import BatchNorm, class_logits, convolution, stem
from tmojax.models.shapes import Description, classifier

EXPANSION = 4


@dataclass(frozen=True)
class ResNetSize:
    """Blocks of the four stages, channels of the first, classes, and pixels along one side of the image."""

    stage1: int = 3
    stage2: int = 4
    stage3: int = 6
    stage4: int = 3
    width: int = 64
    classes: int = 1000
    image: int = 224

    def check(self) -> None:
        """Every size fits: convolutions are padded."""

    def describe(self, batch: int, dtype: jnp.dtype) -> Description:
        return classifier(ResNet(self, dtype), batch, self.image)


RESNET_SIZES = {
    "resnet50": ResNetSize(),
    "resnet101": ResNetSize(stage3=23),
    "resnet152": ResNetSize(stage2=8, stage3=36),
}


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolution around a shortcut, which is projected where its shape changes."""

    width: int
    stride: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "batch row column channel"]) -> Float[Array, "batch r c wide"]:
        wide = EXPANSION * self.width
        y = x
        for index, (features, window) in enumerate(((self.width, 1), (self.width, 3), (wide, 1)), start=1):
            stride = self.stride if window == 3 else 1
            y = convolution(features, window, stride, self.dtype, f"conv{index}")(y)
            y = BatchNorm(self.dtype, name=f"bn{index}")(y)
            if index < 3:
                with jax.named_scope(f"relu{index}"):
                    y = nn.relu(y)
        if x.shape != y.shape:
            x = convolution(wide, 1, self.stride, self.dtype, "shortcut")(x)
            x = BatchNorm(self.dtype, name="shortcut_bn")(x)
        with jax.named_scope("out"):
            return nn.relu(x + y)


class ResNet(nn.Module):
    """Images to the logits of their classes."""

    size: ResNetSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, image: Float[Array, "batch row column 3"]) -> Float[Array, "batch label"]:
        size = self.size
        x = stem(image, size.width, self.dtype)
        for stage, blocks in enumerate((size.stage1, size.stage2, size.stage3, size.stage4), start=1):
            for block in range(1, blocks + 1):
                stride = 2 if stage > 1 and block == 1 else 1
                name = f"stage{stage}_block{block}"
                x = Bottleneck(size.width * 2 ** (stage - 1), stride, self.dtype, name=name)(x)
        return class_logits(x, size.classes, self.dtype)
