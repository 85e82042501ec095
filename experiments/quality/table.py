"""The tables of the quality experiment, and its part of the README."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from experiments.quality.plots import draw_gaps, draw_time
from experiments.quality.rows import (
    HEADROOM,
    HEURISTIC_NAMES,
    MODEL_NAMES,
    SEARCH_NAMES,
    Facts,
    Row,
    Run,
    mistakes_of,
    rows_of,
    summarise,
)
from experiments.recorded import put_between_marks
from tmojax.problem.strict_json import write_text
from tmojax.report.figure_style import svg_text, write_svg


def percent(share: float | None, digits: int = 1) -> str:
    """A share or gap for people; gaps of 1,000 % and more as a multiple of the bound."""
    if share is None:
        return "-"
    return f"{100 * share:.{digits}f} %" if share < 10 else f"{1 + share:.0f} x"


def summary_table(rows: list[Row]) -> list[str]:
    """What is asked for and what came out, one column for each search."""
    found = [summarise(rows, search) for search in SEARCH_NAMES]
    lines = ["| | asked | " + " | ".join(SEARCH_NAMES) + " |", "|" + "---|" * (2 + len(found))]

    def add(words: str, asked: str, texts: list[str]) -> None:
        lines.append("| " + " | ".join((words, asked, *texts)) + " |")

    def worst(value: tuple[float, float, str] | None) -> str:
        return "-" if value is None else f"{percent(value[0])}, {percent(value[1])} ({value[2]})"

    add("instances planned", "all", [f"{item.planned} of {len(rows)}" for item in found])
    add("of them with a valid plan", "all", [str(item.valid) for item in found])
    add("slower than a heuristic", "none", [str(item.slower) for item in found])
    add(f"instances planned where more than {100 * HEADROOM:g} % are left", "15 at least",
        [str(item.open_ones) for item in found])  # fmt: skip
    add("there strictly better than every heuristic", "80 %", [percent(item.better) for item in found])
    add("there closed of the distance from the best heuristic to the bound, mean", "40 %",
        [percent(item.closed) for item in found])  # fmt: skip
    add("gap with K >= 4: mean, worst", "4 %, 12 %", [worst(item.many) for item in found])
    add("gap with K = 1: mean, worst", "4 %, 12 %", [worst(item.one) for item in found])
    add("instances with a plan of an integer programme", "20 at least", [str(len(item.losses)) for item in found])
    add("there at least as good as all of them", "90 %", [percent(item.as_good) for item in found])
    add("there most that it is slower", "1 %",
        [percent(max(item.losses.values(), default=None), 2) for item in found])  # fmt: skip
    return lines


def _cell(row: Row, rival: str, least: float | None) -> str:
    """Gap of one rival, bold for the fastest to 0.01 %; *: a time limit ended it. Without a plan, why."""
    run = row.runs.get(rival)
    if run is None:
        return ""
    if run["mistakes"]:
        return "mistake"
    star, gap = "*" if run["time_limited"] else "", row.gap(rival)
    if gap is None:
        status: str = run["status"]
        return {"no feasible plan found": "none", "proved infeasible": "infeasible"}.get(status, status) + star
    return f"**{percent(gap)}**{star}" if least is not None and gap <= least + 1e-4 else percent(gap) + star


def short_table(rows: list[Row]) -> list[str]:
    """One line for each instance: time with unlimited memory, best heuristic, searches and best integer programme above
    the bound."""
    lines = [
        "| instance | ops | footprint | bound, s | unlimited memory | best heuristic | " + " | ".join(SEARCH_NAMES)
        + " | best integer programme |",
        "|" + "---|" * (7 + len(SEARCH_NAMES)),
    ]  # fmt: skip
    for row in rows:
        heuristic, model = row.best(HEURISTIC_NAMES), row.best(MODEL_NAMES)
        best = row.best(row.runs)
        least = row.gap(best) if best is not None else None
        named = [f"{_cell(row, name, least)} {name}" if name is not None else "" for name in (heuristic, model)]
        fact = row.fact
        lines.append("| " + " | ".join((
            row.name, f"{max(fact['ops']):,}", f"{fact['footprint_bytes'] / fact['capacity_bytes']:.2f} x",
            f"{fact['bound_s']:.4g}", percent(fact["unlimited_s"] / fact["bound_s"] - 1), named[0],
            *(_cell(row, name, least) for name in SEARCH_NAMES), named[1],
        )) + " |")  # fmt: skip
    return lines


def full_table(rows: list[Row], rivals: Iterable[str]) -> list[str]:
    """Instance x planner: step time above the bound, and CPU seconds of planning."""
    shown = [rival for rival in rivals if any(rival in row.runs for row in rows)]
    lines = ["| instance | " + " | ".join(shown) + " |", "|" + "---|" * (1 + len(shown))]
    for row in rows:
        best = row.best(row.runs)
        least = row.gap(best) if best is not None else None
        cells = []
        for rival in shown:
            seconds = f", {row.runs[rival]['plan_cpu_s']:.1f} s" if rival in row.runs else ""
            cells.append(_cell(row, rival, least) + seconds)
        lines.append("| " + " | ".join((row.name, *cells)) + " |")
    return lines


def facts_line(runs: list[Run], rows: list[Row], known: int) -> str:
    """Where and when; what is missing."""
    if not runs:
        return "No runs."
    dates = sorted({run["date"] for run in runs})
    commits, bounded = (
        ", ".join(sorted({(record["commit"] or "none")[:7] for record in records}))
        for records in (runs, [row.fact for row in rows])
    )
    names = ("python", "jax", "numpy", "numba", "highspy")
    versions = ", ".join(
        f"{name} {'/'.join(sorted({run['machine'][name] for run in runs if name in run['machine']}))}" for name in names
    )
    machines = sorted({f"{run['machine']['cpu_count']} CPU cores ({run['machine']['platform']})" for run in runs})
    minutes = sum(run["plan_cpu_s"] for run in runs) / 60
    limited = sum(row.fact["bound_status"] != "all parts solved" for row in rows)
    return (
        f"{len(rows)} of {known} instances, {len(runs)} runs, {minutes:.0f} CPU minutes of planning on "
        f"{' and '.join(machines)}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; {versions}. "
        f"Commits {commits}; of the bounds {bounded} (each file names its own). Bounds that time or a missing part "
        f"makes weaker than they could be: {limited}."
    )


def write_tables(runs: list[Run], facts: Facts, known: list[str], folder: Path, readme: Path | None) -> list[str]:
    """Write table.md, gaps.svg and time.svg into `folder`, and what is short between the marks of `readme`. Returns
    the mistakes."""
    rows = rows_of(runs, facts, known)
    runs = [run for row in rows for run in row.runs.values()]
    mistakes = mistakes_of(rows)
    refused = [f"**{len(mistakes)} mistakes:** " + "; ".join(mistakes) + ".", ""] if mistakes else []
    above, left = sum((row.headroom or 0.0) > HEADROOM for row in rows), sum(row.is_open for row in rows)
    short = [
        facts_line(runs, rows, len(known)), "", *refused,
        f"The best heuristic is more than {100 * HEADROOM:g} % above the bound on {above} of {len(rows)} instances, "
        f"and on {left} of these as much above the time with unlimited memory: there something is left to find. "
        f"What the searches have to show:", "", *summary_table(rows), "",
        "Step time above the proved bound:", "", *short_table(rows), "",
    ]  # fmt: skip
    full = ["Step time above the proved bound, and CPU seconds of planning:", "",
            *full_table(rows, (*HEURISTIC_NAMES, *SEARCH_NAMES, *MODEL_NAMES)), ""]  # fmt: skip
    write_text(folder / "table.md", "\n".join([*short, *full]))
    searched = [row for row in rows if row.compared("gradient")]
    if searched:
        write_svg(folder / "gaps.svg", svg_text(draw_gaps(searched)))
        write_svg(folder / "time.svg", svg_text(draw_time(searched)))
    if readme is not None:
        put_between_marks(
            readme, "\n".join([*short, "Every planner, with its time: [table.md](results/table.md).", ""])
        )
    return mistakes
