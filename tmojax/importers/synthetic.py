"""A transformer with round numbers: sizes and durations follow from a formula, so that results can be checked by hand.

Sizes are in units n = tokens * width * bytes_per_element, one activation of the width of the residual stream. A layer
keeps 16 n for backward: x 1, ln1 1, qkv 3, ctx 1, mid 1 (residual after attention), ln2 1, fc 4, gelu 4. The attention
matrix is not kept (as fused attention kernels do). With 12 layers the keep-all footprint is 192 n plus the last
layer's output, 193 n, plus gradients if they are given a size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from tmojax.errors import InputError
from tmojax.problem import (
    Collective,
    CollectiveKind,
    Lifetime,
    Op,
    Phase,
    Program,
    Tensor,
    TensorKind,
    Workload,
)

# Every layer is 16 ops; more of them would fill memory before anything could say so.
MOST_LAYERS = 10_000

# Forward ops of a layer: (writes, reads, bytes in n, is elementwise). `x` is the layer's input, `out` the next one's.
_FORWARD = (
    ("ln1", ("x",), 1, True),
    ("qkv", ("ln1",), 3, False),
    ("ctx", ("qkv",), 1, False),
    ("mid", ("ctx", "x"), 1, False),
    ("ln2", ("mid",), 1, True),
    ("fc", ("ln2",), 4, False),
    ("gelu", ("fc",), 4, True),
    ("out", ("gelu", "mid"), 1, False),
)
# Backward, in order: of which forward op, whose gradient it writes, the saved tensors and the gradients that it reads.
# The residual connections pass the gradient of `out` around the MLP and that of `mid` around the attention.
_BACKWARD = (
    ("out", "gelu", ("gelu",), ("out",)),
    ("gelu", "fc", ("fc",), ("gelu",)),
    ("fc", "ln2", ("ln2",), ("fc",)),
    ("ln2", "mid", ("mid",), ("ln2", "out")),
    ("mid", "ctx", ("ctx",), ("mid",)),
    ("ctx", "qkv", ("qkv", "ctx"), ("ctx",)),
    ("qkv", "ln1", ("ln1",), ("qkv",)),
    ("ln1", "x", ("x",), ("ln1", "mid")),
)
_UNITS = {"x": 1, **{name: units for name, _, units, _ in _FORWARD}}


@dataclass(frozen=True)
class SyntheticTransformer:
    """Parameters. `tokens` of one micro-batch on one GPU, in sequences of `sequence`; `width` of the residual stream.

    `compute_s`: compute time of one micro-batch, a third of it forward. `elementwise_share`: share of forward and of
    backward that normalisations, activation functions, embedding and loss take, divided among them by the bytes that
    they touch; the rest goes to matrix products by FLOPs. With the default 0.03, all elementwise forward ops
    together take 1 % of the compute time. `gradient_scale`: size of activation gradients relative to the real one (0:
    they take no memory). `parameters`: of the whole network; if positive, gradients of bytes_per_element each persist,
    are accumulated in backward, and are summed over the GPUs by one all-reduce at the end of the step. Weights and
    optimizer state are not modelled.
    """

    layers: int = 12
    tokens: int = 8 * 1024
    width: int = 1600
    sequence: int = 1024
    bytes_per_element: int = 2
    compute_s: float = 0.350
    elementwise_share: float = 0.03
    gradient_scale: float = 0.0
    parameters: int = 0

    def __post_init__(self) -> None:
        """Raises InputError naming the parameter, its value and its range."""
        for field in fields(self):
            value = getattr(self, field.name)
            whole = field.name not in ("compute_s", "elementwise_share", "gradient_scale")
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise InputError(f"{field.name}: {value!r} must be {'an integer' if whole else 'a number'}")
            least = 0 if field.name in ("parameters", "elementwise_share", "gradient_scale") else 1 if whole else 1e-9
            most = MOST_LAYERS if field.name == "layers" else 10**12
            if not (math.isfinite(value) and least <= value <= most):
                raise InputError(f"{field.name}: {value} must be between {least} and {most}")
        if self.elementwise_share > 1:
            raise InputError(f"elementwise_share: {self.elementwise_share} is a share; give at most 1")
        if self.tokens % self.sequence:
            raise InputError(f"tokens: {self.tokens} must be a multiple of sequence {self.sequence}")

    @property
    def unit_bytes(self) -> int:
        """n: bytes of one activation of the width of the residual stream."""
        return self.tokens * self.width * self.bytes_per_element


def synthetic_transformer(spec: SyntheticTransformer, gpus: int, micro_batches: int) -> Workload:
    """A data-parallel training step of `spec` on `gpus` equal GPUs with `micro_batches` micro-batches.

    Raises InputError for counts below 1.
    """
    for name, count in (("gpus", gpus), ("micro_batches", micro_batches)):
        if count < 1:
            raise InputError(f"{name}: {count} must be at least 1")
    tensors, ops = _tables(spec)
    collectives: tuple[Collective, ...] = ()
    gradients = tuple(index for index, tensor in enumerate(tensors) if tensor.lifetime is Lifetime.STATE)
    if gradients and gpus > 1:
        size_bytes = sum(tensors[index].size_bytes for index in gradients)
        collectives = (Collective("gradients", CollectiveKind.ALL_REDUCE, size_bytes, tuple(range(gpus))),)
        ops.append(
            Op("all_reduce", Phase.COLLECTIVE, 0.0, updates=gradients, recomputable=False, step_op=True,
               collective="gradients", layer="synchronisation")
        )  # fmt: skip
    name = f"synthetic transformer, {spec.layers} layers"
    return Workload(
        name,
        (Program("data parallel", tuple(tensors), tuple(ops)),),
        (0,) * gpus,
        micro_batches,
        f"synthetic: {spec.compute_s} s per micro-batch, a third forward, divided by FLOPs",
        collectives,
    )


def _flops(spec: SyntheticTransformer, op: str) -> int:
    """FLOPs of a forward op of one layer: 2 per multiply-add; attention scores over whole sequences, not causal."""
    per_token = {
        "qkv": 6 * spec.width**2,
        "ctx": 4 * spec.sequence * spec.width,
        "mid": 2 * spec.width**2,
        "fc": 8 * spec.width**2,
        "out": 8 * spec.width**2,
    }
    return spec.tokens * per_token.get(op, 0)


def _traffic_bytes(spec: SyntheticTransformer, op: str) -> int:
    """Bytes that a forward op of one layer reads and writes once each, weights not counted."""
    reads = next(reads for name, reads, _, _ in _FORWARD if name == op)
    return spec.unit_bytes * (_UNITS[op] + sum(_UNITS[name] for name in reads))


def _tables(spec: SyntheticTransformer) -> tuple[list[Tensor], list[Op]]:
    tensors: list[Tensor] = []
    index: dict[str, int] = {}

    def add(name: str, size_bytes: int, kind: TensorKind, lifetime: Lifetime = Lifetime.MICRO_BATCH) -> int:
        index[name] = len(tensors)
        tensors.append(Tensor(name, size_bytes, kind, lifetime))
        return index[name]

    elementwise = {name for name, _, _, is_elementwise in _FORWARD if is_elementwise}
    # Embedding and loss touch about as many bytes as a normalisation: they share in the elementwise time.
    edge_bytes = 2 * spec.unit_bytes
    elementwise_bytes = spec.layers * sum(_traffic_bytes(spec, name) for name in elementwise) + edge_bytes
    matrix_flops = spec.layers * sum(_flops(spec, name) for name, *_ in _FORWARD)

    def duration_s(op: str, phase_s: float) -> float:
        if op in elementwise or op in ("embed", "loss"):
            touched = _traffic_bytes(spec, op) if op in elementwise else edge_bytes
            return phase_s * spec.elementwise_share * touched / elementwise_bytes
        return phase_s * (1 - spec.elementwise_share) * _flops(spec, op) / matrix_flops

    forward_s, backward_s = spec.compute_s / 3, 2 * spec.compute_s / 3
    ops: list[Op] = []
    add("layer0.x", spec.unit_bytes, TensorKind.ACTIVATION)
    ops.append(Op("embed", Phase.FORWARD, duration_s("embed", forward_s), writes=(0,), layer="embed",
                  memory_traffic_bytes=edge_bytes))  # fmt: skip
    for layer in range(spec.layers):
        for name, reads, units, _ in _FORWARD:
            written = add(_full_name(layer, name), units * spec.unit_bytes, TensorKind.ACTIVATION)
            ops.append(
                Op(
                    f"layer{layer}.{name}",
                    Phase.FORWARD,
                    duration_s(name, forward_s),
                    reads=tuple(index[_full_name(layer, read)] for read in reads),
                    writes=(written,),
                    layer=f"layer{layer}",
                    flops=_flops(spec, name),
                    memory_traffic_bytes=_traffic_bytes(spec, name),
                )
            )
    last = _full_name(spec.layers - 1, "out")
    gradient_bytes = {name: round(spec.gradient_scale * units * spec.unit_bytes) for name, units in _UNITS.items()}
    written = add(f"d_{last}", gradient_bytes["out"], TensorKind.GRADIENT)
    ops.append(Op("loss", Phase.BACKWARD, duration_s("loss", backward_s), reads=(index[last],), writes=(written,),
                  layer="loss", memory_traffic_bytes=edge_bytes))  # fmt: skip
    for layer in reversed(range(spec.layers)):
        updates: tuple[int, ...] = ()
        if spec.parameters:
            share = spec.parameters * (layer + 1) // spec.layers - spec.parameters * layer // spec.layers
            size_bytes = share * spec.bytes_per_element
            updates = (add(f"layer{layer}.gradients", size_bytes, TensorKind.GRADIENT, Lifetime.STATE),)
        for name, target, saved, gradients in _BACKWARD:
            written = add(f"d_{_full_name(layer, target)}", gradient_bytes[target], TensorKind.GRADIENT)
            # One op adds all weight gradients of its layer: which one makes no difference to memory or time.
            adds = updates if name == "qkv" else ()
            ops.append(
                Op(
                    f"layer{layer}.{name}.backward",
                    Phase.BACKWARD,
                    duration_s(name, backward_s),
                    reads=(
                        *(index[_full_name(layer, read)] for read in saved),
                        *(index[f"d_{_full_name(layer, read)}"] for read in gradients),
                    ),
                    writes=(written,),
                    updates=adds,
                    recomputable=not adds,
                    layer=f"layer{layer}",
                    flops=2 * _flops(spec, name),
                    memory_traffic_bytes=2 * _traffic_bytes(spec, name),
                )
            )
    return tensors, ops


def _full_name(layer: int, name: str) -> str:
    """A layer's output is the input `x` of the next one."""
    return f"layer{layer + 1}.x" if name == "out" else f"layer{layer}.{name}"
