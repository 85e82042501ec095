"""Rows, table and figure of the ablation, from the files that run.py has written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from experiments.ablation.plots import draw_gaps, draw_times
from experiments.recorded import put_between_marks
from tmojax.problem.strict_json import write_text
from tmojax.report.figure_style import svg_text, write_svg

EQUAL = 1e-4  # step times that differ by less count as equal
OPEN = 0.05  # above it an instance has something left to find
GRADIENT = "gradient"
RIVALS = ("no-gradient", "no-search", "evolution", "annealing")

Record = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One instance: what it is, and its runs by variant, one for each seed."""

    name: str
    fact: Record
    runs: dict[str, list[Record]]

    @property
    def budget_s(self) -> float:
        """CPU seconds of the full planner with the first seed, compilation included: what all others got."""
        return self.runs[GRADIENT][0]["plan_cpu_s"]

    @property
    def start(self) -> float:
        """Gap of the best heuristic."""
        return min(run["start_step_s"] for runs in self.runs.values() for run in runs) / self.fact["bound_s"] - 1

    @property
    def is_open(self) -> bool:
        """As in the quality experiment: something is left above the bound, and above the time with unlimited memory."""
        floor_s = max(self.fact["bound_s"], self.fact["unlimited_s"])
        return (1 + self.start) * self.fact["bound_s"] > floor_s * (1 + OPEN)

    def gap(self, variant: str) -> float | None:
        """Median over the seeds."""
        found = [fastest_s(run) for run in self.runs.get(variant, []) if run["valid"]]
        return median(found) / self.fact["bound_s"] - 1 if found else None

    @property
    def rounded(self) -> float | None:
        """Gap of the full planner where its local search begins: the better of rounding and heuristics."""
        found = [run["details"]["before_local_search_step_s"] for run in self.runs[GRADIENT] if run["valid"]]
        return median(found) / self.fact["bound_s"] - 1 if found else None

    def closed(self, variant: str) -> float | None:
        """Share of the distance from the best heuristic to the bound."""
        gap = self.gap(variant)
        return None if gap is None or self.start <= 0 else (self.start - gap) / self.start


def fastest_s(run: Record) -> float:
    """Of all plans that a run found. The gradient planner hands out the most robust of those within 0.5 % of it."""
    details = run["details"]
    robust = details.get("robust", {}).get("fastest", {}).get("step_s")
    known = (run["step_s"], details.get("after_local_search_step_s"), robust)
    return min(step_s for step_s in known if step_s is not None)


def rows_of(facts: list[Record], runs: list[Record]) -> list[Row]:
    """Instances that the full planner and at least one other have planned, in the order of `facts`; runs of earlier
    definitions do not count."""
    rows = []
    for fact in facts:
        mine: dict[str, list[Record]] = {}
        for run in sorted(runs, key=lambda run: run["seed"]):
            if run["instance"] == fact["name"] and run["definition"]["instance"] == fact["definition"]:
                mine.setdefault(run["variant"], []).append(run)
        if GRADIENT in mine and len(mine) > 1:
            rows.append(Row(fact["name"], fact, mine))
    return rows


def mistakes_of(rows: list[Row]) -> list[str]:
    """What must not happen: an invalid plan, one that is slower than the best heuristic, or faster than the bound."""
    told = []
    for row in rows:
        for variant, runs in row.runs.items():
            for run in runs:
                told += [f"{row.name}, {variant}, seed {run['seed']}: {text}" for text in run["mistakes"]]
        for variant in row.runs:
            gap = row.gap(variant)
            if gap is not None and gap > row.start + 1e-6:
                told.append(f"{row.name}, {variant}: slower than the best heuristic")
            if gap is not None and gap < -1e-6:
                told.append(f"{row.name}, {variant}: faster than the bound")
    return told


def percent(share: float | None, digits: int = 2) -> str:
    return "" if share is None else f"{100 * share:.{digits}f} %"


