"""Local search on the exact simulator: threshold accepting over decisions, starts, policies and prefetch distance.

Every move is decoded and simulated exactly, so what is accepted really is faster. The number of simulations is fixed by
the settings and the size of the problem, never by the clock: the same seed gives the same plan.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from tmojax.errors import InputError
from tmojax.planners.moves import Guide, Move, Moves
from tmojax.planners.robust import most_robust
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.relax.decode import NEVER, DoesNotFit

PATIENCE = 40  # evaluations without a new best plan, then back to the best
PROPOSALS = 2  # for each simulation at most: of some moves is known that they lead nowhere
LAST_PLANS = 4  # of the best plans of a search, are compared under jitter


@dataclass(frozen=True)
class SearchSettings:
    """evaluations: exact simulations at most. instructions: total simulated instructions at most, so that large
    problems take bounded time. second_share: part of them that goes to a second start. start_threshold: relative
    slow-down accepted at first; it falls linearly to zero."""

    evaluations: int = 2000
    instructions: int = 80_000_000
    second_share: float = 0.4
    start_threshold: float = 0.001

    def __post_init__(self) -> None:
        for name in ("evaluations", "instructions"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)} must be at least 1")
        if not 0 <= self.second_share <= 1:
            raise InputError(f"second_share: {self.second_share} must be between 0 and 1")
        if self.start_threshold < 0:
            raise InputError(f"start_threshold: {self.start_threshold} must not be negative")


@dataclass(frozen=True)
class SearchLog:
    """evaluations: simulations done. improvements: how often each kind of move led to a new best plan. plans: the start
    and the last of those best plans, slowest first. moments: of every new best plan (reading of `time.perf_counter`,
    simulations of the workbench until then, step_s)."""

    evaluations: int
    improvements: dict[str, int]
    plans: tuple[Candidate, ...]
    moments: tuple[tuple[float, int, float], ...]


def local_search(
    bench: Workbench, start: Candidate, settings: SearchSettings, seed: int, guide: Guide | None = None
) -> tuple[Candidate, SearchLog]:
    """Improve `start`; the result is never slower. Deterministic for a seed."""
    return _search(bench, start, budget_of(start, settings), settings.start_threshold, seed, guide)


def search_from_two(
    bench: Workbench, first: Candidate, second: Candidate, settings: SearchSettings, seed: int,
    guide: Guide | None = None,
) -> tuple[Candidate, SearchLog]:  # fmt: skip
    """The faster of two searches; `second_share` of the simulations go to `second`, with another seed."""
    budget = budget_of(first, settings)
    later = int(budget * settings.second_share)
    best, log = _search(bench, first, max(1, budget - later), settings.start_threshold, seed, guide)
    other, other_log = _search(bench, second, max(1, later), settings.start_threshold, seed + 1, guide)
    improvements = {
        kind: log.improvements.get(kind, 0) + other_log.improvements.get(kind, 0)
        for kind in sorted({*log.improvements, *other_log.improvements})
    }
    total = SearchLog(
        log.evaluations + other_log.evaluations, improvements, log.plans + other_log.plans,
        log.moments + other_log.moments,
    )  # fmt: skip
    return (other if other.step_s < best.step_s else best), total


def budget_of(start: Candidate, settings: SearchSettings) -> int:
    """Simulations that the settings allow for schedules of the size of `start`."""
    instructions = sum(len(rows) for rows in start.schedule.lists)
    return max(2, min(settings.evaluations, settings.instructions // max(1, instructions)))


def _search(
    bench: Workbench, start: Candidate, budget: int, start_threshold: float, seed: int, guide: Guide | None
) -> tuple[Candidate, SearchLog]:
    rng = np.random.default_rng(seed)
    moves = Moves(bench, rng, guide)
    moments: list[tuple[float, int, float]] = []
    best = current = start
    plans = deque([start], maxlen=LAST_PLANS)
    improvements: dict[str, int] = {}
    since_best = simulated = 0
    tried = _Tried(start)
    for proposal in range(PROPOSALS * budget):
        if simulated >= budget:
            break
        threshold = start_threshold * (1 - max(simulated / budget, proposal / (PROPOSALS * budget)))
        move = moves.propose(current)
        if not tried.is_new(move):
            moves.feedback(move.kind, False)
            continue
        found = bench.evaluate(move.decisions, move.coordination, move.lookahead_runs)
        since_best += 1
        if isinstance(found, DoesNotFit):
            moves.feedback(move.kind, False)
            continue
        simulated += 1
        moves.feedback(move.kind, found.step_s < current.step_s)
        if found.step_s <= current.step_s * (1 + threshold) and found.step_s < float("inf"):
            current = found
        if found.step_s < best.step_s * (1 - 1e-9):
            best, since_best = found, 0
            plans.append(found)
            moments.append((time.perf_counter(), bench.simulations, found.step_s))
            improvements[move.kind] = improvements.get(move.kind, 0) + 1
        elif since_best > PATIENCE:
            current, since_best = best, 0
    return best, SearchLog(simulated, improvements, tuple(plans), tuple(moments))


class _Tried:
    """What a search has evaluated."""

    def __init__(self, start: Candidate) -> None:
        self._numbers: dict[tuple, int] = {}  # of decisions
        self._known: set[tuple] = set()
        self.is_new(Move("", start.decisions, start.coordination, start.lookahead_runs))

    def is_new(self, move: Move) -> bool:
        """Whether it was not asked for before; then it counts as tried."""
        numbers = tuple(self._numbers.setdefault(one.key, len(self._numbers)) for one in move.decisions)
        lookahead = move.lookahead_runs or (NEVER,) * len(numbers)
        key = (numbers, move.coordination, lookahead)
        if key in self._known:
            return False
        self._known.add(key)
        return True


def robust_choice(
    bench: Workbench, log: SearchLog, settings: SearchSettings, limit_s: float, seed: int
) -> tuple[Candidate, dict[str, Any]]:
    """The most robust of the plans of a search that are nearly as fast as the fastest, with figures for the details.

    Takes a quarter of `evaluations` on top, and at most a quarter of `instructions`.
    """
    rows = max(1, sum(len(rows) for rows in log.plans[-1].schedule.lists))
    simulations = min(settings.evaluations, settings.instructions // rows) // 4
    choice = most_robust(bench, log.plans, limit_s=limit_s, simulations=simulations, seed=seed)
    return choice.plan, choice.figures
