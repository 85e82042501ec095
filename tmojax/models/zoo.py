"""Networks by name, at real sizes, as shapes and a loss function: what `import_train_step` takes."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.models.bert import BERT_SIZES
from tmojax.models.conformer import CONFORMER_SIZES
from tmojax.models.convnext import CONVNEXT_SIZES
from tmojax.models.densenet import DENSENET_SIZES
from tmojax.models.dlrm import DLRM_SIZES
from tmojax.models.gpt2 import GPT2_SIZES
from tmojax.models.llama import LLAMA_SIZES
from tmojax.models.mlp import MLP_SIZES
from tmojax.models.resnet import RESNET_SIZES
from tmojax.models.shapes import Size
from tmojax.models.vit import VIT_SIZES

DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16, "float32": jnp.float32}
SIZES: dict[str, Any] = {
    **GPT2_SIZES,
    **LLAMA_SIZES,
    **BERT_SIZES,
    **VIT_SIZES,
    **RESNET_SIZES,
    **DENSENET_SIZES,
    **CONVNEXT_SIZES,
    **CONFORMER_SIZES,
    **DLRM_SIZES,
    **MLP_SIZES,
}
MODEL_NAMES = tuple(SIZES)
MOST_LAYERS = 10_000  # they are unrolled


@dataclass(frozen=True)
class Model:
    """A network ready to be traced.

    `loss` maps (params, batch) to a scalar. `params` and `batch` are trees of `jax.ShapeDtypeStruct`; the batch is one
    micro-batch of one GPU. `samples` is the number of sequences, images or rows in it.
    """

    name: str
    loss: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any
    samples: int
    compute_dtype: str


def model_options(name: str) -> Mapping[str, int]:
    """Options of a named model with their defaults, for configs and messages. Raises InputError for unknown names."""
    if name not in SIZES:
        raise InputError(f"model: {name!r} is unknown; choose one of {', '.join(MODEL_NAMES)}")
    return asdict(SIZES[name])


def build_model(name: str, *, batch: int = 8, dtype: str = "bfloat16", **options: int) -> Model:
    """Build a network by name without allocating anything.

    `batch` is the number of sequences, images or rows of one micro-batch on one GPU; `dtype` is that of the matrix
    products (parameters are fp32); `options` replace the sizes that `model_options(name)` lists.
    Raises InputError for an unknown name, option or dtype, and for sizes that are not positive or do not fit together.
    """
    known = model_options(name)
    for key, value in {"batch": batch, **options}.items():
        if key != "batch" and key not in known:
            raise InputError(f"model.{key}: unknown option of {name!r}; it has {', '.join(('batch', *known))}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"model.{key}: {value!r} must be a positive integer")
        if key.startswith(("layers", "stage")) and value > MOST_LAYERS:
            raise InputError(f"model.{key}: {value} is more than {MOST_LAYERS}, the most that are traced; lower it")
    if dtype not in DTYPES:
        raise InputError(f"model.dtype: {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    size: Size = replace(SIZES[name], **options)
    size.check()
    loss, params, shapes = size.describe(batch, DTYPES[dtype])
    return Model(name, loss, params, shapes, batch, dtype)
