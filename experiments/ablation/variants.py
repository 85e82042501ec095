"""The gradient planner with parts taken out, and other searches, for equal planning time.

None of them is worth a name in the registry: each is told how many CPU seconds it may take, and stops by that clock.
"""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from tmojax.planners.base import Planner, PlanResult, Status, Stopwatch
from tmojax.planners.fluid import path_rates
from tmojax.planners.gradient import (
    MOST_TAKEN_OVER,
    Gradient,
    Start,
    alternating,
    find_starts,
    state_moved,
    steps_for,
)
from tmojax.planners.local_search import SearchSettings, local_search, search_from_two
from tmojax.planners.moves import Guide, Moves
from tmojax.planners.peers_and_codecs import find_lenders
from tmojax.planners.selection import FACTORS, LinkLimit, host_users, select
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Problem
from tmojax.relax.decode import DoesNotFit
from tmojax.relax.rounding import Rounding

UNLIMITED = 10**15  # instructions: the clock decides, not the size of the problem
PILOT = 30  # simulations after which the time of one is known
MULTIPLES = (1.0, 2.0)  # of an equal share of a link
SELECTION_ROUNDS = 4
LEAST = 10  # simulations: for fewer no search begins
LEAST_STEPS = 200  # of a descent


class Watched(Workbench):
    """A workbench that remembers the fastest plan and the CPU seconds after which each improvement was found."""

    def __init__(self, problem: Problem) -> None:
        self._begin_s = time.process_time()
        super().__init__(problem)
        self.best: Candidate | None = None
        self.curve: list[tuple[float, float]] = []

    def spent_s(self) -> float:
        return time.process_time() - self._begin_s

    def note(self, candidate: Candidate) -> None:
        if candidate.step_s < (float("inf") if self.best is None else self.best.step_s):
            self.best = candidate
            self.curve.append((self.spent_s(), candidate.step_s))

    def evaluate(self, *arguments, **options) -> Candidate | DoesNotFit:
        found = super().evaluate(*arguments, **options)
        if isinstance(found, Candidate):
            self.note(found)
        return found

    def each_of(self, *arguments, **options) -> list[Candidate] | DoesNotFit:
        found = super().each_of(*arguments, **options)
        if not isinstance(found, DoesNotFit):
            self.note(min(found, key=lambda candidate: candidate.step_s))
        return found


@dataclass(frozen=True)
class Variant(Planner):
    """budget_s: CPU seconds for everything, the sweep of its starts included."""

    name: str
    budget_s: float

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        bench = Watched(problem)
        starts = state_moved(bench, find_starts(bench, seeds, most=12), SearchSettings(), seed)
        for start in starts:
            bench.note(start.candidate)
        self.search(bench, starts, seed)
        best = bench.best
        if best is None:
            return PlanResult(self.name, Status.NOT_FOUND, plan_s=watch.read_s())
        details = {"curve": [list(point) for point in bench.curve], "simulations": bench.simulations}
        return PlanResult(self.name, Status.FEASIBLE, best.schedule, best.step_s, watch.read_s(), candidate=best,
                          details=details, time_limited=True)  # fmt: skip

    @abstractmethod
    def search(self, bench: Watched, starts: list[Start], seed: int) -> None:
        """Simulate plans on `bench`, which remembers the fastest, until the time is spent."""


@dataclass(frozen=True)
class NoGradient(Variant):
    """What heuristics and exact selections for equal shares of the links decide goes where roundings and selections for
    the relaxed timing would: the same variants, sweeps and local search, which takes over parts of them too."""

    planner: Gradient

    def search(self, bench: Watched, starts: list[Start], seed: int) -> None:
        if not starts:
            return
        known = starts[0].candidate
        heuristic = [(start.candidate.decisions, start.candidate.coordination.start_share) for start in starts]
        tried = self.planner.simulate(bench, alternating(equal_selections(bench, known), heuristic), known)
        swept = self.planner.sweep_best(bench, tried, known)
        plans = [start.candidate for start in starts] + ([swept] if swept is not None else [])
        plans.sort(key=lambda plan: plan.step_s)
        guide = Guide(tuple(decisions for _, _, decisions, _ in tried[:MOST_TAKEN_OVER]), {})
        search_until(bench, plans[0], plans[min(1, len(plans) - 1)], self.planner.search, guide, self.budget_s, seed)


