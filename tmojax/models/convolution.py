"""Parts that several convolutional networks share. Arrays are [batch, row, column, channel].

Parameters are fp32; convolutions and what they pass on are in the compute dtype; statistics are fp32.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import tmojax.jax_setup  # noqa: F401

EPSILON = 1e-5


class BatchNorm(nn.Module):
    """Normalise each channel over the batch of one GPU (Ioffe and Szegedy, 2015, algorithm 1).

    Only what a training step needs: running statistics, which no gradient and no later op reads, are left out.
    """

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "*place channel"]) -> Float[Array, "*place channel"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        axes = tuple(range(x.ndim - 1))
        wide = x.astype(jnp.float32)
        mean = wide.mean(axes)
        # Both moments in one pass over x; rounding may make the difference negative.
        variance = jnp.maximum((wide * wide).mean(axes) - mean * mean, 0)
        return ((wide - mean) * (jax.lax.rsqrt(variance + EPSILON) * scale) + bias).astype(self.dtype)


def convolution(features: int, window: int, stride: int, dtype: jnp.dtype, name: str) -> nn.Conv:
    """A square convolution without bias, padded by (window - 1) / 2 on every side."""
    padding = (window - 1) // 2
    return nn.Conv(
        features, (window, window), (stride, stride), padding=padding, use_bias=False, dtype=dtype, name=name
    )


def stem(x: Float[Array, "batch row column 3"], width: int, dtype: jnp.dtype) -> Float[Array, "batch r c channel"]:
    """Convolution 7 x 7 with stride 2, normalisation, ReLU, maximum over 3 x 3 with stride 2. Inside a module only."""
    x = BatchNorm(dtype, name="stem_bn")(convolution(width, 7, 2, dtype, "stem_conv")(x))
    with jax.named_scope("stem_relu"):
        x = nn.relu(x)
    with jax.named_scope("stem_pool"):
        # flax takes numbers, but says that it takes words.
        return nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))  # pyright: ignore[reportArgumentType]


def class_logits(x: Float[Array, "batch row column channel"], classes: int, dtype: jnp.dtype) -> Float[Array, "b k"]:
    """Mean over all places, then a dense layer. Inside a module only."""
    with jax.named_scope("pool"):
        x = x.astype(jnp.float32).mean((1, 2))
    return nn.Dense(classes, dtype=dtype, name="head")(x)
