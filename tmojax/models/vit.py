"""Vision transformers in flax at their real sizes (Dosovitskiy et al., 2021, table 1), in the precision of `gpt2`.

Class token, learned positions, pre-normalised blocks, exact GELU, one dense layer as head.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.models.shapes import Description, check_heads, classifier
from tmojax.models.transformer import PreNormBlock


@dataclass(frozen=True)
class ViTSize:
    """Blocks, width, heads, width of the feed-forward part, side of a patch and of the image in pixels, classes."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    hidden: int = 3072
    patch: int = 16
    image: int = 224
    classes: int = 1000

    def check(self) -> None:
        check_heads(self.width, self.heads)
        if self.image % self.patch:
            raise InputError(f"model.patch: {self.patch} does not divide model.image {self.image}; choose a divisor")

    def describe(self, batch: int, dtype: jnp.dtype) -> Description:
        return classifier(ViT(self, dtype), batch, self.image)


VIT_SIZES = {
    "vit-b16": ViTSize(),
    "vit-l16": ViTSize(layers=24, width=1024, heads=16, hidden=4096),
    "vit-h14": ViTSize(layers=32, width=1280, heads=16, hidden=5120, patch=14),
}


class ViT(nn.Module):
    """Images to the logits of their classes."""

    size: ViTSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, image: Float[Array, "batch row column 3"]) -> Float[Array, "batch label"]:
        size = self.size
        window = (size.patch, size.patch)
        patches = nn.Conv(size.width, window, window, padding="VALID", dtype=self.dtype, name="patches")(image)
        patches = patches.reshape(image.shape[0], -1, size.width)
        token = self.param("class_token", nn.initializers.zeros, (size.width,))
        position = self.param("position", nn.initializers.normal(0.02), (patches.shape[1] + 1, size.width))
        with jax.named_scope("embedding"):
            first = jnp.broadcast_to(token, (image.shape[0], 1, size.width))
            x = jnp.concatenate((first, patches.astype(jnp.float32)), axis=1) + position
        for layer in range(size.layers):
            block = PreNormBlock(size.heads, size.hidden, self.dtype, causal=False, tanh_gelu=False, name=f"h{layer}")
            x = block(x)
        with jax.named_scope("class_token"):
            x = x[:, 0]
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        return nn.Dense(size.classes, dtype=self.dtype, name="head")(x)
