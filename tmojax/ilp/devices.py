"""One device of a model of several: its groups, steps and routes as arrays; and the update section of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tmojax.bounds.highs import INFINITY, LinearModel
from tmojax.ilp.steps import Groups, Steps, group_candidates, state_groups, steps_between, worst_bytes
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
class ModelDevice:
    """One device with N groups of tensors and J steps of slots.

    first_equal: the first device with the same view. begin, stop [N]: a group is idle in steps begin .. stop - 1 and
    wanted in `stop`. ready [N]: the step that writes its last member. seconds [J]. missing [J]: bytes by which keeping
    everything exceeds the memory. out_s, into_s [N]: of the copies of a group at the full rate of the route.
    state_group [S], state_bytes: as of `state_groups`. columns, away ((group, step) -> column): filled by the model.
    """

    device: int
    first_equal: int
    view: StepView
    capacity_bytes: int
    groups: Groups
    steps: Steps
    begin: np.ndarray
    stop: np.ndarray
    ready: np.ndarray
    seconds: np.ndarray
    missing: np.ndarray
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
        """Steps in which something must be away."""
        return np.flatnonzero(self.missing > 0)

    def decision(self, leaves: np.ndarray, rests: np.ndarray, again: np.ndarray | None = None) -> DeviceDecision:
        """Booleans: `leaves` [N]: groups that leave; `rests`: groups of state that rest on the host; `again` [N]:
        groups that are recomputed."""
        choice = keep_everything(self.view).choice
        for groups, what in ((leaves, Choice.OFFLOAD), (again, Choice.RECOMPUTE)):
            for group in () if groups is None else np.flatnonzero(groups):
                choice[self.groups.members[group]] = what
        hosted = np.append(rests, False)[self.state_group]
        return DeviceDecision(choice, np.where(hosted, Rest.ON_HOST, Rest.ON_DEVICE).astype(np.int8))

    def inside(self, step: int) -> np.ndarray:
        """Groups that are idle in the whole of a step."""
        return np.flatnonzero((self.begin <= step) & (step < self.stop))


def model_device(
    problem: Problem, device: int, views: Sequence[StepView], allowed: np.ndarray, most_groups: int
) -> ModelDevice:
    """Arrays of a device. views: of every device (equal ones share one). allowed [I]: candidates to group."""
    view = views[device]
    machine, spec = problem.machine, problem.machine.devices[device]
    capacity_bytes = problem.capacity_bytes(device)
    groups = group_candidates(problem, view, allowed, most_groups)
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
    return ModelDevice(
        device, next(d for d in range(device + 1) if views[d] is view), view, capacity_bytes, groups, steps,
        begin, stop,
        np.searchsorted(steps.end, groups.written, "right"), steps.seconds(view.slot_s),
        worst_bytes(view, steps, nowhere, nowhere) - capacity_bytes, *routes, out_s, into_s, state_group, state_bytes,
    )  # fmt: skip


def add_update(model: LinearModel, devices: Sequence[ModelDevice], problem: Problem, unit_s: float) -> int:
    """Column of the time of the update section, in units of `unit_s`, at a cost of one.

    Resting state that left (columns "rests") comes in for the section and leaves after it, over the links of all.
    """
    least = max(float(gpu.view.step_s.sum()) for gpu in devices) / unit_s
    per_link: list[list[tuple[np.ndarray, np.ndarray]]] = []  # columns, and units of time per column
    for link, spec in enumerate(problem.machine.links):
        per_link.append([])
        for gpu in devices:
            times = (link in gpu.out_route.links) + (link in gpu.into_route.links)
            if times and len(gpu.state_bytes):
                taken = times * gpu.state_bytes / spec.bandwidth_bytes_per_s / unit_s
                per_link[-1].append((gpu.columns["rests"], taken))
    longest = least + sum(float(taken.sum()) for terms in per_link for _, taken in terms)
    update = int(model.add_columns(1, least, longest, cost=1.0)[0])
    for terms in per_link:
        if terms:
            model.add_row(0.0, INFINITY, (update, 1.0), *((columns, -taken) for columns, taken in terms))
    return update
