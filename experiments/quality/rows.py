"""The numbers of the quality experiment, from the files that run.py has written. Pure functions of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from experiments.quality.rivals import HEURISTICS, MODELS, SEARCHES

HEADROOM = 0.05  # above it an instance counts as one where planning together may pay
EQUAL = 1e-6  # relative difference of step times that does not count
HEURISTIC_NAMES = tuple(rival.name for rival in HEURISTICS)
SEARCH_NAMES = tuple(rival.name for rival in SEARCHES)
MODEL_NAMES = tuple(rival.name for rival in MODELS)

Run = dict[str, Any]
Facts = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """One instance: what it is, and its runs by rival."""

    name: str
    fact: dict[str, Any]
    runs: dict[str, Run]

    def gap(self, rival: str) -> float | None:
        """Step time of a valid plan above the proved bound."""
        run = self.runs.get(rival)
        return run["step_s"] / self.fact["bound_s"] - 1 if run is not None and run["valid"] else None

    def best(self, rivals: Iterable[str]) -> str | None:
        """Which of them has the fastest valid plan; the first of equals."""
        gaps = {rival: gap for rival in rivals if (gap := self.gap(rival)) is not None}
        return min(gaps, key=gaps.__getitem__, default=None)

    @property
    def headroom(self) -> float | None:
        """Best heuristic / bound - 1."""
        best = self.best(HEURISTIC_NAMES)
        return None if best is None else self.gap(best)

    @property
    def is_open(self) -> bool:
        """Whether the best heuristic leaves something to find: its gap is above HEADROOM, and it is as far above the
        time that a step takes with unlimited memory (where that is not so, it is the bound that is weak)."""
        best = self.best(HEURISTIC_NAMES)
        if best is None:
            return False
        floor_s = max(self.fact["bound_s"], self.fact["unlimited_s"])
        return self.runs[best]["step_s"] > floor_s * (1 + HEADROOM)

    def compared(self, search: str) -> tuple[float, float] | None:
        """(gap of `search`, headroom), where both are known."""
        gap, headroom = self.gap(search), self.headroom
        return None if gap is None or headroom is None else (gap, headroom)


def rows_of(runs: list[Run], facts: Facts, names: list[str]) -> list[Row]:
    """The instances of `names` that have been built, each with its runs; not those of an earlier definition of it."""
    by_name: dict[str, dict[str, Run]] = {name: {} for name in names if name in facts}
    for run in runs:
        name = run["instance"]
        if name in by_name and run["definition"]["instance"] == facts[name]["definition"]:
            by_name[name][run["rival"]] = run
    return [Row(name, facts[name], by_name[name]) for name in by_name]


def mistakes_of(rows: list[Row]) -> list[str]:
    """What a planner must not do: an invalid plan, one faster than the bound, a search slower than a heuristic."""
    found = [f"{row.name}, {run['rival']}: {text}" for row in rows for run in row.runs.values()
             for text in run["mistakes"]]  # fmt: skip
    for row in rows:
        for rival, gap in ((rival, row.gap(rival)) for rival in row.runs):
            if gap is not None and gap < -EQUAL:
                found.append(f"{row.name}, {rival}: {-100 * gap:.4f} % faster than the bound")
        for search in SEARCH_NAMES:
            if (both := row.compared(search)) and both[0] > both[1] + EQUAL:
                found.append(f"{row.name}, {search}: slower than {row.best(HEURISTIC_NAMES)}")
    return found


@dataclass(frozen=True)
class Summary:
    """What one search has to show. Shares and gaps are None where nothing was run.

    open_ones: instances where something is left to find (`Row.is_open`); better: share of them on which it is strictly
    faster than every heuristic; closed: mean share of the distance from the best heuristic to the bound that it closes
    there. many, one: gaps with K >= 4 and K = 1, (mean, worst, where). losses: by instance, how much slower than the
    best integer programme.
    """

    planned: int
    valid: int
    slower: int
    open_ones: int
    better: float | None
    closed: float | None
    many: tuple[float, float, str] | None
    one: tuple[float, float, str] | None
    losses: dict[str, float]

    @property
    def as_good(self) -> float | None:
        """Share of the instances on which no integer programme is faster."""
        return fmean(loss <= EQUAL for loss in self.losses.values()) if self.losses else None


def summarise(rows: list[Row], search: str) -> Summary:
    """The figures of one search over all instances on which it was run."""
    mine = [row for row in rows if search in row.runs]
    known = [(row, both[0], both[1]) for row in mine if (both := row.compared(search)) is not None]
    open_ones = [(gap, headroom) for row, gap, headroom in known if row.is_open]

    def gaps(micro_batches: Iterable[int]) -> tuple[float, float, str] | None:
        found = {row.name: gap for row in mine
                 if row.fact["micro_batches"] in micro_batches and (gap := row.gap(search)) is not None}  # fmt: skip
        worst = max(found, key=found.__getitem__, default=None)
        return None if worst is None else (fmean(found.values()), found[worst], worst)

    losses = {}
    for row in mine:
        rival, gap = row.best(MODEL_NAMES), row.gap(search)
        if rival is not None and gap is not None:
            losses[row.name] = row.runs[search]["step_s"] / row.runs[rival]["step_s"] - 1
    return Summary(
        planned=len(mine),
        valid=sum(row.gap(search) is not None for row in mine),
        slower=sum(gap > headroom + EQUAL for _, gap, headroom in known),
        open_ones=len(open_ones),
        better=fmean(gap < headroom - EQUAL for gap, headroom in open_ones) if open_ones else None,
        closed=fmean((headroom - gap) / headroom for gap, headroom in open_ones) if open_ones else None,
        many=gaps(range(4, 100_001)),
        one=gaps((1,)),
        losses=losses,
    )
