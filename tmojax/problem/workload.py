"""The training step: what each device computes, on which tensors, in which order.

Everything here is data. A `Workload` holds one `Program` per distinct device role (data-parallel GPUs share one), and
says which device runs which. Sizes are integer bytes, durations are seconds on the device that runs the program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from tmojax.errors import InputError

MOST_DURATION_S = 10**9  # of one op; sums of more leave the range of 64-bit nanoseconds


class TensorKind(StrEnum):
    WEIGHT = "weight"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATION = "activation"
    INPUT = "input"


class Lifetime(StrEnum):
    """How many instances of a tensor exist and how long one lives."""

    MICRO_BATCH = "micro_batch"  # one instance per micro-batch
    STEP = "step"  # one instance per step, written and consumed inside it; instance number 0
    STATE = "state"  # one instance that survives from step to step; instance number 0


class Phase(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    COLLECTIVE = "collective"


class CollectiveKind(StrEnum):
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of one program.

    A tensor that no op writes and that is not STATE is an input of the step: its instances lie in the device's host
    memory when the step starts. `alias_group`: tensors with the same non-empty name share one storage, which has the
    size of the largest of them. `replica_group`: tensors with the same non-empty name hold equal values on several
    devices.
    """

    name: str
    size_bytes: int
    kind: TensorKind
    lifetime: Lifetime = Lifetime.MICRO_BATCH
    alias_group: str = ""
    replica_group: str = ""


@dataclass(frozen=True, slots=True)
class Op:
    """A kernel (or fused group of kernels) of one program; tensor fields are indices into `Program.tensors`.

    `reads` are needed, whole and plain, in device memory; `writes` are produced (a new version of the whole tensor);
    `updates` are read and overwritten in place. `workspace_bytes` is scratch that exists while the op runs.
    An op with a `collective` name is joined by all devices of that collective and runs on the communication stream;
    its `duration_s` is 0 because links determine it. `step_op`: runs once per step (micro-batch number 0), not once
    per micro-batch. `recomputable`: may run again to reproduce what it wrote; never true for ops with `updates`.
    `layer`: label of the block that the op belongs to, used by per-layer planners.
    """

    name: str
    phase: Phase
    duration_s: float
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    workspace_bytes: int = 0
    recomputable: bool = True
    step_op: bool = False
    collective: str = ""
    layer: str = ""
    flops: int = 0
    memory_traffic_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops `first_op` to `end_op` (half-open) run once, in index order, for `micro_batch`.

    Step ops inside the range belong to the run only if `step_ops` is true, micro-batch ops only if it is false: so an
    order can name a range of the table and still be unambiguous.
    """

    first_op: int
    end_op: int
    micro_batch: int
    step_ops: bool = False


@dataclass(frozen=True, slots=True)
class Collective:
    """An operation that several devices enter together; `size_bytes` is the payload of one device."""

    name: str
    kind: CollectiveKind
    size_bytes: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """The graph of one device role.

    `ops` are stored in an order in which one micro-batch can run, step ops included. `orders` maps a name to a
    sequence of segments; together the segments of an order run every micro-batch op once per micro-batch and every
    step op once. An empty mapping means that only the derived order `default` exists.
    """

    name: str
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    orders: dict[str, tuple[Segment, ...]] = field(default_factory=dict)

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """For every tensor, the op that writes it, or -1 (arguments, STATE)."""
        producer = [-1] * len(self.tensors)
        for index, op in enumerate(self.ops):
            for tensor in op.writes:
                if producer[tensor] != -1:
                    raise InputError(
                        f"program {self.name!r}: tensor {self.tensors[tensor].name!r} is written by ops "
                        f"{self.ops[producer[tensor]].name!r} and {op.name!r}; a tensor has one producer, later "
                        f"changes are `updates`"
                    )
                producer[tensor] = index
        return tuple(producer)

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Tensors that lie in host memory when the step starts (not STATE, written by no op)."""
        return tuple(
            index
            for index, tensor in enumerate(self.tensors)
            if tensor.lifetime is not Lifetime.STATE and self.producer[index] == -1
        )


