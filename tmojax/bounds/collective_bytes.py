"""Bytes that collectives send over a link: in a step, and after a moment of its last micro-batch."""

from __future__ import annotations

import numpy as np

from tmojax.bounds.gaps import Gaps
from tmojax.problem import Problem


def collective_bytes(problem: Problem, link: int) -> float:
    """Bytes of all collectives of a step over a link."""
    workload, machine = problem.workload, problem.machine
    total = 0.0
    for collective in workload.collectives:
        ops = workload.program(collective.devices[0]).ops
        runs = sum((1 if op.step_op else workload.micro_batches) for op in ops if op.collective == collective.name)
        load = machine.collective_loads(collective.kind, collective.devices).get(link, 0.0)
        total += runs * collective.size_bytes * load
    return total


def collective_bytes_after(
    problem: Problem, link: int, devices: tuple[int, ...], gaps: Gaps, moment_slots: np.ndarray
) -> np.ndarray:
    """[J + 1] bytes over a link of the collectives of the last micro-batch that cannot begin before a moment on any of
    `devices`, which run one program: they wait for what a later slot writes. The last entry, for the end, is 0."""
    workload, machine = problem.workload, problem.machine
    place = {int(op): slot for slot, op in enumerate(gaps.slot_op)}
    changed: dict[int, int] = {}
    total = np.zeros(len(moment_slots) + 1)
    for index, op in enumerate(workload.program(devices[0]).ops):
        if index in place:
            changed.update(dict.fromkeys((*op.writes, *op.updates), place[index]))
        if not op.collective:
            continue
        collective = workload.collective(op.collective)
        waits_for = max((changed.get(tensor, -1) for tensor in (*op.reads, *op.updates)), default=-1)
        if set(devices) <= set(collective.devices):
            load = machine.collective_loads(collective.kind, collective.devices).get(link, 0.0)
            total[:-1][moment_slots <= waits_for] += collective.size_bytes * load
    return total
