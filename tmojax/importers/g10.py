"""Training steps that the authors of G10 (MICRO 2023) profiled kernel by kernel: github.com/platformxlab/G10.

The traces give each kernel's duration on one A100 and each tensor's size, reads and writes, in fp32. What is made of
them: a tensor that the source calls global becomes STATE of kind weight; a tensor that no kernel writes becomes an
input; a kernel that writes a tensor a second time, or a global one, updates it in place.

Known oddities of the source, kept as they are: biases and constants are as large as the activation that they are
broadcast to (116 of the 156 global tensors of BERT scale with the batch); weight and input of the attention's output
projection are swapped; there is no optimizer state, and one global tensor is applied up to 25 times in a step.
"""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from tmojax.errors import InputError
from tmojax.importers.jax_roofline import COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY, GpuSpec, find_gpu
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
from tmojax.problem.strict_json import parse_json, read_file
from tmojax.problem.typed_json import reader

PACKAGED = ("BERT_Base-128", "BERT_Base-512")
TIMES = ("recorded", "roofline")
RECORDED_ON = "A100-SXM4-40GB"
ELEMENT_BYTES = 4
BERT_HEAD_WIDTH = 64


@dataclass(frozen=True)
class TraceTensor:
    """`weight`: what the source calls global, so it outlives the step."""

    size_bytes: int
    weight: bool


@dataclass(frozen=True)
class TraceOp:
    name: str
    duration_s: float
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Trace:
    """One training step of `model` with `batch` samples; `ops` in the order of execution."""

    model: str
    batch: int
    source: str
    ops: tuple[TraceOp, ...]
    tensors: dict[str, TraceTensor]


@dataclass(frozen=True)
class G10Workload:
    """`kind = "g10"`: a step profiled for G10, data-parallel on all GPUs of the machine.

    `trace`: a name of PACKAGED, or the path of a file of the same form (`.json` or `.json.gz`). `times`: "recorded" as
    profiled on an A100, whatever the machine's GPUs are, or "roofline" of the GPU `gpu` (a row of the GPU table;
    empty: each GPU of the machine).
    """

    trace: str = "BERT_Base-128"
    times: str = "recorded"
    gpu: str = ""

    def __post_init__(self) -> None:
        """Raises InputError for a trace that is neither packaged nor a path, unknown times, an unknown or idle GPU."""
        if self.trace not in PACKAGED and not self.trace.endswith((".json", ".json.gz")):
            raise InputError(
                f"trace: {self.trace!r} is unknown; choose one of {', '.join(PACKAGED)}, or a path that ends in .json "
                f"or .json.gz"
            )
        if self.times not in TIMES:
            raise InputError(f"times: {self.times!r} is unknown; choose one of {', '.join(TIMES)}")
        if self.gpu:
            find_gpu(self.gpu)
            if self.times == "recorded":
                raise InputError(f"gpu: {self.gpu!r} changes nothing, as times are recorded; set times = 'roofline'")


def read_gzipped(path: Any) -> Any:
    """The JSON values of a file, gzipped or not. Raises InputError naming the file and what is wrong in it."""
    data = path.read_bytes() if not isinstance(path, Path) else read_file(path)
    try:
        return parse_json(gzip.decompress(data) if str(path).endswith(".gz") else data)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: is not a whole gzip file ({error}); copy it again") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def read_trace(name: str, folder: Path) -> Trace:
    """A packaged trace, or a file whose path is relative to `folder`. Raises InputError naming file and field."""
    path = files("tmojax") / "data" / "g10" / f"{name}.ops.json.gz" if name in PACKAGED else folder / name
    try:
        trace = reader(Trace)(read_gzipped(path), "trace")
        _check(trace)
    except InputError as error:
        raise InputError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    return trace


def _check(trace: Trace) -> None:
    for position, op in enumerate(trace.ops):
        where = f"trace.ops[{position}] ({op.name})"
        for tensor in (*op.reads, *op.writes):
            if tensor not in trace.tensors:
                raise InputError(f"{where}: tensor {tensor!r} is not in trace.tensors; add it there")
        for label, names in (("reads", op.reads), ("writes", op.writes)):
            if len(set(names)) != len(names):
                raise InputError(f"{where}: {label} names a tensor twice; name it once")
    if not trace.ops:
        raise InputError("trace.ops: is empty; a step has at least one kernel")


