"""The time that a device needs when memory is unlimited: compute in order, collectives alone on their links."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.problem import Problem


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """before [K, Q]: earliest start of a slot (a compute op of a micro-batch) after the start of the step, seconds;
    after [K, Q]: least time from the start of the slot to the end of the step. total_s: of the whole step.
    after_last_s: from the end of the last slot to the end of the step; update_s: compute time of the step ops alone.
    """

    before: np.ndarray
    after: np.ndarray
    total_s: float
    after_last_s: float
    update_s: float


def collective_least_s(problem: Problem, name: str) -> float:
    """Seconds that a collective takes when it has every link for itself (semantics 8.1, 8.4), launch included."""
    collective = problem.workload.collective(name)
    loads = problem.machine.collective_loads(collective.kind, collective.devices)
    slowest = max(
        (load / problem.machine.links[link].bandwidth_bytes_per_s for link, load in loads.items()), default=0.0
    )
    return collective.size_bytes * slowest + problem.machine.overheads.launch_s


def critical_path(problem: Problem, device: int, order: str = "default") -> CriticalPath:
    """Longest paths through compute order, collective order and the data that pass between the two streams."""
    workload, program = problem.workload, problem.workload.program(device)
    sequence = workload.sequence(device, order)
    launch_s = problem.machine.overheads.launch_s
    collective_s = {op.collective: collective_least_s(problem, op.collective) for op in program.ops if op.collective}
    count = len(sequence)
    duration = np.zeros(count)
    earlier: list[list[int]] = []
    last_write: dict[tuple[int, int], int] = {}
    last_of_stream: dict[bool, int] = {}
    for node, (index, micro_batch) in enumerate(sequence):
        op = program.ops[index]
        joint = bool(op.collective)
        duration[node] = collective_s[op.collective] if joint else op.duration_s + launch_s
        sources = {last_of_stream[joint]} if joint in last_of_stream else set()
        for tensor in (*op.reads, *op.updates):
            key = (tensor, workload.instance(device, tensor, index, micro_batch))
            if key in last_write:
                sources.add(last_write[key])
        for tensor in (*op.writes, *op.updates):
            last_write[tensor, workload.instance(device, tensor, index, micro_batch)] = node
        last_of_stream[joint] = node
        earlier.append(sorted(sources))
    start = np.zeros(count)
    for node in range(count):
        start[node] = max((start[i] + duration[i] for i in earlier[node]), default=0.0)
    rest = duration.copy()  # from the start of the node to the end of the step
    for node in range(count - 1, -1, -1):
        for source in earlier[node]:
            rest[source] = max(rest[source], duration[source] + rest[node])

    slot_op = [i for i, op in enumerate(program.ops) if not op.step_op and not op.collective]
    slot_of = {op: slot for slot, op in enumerate(slot_op)}
    before = np.zeros((workload.micro_batches, len(slot_op)))
    after = np.zeros_like(before)
    after_last_s = 0.0
    for node, (index, micro_batch) in enumerate(sequence):
        if index in slot_of:
            before[micro_batch, slot_of[index]] = start[node]
            after[micro_batch, slot_of[index]] = rest[node]
            after_last_s = rest[node] - duration[node]
    update_s = sum(op.duration_s + launch_s for op in program.ops if op.step_op and not op.collective)
    return CriticalPath(before, after, float(rest.max(initial=0.0)), float(after_last_s), float(update_s))
