"""A plan in less than a second, from a small network that has seen what the gradient planner does with other steps."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import as_file, files

from tmojax.learned.warm_start import warm_start
from tmojax.learned.weights import Weights
from tmojax.planners.base import Planner, PlanResult, Status, Stopwatch, does_not_fit
from tmojax.planners.workbench import Workbench
from tmojax.problem import Problem
from tmojax.relax.decode import DoesNotFit


def trained_weights() -> Weights:
    """The network that comes with the package (experiments/warm_start makes it)."""
    with as_file(files("tmojax") / "data" / "warm_start.npz") as path:
        return Weights(path)


@dataclass(frozen=True)
class Learned(Planner):
    """Every idle tensor's choice from its features; rounded, decoded and simulated a few times, then one sweep of link
    policies and staggers. Equal GPUs get equal decisions. A start for searches, or a first answer."""

    name: str = "learned"

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        bench = Workbench(problem)
        found = warm_start(bench, trained_weights())
        if isinstance(found, DoesNotFit):
            return does_not_fit(self.name, problem, found, watch)
        return PlanResult(self.name, Status.FEASIBLE, found.schedule, found.step_s, watch.read_s(), candidate=found,
                          details={"simulations": bench.simulations})  # fmt: skip
