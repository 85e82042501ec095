"""How many bytes are in each memory while a schedule runs, recounted from the times of its instructions.

Independent of how the simulator starts allocations and of how the checker counts positions: a copy or a workspace
exists from the start of the instruction that makes it to the effect of the one that frees it, and what exists at one
time is added up. Which instruction makes and which frees a copy does not depend on times, so it is read once, and many
simulations of one schedule are counted with a few array operations each.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from tmojax.problem import PLAIN, Kind, MemoryKind, Problem, Schedule, part_bytes
from tmojax.simulate import Simulation

START = -1


class Use(IntEnum):
    OWN = 0  # by the list whose memory it is, or in a memory that several lists use
    LOAN = 1  # set aside by the lender
    BORROWED = 2  # by another list, inside a loan


class Occupancy:
    """Everything that a schedule ever has in a memory. One entry each in `memory`, `size_bytes`, `use`, `device` (of
    the list), `begin` and `end` (instructions; START: there from the start; the length of the list: never freed).
    """

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem, self.schedule = problem, schedule
        entries: list[tuple[int, ...]] = []
        for device in range(len(schedule.lists)):
            entries += _ListOccupancy(problem, schedule, device).entries
        columns = np.array(entries, np.int64).reshape(-1, 6).T
        self.memory, self.size_bytes, self.use, self.device, self.begin, self.end = columns

    def times_s(self, simulation: Simulation) -> tuple[np.ndarray, np.ndarray]:
        """When each entry appears and vanishes; infinite where that never happens."""
        appear, vanish = np.zeros(self.begin.size), np.full(self.begin.size, np.inf)
        for device, rows in enumerate(self.schedule.lists):
            start_s, end_s = simulation.start_s[device], simulation.end_s[device]
            starts = np.where(np.isnan(start_s), end_s, start_s)  # a `lend` has no start of its own
            mine = self.device == device
            made = mine & (self.begin != START)
            appear[made] = starts[self.begin[made]]
            freed = mine & (self.end < len(rows))
            vanish[freed] = end_s[self.end[freed]]
        return np.where(np.isnan(appear), np.inf, appear), np.where(np.isnan(vanish), np.inf, vanish)

    def over_time(self, simulation: Simulation, memory: int, uses=(Use.OWN, Use.BORROWED)):
        """(times, bytes from then on): by default what is really there, loans left out and borrowed copies counted."""
        times, changes = self._changes(simulation, memory, uses)
        total = np.cumsum(changes)
        last = np.append(np.diff(times) > 0, True)[: times.size]
        return times[last], total[last]

    def most_bytes(self, simulation: Simulation, memory: int, uses=(Use.OWN, Use.BORROWED)) -> int:
        """The largest total at one time. At one moment frees come first: an allocation starts after those it needs."""
        _, changes = self._changes(simulation, memory, uses)
        return int(np.cumsum(changes).max(initial=0))

    def most_charged_bytes(self, simulation: Simulation, memory: int) -> int:
        """The same with what is lent counted in place of what is borrowed, as the semantics charge it (3.6)."""
        return self.most_bytes(simulation, memory, (Use.OWN, Use.LOAN))

    def most_beyond_loans_bytes(self, simulation: Simulation, lender_memory: int, borrower: int) -> int:
        """By how much a device's copies in the memory of another exceed what that one lends it then; at most 0 if
        all is well.
        """
        appear, vanish = self.times_s(simulation)
        borrowed = (self.memory == lender_memory) & (self.use == Use.BORROWED) & (self.device == borrower)
        owner = next(d for d, spec in enumerate(self.problem.machine.devices) if spec.memory == lender_memory)
        lent = (self.use == Use.LOAN) & (self.device == owner)
        rows = self.schedule.lists[owner]
        lent[lent] = rows["to_device"][self.begin[lent]] == borrower
        times = np.concatenate([appear[borrowed], vanish[borrowed], appear[lent], vanish[lent]])
        sizes = self.size_bytes
        beyond = np.concatenate([sizes[borrowed], -sizes[borrowed], -sizes[lent], sizes[lent]])
        seen = np.isfinite(times)
        order = np.lexsort((beyond[seen], times[seen]))
        return int(np.cumsum(beyond[seen][order]).max(initial=0))

    def _changes(self, simulation: Simulation, memory: int, uses) -> tuple[np.ndarray, np.ndarray]:
        mine = (self.memory == memory) & np.isin(self.use, [int(use) for use in uses])
        appear, vanish = (times[mine] for times in self.times_s(simulation))
        times = np.concatenate([appear, vanish])
        changes = np.concatenate([self.size_bytes[mine], -self.size_bytes[mine]])
        seen = np.isfinite(times)
        order = np.lexsort((changes[seen], times[seen]))
        return times[seen][order], changes[seen][order]


def within_limits(occupancy: Occupancy, simulation: Simulation) -> dict[str, tuple[int, int]]:
    """Per memory (largest bytes at one time, limit). Raises AssertionError where a limit or a loan is exceeded."""
    machine = occupancy.problem.machine
    found = {}
    for memory, spec in enumerate(machine.memories):
        limit = spec.capacity_bytes - spec.reserve_bytes
        if spec.pinned_limit_bytes >= 0:
            limit = min(limit, spec.pinned_limit_bytes)
        most = max(occupancy.most_bytes(simulation, memory), occupancy.most_charged_bytes(simulation, memory))
        assert most <= limit, f"{spec.name}: {most} bytes at one time, {most - limit} over {limit}"
        found[spec.name] = (most, limit)
    for device, spec in enumerate(machine.devices):
        borrowers = set(occupancy.device[(occupancy.memory == spec.memory) & (occupancy.use == Use.BORROWED)].tolist())
        for borrower in borrowers:
            beyond = occupancy.most_beyond_loans_bytes(simulation, spec.memory, borrower)
            assert beyond <= 0, f"device {borrower} has {beyond} bytes more in {spec.name} than device {device} lends"
    return found


class _ListOccupancy:
    """Reads one list. `there`: storage -> (instruction that made it, tensors in it)."""

    def __init__(self, problem: Problem, schedule: Schedule, device: int) -> None:
        self.problem, self.workload, self.machine, self.device = problem, problem.workload, problem.machine, device
        self.program, self.spec = problem.workload.program(device), problem.machine.devices[device]
        self.entries: list[tuple[int, ...]] = []
        self.there: dict[tuple, tuple[int, set[int]]] = {}
        self.sizes: dict[tuple, int] = {}
        rows = schedule.lists[device]
        self.length = len(rows)
        self.owners = {spec.memory: d for d, spec in enumerate(self.machine.devices)}
        for tensor in self.program.inputs:
            spec = self.program.tensors[tensor]
            for k in range(self.workload.micro_batches if spec.lifetime == "micro_batch" else 1):
                self.appear(START, (device, tensor, k, self.spec.host_memory, PLAIN, 0, 1))
        for placement in schedule.initial[device]:
            for memory in placement.memories:
                self.appear(START, (device, placement.tensor, 0, memory, PLAIN, 0, 1))
        self.read(rows)

    def read(self, rows: np.ndarray) -> None:
        retired_at = {int(row["after"]): i for i, row in enumerate(rows) if row["kind"] == Kind.RETIRE}
        ran: set[tuple[int, int]] = set()
        loans: dict[int, tuple[int, int]] = {}
        columns = {name: rows[name].tolist() for name in rows.dtype.names or ()}
        for i, kind in enumerate(columns["kind"]):
            workspace = 0
            if kind in (Kind.COMPUTE, Kind.COLLECTIVE):
                op, k = columns["op"][i], columns["micro_batch"][i]
                workspace = self.program.ops[op].workspace_bytes
                for tensor in self.program.ops[op].writes:
                    instance = self.workload.instance(self.device, tensor, op, k)
                    made = (self.device, tensor, instance, self.spec.memory, PLAIN, 0, 1)
                    if not self.appear(i, made) and (op, k) in ran:
                        workspace += self.program.tensors[tensor].size_bytes
                ran.add((op, k))
            elif kind in (Kind.OFFLOAD, Kind.PREFETCH, Kind.ENCODE, Kind.DECODE, Kind.RELEASE):
                owner = self.device if columns["owner"][i] == -1 else columns["owner"][i]
                copy = (owner, *(columns[f][i] for f in ("tensor", "micro_batch", "memory", "form", "part", "parts")))
                if kind == Kind.RELEASE:
                    self.vanish(i, copy)
                elif kind in (Kind.OFFLOAD, Kind.PREFETCH):
                    self.appear(i, (*copy[:3], columns["to_memory"][i], *copy[4:]))
                else:
                    self.appear(i, copy if kind == Kind.ENCODE else (*copy[:4], PLAIN, *copy[5:]))
                    size = self.workload.program(owner).tensors[copy[1]].size_bytes
                    workspace = self.machine.codecs[copy[4]].workspace_bytes(part_bytes(size, *copy[5:]))
            elif kind == Kind.LEND:
                loans[columns["event"][i]] = (i, columns["size_bytes"][i])
            elif kind == Kind.RECLAIM and columns["event"][i] in loans:
                begin, size = loans.pop(columns["event"][i])
                self.note(self.spec.memory, size, Use.LOAN, begin, i)
            if workspace:
                self.note(self.spec.memory, workspace, Use.OWN, i, retired_at.get(i, i))
        for begin, size in loans.values():
            self.note(self.spec.memory, size, Use.LOAN, begin, self.length)
        for storage, (begin, _) in self.there.items():
            self.note(storage[3], self.size(storage), self.use(storage[3]), begin, self.length)

    def storage(self, copy: tuple) -> tuple:
        group = self.workload.program(copy[0]).tensors[copy[1]].alias_group
        return (copy[0], group or copy[1], *copy[2:])

    def size(self, storage: tuple) -> int:
        owner, group, _, memory, form, part, parts = storage
        key = (owner, group, memory, form, part, parts)
        if key not in self.sizes:
            tensors = self.workload.program(owner).tensors
            members = [t for n, t in enumerate(tensors) if group in (n, t.alias_group)]
            size = max(part_bytes(t.size_bytes, part, parts) for t in members)
            size = size if form == PLAIN else self.machine.codecs[form].encoded_bytes(size)
            spec = self.machine.memories[memory]
            if spec.kind is MemoryKind.HOST and spec.pinned_power_of_two and size:
                size = 2 ** (size - 1).bit_length()
            self.sizes[key] = size
        return self.sizes[key]

    def use(self, memory: int) -> Use:
        return Use.OWN if self.owners.get(memory, self.device) == self.device else Use.BORROWED

    def appear(self, instruction: int, copy: tuple) -> bool:
        """False if the copy is there already."""
        _, members = self.there.setdefault(self.storage(copy), (instruction, set()))
        new = copy[1] not in members
        members.add(copy[1])
        return new

    def vanish(self, instruction: int, copy: tuple) -> None:
        storage = self.storage(copy)
        if storage not in self.there:  # a release of nothing, in a schedule that is not valid
            return
        begin, members = self.there[storage]
        members.discard(copy[1])
        if not members:
            del self.there[storage]
            self.note(storage[3], self.size(storage), self.use(storage[3]), begin, instruction)

    def note(self, memory: int, size: int, use: Use, begin: int, end: int) -> None:
        if size:
            self.entries.append((memory, size, int(use), self.device, begin, end))
