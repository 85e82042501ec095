"""One instruction list as columns of indices: range checks, copies as keys, sizes and durations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tmojax.errors import InputError
from tmojax.problem import (
    COMMUNICATION_STREAM,
    COMPUTE_STREAM,
    FIRST_ENGINE_STREAM,
    INSTRUCTION,
    PLAIN,
    Kind,
    Problem,
    Schedule,
)
from tmojax.simulate.hazards import Accesses, Copies, Rows
from tmojax.simulate.kernel import COLLECTIVE, INSTANT, TRANSFER, WORK
from tmojax.simulate.tables import ProblemTable

NODE_KIND = np.full(len(Kind), INSTANT, np.int8)
NODE_KIND[[Kind.COMPUTE, Kind.ENCODE, Kind.DECODE]] = WORK
NODE_KIND[[Kind.OFFLOAD, Kind.PREFETCH]] = TRANSFER
NODE_KIND[Kind.COLLECTIVE] = COLLECTIVE

_FIXED_STREAM = np.full(len(Kind), -1)
_FIXED_STREAM[[Kind.COMPUTE, Kind.ENCODE, Kind.DECODE]] = COMPUTE_STREAM
_FIXED_STREAM[Kind.COLLECTIVE] = COMMUNICATION_STREAM

_COPIES = np.zeros(len(Kind), np.bool_)  # kinds that name a copy
_COPIES[[Kind.OFFLOAD, Kind.PREFETCH, Kind.RELEASE, Kind.ENCODE, Kind.DECODE]] = True


@dataclass(frozen=True)
class Columns:
    """A list of n instructions. `node_kind`, `work_s`, `flow_bytes`, `flow_class`: n, as in `arrays.Graph`.

    `flow_class` of an instruction without a flow is -1; `flow_bytes` are exact integers. `rows`, `accesses`, `copies`:
    what `hazards.order_list` reads.
    """

    node_kind: NDArray[np.int8]
    work_s: NDArray[np.float64]
    flow_bytes: NDArray[np.int64]
    flow_class: NDArray[np.int32]
    rows: Rows
    accesses: Accesses
    copies: Copies
    access_count: int


class _Checks:
    """Range checks with messages that name the list, the instruction, the field and the value."""

    def __init__(self, rows: NDArray, device: int) -> None:
        self.rows, self.device = rows, device

    def require(self, where: NDArray, field: str, low: int, high: int, what: str) -> None:
        """Every `field` of the instructions `where` (indices) lies in low..high-1."""
        values = self.rows[field][where]
        if values.size and (values.min() < low or values.max() >= high):
            place = int(np.flatnonzero((values < low) | (values >= high))[0])
            self.fail(int(where[place]), field, int(values[place]), f"{what} are {low}..{high - 1}")

    def fail(self, index: int, field: str, value: object, remedy: str) -> None:
        kind = int(self.rows["kind"][index])
        name = Kind(kind).name.lower() if 0 <= kind < len(Kind) else f"kind {kind}"
        raise InputError(f"list {self.device}, instruction {index} ({name}): {field} {value}; {remedy}")


def columns_of(problem: Problem, table: ProblemTable, schedule: Schedule, device: int) -> Columns:
    """Read list `device`. Raises InputError for a field out of range; other validity is the checker's business."""
    rows = schedule.lists[device]
    if rows.dtype != INSTRUCTION or rows.ndim != 1:
        raise InputError(f"list {device}: dtype {rows.dtype} with {rows.ndim} dimensions; build it with ListBuilder")
    machine = problem.machine
    program = table.program(problem, device)
    checks = _Checks(rows, device)
    kind = np.ascontiguousarray(rows["kind"])
    everything = np.arange(rows.size)
    checks.require(everything, "kind", 0, len(Kind), "kinds")

    op = np.ascontiguousarray(rows["op"])
    micro_batch = np.ascontiguousarray(rows["micro_batch"])
    runs = np.flatnonzero((kind == Kind.COMPUTE) | (kind == Kind.COLLECTIVE))
    checks.require(runs, "op", 0, program.duration_s.size, "ops")
    checks.require(runs, "micro_batch", 0, table.micro_batches, "micro-batches")
    entered = program.collective[op[runs]]
    wrong = np.flatnonzero((entered >= 0) != (kind[runs] == Kind.COLLECTIVE))
    if wrong.size:
        index = int(runs[wrong[0]])
        checks.fail(index, "op", int(op[index]), "an op with a collective is run by `collective`, others by `compute`")

    flow_class = np.full(rows.size, -1, np.int32)
    flow_class[runs] = np.where(entered >= 0, table.machine.routes + entered, -1)
    flow_bytes = np.zeros(rows.size, np.int64)
    work_s = np.zeros(rows.size, np.float64)
    work_s[runs] = program.duration_s[op[runs]] + machine.overheads.launch_s

    after = np.ascontiguousarray(rows["after"])
    refer = np.flatnonzero((kind == Kind.RETIRE) | (kind == Kind.SIGNAL))
    checks.require(refer, "after", 0, rows.size, "instructions")
    late = np.flatnonzero(after[refer] >= refer)
    if late.size:
        index = int(refer[late[0]])
        checks.fail(index, "after", int(after[index]), "it must be an earlier instruction of this list")
    retired = np.zeros(rows.size, np.bool_)
    retired[after[kind == Kind.RETIRE]] = True
    waits = np.flatnonzero(kind == Kind.WAIT)
    checks.require(waits, "stream", 0, FIRST_ENGINE_STREAM + len(machine.engines), "streams")
    reclaims = np.flatnonzero(kind == Kind.RECLAIM)
    if reclaims.size:
        after = after.copy()
        lends = np.flatnonzero(kind == Kind.LEND)
        for index in reclaims:
            loans = lends[(rows["event"][lends] == rows["event"][index]) & (lends < index)]
            after[index] = loans[-1] if loans.size else -1

    copy = _copy_columns(problem, table, schedule, device, rows, kind, checks)
    transfers = np.flatnonzero((kind == Kind.OFFLOAD) | (kind == Kind.PREFETCH))
    route = table.machine.route_of[rows["memory"][transfers], rows["to_memory"][transfers]]
    if (route < 0).any():
        index = int(transfers[np.flatnonzero(route < 0)[0]])
        machine.route(int(rows["memory"][index]), int(rows["to_memory"][index]))  # raises, with the names
    flow_class[transfers] = route
    flow_bytes[transfers] = copy.size_bytes[transfers]
    work_s[transfers] = table.machine.setup_s[route]
    workspace_bytes = np.zeros(rows.size, np.int64)
    for index in np.flatnonzero((kind == Kind.ENCODE) | (kind == Kind.DECODE)):
        codec, plain_bytes = machine.codecs[rows["form"][index]], int(copy.plain_bytes[index])
        rate = codec.encode_bytes_per_s if kind[index] == Kind.ENCODE else codec.decode_bytes_per_s
        work_s[index] = plain_bytes / rate + machine.overheads.launch_s
        workspace_bytes[index] = codec.workspace_bytes(plain_bytes)

    stream = np.where(kind == Kind.WAIT, rows["stream"], _FIXED_STREAM[kind])
    stream[transfers] = table.machine.first_stream[route]
    return Columns(
        NODE_KIND[kind],
        work_s,
        flow_bytes,
        flow_class,
        Rows(
            _int64(kind), _int64(op), _int64(micro_batch), copy.key, _int64(copy.memory), copy.target_key,
            _int64(copy.target_memory), _int64(flow_class), _int64(after), _int64(stream), retired, workspace_bytes,
        ),
        Accesses(
            program.access_ptr, program.access_tensor, program.workspace_bytes, program.step_op, program.size_bytes,
            program.first_slot * copy.columns + copy.own_column,
            np.where(program.per_micro_batch, copy.columns, 0).astype(np.int64),
        ),
        copy.copies,
        int(program.access_count[op[runs]].sum()),
    )  # fmt: skip


