"""The time-indexed MILP as a planner: its selection, repaired, with the best link policy and stagger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tmojax.errors import InputError
from tmojax.ilp.time_indexed import solve_time_indexed
from tmojax.planners.base import PlanResult, Stopwatch, does_not_fit
from tmojax.planners.ilp import IlpPlanner
from tmojax.planners.repair import repair
from tmojax.planners.sweep import sweep
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Problem
from tmojax.relax.decisions import DeviceDecision
from tmojax.relax.decode import DoesNotFit


@dataclass(frozen=True)
class TimeIndexedMilp(IlpPlanner):
    """Fractional progress of all GPUs per time bucket (`tmojax.ilp.time_indexed`), for the record.

    Its claim is no estimate: fractions average memory away. buckets: of time; groups: of tensors that leave together,
    at most, on each GPU. whole_steps: progress in order, by binaries for every step and bucket; then memory is not
    averaged over steps, but the bound is as weak and solutions are rare. Without an incumbent in `time_limit_s` the
    linear relaxation is rounded at several thresholds, in at most as much time again.
    """

    name: str = "time-indexed-milp"
    buckets: int = 24
    groups: int = 8
    whole_steps: bool = False

    without_solution = "its model of all GPUs has no solution in this memory with what its groups of tensors can free"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, value in (("buckets", self.buckets), ("groups", self.groups)):
            if not 1 <= value <= 1000:
                raise InputError(f"{field}: {value} must be between 1 and 1000")

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        bench = Workbench(problem)
        views = [bench.view(device) for device in range(bench.device_count)]
        found = solve_time_indexed(
            problem, views, self.solver_settings, buckets=self.buckets, most_groups=self.groups,
            whole_steps=self.whole_steps,
        )  # fmt: skip
        details: dict[str, Any] = {"solves": [found.figures]}
        if not found.selections:
            return self.no_solution(details, watch)
        best: Candidate | None = None
        failure: DoesNotFit | None = None
        for selection in found.selections:
            swept = _fitted(bench, selection)
            if isinstance(swept, DoesNotFit):
                failure = swept
            elif best is None or swept.step_s < best.step_s:
                best = swept
        if best is None:
            assert failure is not None
            return does_not_fit(self.name, problem, failure, watch)
        return self.planned(best, details, watch)


def _fitted(bench: Workbench, selection: tuple[DeviceDecision, ...]) -> Candidate | DoesNotFit:
    fitted = []
    for device, decision in enumerate(selection):
        whole = repair(bench, device, decision)
        if isinstance(whole, DoesNotFit):
            return whole
        fitted.append(whole)
    return sweep(bench, tuple(fitted))
