"""Improve: large-neighbourhood search from the best schedule of the run.

Most of the schedule is fixed and the rest is solved as a sub-model, over and over: first in the decisions behind it,
where it has such, with the fluid model of one GPU (`tmojax.planners.improve_decisions`); then, where all copies and
recomputations of the step fit into the constraint model, with that of `cp-sat` and a part free
(`tmojax.ilp.neighbourhood`): copies of single micro-batches, their moments and their order on the links. The first
changes what moves, which the second, whose parts are few copies, seldom can; the second changes when it moves. The
exact simulator has the last word: only what is valid and strictly faster is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tmojax.check import check
from tmojax.errors import InputError
from tmojax.ilp.cp_sat import CpSettings, solve_cp_sat, solver_version
from tmojax.ilp.cp_sat_decode import decode_times
from tmojax.ilp.cp_sat_start import NotInModelError, read_schedule
from tmojax.ilp.cp_sat_times import Model, device_end, model_of, step_ticks
from tmojax.ilp.neighbourhood import Neighbourhood, Times, choose, offered
from tmojax.planners.base import Planner, PlanResult, Status, Stopwatch, does_not_fit
from tmojax.planners.cp_sat import Known, known_schedules, not_modelled, op_too_large
from tmojax.planners.improve_decisions import FASTER, Log, improve_decisions
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Problem, Schedule
from tmojax.simulate import simulate

SUB_WALL_S = 120.0  # of one sub-model, far beyond its deterministic limit


@dataclass(frozen=True)
class Improve(Planner):
    """of: the planner whose schedule is improved (empty: the fastest of the run).

    iterations: sub-models of each kind. free: gaps (idle intervals) that a sub-model may decide. sub_limit: of a
    constraint sub-model, in CP-SAT's deterministic time. time_limit_s: wall clock that ends the search and the
    sub-model at work (0: none), half of it for the decisions where both kinds are used; only then the plan can depend
    on the machine. ticks, most_items: as of `cp-sat`.
    """

    name: str = "improve"
    of: str = ""
    iterations: int = 60
    free: int = 30
    sub_limit: float = 0.1
    time_limit_s: float = 0.0
    ticks: int = 1_000_000
    most_items: int = 4_000

    def __post_init__(self) -> None:
        for name in ("iterations", "free", "most_items"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)} must be at least 1")
        if not 0 < self.sub_limit < math.inf:
            raise InputError(f"sub_limit: {self.sub_limit} must be positive and finite")
        if not 0 <= self.time_limit_s < math.inf:
            raise InputError(f"time_limit_s: {self.time_limit_s} must be finite and not negative")
        if not 1000 <= self.ticks <= 10**8:
            raise InputError(f"ticks: {self.ticks} must be between 1000 and {10**8}")

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        bench = Workbench(problem)
        too_large = op_too_large(bench)
        if too_large is not None:
            return does_not_fit(self.name, problem, too_large, watch)
        known = known_schedules(bench, seeds, self.of)
        if not known:
            of = f"planner {self.of!r} has" if self.of else "neither another planner nor a simple strategy has"
            return PlanResult(self.name, Status.NOT_FOUND, message=f"{of} no plan to improve", plan_s=watch.read_s())
        start = known[0]
        rng = np.random.default_rng(seed)
        details: dict[str, Any] = {"start": {"from": start.name, "step_s": start.step_s}}
        log, kinds = Log(), []
        unsuited = self._too_large(bench, start)
        if start.candidate is not None:
            kinds.append("fluid")
            over = self._over(watch, 1.0 if unsuited else 0.5)
            found = improve_decisions(bench, start.candidate, self.iterations, self.free, rng, log, over)
            start = Known(start.name, found.schedule, found.step_s, found)
            details["after_decisions_step_s"] = found.step_s
        model, times, reason = (None, None, unsuited) if unsuited else self._model(bench, start)
        schedule, step_s, candidate = start.schedule, start.step_s, start.candidate
        if model is not None and times is not None:
            kinds.append("cp-sat")
            details |= {"items": model.items(), "solver": solver_version(), "threads": 1}
            schedule, step_s, candidate = self._search(model, times, start, rng, log, watch)
        else:
            details["cp_sat_not_used"] = reason
        details |= {
            "sub_models": kinds,
            "end_step_s": step_s,
            "iterations": log.iterations,
            "improvements": log.improvements,
            "sub_solves": log.solves,
        }
        message = "" if log.improvements else f"no improvement of the plan of {start.name!r}"
        return PlanResult(
            self.name, Status.FEASIBLE, schedule, step_s, watch.read_s(), message=message,
            time_limited=log.wall_limited, candidate=candidate, details=details,
        )  # fmt: skip

    def _over(self, watch: Stopwatch, share: float = 1.0) -> Callable[[], bool]:
        return lambda: 0 < self.time_limit_s * share <= watch.read_s()

    def _too_large(self, bench: Workbench, start: Known) -> str:
        """Why the constraint model is not made for any plan of this step ("": it is)."""
        unsuited = not_modelled(bench.problem) or "the step takes no time" * (not start.step_s)
        if unsuited:
            return unsuited
        items = self._empty_model(bench, start).items()
        return f"the model would have {items} items, most_items allows {self.most_items}" * (items > self.most_items)

    def _empty_model(self, bench: Workbench, start: Known) -> Model:
        views = tuple(bench.view(device) for device in range(bench.device_count))
        return model_of(bench.problem, views, start.step_s / self.ticks)

    def _model(self, bench: Workbench, start: Known) -> tuple[Model | None, Times | None, str]:
        """(model, the start in it, why not)."""
        model = self._empty_model(bench, start)
        try:
            return model, read_schedule(model, start.schedule), ""
        except NotInModelError as reason:
            return None, None, f"the start has {reason}, which the model has not"

    def _search(self, model: Model, times: Times, start: Known, rng: np.random.Generator, log: Log,
                watch: Stopwatch) -> tuple[Schedule, float, Candidate | None]:  # fmt: skip
        """Walks on what is better in the model (last end of all, then the sum of the devices' ends)."""
        best: tuple[Schedule, float, Candidate | None] = start.schedule, start.step_s, start.candidate
        best = self._better(model, times, best, "timing", log)
        weight = {kind: 1.0 for kind in offered(model)}
        over = self._over(watch)
        for iteration in range(self.iterations if weight else 0):
            if over():
                log.wall_limited = True
                break
            kind = _draw(weight, rng)
            part = choose(model, times, kind, self.free, rng)
            log.iterations += 1
            if not part:
                weight[kind] = max(0.2, weight[kind] * 0.7)
                continue
            left_s = self.time_limit_s - watch.read_s() if self.time_limit_s else SUB_WALL_S
            settings = CpSettings(min(SUB_WALL_S, max(0.01, left_s)), 0.0, self.sub_limit, 1, iteration)
            answer = solve_cp_sat(model, settings, start=times, free=part)
            log.solved(answer.status.lower())
            log.wall_limited |= answer.wall_limited
            if answer.times is None or _measure(model, answer.times) >= _measure(model, times):
                weight[kind] = max(0.2, weight[kind] * 0.9)
                continue
            weight[kind] = min(4.0, weight[kind] * 1.5)
            times = answer.times
            best = self._better(model, times, best, kind.value, log)
        return best

    def _better(self, model: Model, times: Times, best, kind: str, log: Log):
        """The decoded solution, if it is valid and strictly faster than `best`."""
        if step_ticks(model, times) * model.network.tick_s > best[1] * (1 + 0.01):
            return best  # what the model's rounding and shift to the left cannot make up for
        schedule = decode_times(model, times)
        step_s = simulate(model.problem, schedule).step_s
        if step_s < best[1] * FASTER and check(model.problem, schedule).valid:
            log.improved(kind)
            return schedule, step_s, None
        return best


def _measure(model: Model, times: Times) -> tuple[int, int]:
    return step_ticks(model, times), sum(device_end(model, device, mine) for device, mine in enumerate(times))


def _draw(weight: dict[Neighbourhood, float], rng: np.random.Generator) -> Neighbourhood:
    kinds = list(weight)
    shares = np.array([weight[kind] for kind in kinds])
    return kinds[int(rng.choice(len(kinds), p=shares / shares.sum()))]