def matrix_flops(op: TraceOp, tensors: dict[str, TraceTensor]) -> int:
    """FLOPs of a matrix product from the sizes of its operands; 0 for other kernels.

    A product of m x k and k x n has mk, kn and mn elements, so mkn is the root of their product: it does not matter
    which operand the source calls the weight. A batched product of attention always has a matrix of scores (the largest
    operand), and each of its elements costs one multiply-add per element of a head, 64 wide in BERT.
    """
    elements = [tensors[name].size_bytes // ELEMENT_BYTES for name in (*op.reads, *op.writes)]
    if op.name.startswith("BatchMatMul"):
        return 2 * BERT_HEAD_WIDTH * max(elements)
    if op.name.startswith("Linear") and "Apply" not in op.name:
        if len(elements) != 3:
            raise InputError(f"op {op.name!r}: a matrix product has two operands and a result, here {len(elements)}")
        return 2 * math.isqrt(math.prod(elements))
    return 0


def roofline_s(op: TraceOp, tensors: dict[str, TraceTensor], gpu: GpuSpec) -> float:
    """Seconds of a kernel: products at the fp32 rate (TF32 where it exists), every operand crossing memory once."""
    compute_s = matrix_flops(op, tensors) / (COMPUTE_EFFICIENCY * gpu.matmul_peak("float32"))
    traffic_bytes = sum(tensors[name].size_bytes for name in (*op.reads, *op.writes))
    return max(compute_s, traffic_bytes / (MEMORY_EFFICIENCY * gpu.memory_bandwidth_bytes_per_s))


def parameters(trace: Trace) -> frozenset[str]:
    """The global tensors that are parameters with their real size, so that their gradients are synchronised.

    These are the tables that gathers read and the weights of matrix products, which are smaller than the activation
    that they are multiplied with. Biases and constants, broadcast to the size of an activation, are left out, and so
    are weights not smaller than the activation: the output projections, whose weight and input the source has swapped,
    and the pooler (2.4 MB each).
    """
    others: set[str] = set()
    for op in trace.ops:
        if op.name.startswith("Linear_Forward"):
            others.add(max(op.reads, key=lambda name: trace.tensors[name].size_bytes))
        elif not op.name.startswith(("Linear", "Gather", "Apply")):
            others.update(op.reads)
    return frozenset(name for name, tensor in trace.tensors.items() if tensor.weight and name not in others)


def g10_workload(spec: G10Workload, gpu_models: tuple[str, ...], micro_batches: int, folder: Path) -> Workload:
    """The step on one GPU for each of `gpu_models`, data-parallel: gradients of `parameters` are summed over the GPUs.

    With one micro-batch, weights are updated where the source updates them, in the middle of backward. With more,
    gradients accumulate in place in the kernel that makes them and are applied in the last one. Gradients are summed
    just before they are applied. Raises InputError for a bad file and, with roofline times, an unknown GPU.
    """
    trace = read_trace(spec.trace, folder)
    if spec.times == "recorded":
        names: tuple[str, ...] = ("",) * len(gpu_models)
        source = f"profile: {trace.model}, batch {trace.batch}, kernels on {RECORDED_ON} ({trace.source})"
    else:
        names = tuple(spec.gpu or model for model in gpu_models)
        if "" in names:
            raise InputError("workload.gpu: is missing; the machine names no model for one of its GPUs")
        source = f"roofline: {trace.model}, batch {trace.batch}, fp32, from sizes, on {', '.join(dict.fromkeys(names))}"
    kinds = list(dict.fromkeys(names))
    synchronised = parameters(trace) if len(gpu_models) > 1 else frozenset()
    base, collectives = _program(trace, micro_batches, synchronised, len(gpu_models))
    programs = []
    for name in kinds:
        times = {op.name: roofline_s(op, trace.tensors, find_gpu(name)) for op in trace.ops} if name else {}
        ops = tuple(replace(op, duration_s=times.get(op.name, op.duration_s)) for op in base.ops)
        programs.append(replace(base, name=f"{base.name} on {name}" if len(kinds) > 1 else base.name, ops=ops))
    return Workload(
        f"{trace.model}, batch {trace.batch} (G10)",
        tuple(programs),
        tuple(kinds.index(name) for name in names),
        micro_batches,
        source,
        collectives,
    )


def _phase(name: str) -> Phase:
    if "Apply_Grad" in name:
        return Phase.OPTIMIZER
    return Phase.FORWARD if "_Forward" in name else Phase.BACKWARD


def _program(
    trace: Trace, micro_batches: int, synchronised: frozenset[str], gpus: int
) -> tuple[Program, tuple[Collective, ...]]:
    index = {name: position for position, name in enumerate(trace.tensors)}
    accumulate = micro_batches > 1
    applied = {  # gradient -> weight
        read: op.writes[0]
        for op in trace.ops
        if _phase(op.name) is Phase.OPTIMIZER
        for read in op.reads
        if read not in op.writes
    }
    made_in: dict[str, Phase] = {}
    for op in trace.ops:
        for name in op.writes:
            made_in.setdefault(name, _phase(op.name))
    tensors = []
    for name, tensor in trace.tensors.items():
        kept = tensor.weight or (accumulate and name in applied)
        if tensor.weight:
            kind = TensorKind.WEIGHT
        elif name not in made_in:
            kind = TensorKind.INPUT
        else:
            kind = TensorKind.ACTIVATION if made_in[name] is Phase.FORWARD else TensorKind.GRADIENT
        replica = name if tensor.weight and gpus > 1 else ""
        lifetime = Lifetime.STATE if kept else Lifetime.MICRO_BATCH
        tensors.append(Tensor(name, tensor.size_bytes, kind, lifetime, replica_group=replica))
    state = {name for name, spec in zip(trace.tensors, tensors, strict=True) if spec.lifetime is Lifetime.STATE}

    ops: list[Op] = []
    collectives: list[Collective] = []
    written: set[str] = set(state)
    for op in trace.ops:
        phase = _phase(op.name)
        step_op = accumulate and phase is Phase.OPTIMIZER
        if phase is Phase.OPTIMIZER and op.writes[0] in synchronised:
            gradients = tuple(index[name] for name in op.reads if name not in op.writes)
            size_bytes = sum(tensors[gradient].size_bytes for gradient in gradients)
            name = f"gradient.{op.name}"
            collectives.append(Collective(name, CollectiveKind.ALL_REDUCE, size_bytes, tuple(range(gpus))))
            ops.append(
                Op(f"all_reduce.{op.name}", Phase.COLLECTIVE, 0.0, updates=gradients, recomputable=False,
                   step_op=step_op, collective=name, layer="synchronisation")
            )  # fmt: skip
        updates = [name for name in op.writes if name in written]
        writes = [name for name in op.writes if name not in written]
        written.update(writes)
        traffic_bytes = sum(trace.tensors[name].size_bytes for name in (*op.reads, *op.writes))
        ops.append(
            Op(
                op.name,
                phase,
                op.duration_s,
                reads=tuple(index[name] for name in op.reads if name not in updates),
                writes=tuple(index[name] for name in writes),
                updates=tuple(index[name] for name in updates),
                recomputable=False,  # decided below
                step_op=step_op,
                layer=op.name,
                flops=matrix_flops(op, trace.tensors),
                memory_traffic_bytes=traffic_bytes,
            )
        )
    safe = _recomputable(ops, [spec.lifetime is Lifetime.STATE for spec in tensors])
    program_ops = tuple(replace(op, recomputable=can) for op, can in zip(ops, safe, strict=True))
    return Program(f"{trace.model} data parallel", tuple(tensors), program_ops), tuple(collectives)


def _recomputable(ops: list[Op], is_state: list[bool]) -> list[bool]:
    """For each op, whether it still sees the same values whenever its outputs, or what is made of them, can be wanted.

    The source applies gradients in the middle of backward, some of them several times: an op that reads a weight which
    changes before its outputs are last wanted cannot run again. Backward never runs again.
    """
    first_update: dict[int, int] = {}
    for position, op in enumerate(ops):
        for tensor in op.updates:
            first_update.setdefault(tensor, position)
    wanted = [-1] * len(is_state)  # last position at which a tensor, or one computed from it, is read
    safe = [False] * len(ops)
    for position in range(len(ops) - 1, -1, -1):
        op = ops[position]
        last = max((wanted[tensor] for tensor in op.writes), default=-1)
        changed = any(tensor in first_update and first_update[tensor] <= max(last, position) for tensor in op.reads)
        safe[position] = op.phase is Phase.FORWARD and not op.updates and not changed
        for tensor in op.reads:
            if not is_state[tensor]:
                # Only an op that can run again needs its inputs for longer than it takes to run once.
                wanted[tensor] = max(wanted[tensor], position, last if safe[position] else -1)
        for tensor in op.updates:
            if not is_state[tensor]:
                wanted[tensor] = max(wanted[tensor], position)
    return safe
