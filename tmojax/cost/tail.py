"""Time outside the micro-batches: gradient synchronisation and the update."""

from __future__ import annotations

import numpy as np

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


def step_tail(problem: Problem, view: StepView) -> tuple[float, float]:
    """(sync_s, update_s): what the step's collectives last beyond the last micro-batch, and the step ops' compute.

    Collectives run one after another on the communication stream, each when the op before it in the table is done in
    the last micro-batch.
    """
    ops = problem.workload.program(view.device).ops
    done_s = np.cumsum(view.slot_s)
    stream_s = 0.0
    for op in view.collective_op.tolist():
        if not ops[op].step_op:
            continue
        before = int(np.searchsorted(view.slot_op, op))
        ready_s = float(done_s[before - 1]) if before else 0.0
        stream_s = max(stream_s, ready_s) + collective_s(problem, ops[op].collective)
    end_s = float(done_s[-1]) if len(done_s) else 0.0
    return max(0.0, stream_s - end_s), float(view.step_s.sum())