@dataclass(frozen=True)
class Workload:
    """A training step on several devices.

    `programs[device_program[d]]` is what device `d` runs. `micro_batches` is K, the number of micro-batches between
    two gradient synchronisations. `duration_source` says where op durations come from: roofline, profile, measured or
    synthetic, with details as free text after a colon.
    """

    name: str
    programs: tuple[Program, ...]
    device_program: tuple[int, ...]
    micro_batches: int
    duration_source: str
    collectives: tuple[Collective, ...] = ()

    def program(self, device: int) -> Program:
        return self.programs[self.device_program[device]]

    @property
    def device_count(self) -> int:
        return len(self.device_program)

    def collective(self, name: str) -> Collective:
        for collective in self.collectives:
            if collective.name == name:
                return collective
        raise InputError(f"collective {name!r} is not in the workload; known: {[c.name for c in self.collectives]}")

    def instance(self, device: int, tensor: int, op: int, micro_batch: int) -> int:
        """Instance number of `tensor` when `op` of `micro_batch` touches it.

        Micro-batch tensors have one instance per micro-batch; a step op sees that of the last micro-batch.
        """
        program = self.program(device)
        if program.tensors[tensor].lifetime is not Lifetime.MICRO_BATCH:
            return 0
        return self.micro_batches - 1 if program.ops[op].step_op else micro_batch

    def sequence(self, device: int, order: str = "default") -> list[tuple[int, int]]:
        """First executions in order, as (op, micro-batch); collectives included.

        The derived `default` order runs micro-batch after micro-batch. A collective that is a step op placed between
        micro-batch ops runs at its place in the last micro-batch; other step ops follow the last micro-batch.
        Raises InputError for an unknown order or one that does not run everything exactly once.
        """
        program = self.program(device)
        if order in program.orders:
            runs = [
                (op, segment.micro_batch)
                for segment in program.orders[order]
                for op in range(segment.first_op, segment.end_op)
                if program.ops[op].step_op == segment.step_ops
            ]
            expected = {
                (op, k) for op, spec in enumerate(program.ops) for k in range(1 if spec.step_op else self.micro_batches)
            }
            if len(runs) != len(expected) or set(runs) != expected:
                raise InputError(
                    f"program {program.name!r}: order {order!r} must run every op once per micro-batch and every step "
                    f"op once; it runs {len(runs)} where {len(expected)} are expected"
                )
            return runs
        if order != "default":
            raise InputError(
                f"program {program.name!r} offers no order {order!r}; "
                f"choose from {['default', *sorted(program.orders)]}"
            )
        body = [op for op, spec in enumerate(program.ops) if not spec.step_op]
        runs = [(op, k) for k in range(self.micro_batches - 1) for op in body]
        last = self.micro_batches - 1
        return runs + [(op, 0 if spec.step_op else last) for op, spec in enumerate(program.ops)]


def validate_workload(workload: Workload) -> None:
    """Check that a workload is well formed. Raises InputError naming the field, the value and the remedy."""
    if workload.micro_batches < 1:
        raise InputError(f"micro_batches: {workload.micro_batches} must be at least 1")
    if not workload.device_program:
        raise InputError("device_program: a workload needs at least one device")
    for device, program in enumerate(workload.device_program):
        if not 0 <= program < len(workload.programs):
            raise InputError(
                f"device_program[{device}]: there is no program {program}; give 0..{len(workload.programs) - 1}"
            )
    names = [collective.name for collective in workload.collectives]
    if len(set(names)) != len(names):
        raise InputError(f"collectives: names must be unique, got {names}")
    entered = [{op.collective for op in program.ops} for program in workload.programs]
    for collective in workload.collectives:
        if collective.size_bytes < 0:
            raise InputError(f"collective {collective.name!r}: size_bytes {collective.size_bytes} is negative")
        if len(set(collective.devices)) != len(collective.devices) or not collective.devices:
            raise InputError(
                f"collective {collective.name!r}: devices {collective.devices} must be distinct and not empty"
            )
        for device in collective.devices:
            if not 0 <= device < workload.device_count:
                raise InputError(f"collective {collective.name!r}: device {device} is not in the workload")
            if collective.name not in entered[workload.device_program[device]]:
                raise InputError(f"collective {collective.name!r}: device {device} has no op that enters it")
    for program in workload.programs:
        _validate_program(program, set(names))
    for device in range(workload.device_count):
        for order in ("default", *workload.program(device).orders):
            _validate_dataflow(workload, device, order)


