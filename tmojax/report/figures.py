"""The figures of a run: which there are, and their files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from textwrap import shorten

from matplotlib.figure import Figure

from tmojax.report.figure_style import svg_text, write_png, write_svg
from tmojax.report.outcome import Outcome, RunReport, compute_and_recompute_s
from tmojax.report.plots import PlannerBar, plot_links, plot_memory, plot_plan, plot_planners
from tmojax.report.verdict import comparison_title


def draw(report: RunReport) -> dict[str, Figure]:
    """Figures by name: `planners`, and `plan`, `memory` and `links` of the best plan where there is one that
    takes any time.

    The best plan's simulation must be recorded.
    """
    bars = [_bar(report, outcome) for outcome in report.outcomes]
    figures = {"planners": plot_planners(bars, report.unlimited_s, comparison_title(report))}
    best = report.best
    if best is not None and best.result.schedule is not None and best.simulation is not None and best.step_s > 0:
        plan = (report.problem, best.result.schedule, best.simulation)
        figures["plan"] = plot_plan(*plan)
        figures["memory"] = plot_memory(*plan, footprint_bytes=max(report.footprint_bytes))
        figures["links"] = plot_links(*plan)
    return figures


def write_figures(folder: str | os.PathLike[str], figures: dict[str, Figure], png: bool = False) -> dict[str, str]:
    """Write `NAME.svg` (and `NAME.png`) of every figure into an existing folder; returns the SVG texts."""
    texts = {}
    for name, figure in figures.items():
        texts[name] = svg_text(figure)
        write_svg(Path(folder) / f"{name}.svg", texts[name])
        if png:
            write_png(Path(folder) / f"{name}.png", figure)
    return texts


def _bar(report: RunReport, outcome: Outcome) -> PlannerBar:
    compute_s, recompute_s = compute_and_recompute_s(report.problem, outcome) if outcome.valid else (0.0, 0.0)
    return PlannerBar(
        name=outcome.planner,
        step_s=outcome.step_s,
        compute_s=compute_s,
        recompute_s=recompute_s,
        bound_s=outcome.bound_s,
        baseline=outcome.baseline,
        best=outcome is report.best,
        note=shorten(re.sub(r" \(\d+ bytes\)", "", outcome.result.message) or str(outcome.status), 90),
    )
