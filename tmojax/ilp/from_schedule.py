"""The decision that a schedule amounts to, whoever made it: where a model's search may start."""

from __future__ import annotations

import numpy as np

from tmojax.problem import Kind, Problem, Schedule
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import Choice, DeviceDecision, Rest


def decision_from_schedule(problem: Problem, view: StepView, schedule: Schedule, device: int) -> DeviceDecision:
    """What the list of a device does to every candidate of its first micro-batch, and to its state.

    Offloaded: it comes back from the host. Recomputed, or dropped where backward does not need it: it is released
    before it is wanted, by its next use or by a recomputation. State that comes back within the step is away in its
    gaps. Copies by way of peers, and different treatment of later micro-batches, are not seen.
    """
    spec, rows = problem.machine.devices[device], schedule.lists[device]
    own = ((rows["owner"] == -1) | (rows["owner"] == device)) & (rows["micro_batch"] == 0)
    back = set(rows["tensor"][own & (rows["kind"] == Kind.PREFETCH) & (rows["memory"] == spec.host_memory)].tolist())
    runs: dict[int, list[int]] = {}  # rows that compute an op
    for row in np.flatnonzero(own & (rows["kind"] == Kind.COMPUTE)).tolist():
        runs.setdefault(int(rows["op"][row]), []).append(row)
    released: dict[int, int] = {}  # first row that does
    for row in np.flatnonzero(own & (rows["kind"] == Kind.RELEASE) & (rows["memory"] == spec.memory)).tolist():
        released.setdefault(int(rows["tensor"][row]), row)
    again = {op: places[1] for op, places in runs.items() if len(places) > 1}
    choice = np.zeros(len(view.tensor), np.int8)
    for index, tensor in enumerate(view.tensor.tolist()):
        wanted = [again.get(int(view.slot_op[view.producer_slot[i]]), len(rows)) for i in view.dependents[index]]
        if view.needed[index]:
            wanted = [runs[int(view.slot_op[view.idle_to[index]])][0]]
        if tensor in back and view.may_offload[index]:
            choice[index] = Choice.OFFLOAD
        elif released.get(tensor, len(rows)) < min(wanted, default=len(rows)):
            choice[index] = Choice.RECOMPUTE
    placed = {placement.tensor: placement.memories for placement in schedule.initial[device]}
    state = np.zeros(len(view.state_tensor), np.int8)
    for index, tensor in enumerate(view.state_tensor.tolist()):
        at_home = spec.memory in placed.get(tensor, (spec.memory,))
        if not at_home:
            state[index] = Rest.ON_HOST
        elif tensor in back:
            state[index] = Rest.AWAY
    return DeviceDecision(choice, state)