def _validate_program(program: Program, collectives: set[str]) -> None:
    where = f"program {program.name!r}"
    for label, items in (("tensor", program.tensors), ("op", program.ops)):
        seen: set[str] = set()
        for item in items:
            if not item.name or item.name in seen:
                raise InputError(f"{where}: {label} name {item.name!r} is empty or used twice; names must be unique")
            seen.add(item.name)
    for tensor in program.tensors:
        if tensor.size_bytes < 0:
            raise InputError(f"{where}: tensor {tensor.name!r}: size_bytes {tensor.size_bytes} is negative")
    count = len(program.tensors)
    for op in program.ops:
        if not 0 <= op.duration_s <= MOST_DURATION_S:
            raise InputError(
                f"{where}: op {op.name!r}: duration_s {op.duration_s} must be between 0 and {MOST_DURATION_S}"
            )
        if op.workspace_bytes < 0:
            raise InputError(f"{where}: op {op.name!r}: workspace_bytes {op.workspace_bytes} is negative")
        if op.updates and op.recomputable:
            raise InputError(f"{where}: op {op.name!r} updates in place, so recomputable must be false")
        if op.collective and op.collective not in collectives:
            raise InputError(f"{where}: op {op.name!r} enters collective {op.collective!r}, which is not defined")
        for tensor in (*op.reads, *op.writes, *op.updates):
            if not 0 <= tensor < count:
                raise InputError(f"{where}: op {op.name!r} names tensor {tensor}; tensors are 0..{count - 1}")
        if set(op.writes) & (set(op.reads) | set(op.updates)):
            raise InputError(f"{where}: op {op.name!r} writes a tensor that it also reads; use updates instead")
        for tensor in op.writes:
            if program.tensors[tensor].lifetime is Lifetime.STATE:
                raise InputError(
                    f"{where}: op {op.name!r} writes STATE tensor {program.tensors[tensor].name!r}; use updates"
                )
        for tensor in op.writes if op.step_op else ():
            if program.tensors[tensor].lifetime is Lifetime.MICRO_BATCH:
                raise InputError(
                    f"{where}: step op {op.name!r} writes {program.tensors[tensor].name!r}, "
                    f"which must have lifetime step"
                )
        for tensor in () if op.step_op else op.writes:
            if program.tensors[tensor].lifetime is Lifetime.STEP:
                raise InputError(
                    f"{where}: op {op.name!r} runs per micro-batch and writes {program.tensors[tensor].name!r}, "
                    f"which must then have lifetime micro_batch"
                )
    _ = program.producer


def _validate_dataflow(workload: Workload, device: int, order: str) -> None:
    program = workload.program(device)
    written: set[tuple[int, int]] = set()
    for op_index, micro_batch in workload.sequence(device, order):
        op = program.ops[op_index]
        for tensor in (*op.reads, *op.updates):
            if (
                program.producer[tensor] != -1
                and (tensor, workload.instance(device, tensor, op_index, micro_batch)) not in written
            ):
                raise InputError(
                    f"program {program.name!r}, order {order!r}: op {op.name!r} of micro-batch {micro_batch} reads "
                    f"{program.tensors[tensor].name!r} before it is written"
                )
        written.update((tensor, workload.instance(device, tensor, op_index, micro_batch)) for tensor in op.writes)
