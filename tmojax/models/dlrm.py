"""A deep-learning recommendation model in flax (Naumov et al., 2019), at the size of its Criteo Kaggle benchmark.

One row of every embedding table per sample, a bottom perceptron for the dense features, all pairwise dot products, a
top perceptron. Tables are fp32 and looked up in fp32; products run in the compute dtype. The gradient of a table is
dense, as JAX makes it: a scatter-add into zeros of the table's size.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.models.shapes import Description, parameter_shapes

DENSE_FEATURES = 13
# Distinct values of the 26 categorical features of the Criteo Kaggle data: 33,762,577 rows.
CRITEO_KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


@dataclass(frozen=True)
class DLRMSize:
    """Tables (the first of the 26), most rows of one, width of a row, widths of inner layers of both perceptrons."""

    tables: int = 26
    rows: int = 10_131_227
    embedding: int = 16
    bottom1: int = 512
    bottom2: int = 256
    bottom3: int = 64
    top1: int = 512
    top2: int = 256

    def check(self) -> None:
        if self.tables > len(CRITEO_KAGGLE_ROWS):
            raise InputError(f"model.tables: {self.tables} are more than the {len(CRITEO_KAGGLE_ROWS)} there are")

    def describe(self, batch: int, dtype: jnp.dtype) -> Description:
        """Mean binary cross entropy of clicks.

        Batch: `dense` fp32 [batch, 13], `rows` int32 [batch, tables], `click` fp32 [batch], 0 or 1.
        """
        module = DLRM(self, dtype)

        def loss(params, batch):
            logits = jnp.asarray(module.apply({"params": params}, batch["dense"], batch["rows"]))
            with jax.named_scope("loss"):
                return optax.sigmoid_binary_cross_entropy(logits.astype(jnp.float32), batch["click"]).mean()

        dense = jax.ShapeDtypeStruct((batch, DENSE_FEATURES), jnp.float32)
        rows = jax.ShapeDtypeStruct((batch, self.tables), jnp.int32)
        click = jax.ShapeDtypeStruct((batch,), jnp.float32)
        return loss, parameter_shapes(module, dense, rows), {"dense": dense, "rows": rows, "click": click}


DLRM_SIZES = {"dlrm": DLRMSize()}


def layer(x: Float[Array, "batch feature"], width: int, dtype: jnp.dtype, name: str) -> Float[Array, "batch output"]:
    """A dense layer with ReLU. Inside a module only."""
    x = nn.Dense(width, dtype=dtype, name=name)(x)
    with jax.named_scope(f"{name}/relu"):
        return nn.relu(x)


class DLRM(nn.Module):
    """Dense and categorical features to the logit of a click."""

    size: DLRMSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, dense: Float[Array, "batch 13"], rows: Int[Array, "batch table"]) -> Float[Array, " batch"]:
        size = self.size
        x = dense
        for index, width in enumerate((size.bottom1, size.bottom2, size.bottom3, size.embedding), start=1):
            x = layer(x, width, self.dtype, f"bottom{index}")
        vectors = [x]
        for index, count in enumerate(CRITEO_KAGGLE_ROWS[: size.tables]):
            table = nn.Embed(min(count, size.rows), size.embedding, name=f"table{index}")
            row = table(rows[:, index])
            with jax.named_scope(f"table{index}"):
                vectors.append(row.astype(self.dtype))
        with jax.named_scope("interaction"):
            stacked = jnp.stack(vectors, axis=1)
            products = jnp.einsum("bid,bjd->bij", stacked, stacked)
            lower = np.tril_indices(len(vectors), -1)
            x = jnp.concatenate((x, products[:, lower[0], lower[1]]), axis=-1)
        for index, width in enumerate((size.top1, size.top2), start=1):
            x = layer(x, width, self.dtype, f"top{index}")
        return nn.Dense(1, dtype=self.dtype, name="click")(x)[:, 0]