def gap_table(rows: list[Row]) -> list[str]:
    """Gaps of all variants; bold: the fastest, to 0.01 %."""
    names = (GRADIENT, *RIVALS)
    lines = [
        "| instance | K | time, s | best heuristic | rounded, no search | " + " | ".join(names) + " | seeds |",
        "|" + "---|" * (6 + len(names)),
    ]
    for row in rows:
        gaps = {name: row.gap(name) for name in names}
        best = min(gap for gap in gaps.values() if gap is not None)
        cells = [
            f"**{percent(gap)}**" if gap is not None and gap <= best + EQUAL else percent(gap) for gap in gaps.values()
        ]
        seeds = sorted({len(runs) for runs in row.runs.values()})
        name = f"{row.name} \\*" if row.is_open else row.name
        head = [name, str(row.fact["micro_batches"]), f"{row.budget_s:.0f}", percent(row.start), percent(row.rounded)]
        lines.append("| " + " | ".join([*head, *cells, " to ".join(map(str, sorted({seeds[0], seeds[-1]})))]) + " |")
    return lines


def mean_closed(rows: list[Row], variant: str) -> str:
    found = [share for row in rows if (share := row.closed(variant)) is not None]
    return percent(fmean(found), 0) if found else "-"


def duel_table(rows: list[Row]) -> list[str]:
    """The full planner against each of the others, where both have planned."""
    lines = [
        "| against | instances | gradient faster | equal | gradient slower | closed by gradient, mean | by it | "
        "where something is left: instances, faster | closed by gradient, mean | by it |",
        "|" + "---|" * 10,
    ]
    for rival in RIVALS:
        cells: list[str] = []
        for some in (rows, [row for row in rows if row.is_open]):
            both = [row for row in some if row.gap(rival) is not None and row.gap(GRADIENT) is not None]
            faster = [(1 + row.gap(rival)) / (1 + row.gap(GRADIENT)) - 1 for row in both]  # type: ignore[operator]
            won, lost = sum(one > EQUAL for one in faster), sum(one < -EQUAL for one in faster)
            closed = [mean_closed(both, name) for name in (GRADIENT, rival)]
            whole = [str(len(both)), str(won), str(len(both) - won - lost), str(lost)]
            cells += [*(whole if some is rows else [f"{len(both)}, {won}"]), *closed]
        lines.append(f"| {rival} | " + " | ".join(cells) + " |")
    return lines


def facts_line(rows: list[Row]) -> str:
    runs = [run for row in rows for each in row.runs.values() for run in each]
    if not runs:
        return "No runs."
    machine = runs[0]["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "jax", "numpy", "numba") if name in machine)
    share = [run["plan_cpu_s"] / row.budget_s for row in rows for name in RIVALS for run in row.runs.get(name, [])]
    minutes = sum(run["plan_cpu_s"] for run in runs) / 60
    return (
        f"{len(rows)} instances, {len(runs)} runs, {minutes:.0f} CPU minutes of planning on one of "
        f"{machine['cpu_count']} CPU cores ({machine['platform']}), {max(run['date'] for run in runs)}; {versions}. "
        f"Commits {', '.join(sorted({run['commit'][:7] for run in runs}))}. CPU time of a rival / of the full planner: "
        f"{min(share):.2f} to {max(share):.2f}, median {median(share):.2f}."
    )


def write_tables(facts: list[Record], runs: list[Record], out: Path, readme: Path | None) -> list[str]:
    """Write table.md, gaps.svg, times.svg and, where given, the part of the README; returns mistakes."""
    rows = rows_of(facts, runs)
    out.mkdir(parents=True, exist_ok=True)
    text = "\n".join([
        facts_line(rows), "",
        "Step time above the proved bound, medians over the seeds:", "", *gap_table(rows), "",
        "The full planner against the others:", "", *duel_table(rows),
    ])  # fmt: skip
    write_text(out / "table.md", text + "\n")
    if rows:
        write_svg(out / "gaps.svg", svg_text(draw_gaps(rows)))
        write_svg(out / "times.svg", svg_text(draw_times(rows)))
    if readme is not None:
        put_between_marks(readme, text)
    return mistakes_of(rows)
