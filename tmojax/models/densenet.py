"""DenseNets in flax at their real sizes (Huang et al., 2017, table 1: DenseNet-BC, compression 0.5).

Every layer reads all features of its block before it. Batch normalisation by the statistics of the batch, running
statistics left out; no dropout.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.models.convolution import BatchNorm, class_logits, convolution, stem
from tmojax.models.shapes import Description, classifier

BOTTLENECK = 4
HALVINGS = 5  # two in the stem, one between blocks


@dataclass(frozen=True)
class DenseNetSize:
    """Layers of the four blocks, features that a layer adds, features of the stem, classes, side of the image."""

    stage1: int = 6
    stage2: int = 12
    stage3: int = 24
    stage4: int = 16
    growth: int = 32
    width: int = 64
    classes: int = 1000
    image: int = 224

    def check(self) -> None:
        if self.image < 2**HALVINGS:
            raise InputError(
                f"model.image: {self.image} pixels are none after {HALVINGS} halvings; take at least {2**HALVINGS}"
            )

    def describe(self, batch: int, dtype: jnp.dtype) -> Description:
        return classifier(DenseNet(self, dtype), batch, self.image)


DENSENET_SIZES = {
    "densenet121": DenseNetSize(),
    "densenet169": DenseNetSize(stage3=32, stage4=32),
    "densenet201": DenseNetSize(stage3=48, stage4=32),
}


class NormalisedConvolution(nn.Module):
    """Batch normalisation, ReLU, convolution."""

    features: int
    window: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "batch row column channel"]) -> Float[Array, "batch row column feature"]:
        x = BatchNorm(self.dtype, name="bn")(x)
        with jax.named_scope("relu"):
            x = nn.relu(x)
        return convolution(self.features, self.window, 1, self.dtype, "conv")(x)


class DenseLayer(nn.Module):
    """A bottleneck of 1 x 1 and 3 x 3 whose new features are put behind the old ones."""

    growth: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "batch row column channel"]) -> Float[Array, "batch row column more"]:
        new = NormalisedConvolution(BOTTLENECK * self.growth, 1, self.dtype, name="reduce")(x)
        new = NormalisedConvolution(self.growth, 3, self.dtype, name="grow")(new)
        with jax.named_scope("concatenate"):
            return jnp.concatenate((x, new), axis=-1)


class DenseNet(nn.Module):
    """Images to the logits of their classes."""

    size: DenseNetSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, image: Float[Array, "batch row column 3"]) -> Float[Array, "batch label"]:
        size = self.size
        x = stem(image, size.width, self.dtype)
        stages = (size.stage1, size.stage2, size.stage3, size.stage4)
        for stage, layers in enumerate(stages, start=1):
            for layer in range(1, layers + 1):
                x = DenseLayer(size.growth, self.dtype, name=f"block{stage}_layer{layer}")(x)
            if stage < len(stages):
                x = NormalisedConvolution(x.shape[-1] // 2, 1, self.dtype, name=f"transition{stage}")(x)
                with jax.named_scope(f"transition{stage}/pool"):
                    x = nn.avg_pool(x, (2, 2), (2, 2))
        x = BatchNorm(self.dtype, name="bn")(x)
        with jax.named_scope("relu"):
            x = nn.relu(x)
        return class_logits(x, size.classes, self.dtype)
