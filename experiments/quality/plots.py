"""The figures of the quality experiment: distribution of gaps, and quality over planning time."""

from __future__ import annotations

from statistics import median

import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.transforms import Bbox

from experiments.quality.rows import HEADROOM, HEURISTIC_NAMES, MODEL_NAMES, Row
from tmojax.report.figure_style import BLACK, BLUE, GREY, ORANGE, VERMILLION, figure_settings

COLOUR = {"best heuristic": GREY, "local-search": ORANGE, "gradient": BLUE, "best integer programme": VERMILLION}
LEAST = 1e-4  # gaps below it are drawn there: axes are logarithmic


def _gap_axis(axis: Axis) -> None:
    """1, 3, 10, 30 ... per cent, or where they span much 1, 10, 100 ...; no other labels."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 3.0) if high < 1e4 * low else (1.0,)))
    axis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    axis.set_minor_formatter(NullFormatter())


def gaps_of(rows: list[Row]) -> dict[str, list[float]]:
    """Gaps by planner over the same instances: a planner only if all of `rows` have a plan of it."""
    found: dict[str, list[float]] = {}
    for name, rivals in (("best heuristic", HEURISTIC_NAMES), ("local-search", ("local-search",)),
                         ("gradient", ("gradient",)), ("best integer programme", MODEL_NAMES)):  # fmt: skip
        best = [row.best(rivals) for row in rows]
        gaps = [row.gap(rival) for row, rival in zip(rows, best, strict=True) if rival is not None]
        if len(gaps) == len(rows):
            found[name] = [gap for gap in gaps if gap is not None]
    return found


def draw_gaps(rows: list[Row]) -> Figure:
    """Left: share of the instances over the gap. Right: gap of the gradient planner over the headroom; on the
    diagonal it has won nothing."""
    with figure_settings():
        figure = Figure(figsize=(9.0, 3.6))
        left, right = figure.subplots(1, 2)
        for name, gaps in gaps_of(rows).items():
            places = np.maximum(np.sort(gaps), LEAST)
            left.step([places[0], *places], np.arange(len(gaps) + 1) / len(gaps), where="post", color=COLOUR[name],
                      label=name)  # fmt: skip
        left.set_xscale("log")
        left.set_xlabel("above the proved bound (0.01 % stands for less)")
        left.set_ylabel(f"share of {len(rows)} instances")
        left.set_ylim(0, 1.02)
        left.grid()
        left.legend(loc="lower right")
        left.set_title("gap distribution")
        for label, marker, wanted in (("K = 1", "o", lambda k: k == 1), ("K = 4", "s", lambda k: k == 4),
                                      ("K = 16", "^", lambda k: k > 4)):  # fmt: skip
            points = [both for row in rows if wanted(row.fact["micro_batches"]) and (both := row.compared("gradient"))]
            if points:
                gap, headroom = np.maximum(np.array(points), LEAST).T
                right.plot(headroom, gap, marker, color=BLUE, markersize=4.5, alpha=0.8, label=label)
        ends = np.array(right.get_xlim())
        right.plot(ends, ends, color=GREY, linewidth=0.8)
        right.axvline(HEADROOM, color=GREY, linewidth=0.8, linestyle=":")
        right.set_xscale("log")
        right.set_yscale("log")
        right.set_xlabel("headroom: best heuristic above the bound")
        right.set_ylabel("gradient above the bound")
        right.grid()
        right.legend(loc="lower right")
        right.set_title("what the gradient planner leaves")
        for axis in (left.xaxis, right.xaxis, right.yaxis):
            _gap_axis(axis)
        return figure


def progress(row: Row, search: str) -> list[tuple[float, float]]:
    """(CPU seconds of planning, gap of the best plan so far): heuristics one after the other, then one search.

    A search reports every better plan (`improvements_over_time`) by the clock, which other load slows; the same share
    of its CPU time is drawn.
    """
    spent_s, points = 0.0, []
    for rival in HEURISTIC_NAMES:
        if rival in row.runs:
            spent_s += row.runs[rival]["plan_cpu_s"]
            points.append((spent_s, row.gap(rival)))
    run, details = row.runs[search], row.runs[search]["details"]
    cpu_share = run["plan_cpu_s"] / run["plan_s"]
    for seconds, _, step_s in details.get("improvements_over_time", ()):
        points.append((spent_s + cpu_share * seconds, step_s / row.fact["bound_s"] - 1))
    points.append((spent_s + run["plan_cpu_s"], row.gap(search)))
    best, found = float("inf"), []
    for seconds, gap in points:
        if gap is not None and gap < best:
            best = gap
            found.append((seconds, gap))
    return found


def draw_time(rows: list[Row]) -> Figure:
    """Gap over planning time: heuristics then a search, median and upper quartile of the instances on which it ran; and
    where every single planner ends."""
    with figure_settings():
        figure = Figure(figsize=(9.0, 3.9))
        left, right = figure.subplots(1, 2, sharey=True)
        for search in ("local-search", "gradient"):
            curves = [progress(row, search) for row in rows if search in row.runs]
            if not curves:
                continue
            times = np.array(sorted({seconds for curve in curves for seconds, _ in curve}))
            gaps = np.full((len(curves), len(times)), np.inf)
            for line, curve in zip(gaps, curves, strict=True):
                for seconds, gap in curve:
                    line[times >= seconds] = gap
            for share, style, words in ((50, "-", "median"), (75, ":", "upper quartile")):
                value = np.percentile(gaps, share, axis=0, method="higher")
                known = np.isfinite(value)
                left.step(times[known], np.maximum(value[known], LEAST), style, where="post", color=COLOUR[search],
                          label=f"{search}, {words} of {len(curves)}")  # fmt: skip
        left.set_xlabel("planning, CPU seconds: all heuristics, then the search")
        left.set_ylabel("above the proved bound")
        left.set_title("quality over time")
        left.legend(loc="upper right")
        rivals = [rival for rival in (*HEURISTIC_NAMES, "local-search", "gradient", *MODEL_NAMES)
                  if sum(row.gap(rival) is not None for row in rows) * 2 >= len(rows)]  # fmt: skip
        labels = []
        for rival in rivals:
            found = [(row.runs[rival]["plan_cpu_s"], gap) for row in rows if (gap := row.gap(rival)) is not None]
            place = (median(seconds for seconds, _ in found), max(median(gap for _, gap in found), LEAST))
            right.plot(*place, "o", color=COLOUR.get(rival, BLACK), markersize=4.5)
            offset = (5, -8 if rival == "gradient" else 3)
            labels.append(right.annotate(rival, place, textcoords="offset points", xytext=offset, fontsize=7.5))
        right.set_xlabel("planning, CPU seconds (median)")
        right.set_title("single planners, where at least half have a plan")
        right.margins(x=0.25)
        for axes in (left, right):
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.grid()
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _gap_axis(left.yaxis)
        figure.draw_without_rendering()
        _separate(labels)
        return figure


def _separate(labels: list[Annotation]) -> None:
    """Move labels up, the lowest first, until none covers another."""
    placed: list[Bbox] = []
    for label in sorted(labels, key=lambda label: label.get_window_extent().y0):
        while any(label.get_window_extent().overlaps(other) for other in placed):
            x, y = label.get_position()
            label.set_position((x, y + 1))
        placed.append(label.get_window_extent())