def _int64(column: NDArray) -> NDArray[np.int64]:
    return column.astype(np.int64)


@dataclass(frozen=True)
class _CopyColumns:
    key: NDArray[np.int64]
    memory: NDArray[np.int32]
    target_key: NDArray[np.int64]
    target_memory: NDArray[np.int32]
    plain_bytes: NDArray[np.int64]
    size_bytes: NDArray[np.int64]
    columns: int
    own_column: int
    copies: Copies


def _copy_columns(problem, table, schedule, device, rows, kind, checks) -> _CopyColumns:
    """Copies as keys: slot of (owner, tensor, instance), then one column per memory and variant (form, part, parts)."""
    machine = problem.machine
    memories = len(machine.memories)
    named = np.flatnonzero(_COPIES[kind])
    coded = np.flatnonzero((kind == Kind.ENCODE) | (kind == Kind.DECODE))
    moved = np.flatnonzero((kind == Kind.OFFLOAD) | (kind == Kind.PREFETCH))
    checks.require(named, "owner", -1, problem.workload.device_count, "devices")
    checks.require(named, "memory", 0, memories, "memories")
    checks.require(moved, "to_memory", 0, memories, "memories")
    checks.require(named, "form", PLAIN, len(machine.codecs), "codecs (and -1: plain)")
    checks.require(coded, "form", 0, len(machine.codecs), "codecs")
    checks.require(named, "parts", 1, 2**20, "numbers of parts")
    part, parts, form = rows["part"][named], rows["parts"][named], rows["form"][named]
    if ((part < 0) | (part >= parts)).any():
        index = int(named[np.flatnonzero((part < 0) | (part >= parts))[0]])
        checks.fail(index, "part", int(rows["part"][index]), f"parts are 0..{int(rows['parts'][index]) - 1}")

    # Slots: those of the list's own device first, then those of other owners that it names.
    owner = np.where(rows["owner"][named] < 0, device, rows["owner"][named])
    owners = [device, *(int(other) for other in np.unique(owner) if other != device)]
    slot = np.zeros(named.size, np.int64)
    plain_bytes = np.zeros(rows.size, np.int64)
    bases: list[int] = []
    base = 0
    for other in owners:
        program = table.program(problem, other)
        bases.append(base)
        theirs = np.flatnonzero(owner == other) if len(owners) > 1 else slice(None)
        where = named[theirs]
        checks.require(where, "tensor", 0, program.size_bytes.size, f"tensors of device {other}")
        tensor = rows["tensor"][where]
        per_micro_batch = program.per_micro_batch[tensor]
        checks.require(where[per_micro_batch], "micro_batch", 0, table.micro_batches, "micro-batches")
        slot[theirs] = base + program.first_slot[tensor] + np.where(per_micro_batch, rows["micro_batch"][where], 0)
        size = program.size_bytes[tensor]
        cut, pieces = part[theirs].astype(np.int64), parts[theirs]
        plain_bytes[where] = size * (cut + 1) // pieces - size * cut // pieces
        base += program.slot_count

    most = int(parts.max(initial=1))
    variants = np.array([_variant(PLAIN, 0, 1, most)])  # the smallest number of all, so column 0 is the plain whole
    if most > 1 or (form != PLAIN).any():
        both = np.concatenate((_variant(form, part, parts, most), _variant(PLAIN, part, parts, most)))
        variants = np.unique(np.concatenate((variants, both)))
    columns = memories * variants.size

    def column(of_form, memory):
        return np.searchsorted(variants, _variant(of_form, part, parts, most)) * memories + memory

    memory = np.ascontiguousarray(rows["memory"])
    target_memory = np.where(NODE_KIND[kind] == TRANSFER, rows["to_memory"], memory)
    key = np.zeros(rows.size, np.int64)
    target_key = np.zeros(rows.size, np.int64)
    named_kind = kind[named]
    source_form = np.where(named_kind == Kind.ENCODE, PLAIN, form)
    target_form = np.where(named_kind == Kind.DECODE, PLAIN, form)
    key[named] = slot * columns + column(source_form, memory[named])
    target_key[named] = slot * columns + column(target_form, target_memory[named])
    size_bytes = plain_bytes.copy()
    for index in named[form != PLAIN]:
        size_bytes[index] = machine.codecs[rows["form"][index]].encoded_bytes(int(plain_bytes[index]))

    stores, persistent = zip(*(table.program(problem, other).copies(columns) for other in owners), strict=True)
    resident = np.zeros(base * columns, np.bool_)
    for other, first in zip(owners, bases, strict=True):
        program = table.program(problem, other)
        tensors, places = _placements(problem, schedule, other, program.size_bytes.size)
        resident[(first + program.first_slot[tensors]) * columns + places] = True
        host = machine.devices[other].host_memory
        for tensor in program.inputs:
            instances = table.micro_batches if program.per_micro_batch[tensor] else 1
            slots = first + program.first_slot[tensor] + np.arange(instances)
            resident[slots * columns + host] = True
    store = (
        np.concatenate([s + b * columns for s, b in zip(stores, bases, strict=True)]) if len(owners) > 1 else stores[0]
    )
    whole, slices = _slices(variants, most, memories)
    return _CopyColumns(
        key,
        memory,
        target_key,
        target_memory,
        plain_bytes,
        size_bytes,
        columns,
        machine.devices[device].memory,
        Copies(
            store, np.concatenate(persistent) if len(owners) > 1 else persistent[0], resident, whole, slices, memories
        ),
    )  # fmt: skip


