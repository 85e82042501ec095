"""What every family of the zoo gives: a size that checks itself and describes its network by shapes."""

from collections.abc import Callable
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError

# loss(params, batch), and the shapes of both.
Description = tuple[Callable[[Any, Any], jax.Array], Any, dict[str, jax.ShapeDtypeStruct]]


class Size(Protocol):
    """Positive integers that size a network: a frozen dataclass whose fields are the options of the model."""

    def check(self) -> None:
        """Raises InputError where fields do not fit each other."""
        ...

    def describe(self, batch: int, dtype: Any) -> Description:
        """Loss, parameters and batch of `batch` samples, with products in `dtype`. Allocates nothing."""
        ...


def parameter_shapes(module: nn.Module, *inputs: jax.ShapeDtypeStruct) -> Any:
    """Tree of shapes and dtypes of a module's parameters."""
    return jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]


def check_heads(width: int, heads: int) -> None:
    """Raises InputError if the attention heads do not divide the width."""
    if width % heads:
        raise InputError(f"model.heads: {heads} does not divide model.width {width}; choose a divisor")


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy of integer labels, on fp32 logits of one more dimension."""
    with jax.named_scope("loss"):
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def classifier(module: nn.Module, batch: int, image: int) -> Description:
    """A network from square RGB images, [batch, row, column, 3] in fp32, to the logits of classes."""
    images = jax.ShapeDtypeStruct((batch, image, image, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def loss(params, batch):
        return cross_entropy(jnp.asarray(module.apply({"params": params}, batch["image"])), batch["label"])

    return loss, parameter_shapes(module, images), {"image": images, "label": labels}
