"""A multilayer perceptron, small enough to count its tensors by hand."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import tmojax.jax_setup  # noqa: F401
from tmojax.models.shapes import Description, parameter_shapes


@dataclass(frozen=True)
class MLPSize:
    """Dense layers of one width, with ReLU between them."""

    layers: int = 4
    width: int = 1024

    def check(self) -> None:
        """Every size fits."""

    def describe(self, batch: int, dtype: jnp.dtype) -> Description:
        """Mean squared error of rows x against rows y, both [batch, width] in fp32."""
        module = Perceptron((self.width,) * self.layers, dtype)
        rows = jax.ShapeDtypeStruct((batch, self.width), jnp.float32)

        def loss(params, batch):
            prediction = jnp.asarray(module.apply({"params": params}, batch["x"]))
            with jax.named_scope("loss"):
                return jnp.mean((prediction.astype(jnp.float32) - batch["y"]) ** 2)

        return loss, parameter_shapes(module, rows), {"x": rows, "y": rows}


MLP_SIZES = {"mlp": MLPSize()}


class Perceptron(nn.Module):
    """Dense layers with ReLU between them, none after the last."""

    widths: tuple[int, ...]
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "*batch feature"]) -> Float[Array, "*batch output"]:
        for index, width in enumerate(self.widths):
            x = nn.Dense(width, dtype=self.dtype, name=f"dense{index}")(x)
            if index + 1 < len(self.widths):
                with jax.named_scope(f"dense{index}/relu"):
                    x = nn.relu(x)
        return x