def _slices(variants: NDArray, most: int, memories: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`Copies.whole` and `Copies.slices`: which variants are plain slices, which complete sets are in use."""
    plain = variants // ((most + 1) * most) == 0
    parts = variants // most % (most + 1)
    whole = np.where(plain, -np.arange(variants.size) * memories, 1)
    sets = [
        (count, int(np.flatnonzero(plain & (parts == count))[0]) * memories)
        for count in np.unique(parts[plain & (parts > 1)]).tolist()
        if np.count_nonzero(plain & (parts == count)) == count
    ]
    return whole, np.array(sets, np.int64).reshape(-1, 2)


def _variant(form, part, parts, most: int):
    """A number for (form, part, parts); `most` is the largest number of parts in use."""
    return ((np.asarray(form, np.int64) + 1) * (most + 1) + parts) * most + part


def _placements(problem: Problem, schedule: Schedule, device: int, tensor_count: int) -> tuple[NDArray, NDArray]:
    """The initial placement of a device's STATE tensors as arrays (tensor, memory)."""
    if len(schedule.initial) != problem.workload.device_count:
        raise InputError(
            f"schedule.initial: {len(schedule.initial)} entries; give one per device ({problem.workload.device_count})"
        )
    pairs = [(placement.tensor, memory) for placement in schedule.initial[device] for memory in placement.memories]
    tensors, memories = np.array(pairs, np.int64).reshape(-1, 2).T
    limit = len(problem.machine.memories)
    if ((tensors < 0) | (tensors >= tensor_count) | (memories < 0) | (memories >= limit)).any():
        raise InputError(
            f"schedule.initial[{device}]: a placement names a tensor outside 0..{tensor_count - 1} or a memory outside "
            f"0..{limit - 1}"
        )
    return tensors, memories
