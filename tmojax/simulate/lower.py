"""A schedule as a dependency graph in arrays (docs/semantics.md, sections 3 to 5 and 7)."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tmojax.errors import InputError
from tmojax.problem import COMPUTE_STREAM, FIRST_ENGINE_STREAM, INSTRUCTION, Kind, Problem, Schedule
from tmojax.simulate.arrays import Graph
from tmojax.simulate.columns import Columns, columns_of
from tmojax.simulate.hazards import order_list
from tmojax.simulate.jit import compiled
from tmojax.simulate.kernel import COLLECTIVE, INSTANT, TIMER
from tmojax.simulate.tables import ProblemTable, table_of

# Lists that are not lowered again when they come back: so many instructions of one problem, and of so many problems.
MOST_ROWS_KEPT, MOST_PROBLEMS_KEPT = 300_000, 4


@dataclass(frozen=True)
class Lowered:
    """The graph of `steps` repetitions of a schedule.

    Instruction i of step s of list d is node `first_node[d] + s * length[d] + i`; collectives, hand-overs and auxiliary
    instants follow. `effect[v]`: node whose times are those of instruction node v (a collective's common node, else v).
    `flow_size_bytes`: exact bytes of transfers and payload bytes of collectives, per node. `on_compute`: instruction
    nodes of the compute stream.
    """

    graph: Graph
    work_s: NDArray[np.float64]
    flow_size_bytes: NDArray[np.int64]
    effect: NDArray[np.int32]
    first_node: NDArray[np.int64]
    length: NDArray[np.int64]
    steps: int
    instruction_kind: NDArray[np.int64]
    on_compute: NDArray[np.bool_]
    has_collectives: bool

    def nodes(self, device: int) -> slice:
        """Instruction nodes of a list, step after step."""
        first = int(self.first_node[device])
        return slice(first, first + int(self.length[device]) * self.steps)


@compiled
def _successors(source, target, nodes):
    """Edges as (successor pointers, successors in order of the edges, number of predecessors)."""
    pointer = np.zeros(nodes + 1, np.int32)
    waiting = np.zeros(nodes, np.int32)
    for e in range(source.size):
        pointer[source[e] + 1] += 1
        waiting[target[e]] += 1
    for node in range(nodes):
        pointer[node + 1] += pointer[node]
    place = pointer[:-1].copy()
    successor = np.empty(max(source.size, 1), np.int32)
    for e in range(source.size):
        successor[place[source[e]]] = target[e]
        place[source[e]] += 1
    return pointer, successor, waiting


class _Nodes:
    """Nodes after the instructions, and the edges between lists."""

    def __init__(self, instructions: int) -> None:
        self.count = instructions
        self.kind: list[int] = []
        self.device: list[int] = []
        self.flow_class: list[int] = []
        self.work_s: list[float] = []
        self.size_bytes: list[int] = []
        self.sources: list[int] = []
        self.targets: list[int] = []
        self.never: list[int] = []  # nodes that wait for something that does not exist

    def add(self, kind: int, device: int, flow_class: int = -1, work_s: float = 0.0, size_bytes: int = 0) -> int:
        self.kind.append(kind)
        self.device.append(device)
        self.flow_class.append(flow_class)
        self.work_s.append(work_s)
        self.size_bytes.append(size_bytes)
        self.count += 1
        return self.count - 1

    def edge(self, source: int, target: int) -> None:
        self.sources.append(source)
        self.targets.append(target)


def lower(problem: Problem, schedule: Schedule, steps: int = 1) -> Lowered:
    """Build the graph. Raises InputError for lists that cannot be read; what cannot finish is found by the run."""
    devices = problem.workload.device_count
    if len(schedule.lists) != devices:
        raise InputError(f"schedule.lists: {len(schedule.lists)} lists; give one per device ({devices})")
    if steps < 1:
        raise InputError(f"steps: {steps} must be at least 1")
    table = table_of(problem)
    parts = [_part(problem, table, schedule, device) for device in range(devices)]
    lists = [part.columns for part in parts]
    length = np.array([columns.node_kind.size for columns in lists], np.int64)
    first = np.concatenate(([0], np.cumsum(length * steps)))
    extra = _Nodes(int(first[-1]))
    effect = np.arange(first[-1], dtype=np.int32)
    _join_collectives(problem, table, lists, first, length, steps, extra, effect)
    _link_events(problem, schedule, first, length, steps, extra)

    sources = [np.array(extra.sources, np.int64)]
    targets = [np.array(extra.targets, np.int64)]
    auxiliary_device: list[NDArray] = []
    nodes = extra.count
    for device, part in enumerate(parts):
        source, target, added = part.edges if steps == 1 else _ordered(problem, table, part.columns, device, steps)
        total = length[device] * steps
        sources.append(np.where(source < total, source + first[device], source - total + nodes))
        targets.append(np.where(target < total, target + first[device], target - total + nodes))
        auxiliary_device.append(np.full(added, device))
        nodes += added
    source, target = np.concatenate(sources), np.concatenate(targets)
    member = np.flatnonzero(effect != np.arange(effect.size))
    if member.size:
        # What follows a collective waits for its common node; the entries themselves lead there and nowhere else.
        whole = np.concatenate((effect, np.arange(effect.size, nodes)))
        source = whole[source]
        source, target = np.concatenate((source, member)), np.concatenate((target, effect[member]))
    successor_ptr, successor, waiting = _successors(source, target, nodes)
    for node in extra.never:
        waiting[node] += 1

    spare = nodes - extra.count
    kind = [np.tile(columns.node_kind, steps) for columns in lists]
    node_kind = np.concatenate([*kind, np.array(extra.kind, np.int8), np.full(spare, INSTANT, np.int8)])
    node_kind[member] = INSTANT
    device_of = np.concatenate(
        [np.repeat(np.arange(devices), length * steps), np.array(extra.device, np.int64), *auxiliary_device]
    )
    position = np.concatenate([*(np.arange(n * steps) for n in length), np.zeros(nodes - first[-1], np.int64)])
    flow_class = np.concatenate(
        [
            *(np.tile(columns.flow_class, steps) for columns in lists),
            np.array(extra.flow_class, np.int64),
            np.full(spare, -1),
        ]
    )
    work_s = np.concatenate([*(np.tile(columns.work_s, steps) for columns in lists), extra.work_s, np.zeros(spare)])
    size = np.concatenate(
        [*(np.tile(columns.flow_bytes, steps) for columns in lists), np.array(extra.size_bytes, np.int64),
         np.zeros(spare, np.int64)]
    )  # fmt: skip
    machine = table.machine
    load = np.array([1.0] * machine.routes + machine.collective_load + [0.0], np.float64)  # last: no flow (class -1)
    graph = Graph(
        node_kind.astype(np.int8), device_of.astype(np.int32), position.astype(np.int32), flow_class.astype(np.int32),
        size * load[flow_class], waiting, successor_ptr, successor, machine.link_ptr, machine.link, machine.coefficient,
        machine.engine_ptr, machine.engine, machine.source, machine.destination, machine.member_ptr, machine.member,
        machine.device_memory, len(problem.machine.memories), len(problem.machine.engines),
    )  # fmt: skip
    instruction_kind = np.concatenate([np.tile(columns.rows.kind, steps) for columns in lists])
    stream = np.concatenate([np.tile(columns.rows.stream, steps) for columns in lists])
    return Lowered(
        graph, work_s, size, effect, first, length, steps, instruction_kind, stream == COMPUTE_STREAM, member.size > 0
    )


@dataclass(frozen=True)
class _Part:
    """What of one list does not depend on the others: its columns, and the edges inside it when it is issued once."""

    columns: Columns
    edges: tuple[NDArray, NDArray, int]


class _Parts:
    """Parts of lists of one problem, by device, content of the list and of the placement; the last used stand last."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, bytes, bytes], _Part] = {}
        self.rows = 0

    def add(self, key: tuple[int, bytes, bytes], part: _Part) -> None:
        self.known[key] = part
        self.rows += part.columns.work_s.size
        while self.rows > MOST_ROWS_KEPT:
            self.rows -= self.known.pop(next(iter(self.known))).columns.work_s.size


_parts: WeakKeyDictionary[ProblemTable, _Parts] = WeakKeyDictionary()  # the last used stand last


def _parts_of(table: ProblemTable) -> _Parts:
    parts = _parts[table] = _parts.pop(table, None) or _Parts()
    if len(_parts) > MOST_PROBLEMS_KEPT:
        del _parts[next(iter(_parts))]
    return parts


def _part(problem: Problem, table: ProblemTable, schedule: Schedule, device: int) -> _Part:
    """The part of a list. Searches change the list of one device at a time, so those seen last are kept."""
    rows, key = schedule.lists[device], None
    parts = _parts_of(table)
    if rows.dtype == INSTRUCTION and rows.ndim == 1 and len(schedule.initial) == problem.workload.device_count:
        alone = (rows["owner"] < 0).all()
        placed = schedule.initial[device : device + 1] if alone else schedule.initial
        numbers = [n for one in placed for item in one for n in (item.tensor, len(item.memories), *item.memories)]
        numbers += [len(one) for one in placed]
        key = (device, rows.tobytes(), np.array(numbers, np.int64).tobytes())
        if key in parts.known:
            parts.known[key] = parts.known.pop(key)
            return parts.known[key]
    columns = columns_of(problem, table, schedule, device)
    part = _Part(columns, _ordered(problem, table, columns, device, 1))
    if key is not None:
        parts.add(key, part)
    return part


def _ordered(problem: Problem, table: ProblemTable, columns: Columns, device: int, steps: int):
    """Edges inside one list: (sources, targets, number of auxiliary nodes), in positions of the list."""
    machine = table.machine
    return order_list(
        columns.rows, columns.accesses, columns.copies, table.micro_batches, steps,
        FIRST_ENGINE_STREAM + len(problem.machine.engines), len(problem.machine.memories),
        int(machine.device_memory[device]), machine.engine_ptr, machine.engine, columns.access_count,
    )  # fmt: skip


def _join_collectives(problem, table, lists, first, length, steps, extra: _Nodes, effect) -> None:
    """One node per collective: all devices enter it, and it takes effect everywhere at the same moment."""
    routes = table.machine.routes
    entries: dict[tuple[int, int, int, int], list[int]] = {}
    for device, columns in enumerate(lists):
        seen: dict[tuple[int, int], int] = {}
        for index in np.flatnonzero(columns.node_kind == COLLECTIVE).tolist():
            collective = int(columns.flow_class[index]) - routes
            if device not in problem.workload.collectives[collective].devices:
                raise InputError(
                    f"list {device}, instruction {index}: device {device} is not in collective "
                    f"{problem.workload.collectives[collective].name!r}"
                )
            micro_batch = int(columns.rows.micro_batch[index])
            time = seen.get((collective, micro_batch), 0)
            seen[collective, micro_batch] = time + 1
            for step in range(steps):
                node = int(first[device] + step * length[device] + index)
                entries.setdefault((collective, micro_batch, time, step), []).append(node)
    for (collective, _, _, _), members in entries.items():
        spec = problem.workload.collectives[collective]
        flow_class = routes + collective
        node = extra.add(
            COLLECTIVE, spec.devices[0], flow_class, float(table.machine.setup_s[flow_class]), spec.size_bytes
        )
        effect[members] = node
        if len(members) < len(spec.devices):
            extra.never.append(node)


def _link_events(problem: Problem, schedule: Schedule, first, length, steps: int, extra: _Nodes) -> None:
    """Signals to waits; to those of other devices through one hand-over."""
    signals: dict[int, tuple[int, int]] = {}
    waits: list[tuple[int, int, int]] = []
    for device, rows in enumerate(schedule.lists):
        events = rows["event"]
        for index in np.flatnonzero(rows["kind"] == Kind.SIGNAL).tolist():
            event = int(events[index])
            if event in signals:
                raise InputError(
                    f"list {device}, instruction {index}: event {event} is also signalled by instruction "
                    f"{signals[event][1]} of list {signals[event][0]}; an event has one signal"
                )
            signals[event] = (device, index)
        waits += [(int(events[index]), device, index) for index in np.flatnonzero(rows["kind"] == Kind.WAIT).tolist()]
    handover_s = problem.machine.overheads.handover_s
    for step in range(steps):
        arrivals: dict[int, int] = {}
        for event, device, index in waits:
            wait = int(first[device] + step * length[device] + index)
            if event not in signals:
                extra.never.append(wait)
                continue
            origin, place = signals[event]
            source = int(first[origin] + step * length[origin] + place)
            if origin != device and handover_s > 0.0:
                if event not in arrivals:
                    arrivals[event] = extra.add(TIMER, origin, work_s=handover_s)
                    extra.edge(source, arrivals[event])
                source = arrivals[event]
            extra.edge(source, wait)
