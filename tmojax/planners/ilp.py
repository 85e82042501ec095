"""What planners that solve an integer programme have in common: settings, honest statuses, figures."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from tmojax.bounds.highs import SolverStatus
from tmojax.ilp.solver import SolverSettings
from tmojax.planners.base import Planner, PlanResult, Status, Stopwatch, does_not_fit
from tmojax.planners.repair import repair
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Problem
from tmojax.relax.decisions import DeviceDecision
from tmojax.relax.decode import DoesNotFit


@dataclass(frozen=True)
class IlpPlanner(Planner):
    """time_limit_s of each solve; gap: relative, at which it stops; threads; solver: `highs` or `gurobi`.

    `details["solves"]` has the figures of every solve (`tmojax.ilp.solver.solve_figures`, and more of the planner's
    own).
    """

    time_limit_s: float = 12.0
    gap: float = 5e-3
    threads: int = 1
    solver: str = "highs"

    # Every schedule satisfies the model, so that a proof that the model has no solution is one for the problem.
    model_is_relaxation: ClassVar[bool] = False
    without_solution: ClassVar[str] = "its model has no solution"

    def __post_init__(self) -> None:
        _ = self.solver_settings

    @property
    def solver_settings(self) -> SolverSettings:
        return SolverSettings(self.time_limit_s, self.gap, self.threads, self.solver)

    def no_solution(self, details: dict[str, Any], watch: Stopwatch) -> PlanResult:
        """The result when the last of `details["solves"]` ended without a solution."""
        last = details["solves"][-1]
        status = Status.NOT_FOUND
        message = f"the solver ended with {last['status']} and without a solution after {last['solve_s']:.1f} s"
        if last["status"] == SolverStatus.INFEASIBLE:
            message = self.without_solution
            status = Status.INFEASIBLE if self.model_is_relaxation else Status.NOT_FOUND
        return PlanResult(
            self.name, status, message=message, plan_s=watch.read_s(), time_limited=_limited(details), details=details
        )

    def planned(self, found: Candidate, details: dict[str, Any], watch: Stopwatch) -> PlanResult:
        """The result with a schedule. A model's optimum is decoded outside of it, so the schedule is not proved optimal
        for it."""
        limited = _limited(details)
        status = Status.TIME_LIMIT if limited else Status.FEASIBLE
        return PlanResult(
            self.name, status, found.schedule, found.step_s, watch.read_s(), candidate=found, time_limited=limited,
            details=details,
        )  # fmt: skip


@dataclass(frozen=True)
class SelectingPlanner(IlpPlanner):
    """A model of one device selects what it does with its tensors; then the devices are coordinated."""

    @abstractmethod
    def _links(self, problem: Problem, device: int) -> Hashable:
        """What the model knows of the links of a device."""

    @abstractmethod
    def _solve(
        self, bench: Workbench, device: int, links: Any, seeds: tuple[PlanResult, ...]
    ) -> tuple[DeviceDecision | DoesNotFit | None, dict[str, Any] | None]:
        """(what it selects, None without a solution, or why nothing fits; figures of the solve if there was one)."""

    def _select(
        self, bench: Workbench, seeds: tuple[PlanResult, ...]
    ) -> tuple[tuple[DeviceDecision, ...] | DoesNotFit | None, dict[str, Any]]:
        """(decisions of all devices, None without a solution, or why they do not fit; details with "solves").

        One solve for all devices that are equal in what they run, in memory and in what the model knows of their links.
        """
        solved: dict[Hashable, DeviceDecision] = {}
        details: dict[str, Any] = {"solves": []}
        chosen: list[DeviceDecision] = []
        for device, first in enumerate(bench.device_class):
            links = self._links(bench.problem, device)
            if (first, links) not in solved:
                found, figures = self._solve(bench, device, links, seeds)
                if figures is not None:
                    details["solves"].append(figures)
                if isinstance(found, DeviceDecision):
                    found = repair(bench, device, found)
                if not isinstance(found, DeviceDecision):
                    return found, details
                solved[first, links] = found
            chosen.append(solved[first, links])
        return tuple(chosen), details

    @abstractmethod
    def _coordinate(self, bench: Workbench, decisions: tuple[DeviceDecision, ...]) -> Candidate | DoesNotFit:
        """The schedule of the selected decisions."""

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        bench = Workbench(problem)
        decisions, details = self._select(bench, seeds)
        if isinstance(decisions, DoesNotFit):
            return does_not_fit(self.name, problem, decisions, watch)
        if decisions is None:
            return self.no_solution(details, watch)
        found = self._coordinate(bench, decisions)
        if isinstance(found, DoesNotFit):
            return does_not_fit(self.name, problem, found, watch)
        if not math.isfinite(found.step_s):
            message = "GPUs wait for each other for ever: what one starts after is behind a collective of both"
            return PlanResult(
                self.name, Status.NOT_FOUND, message=message, plan_s=watch.read_s(), time_limited=_limited(details),
                details=details,
            )  # fmt: skip
        return self.planned(found, details, watch)


def _limited(details: dict[str, Any]) -> bool:
    return any(solve["status"] == SolverStatus.TIME_LIMIT for solve in details["solves"])
