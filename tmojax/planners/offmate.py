"""OffMate's step model of one GPU (`tmojax.ilp.offmate`), rounded to tensors and coordinated by a sweep."""

from __future__ import annotations

from dataclasses import dataclass

from tmojax.errors import InputError
from tmojax.ilp.fluid import PathRates
from tmojax.ilp.offmate import solve_steps
from tmojax.ilp.outer_lp_layers import layers_of
from tmojax.ilp.solver import solve_figures
from tmojax.planners.base import PlanResult, Stopwatch
from tmojax.planners.fluid import path_rates
from tmojax.planners.ilp import SelectingPlanner
from tmojax.planners.outer_lp import least_memory
from tmojax.planners.poet import RATES
from tmojax.planners.sweep import sweep
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, Problem
from tmojax.relax.decisions import DeviceDecision
from tmojax.relax.decode import DoesNotFit


@dataclass(frozen=True)
class OffMate(SelectingPlanner):
    """rates: what the model takes the path to be: `alone`, or an `equal-share` of every link that is shared.

    What the model selects is repaired where it does not fit; policies and starts are swept.
    """

    name: str = "offmate"
    rates: str = "alone"

    without_solution = "its model of one GPU has no solution in this memory"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rates not in RATES:
            raise InputError(f"rates: {self.rates!r} is unknown; choose one of {', '.join(RATES)}")

    def actions(self, problem: Problem) -> frozenset[Action]:
        return problem.actions & {Action.OFFLOAD, Action.RECOMPUTE}

    def _links(self, problem: Problem, device: int) -> PathRates:
        return path_rates(problem, device, shared=self.rates == "equal-share")

    def _solve(self, bench: Workbench, device: int, links: PathRates, seeds: tuple[PlanResult, ...]):
        problem, view = bench.problem, bench.view(device)
        over = least_memory(problem, view, device, state_stays=Action.OFFLOAD not in problem.actions)
        if over is not None:
            return over, None
        watch = Stopwatch()
        layers = layers_of(problem, view)
        found = solve_steps(
            problem, view, layers, problem.capacity_bytes(device), links, self.solver_settings,
            allow_offload=Action.OFFLOAD in problem.actions, allow_recompute=Action.RECOMPUTE in problem.actions,
        )  # fmt: skip
        build_s = max(0.0, watch.read_s() - found.answer.solve_s)
        figures = solve_figures(found.answer, self.solver_settings, unit_s=found.unit_s, build_s=build_s)
        return found.decision, {
            **figures, "layers": layers.count, "steps": found.steps,
            "offloaded_bytes": float(found.offloaded.sum()), "resting_bytes": found.resting_bytes,
        }  # fmt: skip

    def _coordinate(self, bench: Workbench, decisions: tuple[DeviceDecision, ...]) -> Candidate | DoesNotFit:
        return sweep(bench, decisions)
