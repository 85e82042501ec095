"""Checkmate: optimal rematerialisation by an integer programme, and by its linear relaxation with rounding.

Jain et al., "Checkmate: Breaking the memory wall with optimal tensor rematerialization", MLSys 2020. Nothing is
copied; a value may be recomputed any number of times. The claimed time is compute alone: K micro-batches and the step
ops. Where no input has to come from host memory and no collective runs, the simulated step takes just that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tmojax.bounds.highs import Answer, SolverStatus
from tmojax.errors import InputError
from tmojax.ilp.checkmate_graph import StageGraph
from tmojax.ilp.checkmate_model import RematColumns, StagePlan, checkmate_model, read_plan, unit_s
from tmojax.ilp.checkmate_rounding import plan_of_kept, plan_peak_bytes
from tmojax.ilp.poet_start import best_start
from tmojax.ilp.solver import solve_milp
from tmojax.planners.base import Stopwatch
from tmojax.planners.stages import StagePlanner
from tmojax.problem import Action, Problem


def start_values(columns: int, remat: RematColumns, plan: StagePlan | None) -> np.ndarray | None:
    """[columns] values of R and S of a plan, nan elsewhere."""
    if plan is None:
        return None
    start = np.full(columns, np.nan)
    for index, flags in ((remat.run, plan.run), (remat.kept, plan.kept)):
        start[index[index >= 0]] = flags[index >= 0]
    return start


@dataclass(frozen=True)
class Checkmate(StagePlanner):
    """The integer programme (section 4), started from the cheapest of a few plans that drop cheap bytes first."""

    name: str = "checkmate"

    without_solution = (
        "its model of one GPU has no solution in this memory (in it, persistent tensors stay on the device)"
    )

    def actions(self, problem: Problem) -> frozenset[Action]:
        return problem.actions & {Action.RECOMPUTE}

    def _needs(self) -> Action | None:
        return Action.RECOMPUTE

    def _path(self, problem: Problem, device: int) -> Any:
        return None

    def _solve(self, problem, graph: StageGraph, device: int, path, decided):
        watch = Stopwatch()
        capacity = problem.capacity_bytes(device)
        model, columns = checkmate_model(graph, capacity)
        start = start_values(model.columns, columns, best_start(graph, capacity, decided=decided))
        build_s = watch.read_s()
        answer = solve_milp(model, self.solver_settings, start)
        if not len(answer.values):
            return None, answer, float("inf"), build_s
        plan = read_plan(graph, columns, answer.values)
        return plan, answer, plan.compute_s(graph), build_s


@dataclass(frozen=True)
class CheckmateRounding(StagePlanner):
    """The linear relaxation with two-phase rounding (section 5).

    allowances: shares of the memory set aside in the relaxation; thresholds: at which S is rounded up. The paper takes
    0.1 and 0.5. All pairs are tried, the cheapest plan that fits is taken; its gap is against the relaxation with no
    allowance, which bounds the integer programme.
    """

    name: str = "checkmate-lp"
    allowances: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4)
    thresholds: tuple[float, ...] = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)

    without_solution = "its linear relaxation has no solution in this memory"
    without_plan = "no rounding of its linear relaxation fits in this memory"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver != "highs":
            raise InputError(f"solver: {self.solver!r} is not offered for the linear relaxation; take 'highs'")
        if self.warm_start:
            raise InputError("warm_start: a linear relaxation takes no start; leave it out")
        for name, values in (("allowances", self.allowances), ("thresholds", self.thresholds)):
            if not values or not all(0 <= value < 1 for value in values):
                raise InputError(f"{name}: {values} must be one or more shares, at least 0 and below 1")

    def actions(self, problem: Problem) -> frozenset[Action]:
        return problem.actions & {Action.RECOMPUTE}

    def _needs(self) -> Action | None:
        return Action.RECOMPUTE

    def _path(self, problem: Problem, device: int) -> Any:
        return None

    def _solve(self, problem, graph: StageGraph, device: int, path, decided):
        capacity = problem.capacity_bytes(device)
        build_s = solve_s = 0.0
        first: Answer | None = None
        best: tuple[float, StagePlan] | None = None
        for allowance in sorted({0.0, *self.allowances}):
            watch = Stopwatch()
            model, columns = checkmate_model(graph, max(1, int(capacity * (1 - allowance))))
            build_s += watch.read_s()
            answer = model.solve(time_limit_s=self.time_limit_s, threads=self.threads, relax=True)
            solve_s += answer.solve_s
            first = first or answer
            if answer.status is not SolverStatus.OPTIMAL:
                break  # a smaller capacity is harder
            if allowance not in self.allowances:
                continue
            share = np.where(columns.kept >= 0, answer.values[np.maximum(columns.kept, 0)], 0.0)
            for threshold in self.thresholds:
                plan = plan_of_kept(graph, share > threshold)
                seconds = plan.compute_s(graph)
                if (best is None or seconds < best[0]) and plan_peak_bytes(graph, plan) <= capacity:
                    best = (seconds, plan)
        assert first is not None
        return self._result(graph, first, best, solve_s, build_s)

    def _result(
        self, graph: StageGraph, first: Answer, best: tuple[float, StagePlan] | None, solve_s: float, build_s: float
    ):
        """The rounded plan with the relaxation's bound: feasible, never optimal by itself."""
        status = first.status
        objective = float("inf")
        if status is SolverStatus.OPTIMAL:
            status = SolverStatus.FAILED if best is None else SolverStatus.GAP_REACHED
        if best is not None:
            objective = best[0] / unit_s(graph)
        gap = abs(objective - first.bound) / max(abs(objective), 1e-12) if best is not None else float("inf")
        answer = Answer(
            status, np.zeros(0), objective, first.bound, gap, solve_s, first.rows, first.columns, np.zeros(0)
        )
        return (best[1] if best else None), answer, (best[0] if best else float("inf")), build_s
