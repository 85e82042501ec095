"""One device of the TMO-type model: its groups, steps and routes as arrays, and its columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tmojax.ilp.steps import Groups, Steps, group_candidates, small_candidates, state_groups, steps_between, worst_bytes
from tmojax.problem import Problem, Route
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import Choice, DeviceDecision, Rest, keep_everything


@dataclass(frozen=True, eq=False)
class DeviceTimes:
    """What a simulation says of one device in one micro-batch, seconds: (start, end) of the copies of each tensor that
    leaves; begin and end [Q] of the slots."""

    out_s: dict[int, tuple[float, float]]
    into_s: dict[int, tuple[float, float]]
    slot_begin_s: np.ndarray
    slot_end_s: np.ndarray


@dataclass(eq=False)
class TmoDevice:
    """One device. leaves [N], out, into [N]: columns of the groups; away: (group, step) -> column; start [J + 1]."""

    device: int
    first_equal: int
    view: StepView
    capacity_bytes: int
    groups: Groups
    steps: Steps
    begin: np.ndarray
    stop: np.ndarray
    ready: np.ndarray  # step that writes the last member of a group
    seconds: np.ndarray
    missing: np.ndarray  # bytes that must be away in each step
    out_route: Route
    into_route: Route
    out_s: np.ndarray
    into_s: np.ndarray
    state_group: np.ndarray
    state_bytes: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    away: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def short(self) -> np.ndarray:
        return np.flatnonzero(self.missing > 0)

    def decision(self, leaves: np.ndarray, rests: np.ndarray) -> DeviceDecision:
        """`leaves`: groups that leave, as indices or booleans [N]; `rests`: groups of state that rest on the host."""
        choice = keep_everything(self.view).choice
        for group in np.arange(len(self.groups.members))[leaves]:
            choice[self.groups.members[group]] = Choice.OFFLOAD
        hosted = np.append(rests, False)[self.state_group]
        return DeviceDecision(choice, np.where(hosted, Rest.ON_HOST, Rest.ON_DEVICE).astype(np.int8))

    def inside(self, step: int) -> np.ndarray:
        """Groups that are idle in the whole of a step."""
        return np.flatnonzero((self.begin <= step) & (step < self.stop))


def tmo_device(problem: Problem, device: int, view: StepView, views: Sequence[StepView], most_groups: int,
         small_share: float) -> TmoDevice:  # fmt: skip
    machine, spec = problem.machine, problem.machine.devices[device]
    capacity_bytes = problem.capacity_bytes(device)
    small = small_candidates(view, capacity_bytes, small_share)
    groups = group_candidates(problem, view, view.needed & view.may_offload & ~small, most_groups)
    borders = np.concatenate([groups.written + 1, groups.idle_from + 1, groups.idle_to])
    steps = steps_between(len(view.slot_s), borders.tolist())
    begin, stop = steps.whole(groups.idle_from, groups.idle_to)
    nowhere = np.zeros(len(view.tensor), np.int64)
    routes = machine.route(spec.memory, spec.host_memory), machine.route(spec.host_memory, spec.memory)
    setup_s = [
        machine.overheads.transfer_setup_s + sum(machine.links[link].latency_s for link in route.links)
        for route in routes
    ]
    rates = [min(machine.links[link].bandwidth_bytes_per_s for link in route.links) for route in routes]
    count = np.array([len(members) for members in groups.members])
    out_s, into_s = (count * setup_s[way] + groups.size_bytes / rates[way] for way in (0, 1))
    state_group, state_bytes = state_groups(view)
    return TmoDevice(
        device, next(d for d in range(device + 1) if views[d] is view), view, capacity_bytes, groups, steps,
        begin, stop,
        np.searchsorted(steps.end, groups.written, "right"), steps.seconds(view.slot_s),
        worst_bytes(view, steps, nowhere, nowhere) - capacity_bytes, *routes, out_s, into_s, state_group, state_bytes,
    )  # fmt: skip
