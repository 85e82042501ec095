"""The figures of the ablation: what each variant closes of the headroom, and quality over planning time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from tmojax.report.figure_style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION, figure_settings

if TYPE_CHECKING:
    from experiments.ablation.table import Record, Row

LOOK = {
    "gradient": (BLUE, "o"),
    "no-gradient": (ORANGE, "s"),
    "no-search": (GREEN, "^"),
    "evolution": (VERMILLION, "v"),
    "annealing": (PURPLE, "D"),
}


def draw_gaps(rows: list[Row]) -> Figure:
    """One line for each instance: gap of every variant as a share of the gap of the best heuristic."""
    with figure_settings():
        figure = Figure(figsize=(8.0, 1.4 + 0.3 * len(rows)))
        axes = figure.subplots()
        for place, row in enumerate(reversed(rows)):
            axes.axhline(place, color=GREY, linewidth=0.4)
            for level, (variant, (colour, marker)) in enumerate(LOOK.items()):
                closed = row.closed(variant)
                if closed is not None:
                    axes.plot(1 - closed, place + 0.1 * (2 - level), marker, color=colour, markersize=5, alpha=0.85)
        for variant, (colour, marker) in LOOK.items():
            axes.plot([], [], marker, color=colour, markersize=5, label=variant)
        axes.axvline(1.0, color=BLACK, linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(rows)), [row.name for row in reversed(rows)])
        axes.set_xlim(-0.02, 1.05)
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.set_xlabel("left of the gap of the best heuristic (dotted: nothing found)")
        axes.set_title("Same planning time, medians over the seeds")
        figure.legend(loc="outside lower center", ncols=len(LOOK))
        return figure


def progress(run: Record, start_s: float) -> list[tuple[float, float]]:
    """(CPU seconds, step time of the best plan so far): every improvement."""
    details = run["details"]
    share = run["plan_cpu_s"] / run["plan_s"]  # other load slows the clock
    found = details["curve"] if "curve" in details else [
        (share * seconds, step_s) for seconds, _, step_s in details["improvements_over_time"]]  # fmt: skip
    points = [(0.0, start_s), *found]
    best = float("inf")
    found = []
    for seconds, step_s in points:
        best = min(best, step_s)
        found.append((seconds, best))
    return found


def draw_times(rows: list[Row]) -> Figure:
    """Share of the heuristic's gap that is left over the share of the planning time, mean over instances and seeds; of
    the instances that were planned without the gradient as well, and variants that have planned all of these."""
    rows = [row for row in rows if "no-gradient" in row.runs]
    with figure_settings():
        figure = Figure(figsize=(7.5, 3.6))
        axes = figure.subplots()
        times = np.linspace(0.0, 1.0, 201)
        for variant, (colour, _) in LOOK.items():
            if any(variant not in row.runs for row in rows):
                continue
            curves = []
            for row in rows:
                start_s = (1 + row.start) * row.fact["bound_s"]
                for run in row.runs.get(variant, []):
                    if not run["valid"] or row.start <= 0:
                        continue
                    seconds, step_s = np.array(progress(run, start_s)).T
                    place = np.searchsorted(seconds / row.budget_s, times, side="right") - 1
                    left = (np.array(step_s) / row.fact["bound_s"] - 1) / row.start
                    curves.append(np.append(left[:1], left)[place + 1])
            if curves:
                words = f"{variant} ({len(curves)} runs)"
                axes.step(times, np.mean(curves, axis=0), where="post", color=colour, label=words)
        axes.set_xlabel("share of the planning time of the full planner")
        axes.set_ylabel("left of the heuristic's gap, mean")
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.set_xlim(0, 1)
        axes.grid()
        figure.legend(loc="outside right upper")
        axes.set_title("Quality over time")
        return figure
