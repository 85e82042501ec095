"""The time that a step needs when memory is unlimited: compute in order, collectives alone on their links."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tmojax.errors import InputError
from tmojax.problem import Op, Problem

_Kind = tuple[int, tuple[str, ...]]  # a program and the collectives that a device takes part in
_Sequence = list[tuple[int, int, int]]  # (op, micro-batch, node) in the order of a device


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """before [K, Q]: earliest start of a slot (a compute op of a micro-batch) after the start of the step, seconds;
    after [K, Q]: least time from the start of the slot to the end of the step. total_s: the longest path through
    anything that the device runs.
    before_end, after_end [Q']: the same of the compute ops of the last micro-batch and of the step, in their order;
    after_last_s: from the end of the last of them to the end of the step.
    """

    before: np.ndarray
    after: np.ndarray
    before_end: np.ndarray
    after_end: np.ndarray
    total_s: float
    after_last_s: float


def collective_least_s(problem: Problem, name: str) -> float:
    """Seconds that a collective takes when it has every link for itself (semantics 8.1, 8.4), launch and latency
    included."""
    collective = problem.workload.collective(name)
    loads = problem.machine.collective_loads(collective.kind, collective.devices)
    slowest = max(
        (load / problem.machine.links[link].bandwidth_bytes_per_s for link, load in loads.items()), default=0.0
    )
    latency_s = problem.machine.collective_latency_s(collective.kind, collective.devices)
    return problem.machine.overheads.launch_s + latency_s + collective.size_bytes * slowest


def critical_paths(problem: Problem, order: str = "default") -> list[CriticalPath]:
    """Of every device: longest paths through the compute order, the collective order and the data that pass between
    the two streams, over all devices together: a collective begins when all its devices have come to it.

    Raises InputError where the devices come to their collectives in orders that contradict each other.
    """
    kinds, sequences, nodes = _graph(problem, order)
    before, rest = nodes.longest_paths()
    paths = {kind: _path_of(problem, kind[0], sequence, before, rest, nodes) for kind, sequence in sequences.items()}
    return [paths[kind] for kind in kinds]


def least_until(problem: Problem, devices: tuple[int, ...], op: int) -> np.ndarray:
    """[Q'] least seconds from the start of each compute op of the last micro-batch and of the step, as in
    `CriticalPath.before_end`, to the end of `op` on the same device, which is one of them; for each of `devices`, which
    run one program. -infinity behind `op`."""
    kinds, sequences, nodes = _graph(problem, "default")
    last, found = problem.workload.micro_batches - 1, []
    for kind in {kinds[device] for device in devices}:
        ops = problem.workload.programs[kind[0]].ops
        at = _at_end(sequences[kind], ops, last)
        rest = nodes.longest_until(at[op])
        found.append(rest[list(at.values())])
    return np.min(found, axis=0)


@dataclass(frozen=True, eq=False)
class JointPaths:
    """Of a collective of the last micro-batch or of the step, for each device that takes part: until_s [Q'] least
    seconds from the start of each compute op, as in `CriticalPath.before_end`, to the start of the collective; since_s
    [Q'] from there to the start of each compute op; -infinity where one need not wait for the other. later_s:
    collectives that cannot start before it, and least seconds from its start to theirs."""

    devices: tuple[int, ...]
    until_s: dict[int, np.ndarray]
    since_s: dict[int, np.ndarray]
    later_s: tuple[tuple[str, float], ...]


def joint_paths(problem: Problem, most: int) -> list[JointPaths]:
    """Of up to `most` collectives, in equal distances."""
    kinds, sequences, nodes = _graph(problem, "default")
    workload = problem.workload
    last, found = workload.micro_batches - 1, []
    step_ops = {op.collective for program in workload.programs for op in program.ops if op.step_op}
    joint = [(name, node) for (name, k), node in nodes.joint.items() if k == last or name in step_ops]
    chosen = {round(i) for i in np.linspace(0, len(joint) - 1, min(most, len(joint)))}
    for name, node in [joint[i] for i in sorted(chosen)]:
        until, since = nodes.longest_until(node) - nodes.duration_s[node], nodes.longest_since(node)
        ways = {}
        for kind, sequence in sequences.items():
            at = list(_at_end(sequence, workload.programs[kind[0]].ops, last).values())
            ways[kind] = until[at], since[at]
        devices = workload.collective(name).devices
        later = tuple((other, float(since[n])) for other, n in joint if since[n] > -np.inf)
        found.append(JointPaths(devices, {d: ways[kinds[d]][0] for d in devices},
                                {d: ways[kinds[d]][1] for d in devices}, later))  # fmt: skip
    return found


def _at_end(sequence: _Sequence, ops: tuple[Op, ...], last: int) -> dict[int, int]:
    """Compute ops of the last micro-batch and of the step, in the order of the program -> node."""
    return dict(sorted((index, node) for index, k, node in sequence
                       if not ops[index].collective and (ops[index].step_op or k == last)))  # fmt: skip


def _graph(problem: Problem, order: str) -> tuple[list[_Kind], dict[_Kind, _Sequence], _Nodes]:
    """(kind of every device, what a device of each kind runs, all nodes)."""
    workload = problem.workload
    # Devices with one program and the same partners have equal paths: one of them stands for all.
    member_of = [tuple(c.name for c in workload.collectives if d in c.devices) for d in range(workload.device_count)]
    kinds = [(workload.device_program[d], member_of[d]) for d in range(workload.device_count)]
    nodes = _Nodes()
    sequences = {}
    for kind in dict.fromkeys(kinds):
        sequences[kind] = _add_device(problem, kinds.index(kind), set(kind[1]), order, nodes)
    return kinds, sequences, nodes


@dataclass
class _Nodes:
    """What runs, on all devices: seconds, what each waits for, and the nodes of collectives, which devices share."""

    duration_s: list[float] = field(default_factory=list)
    earlier: list[set[int]] = field(default_factory=list)
    joint: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, duration_s: float) -> int:
        self.duration_s.append(duration_s)
        self.earlier.append(set())
        return len(self.duration_s) - 1

    def longest_paths(self) -> tuple[np.ndarray, np.ndarray]:
        """(earliest start of each node, least time from its start to the end of everything), seconds."""
        ordered = self._ordered()
        start, rest = np.zeros(len(ordered)), np.array(self.duration_s)
        for node in ordered:
            for source in self.earlier[node]:
                start[node] = max(start[node], start[source] + self.duration_s[source])
        for node in reversed(ordered):
            for source in self.earlier[node]:
                rest[source] = max(rest[source], self.duration_s[source] + rest[node])
        return start, rest

    def longest_until(self, last: int) -> np.ndarray:
        """Least time from the start of each node to the end of node `last`, seconds; -infinity where it need not have
        started by then."""
        rest = np.full(len(self.duration_s), -np.inf)
        rest[last] = self.duration_s[last]
        for node in reversed(self._ordered()):
            for source in self.earlier[node]:
                rest[source] = max(rest[source], self.duration_s[source] + rest[node])
        return rest

    def longest_since(self, first: int) -> np.ndarray:
        """Least time from the start of node `first` to that of each node, seconds; -infinity where it need not wait."""
        start = np.full(len(self.duration_s), -np.inf)
        start[first] = 0.0
        for node in self._ordered():
            for source in self.earlier[node]:
                start[node] = max(start[node], start[source] + self.duration_s[source])
        return start

    def _ordered(self) -> list[int]:
        """Each node behind those that it waits for."""
        count = len(self.duration_s)
        later: list[list[int]] = [[] for _ in range(count)]
        waits = [len(sources) for sources in self.earlier]
        for node, sources in enumerate(self.earlier):
            for source in sources:
                later[source].append(node)
        ordered = [node for node in range(count) if not waits[node]]
        for node in ordered:  # which grows
            for follower in later[node]:
                waits[follower] -= 1
                if not waits[follower]:
                    ordered.append(follower)
        if len(ordered) < count:
            names = sorted({name for (name, _), node in self.joint.items() if waits[node]})
            raise InputError(
                f"collectives: devices wait for each other in a circle at {names[:3]}; their programs must come to "
                "common collectives in one order"
            )
        return ordered


def _add_device(
    problem: Problem, device: int, partners: set[str], order: str, nodes: _Nodes
) -> _Sequence:
    """Adds what a device runs; in its order."""
    workload, program = problem.workload, problem.workload.program(device)
    launch_s = problem.machine.overheads.launch_s
    collective_s = {op.collective: collective_least_s(problem, op.collective) for op in program.ops if op.collective}
    found = []
    last_write: dict[tuple[int, int], int] = {}
    last_of_stream: dict[bool, int] = {}
    for index, micro_batch in workload.sequence(device, order):
        op = program.ops[index]
        joint = bool(op.collective)
        node = nodes.joint.get((op.collective, micro_batch)) if op.collective in partners else None
        if node is None:
            node = nodes.add(collective_s[op.collective] if joint else op.duration_s + launch_s)
            if op.collective in partners:
                nodes.joint[op.collective, micro_batch] = node
        if joint in last_of_stream:
            nodes.earlier[node].add(last_of_stream[joint])
        for tensor in (*op.reads, *op.updates):
            key = (tensor, workload.instance(device, tensor, index, micro_batch))
            if key in last_write:
                nodes.earlier[node].add(last_write[key])
        for tensor in (*op.writes, *op.updates):
            last_write[tensor, workload.instance(device, tensor, index, micro_batch)] = node
        last_of_stream[joint] = node
        found.append((index, micro_batch, node))
    return found


def _path_of(problem: Problem, program_index: int, sequence: _Sequence, start: np.ndarray, rest: np.ndarray,
             nodes: _Nodes) -> CriticalPath:  # fmt: skip
    program, micro_batches = problem.workload.programs[program_index], problem.workload.micro_batches
    slot_op = [i for i, op in enumerate(program.ops) if not op.step_op and not op.collective]
    slot_of = {op: slot for slot, op in enumerate(slot_op)}
    slot_at_end = {op: slot for slot, op in enumerate(i for i, op in enumerate(program.ops) if not op.collective)}
    before_end, after_end = np.zeros(len(slot_at_end)), np.zeros(len(slot_at_end))
    before = np.zeros((micro_batches, len(slot_op)))
    after = np.zeros_like(before)
    after_last_s = 0.0
    for index, micro_batch, node in sequence:
        if index in slot_of:
            before[micro_batch, slot_of[index]] = start[node]
            after[micro_batch, slot_of[index]] = rest[node]
        if index in slot_at_end and (program.ops[index].step_op or micro_batch == micro_batches - 1):
            before_end[slot_at_end[index]] = start[node]
            after_end[slot_at_end[index]] = rest[node]
            after_last_s = float(rest[node]) - nodes.duration_s[node]
    total_s = max((float(start[node] + rest[node]) for *_, node in sequence), default=0.0)
    return CriticalPath(before, after, before_end, after_end, total_s, after_last_s)


def shortest(paths: list[CriticalPath]) -> CriticalPath:
    """What holds for every one of devices that run one program."""
    return CriticalPath(
        np.min([path.before for path in paths], axis=0),
        np.min([path.after for path in paths], axis=0),
        np.min([path.before_end for path in paths], axis=0),
        np.min([path.after_end for path in paths], axis=0),
        min(path.total_s for path in paths),
        min(path.after_last_s for path in paths),
    )