def equal_selections(bench: Watched, known: Candidate) -> list[Rounding]:
    """Selections as the planner makes them, of every class of equal GPUs, for an equal share of every link at every
    moment and for multiples of it, since staggered GPUs do not all copy at once."""
    decided = {device: [] for device in sorted(set(bench.device_class))}
    for device, found in decided.items():
        view = bench.view(device)
        alone = path_rates(bench.problem, device, shared=False)
        lanes = (((True, False), alone.out_bytes_per_s), ((False, True), alone.in_bytes_per_s))
        shared = (
            (uses, bench.problem.machine.links[link].bandwidth_bytes_per_s / users)
            for link, (uses, users) in host_users(bench, device).items()
        )
        limits = [LinkLimit(uses, np.full(len(view.slot_s), rate)) for uses, rate in (*lanes, *shared)]
        for factor, (rate, capacity) in itertools.product(MULTIPLES, FACTORS):
            selected = select(bench, device, limits, known.decisions[device], rate_factor=factor * rate,
                              capacity_factor=capacity, rounds=SELECTION_ROUNDS)  # fmt: skip
            if selected.decision is not None:
                found.append(selected.decision)
    count = min(len(found) for found in decided.values())
    together = (0.0,) * bench.device_count
    return [(tuple(decided[first][place] for first in bench.device_class), together) for place in range(count)]


def search_until(bench: Watched, first: Candidate, second: Candidate, settings: SearchSettings, guide: Guide | None,
                 end_s: float, seed: int) -> None:  # fmt: skip
    """Local search from two plans with as many simulations as there is time for; where time is left, again from the
    best."""
    begin_s = bench.spent_s()
    local_search(bench, first, replace(settings, evaluations=PILOT, instructions=UNLIMITED), seed, guide)
    each_s = (bench.spent_s() - begin_s) / PILOT / 0.85  # later plans may take longer
    while (count := int((end_s - bench.spent_s()) / each_s)) >= LEAST:
        begin_s, seed = bench.spent_s(), seed + 1000
        first = bench.best if bench.best is not None else first
        search_from_two(bench, first, second, replace(settings, evaluations=count, instructions=UNLIMITED), seed, guide)
        each_s = (bench.spent_s() - begin_s) / count


@dataclass(frozen=True)
class NoSearch(Variant):
    """Descent, selection, rounding and sweep without local search; as often as there is time for, from the best plans
    so far, the last time with as many steps as fit. Every descent is compiled anew."""

    planner: Gradient

    def search(self, bench: Watched, starts: list[Start], seed: int) -> None:
        from tmojax.cost import relax_problem
        from tmojax.planners.selection import selections
        from tmojax.relax.optimise import optimise
        from tmojax.relax.rounding import round_solution

        views = [bench.view(device) for device in range(bench.device_count)]
        model = relax_problem(bench.problem, views, lenders=find_lenders(bench))
        known = [start.candidate for start in starts[:3]]
        steps = most_steps = steps_for(model, self.planner.steps)
        while steps >= LEAST_STEPS:
            warm = [(plan.decisions, plan.coordination.start_share) for plan in known[: self.planner.restarts]]
            begin_s = bench.spent_s()
            solution = optimise(model, restarts=self.planner.restarts, steps=steps, seed=seed, warm_starts=warm)
            descended_s = bench.spent_s()
            best = known[0] if known else None
            selected, _ = selections(bench, model, solution, best)
            rounded = alternating(selected, round_solution(model, solution, views, most=self.planner.roundings))
            self.planner.sweep_best(bench, self.planner.simulate(bench, rounded, best), best)
            # Clock times tell how the CPU time of the descent divides into compilation and steps.
            share = solution.run_s / (solution.run_s + solution.compile_s)
            step_s = share * (descended_s - begin_s) / steps
            fixed_s = (1 - share) * (descended_s - begin_s) + bench.spent_s() - descended_s
            steps = min(most_steps, int((self.budget_s - bench.spent_s() - fixed_s) / step_s))
            known, seed = ([bench.best, *known[:2]] if bench.best is not None else known), seed + 1000


@dataclass(frozen=True)
class Annealing(Variant):
    """Simulated annealing over the moves of local search: a plan that is slower by a share d is accepted with
    probability exp(-d / temperature); the temperature falls geometrically with the time (Kirkpatrick, Gelatt and
    Vecchi 1983, section 2)."""

    hottest: float = 0.004
    coldest: float = 0.00002

    def search(self, bench: Watched, starts: list[Start], seed: int) -> None:
        if not starts:
            return
        rng = np.random.default_rng(seed)
        moves = Moves(bench, rng)
        current, begin_s = starts[0].candidate, bench.spent_s()
        while (now_s := bench.spent_s()) < self.budget_s:
            cooled = (now_s - begin_s) / max(1e-9, self.budget_s - begin_s)
            temperature = self.hottest * (self.coldest / self.hottest) ** cooled
            kind, decisions, coordination, lookahead = moves.propose(current)
            found = bench.evaluate(decisions, coordination, lookahead)
            if isinstance(found, DoesNotFit) or not found.step_s < float("inf"):
                moves.feedback(kind, False)
                continue
            slower = found.step_s / current.step_s - 1
            moves.feedback(kind, slower < 0)
            if slower <= 0 or rng.random() < np.exp(-slower / temperature):
                current = found
