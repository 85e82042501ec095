"""From a plan of stages to the instruction list of one device: the programme's own schedule, run for run.

Every micro-batch follows the plan; step ops stand behind the nodes that precede them. A tensor is freed behind its last
use before it is written or brought again, so the list never holds more than the programme counted. A copy stands at the
start of its stage, what it frees is freed at the end of that stage; so nothing in the list waits for anything that has
not ended before the same stage in the programme, and on a path of its own the list never takes longer than claimed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tmojax.ilp.checkmate_graph import StageGraph
from tmojax.ilp.checkmate_model import StagePlan
from tmojax.problem import (
    COMMUNICATION_STREAM,
    COMPUTE_STREAM,
    FIRST_ENGINE_STREAM,
    Lifetime,
    ListBuilder,
    Placement,
    Problem,
)
from tmojax.problem.step_view import StepView
from tmojax.relax.decode import DeviceList, DoesNotFit
from tmojax.relax.host_memory import host_peak_bytes

RUN, OUT, IN, STAGE_END = range(4)


@dataclass(frozen=True)
class _Item:
    """A run of an op (`number` is the op), a copy (`number` is the tensor), or the end of a stage."""

    kind: int
    number: int = -1
    micro_batch: int = 0


@dataclass(eq=False)
class _Uses:
    """Of one tensor instance, in the order of items: allocating (written or brought) or only read, and by a copy."""

    places: list[int] = field(default_factory=list)
    allocates: list[bool] = field(default_factory=list)
    copies: list[bool] = field(default_factory=list)


def stage_list(
    problem: Problem, view: StepView, graph: StageGraph, plan: StagePlan, device: int, *, barriers: bool = False
) -> DeviceList | DoesNotFit:
    """The list of `device`, which is equal to the device of `view`. `barriers`: no stage starts before all of the one
    before it has ended, as in the programme; without them copies and compute start when they can.

    DoesNotFit where the list needs more than the device's capacity, which a plan of the programme never does.
    """
    return _Writer(problem, view, graph, plan, device).write(barriers)


class _Writer:
    def __init__(self, problem: Problem, view: StepView, graph: StageGraph, plan: StagePlan, device: int) -> None:
        self.problem, self.view, self.graph, self.plan, self.device = problem, view, graph, plan, device
        self.program = problem.workload.program(device)
        self.spec = problem.machine.devices[device]
        self.count = problem.workload.micro_batches
        self.items = self._without_idle_copies(self._sequence())

    def _instance(self, tensor: int, op: int, micro_batch: int) -> int:
        return self.problem.workload.instance(self.device, tensor, op, micro_batch)

    def _sequence(self) -> list[_Item]:
        """All runs and copies of the step."""
        graph, plan, ops = self.graph, self.plan, self.program.ops
        node_of = {op: node for node, members in enumerate(graph.ops) for op in members}
        behind: dict[int, list[int]] = {}
        before = -1
        for op, spec in enumerate(ops):
            if spec.step_op:
                behind.setdefault(before, []).append(op)
            else:
                before = node_of[op]
        paged = set(graph.tensor[graph.producer < 0].tolist())
        brought: set[tuple[int, int]] = set()
        items: list[_Item] = []

        def bring(op: int, micro_batch: int) -> None:
            """Inputs that the plan does not page come before the first op that reads them."""
            for tensor in (*ops[op].reads, *ops[op].updates):
                key = (tensor, self._instance(tensor, op, micro_batch))
                if tensor in self.inputs and tensor not in paged and key not in brought:
                    brought.add(key)
                    items.append(_Item(IN, tensor, key[1]))

        def step_ops(node: int) -> None:
            for op in behind.get(node, ()):
                bring(op, 0)
                items.append(_Item(RUN, op))
            if node in behind:
                items.append(_Item(STAGE_END))

        self.inputs = set(self.program.inputs)
        for k in range(self.count):
            if k + 1 == self.count:
                step_ops(-1)
            first = np.flatnonzero(plan.kept[0])
            if len(first):
                items += [_Item(IN, int(graph.tensor[value]), k) for value in first]
                items.append(_Item(STAGE_END))
            for t in range(graph.stages):
                for op in graph.ops[t]:
                    bring(op, k)
                items += [_Item(OUT, int(graph.tensor[value]), k) for value in np.flatnonzero(plan.go[t])]
                items += [_Item(IN, int(graph.tensor[value]), k) for value in np.flatnonzero(plan.come[t])]
                for node in np.flatnonzero(plan.run[t]):
                    items += [_Item(RUN, op, k) for op in graph.ops[node]]
                items.append(_Item(STAGE_END))
                if k + 1 == self.count:
                    step_ops(t)
        return items

    def _without_idle_copies(self, items: list[_Item]) -> list[_Item]:
        """Without copies in that nothing reads before the next one or before the tensor is written, and without copies
        out that none comes back from. (A programme has no reason to drop what costs it nothing.)"""
        uses = self._uses(items)
        idle: set[int] = set()
        for found in uses.values():
            wanted_back = False
            for place in reversed(range(len(found.places))):
                at = found.places[place]
                read_next = place + 1 < len(found.places) and not found.allocates[place + 1]
                if items[at].kind == IN:
                    if read_next:
                        wanted_back = True
                    else:
                        idle.add(at)
                elif items[at].kind == OUT and not wanted_back:
                    idle.add(at)
        if not idle:
            return items
        return self._without_idle_copies([item for place, item in enumerate(items) if place not in idle])

    def _uses(self, items: list[_Item]) -> dict[tuple[int, int], _Uses]:
        found: dict[tuple[int, int], _Uses] = {}

        def note(tensor: int, instance: int, place: int, allocates: bool, copies: bool) -> None:
            if self.program.tensors[tensor].lifetime is not Lifetime.STATE:
                uses = found.setdefault((tensor, instance), _Uses())
                uses.places.append(place)
                uses.allocates.append(allocates)
                uses.copies.append(copies)

        for place, item in enumerate(items):
            if item.kind in (OUT, IN):
                note(item.number, item.micro_batch, place, item.kind == IN, True)
            elif item.kind == RUN:
                op = self.program.ops[item.number]
                for tensor in dict.fromkeys((*op.reads, *op.updates)):
                    note(tensor, self._instance(tensor, item.number, item.micro_batch), place, False, False)
                for tensor in op.writes:
                    note(tensor, self._instance(tensor, item.number, item.micro_batch), place, True, False)
        return found

    def _releases(self) -> tuple[dict[int, list[tuple[int, int]]], dict[int, list[tuple[int, int]]]]:
        """By the item behind which they stand: (device copies, host copies) to free, as (tensor, instance)."""
        ends = np.array([place for place, item in enumerate(self.items) if item.kind == STAGE_END], np.int64)

        def stage_end(place: int) -> int:
            return int(ends[np.searchsorted(ends, place)])

        device: dict[int, list[tuple[int, int]]] = {}
        host: dict[int, list[tuple[int, int]]] = {}
        for key, uses in self._uses(self.items).items():
            last_in = -1
            going_until = -1
            for place, at in enumerate(uses.places):
                if uses.copies[place]:
                    if uses.allocates[place]:
                        last_in = at
                    else:
                        going_until = stage_end(at)
                until = max(at, going_until)
                # What is written again while it is on its way out has not left yet.
                if place + 1 == len(uses.places) or (uses.allocates[place + 1] and uses.places[place + 1] > until):
                    device.setdefault(until, []).append(key)
            if last_in >= 0 and key[0] not in self.inputs:
                host.setdefault(stage_end(last_in), []).append(key)
        return device, host

    def write(self, barriers: bool) -> DeviceList | DoesNotFit:
        problem, program, spec = self.problem, self.program, self.spec
        rows, out = ListBuilder(), problem.machine.route(spec.memory, spec.host_memory)
        into = problem.machine.route(spec.host_memory, spec.memory)
        device_frees, host_frees = self._releases()
        memory = _Memory(problem, self.device)
        compute_row, seconds, moved = [], [], [0, 0]
        latest: dict[int, int] = {}
        engines = sorted({*out.engines, *into.engines})
        streams = (COMPUTE_STREAM, COMMUNICATION_STREAM, *(FIRST_ENGINE_STREAM + engine for engine in engines))
        events = 0
        for place, item in enumerate(self.items):
            if item.kind == RUN:
                op = program.ops[item.number]
                memory.run(item, self._instance)
                if memory.over_bytes > 0:
                    return DoesNotFit(self.device, item.number, item.micro_batch, memory.over_bytes)
                row = (rows.collective if op.collective else rows.compute)(item.number, item.micro_batch)
                latest[COMMUNICATION_STREAM if op.collective else COMPUTE_STREAM] = row
                compute_row.append(row)
                launch_s = problem.machine.overheads.launch_s
                seconds.append(0.0 if op.collective else op.duration_s + launch_s)
            elif item.kind in (OUT, IN):
                goes = item.kind == OUT
                if not goes:
                    memory.allocate(item.number, item.micro_batch)
                if goes:
                    row = rows.offload(item.number, item.micro_batch, spec.memory, spec.host_memory)
                else:
                    row = rows.prefetch(item.number, item.micro_batch, spec.host_memory, spec.memory)
                moved[0 if goes else 1] += program.tensors[item.number].size_bytes
                for engine in (out if goes else into).engines:
                    latest[FIRST_ENGINE_STREAM + engine] = row
            for tensor, instance in device_frees.get(place, ()):
                rows.release(tensor, instance, spec.memory)
                memory.free(tensor, instance)
            for tensor, instance in host_frees.get(place, ()):
                rows.release(tensor, instance, spec.host_memory)
            if item.kind == STAGE_END and barriers:
                for row in sorted(set(latest.values())):
                    rows.signal(events, row)
                    for stream in streams:
                        rows.wait(events, stream)
                    events += 1
                latest = {}
        table = rows.build()
        initial = tuple(Placement(int(tensor), (spec.memory,)) for tensor in self.view.state_tensor)
        host_bytes = host_peak_bytes(problem, self.device, table, initial)
        return DeviceList(
            table, np.array(compute_row, np.int64), np.cumsum(seconds), (moved[0], moved[1]), initial, host_bytes
        )


class _Memory:
    """Bytes that a list has allocated in its device's memory, position by position."""

    def __init__(self, problem: Problem, device: int) -> None:
        self.program = problem.workload.program(device)
        self.capacity = problem.capacity_bytes(device)
        tensors = self.program.tensors
        self.size: dict[object, int] = {}
        for number, tensor in enumerate(tensors):
            key = tensor.alias_group or number
            self.size[key] = max(self.size.get(key, 0), tensor.size_bytes)
        self.members: dict[tuple[object, int], set[int]] = {}
        self.used = 0
        self.over_bytes = 0
        for number, tensor in enumerate(tensors):
            if tensor.lifetime is Lifetime.STATE:
                self.allocate(number, 0)

    def _storage(self, tensor: int, instance: int) -> tuple[object, int]:
        return (self.program.tensors[tensor].alias_group or tensor, instance)

    def allocate(self, tensor: int, instance: int) -> bool:
        """Whether the tensor was not there before."""
        key = self._storage(tensor, instance)
        there = self.members.setdefault(key, set())
        if tensor in there:
            return False
        if not there:
            self.used += self.size[key[0]]
        there.add(tensor)
        self.over_bytes = max(self.over_bytes, self.used - self.capacity)
        return True

    def free(self, tensor: int, instance: int) -> None:
        key = self._storage(tensor, instance)
        self.members[key].discard(tensor)
        if not self.members[key]:
            self.used -= self.size[key[0]]

    def run(self, item: _Item, instance) -> None:
        """Allocate what an op writes and count its workspace; what is there already goes to scratch."""
        op = self.program.ops[item.number]
        scratch = op.workspace_bytes
        for tensor in op.writes:
            if not self.allocate(tensor, instance(tensor, item.number, item.micro_batch)):
                scratch += self.program.tensors[tensor].size_bytes
        self.over_bytes = max(self.over_bytes, self.used + scratch - self.capacity)
