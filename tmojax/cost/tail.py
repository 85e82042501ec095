"""Time outside the micro-batches: gradient synchronisation and the update."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.cost.model import GB
from tmojax.problem import Problem
from tmojax.problem.step_view import StepView


def collective_s(problem: Problem, name: str) -> float:
    """Seconds of one collective that has its links to itself: launch, latency, bytes over the slowest link
    (semantics 8.1).
    """
    machine, collective = problem.machine, problem.workload.collective(name)
    loads = machine.collective_loads(collective.kind, collective.devices)
    moving_s = max(
        (share * collective.size_bytes / machine.links[link].bandwidth_bytes_per_s for link, share in loads.items()),
        default=0.0,
    )
    latency_s = machine.collective_latency_s(collective.kind, collective.devices)
    return machine.overheads.launch_s + latency_s + moving_s


def collective_slot_s(problem: Problem, view: StepView) -> np.ndarray:
    """[Q] seconds of the collectives that are slots of a micro-batch (0 for other slots)."""
    ops = problem.workload.program(view.device).ops
    return np.array([collective_s(problem, ops[op].collective) if ops[op].collective else 0.0 for op in view.slot_op])


@dataclass(frozen=True, eq=False)
class StepCollectives:
    """The collectives of a step that are not part of a micro-batch, in order: C of them on L links of the machine.

    before [C]: slot of the last micro-batch behind which each may start (-1: at once). left_s [C]: seconds that it and
    all later ones take when nothing else uses their links. left_gb [L, C]: what they load each link with.
    """

    before: np.ndarray
    left_s: np.ndarray
    left_gb: np.ndarray


def step_collectives(problem: Problem, view: StepView) -> StepCollectives:
    """Collectives run one after another on the communication stream, each when the op before it in the table is done in
    the last micro-batch.
    """
    ops, machine = problem.workload.program(view.device).ops, problem.machine
    names = [(op, ops[op].collective) for op in view.collective_op.tolist() if ops[op].step_op]
    load_gb = np.zeros((len(machine.links), len(names)))
    for column, (_, name) in enumerate(names):
        collective = problem.workload.collective(name)
        for link, share in machine.collective_loads(collective.kind, collective.devices).items():
            load_gb[link, column] = share * collective.size_bytes / GB
    seconds = np.array([collective_s(problem, name) for _, name in names])
    before = np.searchsorted(view.slot_op, [op for op, _ in names]) - 1
    return StepCollectives(before.astype(np.int64), _suffix_sums(seconds), _suffix_sums(load_gb))


def _suffix_sums(values: np.ndarray) -> np.ndarray:
    return np.flip(np.cumsum(np.flip(values, -1), axis=-1), -1)
