"""The table and the figure, from the rows that run.py has written. Pure functions of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tmojax.problem.strict_json import write_text
from tmojax.report.figure_style import BLUE, GREEN, GREY, ORANGE, SKY, VERMILLION, figure_settings, svg_text, write_svg

BEGIN, END = "<!-- written by run.py: begin -->\n", "<!-- written by run.py: end -->\n"
SHORT_BEGIN = "<!-- table of experiments/coordination/run.py: begin -->\n"
SHORT_END = "<!-- table of experiments/coordination/run.py: end -->\n"
# Two times that differ by less are the same: 0.01 %.
SAME = 1e-4
ZOOM = 1.15  # right end of the figure's second panel, as a multiple of the bound
SERIES = (
    ("oblivious, fair", GREY),
    ("oblivious, fcfs", ORANGE),
    ("best heuristic", SKY),
    ("local search", GREEN),
    ("gradient", BLUE),
)

Row = dict[str, Any]
Plan = dict[str, Any]


def plan_of(row: Row, planner: str, seed: int | None = None) -> Plan | None:
    """The valid plan of a planner; of a search, with that seed (default: the first)."""
    return next(
        (p for p in row["plans"] if p["planner"] == planner and p["valid"] and seed in (None, p["seed"])), None
    )


def best_heuristic(row: Row) -> Plan | None:
    """The fastest valid plan that no search has made; of equal ones the first."""
    found = [plan for plan in row["plans"] if plan["valid"] and not plan["search"]]
    return min(found, key=lambda plan: round(plan["step_s"] / row["bound"]["step_s"], 6), default=None)


def series(row: Row) -> dict[str, Plan | None]:
    """The plans that the figure shows, by label."""
    plans = (plan_of(row, "oblivious-fair"), plan_of(row, "oblivious-fcfs"), best_heuristic(row),
             plan_of(row, "local-search"), plan_of(row, "gradient"))  # fmt: skip
    return {label: plan for (label, _), plan in zip(SERIES, plans, strict=True)}


def _per_micro_batch(row: Row, plan: Plan | None) -> str:
    return "-" if plan is None else f"{plan['step_s'] / row['case']['micro_batches']:.4f}"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):.2f} %"


def _gap(row: Row, plan: Plan | None) -> str:
    return "-" if plan is None else _percent(plan["step_s"] / row["bound"]["step_s"])


def coordination_words(plan: Plan) -> str:
    """Link policy and stagger of a plan. Stagger 1: the GPUs start spread evenly over a micro-batch of compute."""
    starts = plan["start_share"]
    count = len(starts)
    if not any(starts):
        return plan["policy"]
    last = starts[-1] * count / (count - 1)
    even = all(abs(start - last * gpu / count) < 1e-9 for gpu, start in enumerate(starts))
    return f"{plan['policy']}, " + (f"stagger {last:.3g}" if even else "starts " + " ".join(f"{s:.2f}" for s in starts))


def _labels(row: Row) -> tuple[str, str, str, str, str]:
    case = row["case"]
    return case["problem"], case["actions"], _footprint(row), str(case["micro_batches"]), case["duplex"]


def _footprint(row: Row) -> str:
    """The factor that was planned with: less than asked for where the largest op alone needs more."""
    factor = max(row["footprint_bytes"]) / row["capacity_bytes"]
    return row["case"]["footprint"] if abs(factor / float(row["case"]["footprint"]) - 1) < 1e-6 else f"{factor:.3g}"


def main_table(rows: list[Row]) -> list[str]:
    lines = [
        "| problem | actions | footprint | K | path | oblivious, fair | oblivious, fcfs | best heuristic | which | "
        "local search | gradient | bound | headroom | gap of gradient |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found, best = series(row), best_heuristic(row)
        which = f"{best['planner'].removeprefix('oblivious-')}" if best else "-"
        if best and best["planner"].startswith("oblivious"):
            which = "oblivious"
        times = [_per_micro_batch(row, found[label]) for label, _ in SERIES]
        bound_s = row["bound"]["step_s"] / row["case"]["micro_batches"]
        lines.append(
            "| " + " | ".join((
                *_labels(row), *times[:3], f"{which}: {coordination_words(best)}" if best else "-", *times[3:],
                f"{bound_s:.4f}", _gap(row, best), _gap(row, found["gradient"]),
            )) + " |"
        )  # fmt: skip
    return lines


def short_table(rows: list[Row]) -> list[str]:
    """One line a row for the project's README; what the gradient added is that of the first seed."""
    lines = [
        "| problem | actions | footprint | K | path | oblivious | best heuristic | gradient planner | bound | "
        "headroom | added by the gradient |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found, best = series(row), best_heuristic(row)
        gradient, search = found["gradient"], found["local search"]
        which = f" {best['planner']}, {coordination_words(best)}" if best else ""
        if best and best["planner"].startswith("oblivious"):
            which = f" oblivious, {coordination_words(best)}"
        bound_s = row["bound"]["step_s"] / row["case"]["micro_batches"]
        lines.append(
            "| " + " | ".join((
                *_labels(row), _per_micro_batch(row, found["oblivious, fair"]), _per_micro_batch(row, best) + which,
                _per_micro_batch(row, gradient), f"{bound_s:.4f}", _gap(row, best),
                added_words(gradient, search) if gradient and search else "-",
            )) + " |"
        )  # fmt: skip
    return lines


def gradient_table(rows: list[Row]) -> list[str]:
    """What the gradient added, for every row and seed in which both searches ran."""
    lines = [
        "| problem | actions | footprint | K | path | headroom | seed | start | after gradient and rounding | "
        "gradient, final | local search, final | simulations | gradient added |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for gradient in row["plans"]:
            search = plan_of(row, "local-search", gradient["seed"])
            if gradient["planner"] != "gradient" or not gradient["valid"] or search is None:
                continue
            details, best = gradient["details"], best_heuristic(row)
            count = row["case"]["micro_batches"]
            rounded = details["after_gradient_step_s"]
            lines.append(
                "| " + " | ".join((
                    *_labels(row), _gap(row, best), str(gradient["seed"]),
                    f"{details['start_step_s'] / count:.4f}" if details["start_step_s"] else "-",
                    f"{rounded / count:.4f}" if rounded else "nothing fits",
                    _per_micro_batch(row, gradient), _per_micro_batch(row, search),
                    str(search["details"]["evaluations"]), added_words(gradient, search),
                )) + " |"
            )  # fmt: skip
    return lines


def added_words(gradient: Plan, search: Plan) -> str:
    """How much faster the gradient planner's plan is than that of local search alone, from the same start."""
    ratio = search["step_s"] / gradient["step_s"]
    if abs(ratio - 1) < SAME:
        return "nothing"
    return f"{100 * (ratio - 1):.2f} %" if ratio > 1 else f"nothing; {100 * (1 / ratio - 1):.2f} % slower"


def facts(rows: list[Row]) -> list[str]:
    """Where and when the rows were made."""
    if not rows:
        return ["No rows."]
    first, dates = rows[0]["provenance"], sorted({row["date"] for row in rows})
    names = ("python", "jax", "jaxlib", "optax", "numpy", "numba", "highspy")
    versions = ", ".join(f"{name} {first['versions'][name]}" for name in names if name in first["versions"])
    limited = [f"{row['case']['name']} ({plan['planner']})" for row in rows for plan in row["plans"]
               if plan["time_limited"]]  # fmt: skip
    commits = sorted({(row["provenance"]["git_commit"] or "none")[:7] for row in rows})
    refused = sum(len(row["mistakes"]) for row in rows)
    return [
        f"{first['cpu_count']} CPU cores ({first['platform']}), {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; "
        f"{versions}. {len(rows)} rows in {sum(row['wall_s'] for row in rows) / 60:.0f} minutes. "
        f"Commits {', '.join(commits)} (each row names its own). Times in seconds per micro-batch. "
        + (f"**{refused} mistakes, see the rows.** " if refused else "The checker accepted every plan. ")
        + f"Plans that a time limit of a solver ended, so that another machine may find others: "
        f"{'; '.join(dict.fromkeys(limited)) or 'none'}."
    ]


def jitter_table(rows: list[Row]) -> list[str]:
    """Median and 95th percentile of the time when every duration and rate varies by up to 5 %."""
    lines = [
        "| problem | actions | footprint | K | path | best heuristic | under jitter | gradient | under jitter |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = []
        for plan in (best_heuristic(row), plan_of(row, "gradient")):
            count = row["case"]["micro_batches"]
            varied = plan["jitter"] if plan else None
            both = f"{varied['median_s'] / count:.4f}, {varied['p95_s'] / count:.4f}" if varied else "-"
            cells += [_per_micro_batch(row, plan), both]
        lines.append("| " + " | ".join((*_labels(row), *cells)) + " |")
    return lines


def _between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two marks of a page."""
    head, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, tail = rest.partition(end)
    write_text(page, f"{head}{begin}\n{text}\n{end}{tail}")


def write_table(rows: list[Row], folder: Path, readme: Path | None) -> None:
    """Write table.md and table.svg into `folder`; put the tables between the marks of `readme`, and the short one
    between those of the project's README."""
    text = "\n".join([
        *facts(rows), "", *main_table(rows), "", "What the gradient added:", "", *gradient_table(rows), "",
        "Times under jitter of +-5 % (median, 95th percentile of 20 samples):", "", *jitter_table(rows), "",
    ])  # fmt: skip
    write_text(folder / "table.md", text)
    if rows:
        write_svg(folder / "table.svg", svg_text(draw(rows)))
    if readme is not None:
        _between(readme, BEGIN, END, text)
        _between(readme.parents[2] / "README.md", SHORT_BEGIN, SHORT_END, "\n".join(short_table(rows)))


def draw(rows: list[Row]) -> Figure:
    """Bars of time / bound for every row; the right panel shows the same near the bound."""
    with figure_settings():
        figure = Figure(figsize=(9.0, 0.5 * len(rows) + 1.2))
        wide, near = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        height = 0.8 / len(SERIES)
        for axes in (wide, near):
            for number, (label, colour) in enumerate(SERIES):
                places = [place + (number - 2) * height for place in range(len(rows))]
                plans = [series(row)[label] for row in rows]
                over = [plan["step_s"] / row["bound"]["step_s"] - 1 if plan else 0.0
                        for plan, row in zip(plans, rows, strict=True)]  # fmt: skip
                axes.barh(places, over, height, color=colour, label=label)
            axes.axvline(0.0, color=VERMILLION, linewidth=1.0)
            axes.grid(axis="x")
            axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
        near.set_xlim(0.0, ZOOM - 1)
        near.set_title("near the bound")
        wide.set_title("time above the lower bound")
        wide.set_yticks(range(len(rows)), [_figure_label(row) for row in rows])
        wide.set_ylim(len(rows) - 0.5, -0.5)
        handles, labels = wide.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(SERIES))
        return figure


def _figure_label(row: Row) -> str:
    problem, actions, footprint, micro_batches, duplex = _labels(row)
    allowed = "offload only" if actions == "offload" else "all actions"
    return f"{problem}, {allowed}\n{footprint} x, K = {micro_batches}, {duplex} duplex"
