"""Operation counts of primitives, GPU rates from the table, and durations by the roofline.

time = max(flops / (eta_c x peak), bytes / (eta_m x bandwidth)). The fractions are below published measurements: bf16
matrix products reach 78 to 87 % of peak on A100, H100 and B200 at large sizes, element-wise kernels 80 to 93 % of the
memory bandwidth.
Launch overhead belongs to the machine and is not part of a duration.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from tmojax.errors import InputError

if TYPE_CHECKING:
    from tmojax.importers.jax_tracing import Equation, Graph

COMPUTE_EFFICIENCY = 0.70
LARGE_COMPUTE_EFFICIENCY = 0.80
LARGE_DIMENSION = 4096
MEMORY_EFFICIENCY = 0.85
TENSOR_CORE_CHANNELS = 8  # fp16 and bf16 tiles are multiples of it

_TABLE = files("tmojax") / "data" / "gpus.csv"


@dataclass(frozen=True)
class GpuSpec:
    """Rates of one GPU: peaks in FLOP/s by matrix operand dtype, memory bandwidth in bytes/s, capacity in bytes.

    `bf16_vector`: element-wise bf16 arithmetic exists; without it, compilers compute such values in fp32.
    """

    name: str
    matmul_flops_per_s: dict[str, float]
    vector_flops_per_s: float
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    bf16_vector: bool = True

    def matmul_peak(self, dtype: str) -> float:
        """Peak in FLOP/s for matrix products of `dtype`. Raises InputError if the GPU has no such arithmetic."""
        if dtype in self.matmul_flops_per_s:
            return self.matmul_flops_per_s[dtype]
        raise InputError(
            f"gpu: {self.name} has no {dtype} matrix arithmetic; use dtype "
            f"{' or '.join(sorted(self.matmul_flops_per_s))}, or another GPU"
        )


@cache
def gpu_table() -> dict[str, GpuSpec]:
    """All GPUs of `tmojax/data/gpus.csv` by name. Dense rates; fp32 products use TF32 where it exists, as XLA does."""
    table = {}
    with _TABLE.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            fp32 = float(row["fp32_TFLOPs"]) * 1e12
            half = float(row["half_dense_TFLOPs"]) * 1e12
            rates = {"float32": float(row["tf32_TFLOPs"]) * 1e12 if row["tf32_TFLOPs"] else fp32, "float16": half}
            if row["half_type"].startswith("bf16"):
                rates["bfloat16"] = half
            table[row["gpu"]] = GpuSpec(
                row["gpu"],
                rates,
                fp32,
                float(row["hbm_GBps"]) * 1e9,
                int(float(row["memory_GiB"]) * 2**30),
                row["bf16_vector"] == "yes",
            )
    return table


def find_gpu(name: str) -> GpuSpec:
    """Look a GPU up by its name in the table. Raises InputError that lists the known names."""
    table = gpu_table()
    if name not in table:
        raise InputError(f"gpu: {name!r} is unknown; choose one of {', '.join(sorted(table))}")
    return table[name]


def is_matmul(primitive: str) -> bool:
    return primitive in ("dot_general", "conv_general_dilated", "ragged_dot")


def matmul_dimensions(equation: Equation) -> tuple[int, int, int, int]:
    """Return (batch, m, n, k) of a matrix product; a convolution counts as the product that it equals."""
    left, right = equation.input_shapes[0], equation.input_shapes[1]
    if equation.primitive == "conv_general_dilated":
        numbers = equation.params["dimension_numbers"]
        output_features = right[numbers.rhs_spec[0]]
        k = math.prod(right) // output_features
        places = math.prod(equation.output_shape) // output_features
        if any(d > 1 for d in equation.params["lhs_dilation"]):
            # The gradient of a strided convolution: zeros between the elements of the left side are not multiplied.
            places = min(places, math.prod(left) // left[numbers.lhs_spec[1]])
        return 1, places, output_features, k
    if equation.primitive == "ragged_dot":
        return 1, left[0], right[-1], left[1]
    (left_contract, _), (left_batch, _) = equation.params["dimension_numbers"]
    k = math.prod(left[d] for d in left_contract)
    batch = math.prod(left[d] for d in left_batch)
    m = math.prod(left) // max(1, k * batch)
    n = math.prod(right) // max(1, k * batch)
    return batch, m, n, k


def uses_matrix_units(equation: Equation) -> bool:
    """Say whether a product can run on tensor cores: not a convolution whose groups have few channels (depthwise)."""
    if equation.primitive != "conv_general_dilated":
        return True
    groups = max(equation.params["feature_group_count"], equation.params["batch_group_count"])
    features = equation.input_shapes[1][equation.params["dimension_numbers"].rhs_spec[0]]
    return groups == 1 or features // groups >= TENSOR_CORE_CHANNELS


def equation_flops(equation: Equation, graph: Graph) -> int:
    """Floating-point operations: 2 m n k for products, one per element for everything else that computes.

    Pooling compares or adds the elements of a window for every result, or for every gradient that it passes on.
    """
    if is_matmul(equation.primitive):
        batch, m, n, k = matmul_dimensions(equation)
        return 2 * batch * m * n * k
    if equation.primitive.startswith("reduce_window_"):
        return math.prod(equation.output_shape) * math.prod(equation.params["window_dimensions"])
    if equation.primitive == "select_and_scatter_add":
        return math.prod(equation.input_shapes[0]) * math.prod(equation.params["window_dimensions"])
    if equation.primitive.startswith(("reduce_", "cum", "arg")):
        return math.prod(equation.input_shapes[0]) if equation.input_shapes else 0
    if equation.primitive in _MOVES:
        return 0
    return sum(graph.storages[out].elements for out in equation.outputs)


_MOVES = frozenset(
    "broadcast_in_dim iota slice dynamic_slice split unstack concatenate stack pad gather convert_element_type "
    "select_n".split()
)


def duration_s(gpu: GpuSpec, matmuls: list[Equation], vector_flops: int, traffic_bytes: int) -> float:
    """Seconds of one kernel group by the roofline, without launch overhead.

    `matmuls` are its matrix products, each at the peak of its operand dtype; depthwise convolutions and `vector_flops`
    run at the fp32 rate.
    Raises InputError if the GPU lacks the dtype of a product.
    """
    compute_s = vector_flops / (COMPUTE_EFFICIENCY * gpu.vector_flops_per_s)
    for equation in matmuls:
        batch, m, n, k = matmul_dimensions(equation)
        peak = gpu.matmul_peak(equation.input_dtype)
        if not uses_matrix_units(equation):
            peak = min(peak, gpu.vector_flops_per_s)
        efficiency = LARGE_COMPUTE_EFFICIENCY if min(m, n, k) >= LARGE_DIMENSION else COMPUTE_EFFICIENCY
        compute_s += 2 * batch * m * n * k / (efficiency * peak)
    return max(compute_s, traffic_bytes / (MEMORY_EFFICIENCY * gpu.memory_bandwidth_bytes_per_s))
