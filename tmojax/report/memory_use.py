"""Memory in use over time, read from a schedule and its simulated times (docs/semantics.md, section 5).

An allocation counts from the start of its instruction, a release, retire or reclaim from its effect. This reading is
for people (plots, traces); whether a plan is valid is the checker's answer, which needs no times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.problem import PLAIN, Kind, Lifetime, Problem, Schedule, TensorKind, part_bytes
from tmojax.problem.machine import MemoryKind
from tmojax.simulate import Simulation

# Columns of `MemoryUse.bytes_by_kind`, in the order in which plots stack them.
BYTE_KINDS = ("weights", "optimizer state", "gradients", "activations", "inputs", "workspace", "lent to peers")
_COLUMN = {
    TensorKind.WEIGHT: 0,
    TensorKind.OPTIMIZER_STATE: 1,
    TensorKind.GRADIENT: 2,
    TensorKind.ACTIVATION: 3,
    TensorKind.INPUT: 4,
}
_WORKSPACE, _LENT = 5, 6

_Change = tuple[float, int, int]  # time_s, column, bytes


@dataclass(frozen=True, eq=False)
class MemoryUse:
    """Bytes in one memory: `bytes_by_kind` [E, kind] holds from `time_s` [E], which increases strictly, to the next."""

    memory: int
    time_s: np.ndarray
    bytes_by_kind: np.ndarray

    @property
    def total_bytes(self) -> np.ndarray:
        """Bytes in use, [E]."""
        return self.bytes_by_kind.sum(axis=1)

    @property
    def peak(self) -> int:
        """Event with the largest total."""
        return int(np.argmax(self.total_bytes))


def read_memory_use(problem: Problem, schedule: Schedule, simulation: Simulation) -> tuple[MemoryUse, ...]:
    """Memory in use over one step, for every memory of the machine, in its order.

    A copy that lies in the memory of another GPU is part of that GPU's loan and is not counted twice.
    """
    changes: list[list[_Change]] = [[] for _ in problem.machine.memories]
    for device in range(problem.workload.device_count):
        _ListReader(problem, schedule, device, simulation.start_s[device], simulation.end_s[device], changes).read()
    return tuple(_collect(memory, rows) for memory, rows in enumerate(changes))


def peak_by_kind(problem: Problem, schedule: Schedule) -> np.ndarray:
    """Bytes of every kind in every memory at its fullest position, [memory, kind]; needs no times.

    As the rules charge them (docs/semantics.md, 5.2 and 5.3): allocated sets follow list positions, and a memory that
    several lists use is charged with each list's own maximum.
    """
    total = np.zeros((len(problem.machine.memories), len(BYTE_KINDS)), np.int64)
    for device, rows in enumerate(schedule.lists):
        changes: list[list[_Change]] = [[] for _ in problem.machine.memories]
        position = np.arange(1, len(rows) + 1, dtype=float)
        # What instruction i frees is gone before instruction i + 1; a written retire stands at its own place.
        _ListReader(problem, schedule, device, position, position + 0.5, changes).read()
        for memory, found in enumerate(changes):
            use = _collect(memory, found)
            total[memory] += use.bytes_by_kind[use.peak]
    return total


def _collect(memory: int, rows: list[_Change]) -> MemoryUse:
    if not rows:
        return MemoryUse(memory, np.zeros(1), np.zeros((1, len(BYTE_KINDS)), np.int64))
    times = np.array([row[0] for row in rows])
    # What is freed and allocated at one moment nets out: an allocation starts after the frees that it needs.
    time_s, event = np.unique(times, return_inverse=True)
    delta = np.zeros((len(time_s), len(BYTE_KINDS)), np.int64)
    np.add.at(delta, (event, np.array([row[1] for row in rows])), np.array([row[2] for row in rows], np.int64))
    return MemoryUse(memory, time_s, np.cumsum(delta, axis=0))


class _ListReader:
    """Follows one list and notes every change of bytes in every memory."""

    def __init__(self, problem: Problem, schedule: Schedule, device: int, start_s, end_s, changes):
        self._problem, self._machine, self._workload = problem, problem.machine, problem.workload
        self._device = device
        self._program = problem.workload.program(device)
        self._memory = problem.machine.devices[device].memory
        self._rows = schedule.lists[device]
        self._initial = schedule.initial[device]
        self._start_s, self._end_s = start_s, end_s
        self._changes = changes
        self._others = {d.memory for d in self._machine.devices if d.memory != self._memory and d.kind == "gpu"}
        # storage -> (bytes, column, member tensors); alias groups have one storage of the largest member's size
        self._storages: dict[tuple, tuple[int, int, set[int]]] = {}
        self._group_bytes: dict[tuple[int, str], int] = {}

    def read(self) -> None:
        for placement in self._initial:
            for memory in placement.memories:
                self._allocate(0.0, (self._device, placement.tensor, 0, memory, PLAIN, 0, 1))
        for tensor in self._program.inputs:
            micro_batch = self._program.tensors[tensor].lifetime is Lifetime.MICRO_BATCH
            for instance in range(self._workload.micro_batches if micro_batch else 1):
                host = self._machine.devices[self._device].host_memory
                self._allocate(0.0, (self._device, tensor, instance, host, PLAIN, 0, 1))
        self._walk()

    def _walk(self) -> None:
        rows = self._rows
        retired = set(rows["after"][rows["kind"] == Kind.RETIRE].tolist())
        workspace: dict[int, int] = {}
        ran: set[tuple[int, int]] = set()
        loans: dict[int, int] = {}
        columns = [rows[name].tolist() for name in
                   ("kind", "op", "micro_batch", "owner", "tensor", "form", "part", "parts", "memory", "to_memory",
                    "after", "event", "size_bytes")]  # fmt: skip
        for index, (kind, op, micro_batch, owner, tensor, form, part, parts, memory, to_memory, after, event,
                    size) in enumerate(zip(*columns, strict=True)):  # fmt: skip
            start_s, end_s = float(self._start_s[index]), float(self._end_s[index])
            owner = self._device if owner == -1 else owner
            copy = (owner, tensor, micro_batch, memory, form, part, parts)
            scratch = 0
            if kind in (Kind.COMPUTE, Kind.COLLECTIVE):
                scratch = self._run(op, micro_batch, start_s, (op, micro_batch) in ran)
                ran.add((op, micro_batch))
            elif kind in (Kind.OFFLOAD, Kind.PREFETCH):
                self._allocate(start_s, (owner, tensor, micro_batch, to_memory, form, part, parts))
            elif kind in (Kind.ENCODE, Kind.DECODE):
                codec = self._machine.codecs[form]
                spec = self._workload.program(owner).tensors[tensor]
                scratch = codec.workspace_bytes(part_bytes(spec.size_bytes, part, parts))
                made = form if kind == Kind.ENCODE else PLAIN
                self._allocate(start_s, (owner, tensor, micro_batch, memory, made, part, parts))
            elif kind == Kind.RELEASE:
                self._free(end_s, copy)
            elif kind == Kind.RETIRE:
                self._change(end_s, self._memory, _WORKSPACE, -workspace.pop(after, 0))
            elif kind == Kind.LEND:
                loans[event] = size
                self._change(end_s, self._memory, _LENT, size)
            elif kind == Kind.RECLAIM:
                self._change(end_s, self._memory, _LENT, -loans.pop(event, 0))
            if scratch:
                self._change(start_s, self._memory, _WORKSPACE, scratch)
                if index in retired:
                    workspace[index] = scratch
                else:
                    self._change(end_s, self._memory, _WORKSPACE, -scratch)

    def _run(self, op_index: int, micro_batch: int, start_s: float, again: bool) -> int:
        """Allocate what the op writes; returns its workspace with the scratch for outputs that are resident."""
        op = self._program.ops[op_index]
        scratch = op.workspace_bytes
        for tensor in op.writes:
            instance = self._workload.instance(self._device, tensor, op_index, micro_batch)
            copy = (self._device, tensor, instance, self._memory, PLAIN, 0, 1)
            if not self._allocate(start_s, copy) and again:
                scratch += self._program.tensors[tensor].size_bytes
        return scratch

    def _storage(self, copy: tuple) -> tuple:
        owner, tensor, *rest = copy
        group = self._workload.program(owner).tensors[tensor].alias_group
        return (owner, group or tensor, *rest)

    def _bytes(self, copy: tuple) -> int:
        owner, tensor, _, memory, form, part, parts = copy
        tensors = self._workload.program(owner).tensors
        size, group = tensors[tensor].size_bytes, tensors[tensor].alias_group
        if group:
            key = (owner, group)
            if key not in self._group_bytes:
                self._group_bytes[key] = max(t.size_bytes for t in tensors if t.alias_group == group)
            size = self._group_bytes[key]
        size = part_bytes(size, part, parts)
        if form != PLAIN:
            size = self._machine.codecs[form].encoded_bytes(size)
        spec = self._machine.memories[memory]
        if spec.kind is MemoryKind.HOST and spec.pinned_power_of_two and size:
            size = 1 << (size - 1).bit_length()
        return size

    def _allocate(self, time_s: float, copy: tuple) -> bool:
        """Note a copy; False when it is resident already."""
        storage = self._storage(copy)
        if storage in self._storages:
            members = self._storages[storage][2]
            known = copy[1] in members
            members.add(copy[1])
            return not known
        size = self._bytes(copy)
        column = _COLUMN[self._workload.program(copy[0]).tensors[copy[1]].kind]
        self._storages[storage] = (size, column, {copy[1]})
        self._change(time_s, copy[3], column, size)
        return True

    def _free(self, time_s: float, copy: tuple) -> None:
        storage = self._storage(copy)
        if storage not in self._storages:
            return  # an invalid schedule; the checker says so
        size, column, members = self._storages[storage]
        members.discard(copy[1])
        if not members:
            del self._storages[storage]
            self._change(time_s, copy[3], column, -size)

    def _change(self, time_s: float, memory: int, column: int, size: int) -> None:
        if size and memory not in self._others:
            self._changes[memory].append((time_s, column, size))
