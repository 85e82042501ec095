"""Networks by name, at real sizes, as shapes and a loss function: what `import_train_step` takes."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.models.gpt2 import GPT2, GPT2Size, next_token_loss
from tmojax.models.llama import Llama, LlamaSize

DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16, "float32": jnp.float32}


@dataclass(frozen=True)
class Model:
    """A network ready to be traced.

    `loss` maps (params, batch) to a scalar. `params` and `batch` are trees of `jax.ShapeDtypeStruct`; the batch is one
    micro-batch of one GPU. `samples` is the number of sequences or rows in it.
    """

    name: str
    loss: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any
    samples: int
    compute_dtype: str


class Perceptron(nn.Module):
    """Dense layers with ReLU between them; small enough to count its tensors by hand."""

    widths: tuple[int, ...]
    dtype: Any

    @nn.compact
    def __call__(self, x):
        for index, width in enumerate(self.widths):
            x = nn.Dense(width, dtype=self.dtype, name=f"dense{index}")(x)
            if index + 1 < len(self.widths):
                with jax.named_scope(f"dense{index}/relu"):
                    x = nn.relu(x)
        return x


def _transformer(name: str, size: GPT2Size | LlamaSize, batch: int, dtype: str) -> Model:
    if size.width % size.heads:
        raise InputError(f"model.heads: {size.heads} does not divide model.width {size.width}; choose a divisor")
    module = GPT2(size, DTYPES[dtype]) if isinstance(size, GPT2Size) else Llama(size, DTYPES[dtype])
    tokens = jax.ShapeDtypeStruct((batch, size.sequence + 1), jnp.int32)
    inputs = jax.ShapeDtypeStruct((batch, size.sequence), jnp.int32)
    params = jax.eval_shape(module.init, jax.random.key(0), inputs)["params"]
    return Model(name, next_token_loss(module), params, {"tokens": tokens}, batch, dtype)


def _mlp(name: str, layers: int, width: int, batch: int, dtype: str) -> Model:
    module = Perceptron((width,) * layers, DTYPES[dtype])
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    params = jax.eval_shape(module.init, jax.random.key(0), x)["params"]

    def loss(params, batch):
        prediction = jnp.asarray(module.apply({"params": params}, batch["x"]))
        with jax.named_scope("loss"):
            return jnp.mean((prediction.astype(jnp.float32) - batch["y"]) ** 2)

    return Model(name, loss, params, {"x": x, "y": x}, batch, dtype)


TRANSFORMER_SIZES: dict[str, GPT2Size | LlamaSize] = {
    "gpt2": GPT2Size(),
    "gpt2-medium": GPT2Size(layers=24, width=1024, heads=16),
    "gpt2-large": GPT2Size(layers=36, width=1280, heads=20),
    "gpt2-xl": GPT2Size(layers=48, width=1600, heads=25),
    "llama-7b": LlamaSize(),
    "llama-13b": LlamaSize(layers=40, width=5120, heads=40, hidden=13824),
}
MOST_LAYERS = 10_000  # they are unrolled
MLP_OPTIONS = {"layers": 4, "width": 1024}
MODEL_NAMES = (*TRANSFORMER_SIZES, "mlp")


def model_options(name: str) -> Mapping[str, int]:
    """Options of a named model with their defaults, for configs and messages. Raises InputError for unknown names."""
    if name in TRANSFORMER_SIZES:
        return asdict(TRANSFORMER_SIZES[name])
    if name == "mlp":
        return MLP_OPTIONS
    raise InputError(f"model: {name!r} is unknown; choose one of {', '.join(MODEL_NAMES)}")


def build_model(name: str, *, batch: int = 8, dtype: str = "bfloat16", **options: int) -> Model:
    """Build a network by name without allocating anything.

    `batch` is the number of sequences (rows for `mlp`) of one micro-batch on one GPU; `dtype` is that of the matrix
    products (parameters are fp32); `options` replace the sizes that `model_options(name)` lists.
    Raises InputError for an unknown name, option or dtype, and for sizes that are not positive.
    """
    known = model_options(name)
    for key, value in {"batch": batch, **options}.items():
        if key != "batch" and key not in known:
            raise InputError(f"model.{key}: unknown option of {name!r}; it has {', '.join(('batch', *known))}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"model.{key}: {value!r} must be a positive integer")
        if key == "layers" and value > MOST_LAYERS:
            raise InputError(f"model.layers: {value} is more than {MOST_LAYERS}, the most that are traced; lower it")
    if dtype not in DTYPES:
        raise InputError(f"model.dtype: {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    if name == "mlp":
        return _mlp(name, **{**known, **options}, batch=batch, dtype=dtype)
    return _transformer(name, replace(TRANSFORMER_SIZES[name], **options), batch, dtype)
