"""The tables and the figure, from the files that run.py has written. Pure functions of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.ilp.instances import INSTANCES
from experiments.ilp.rivals import HEURISTICS, MODELS, SEARCHES
from experiments.recorded import put_between_marks
from tmojax.problem.strict_json import write_text
from tmojax.report.figure_style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    figure_settings,
    svg_text,
    write_svg,
)

COLOURS = (BLUE, SKY, ORANGE, VERMILLION, GREEN, PURPLE, BLACK)
MARKS = ("o", "s", "D", "^", "v", "P", "X")
HIDDEN = {
    "lockstep-milp, warm", "budget-milp, warm", "tmo-milp, not disjoint", "poet, equal share", "offmate, equal share",
}  # fmt: skip  # in tables only

Run = dict[str, Any]
Facts = dict[str, dict[str, Any]]


def best_of(runs: list[Run], instance: str, names: tuple[str, ...]) -> Run | None:
    """The fastest valid plan of these rivals."""
    found = [run for run in runs if run["instance"] == instance and run["rival"] in names and run["valid"]]
    return min(found, key=lambda run: run["step_s"], default=None)


def with_limit(runs: list[Run], instance: str, rival: str, limit_s: float) -> Run | None:
    """The run with that limit, or the one with less time that ended by itself."""
    found = [run for run in runs if run["instance"] == instance and run["rival"] == rival]
    found = [run for run in found if run["limit_s"] == limit_s or (run["limit_s"] or 0) < limit_s]
    if not found:
        return None
    last = max(found, key=lambda run: run["limit_s"] or 0)
    return last if last["limit_s"] == limit_s or not last["time_limited"] else None


def over_bound(run: Run | None, facts: Facts) -> float | None:
    return run["step_s"] / facts[run["instance"]]["bound_s"] - 1 if run is not None and run["valid"] else None


def solves_of(run: Run) -> list[dict[str, Any]]:
    """Figures of every solve. A constraint model has one, whose figures stand in `details`; its constraints and
    variables, all of them integer, count as rows and columns."""
    details = run["details"]
    if "claimed_step_s" in details:
        size = {
            "rows": details["constraints"],
            "columns": details["variables"],
            "integer_columns": details["variables"],
        }
        return [size | details]
    return details.get("solves", [])


def solve_sums(run: Run) -> dict[str, Any]:
    """Figures of all solves of a run together; None where one of them has no such number.

    Sizes and times add up. first: until the last solve has an incumbent, so that there is a plan. claimed and gap: the
    largest.
    """
    solves = solves_of(run)

    def all_of(name: str) -> list[float] | None:
        values = [solve.get(name) for solve in solves]
        return values if values and None not in values else None  # type: ignore[return-value]

    def total(name: str) -> float | None:
        values = all_of(name)
        return sum(values) if values is not None else None

    def largest(name: str) -> float | None:
        values = all_of(name)
        return max(values) if values is not None else None

    firsts = all_of("first_incumbent_s")
    spent_s = sum(solve.get("solve_s") or 0.0 for solve in solves[:-1])
    return {
        "rows": total("rows"), "columns": total("columns"), "integer": total("integer_columns"),
        "build_s": total("build_s"), "solve_s": total("solve_s"),
        "first_s": spent_s + firsts[-1] if firsts else None,
        "claimed_s": largest("claimed_step_s"), "gap": largest("model_gap"),
    }  # fmt: skip


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" if value < 10 else f"{1 + value:.0f} x"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{int(value):,}"


def _outcome(run: Run | None, facts: Facts) -> str:
    """Time above the bound; *: ended by its time limit. Without a plan, why."""
    if run is None:
        return ""
    if run["mistakes"]:
        return "mistake"
    if not run["valid"]:
        words = {"no feasible plan found": "none", "proved infeasible": "infeasible"}
        return words.get(run["status"], run["status"]) + ("*" if run["time_limited"] else "")
    return _percent(over_bound(run, facts)) + ("*" if run["time_limited"] else "")


def _header(first: str, names: list[str]) -> list[str]:
    return ["| " + " | ".join([first, *names]) + " |", "|" + "---|" * (1 + len(names))]


def instance_table(facts: Facts) -> list[str]:
    """What the instances are."""
    lines = _header("instance", ["problem", "ops", "tensors", "bound, s"])
    for name, fact in facts.items():
        counts = ["/".join(f"{count:,}" for count in fact[what]) for what in ("ops", "tensors")]
        lines.append(f"| {name} | {fact['words']} | {counts[0]} | {counts[1]} | {fact['bound_s']:.5g} |")
    return lines


def summary_table(runs: list[Run], facts: Facts, limit_s: float) -> list[str]:
    """Step time above the bound: a row for each rival, a column for each instance."""
    heuristics = tuple(rival.name for rival in HEURISTICS)
    found: dict[str, list[Run | None]] = {"best heuristic": [best_of(runs, name, heuristics) for name in facts]}
    for rival in SEARCHES:
        found[rival.name] = [with_limit(runs, name, rival.name, limit_s) for name in facts]
    for rival in MODELS:
        found[rival.name] = [with_limit(runs, name, rival.name, limit_s) for name in facts]
    lines = _header("", list(facts))
    fastest = [
        min((run["step_s"] for run in column if run is not None and run["valid"]), default=0.0)
        for column in zip(*found.values(), strict=True)
    ]
    for rival, row in found.items():
        cells = []
        for run, least_s in zip(row, fastest, strict=True):
            text = _outcome(run, facts)
            if run is not None and run["valid"] and run["step_s"] <= least_s * (1 + 1e-4):
                text = f"**{text}**"
            cells.append(text + (f" {run['rival']}" if run is not None and rival == "best heuristic" else ""))
        if any(cells):
            lines.append("| " + " | ".join([rival, *cells]) + " |")
    return lines


def detail_table(runs: list[Run], facts: Facts) -> list[str]:
    """One row for each run of a model."""
    lines = [
        "| instance | model | limit, s | status | rows | columns | integer | build, s | first incumbent, s | solve, s "
        "| gap of the model | claimed, s | simulated, s | above the bound |",
        "|" + "---|" * 14,
    ]
    order = {model.name: place for place, model in enumerate(MODELS)}
    for name in facts:
        mine = [run for run in runs if run["instance"] == name and run["rival"] in order]
        for run in sorted(mine, key=lambda run: (order[run["rival"]], run["limit_s"] or 0)):
            sums = solve_sums(run)
            lines.append("| " + " | ".join((
                name, run["rival"], _seconds(run["limit_s"]), run["status"], _count(sums["rows"]),
                _count(sums["columns"]), _count(sums["integer"]), _seconds(sums["build_s"]), _seconds(sums["first_s"]),
                _seconds(sums["solve_s"]), _percent(sums["gap"]),
                f"{sums['claimed_s']:.5g}" if sums["claimed_s"] is not None else "-",
                f"{run['step_s']:.5g}" if run["valid"] else "-", _percent(over_bound(run, facts)),
            )) + " |")  # fmt: skip
    return lines


def other_table(runs: list[Run], facts: Facts) -> list[str]:
    """Heuristics and searches: time above the bound and planning time."""
    lines = _header("", list(facts))
    for rival in (*HEURISTICS, *SEARCHES):
        cells = []
        for name in facts:
            run = next((r for r in runs if r["instance"] == name and r["rival"] == rival.name), None)
            cells.append(f"{_outcome(run, facts)}, {run['plan_s']:.1f} s" if run is not None else "")
        lines.append("| " + " | ".join([rival.name, *cells]) + " |")
    return lines


def facts_line(runs: list[Run]) -> str:
    if not runs:
        return "No runs."
    dates = sorted({run["date"] for run in runs})
    versions: dict[str, set[str]] = {}
    for run in runs:
        for package in ("python", "highspy", "ortools", "jax", "numpy"):
            if package in run["provenance"]["versions"]:
                versions.setdefault(package, set()).add(run["provenance"]["versions"][package])
    solvers = sorted(
        {solve["solver"] for run in runs for solve in (*solves_of(run), run["details"]) if solve.get("solver")}
    )
    commits = sorted({(run["provenance"]["git_commit"] or "none")[:7] for run in runs})
    first = runs[0]["provenance"]
    minutes = sum(run["plan_s"] for run in runs) / 60
    return (
        f"{first['cpu_count']} CPU cores ({first['platform']}), {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; "
        + ", ".join(f"{package} {'/'.join(sorted(found))}" for package, found in versions.items())
        + f"; {', '.join(solvers)}. {len(runs)} runs, {minutes:.0f} minutes of planning. "
        + f"Commits {', '.join(commits)} (each run names its own). "
        + (f"**{sum(bool(run['mistakes']) for run in runs)} runs with mistakes.**" if any(r["mistakes"] for r in runs)
           else "The checker accepted every plan.")
    )  # fmt: skip


def write_table(runs: list[Run], facts: Facts, folder: Path, readme: Path | None) -> None:
    """Write table.md and table.svg into `folder`; put the short tables between the marks of `readme`."""
    order = [instance.name for instance in INSTANCES]
    facts = {name: facts[name] for name in order if name in facts}
    limits = sorted({run["limit_s"] for run in runs if run["limit_s"]})
    short = [facts_line(runs), "", *instance_table(facts), ""]
    for limit_s in limits:
        known = {name: fact for name, fact in facts.items() if any(
            run["instance"] == name and run["limit_s"] == limit_s for run in runs
        )}  # fmt: skip
        if known:
            short += [f"Step time above the proved bound with a time limit of {limit_s:g} s:", "",
                      *summary_table(runs, known, limit_s), ""]  # fmt: skip
    short += ["Heuristics and searches, with their planning time:", "", *other_table(runs, facts), ""]
    text = "\n".join([*short, "Every run of a model:", "", *detail_table(runs, facts), ""])
    write_text(folder / "table.md", text)
    if limits and facts:
        write_svg(folder / "table.svg", svg_text(draw(runs, facts, limits)))
    if readme is not None:
        body = "\n".join([*short, "Size, times and gaps of every run: [table.md](results/table.md).", ""])
        put_between_marks(readme, body)


def draw(runs: list[Run], facts: Facts, limits: list[float]) -> Figure:
    """Left: time above the bound of every plan, with the second limit (the only one in a quick run). Right: what the
    model's gap is when its time is up, over its size."""
    limit_s = limits[min(1, len(limits) - 1)]
    shown = [model.name for model in MODELS if model.name not in HIDDEN]
    styles = {name: (COLOURS[n % len(COLOURS)], MARKS[(n + 3 * (n // len(COLOURS))) % len(MARKS)])
              for n, name in enumerate(shown)}  # fmt: skip
    with figure_settings():
        figure = Figure(figsize=(10.0, 0.55 * len(facts) + 2.6))
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for row, name in enumerate(facts):
            left.axhline(row, color="#d0d7de", linewidth=0.6)
            best = best_of(runs, name, tuple(rival.name for rival in HEURISTICS))
            gradient = next((r for r in runs if r["instance"] == name and r["rival"] == "gradient"), None)
            for run, colour, label in ((best, GREY, "best heuristic"), (gradient, BLACK, "gradient")):
                value = over_bound(run, facts)
                if value is not None:
                    left.plot(max(value, 1e-4), row, "|", color=colour, markersize=16, markeredgewidth=2.2,
                              label=label if row == 0 else None)  # fmt: skip
            for number, model in enumerate(shown):
                run = with_limit(runs, name, model, limit_s)
                value = over_bound(run, facts)
                offset = 0.6 * (number / max(len(shown) - 1, 1) - 0.5)
                if value is not None:
                    left.plot(max(value, 1e-4), row + offset, styles[model][1], color=styles[model][0], markersize=5)
                sums = solve_sums(run) if run is not None else {}
                if sums.get("gap") is not None and sums.get("columns"):
                    right.plot(sums["columns"], max(sums["gap"], 1e-5), styles[model][1], color=styles[model][0],
                               markersize=5)  # fmt: skip
        for model in shown:
            if any(run["rival"] == model for run in runs):
                left.plot([], [], styles[model][1], color=styles[model][0], markersize=5, label=model)
        left.set_xscale("log")
        left.set_xlabel("above the proved bound (0.01 % stands for less)")
        left.set_title(f"plans, time limit {limit_s:g} s")
        left.set_yticks(range(len(facts)), list(facts))
        left.set_ylim(len(facts) - 0.5, -0.5)
        left.grid(axis="x")
        right.set_xscale("log")
        right.set_yscale("log")
        right.set_xlabel("columns of the model")
        right.set_title("gap that the solver leaves")
        right.grid()
        for axis in (left.xaxis, right.yaxis):
            axis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6)
        return figure
