"""The tables and the figure, from the rows that run.py has written. Pure functions of them."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from tmojax.problem.strict_json import write_text
from tmojax.report.figure_style import BLUE, GREY, ORANGE, SKY, VERMILLION, figure_settings, svg_text, write_svg

BEGIN, END = "<!-- written by run.py: begin -->\n", "<!-- written by run.py: end -->\n"
BASELINE = "oblivious-fair"
TMO = ("tmo-disjoint", "tmo-ordered", "tmo")
# What the paper reports as average speedups: footprint -> share. For 1.5 it gives none in its abstract.
PAPER = {1.33: 0.383, 2.0: 0.318}
COLUMNS = (*TMO, "best of TMO", "best heuristic", "gradient", "bound")
COLOURS = {"tmo-disjoint": SKY, "tmo-ordered": ORANGE, "tmo": VERMILLION, "gradient": BLUE, "bound": GREY}

Row = dict[str, Any]


def times(row: Row) -> dict[str, float]:
    """Step times by column, seconds, as far as there are valid plans; `bound` is no plan."""
    valid = {plan["planner"]: plan for plan in row["plans"] if plan["valid"]}
    found = {name: valid[name]["step_s"] for name in (BASELINE, *TMO, "gradient") if name in valid}
    tmo = [found[name] for name in TMO if name in found]
    heuristics = [plan["step_s"] for plan in valid.values() if not plan["search"]]
    if tmo:
        found["best of TMO"] = min(tmo)
    if heuristics:
        found["best heuristic"] = min(heuristics)
    return found | {"bound": row["bound_s"]}


def speedups(row: Row) -> dict[str, float]:
    """Speedup over the oblivious baseline less one, by column; empty where the baseline has no plan."""
    found = times(row)
    return {name: found[BASELINE] / found[name] - 1 for name in COLUMNS if BASELINE in found and name in found}


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def best_heuristic_name(row: Row) -> str:
    found = [plan for plan in row["plans"] if plan["valid"] and not plan["search"]]
    return min(found, key=lambda plan: plan["step_s"])["planner"] if found else "-"


def main_table(rows: list[Row]) -> list[str]:
    """One line for each row: times in seconds per micro-batch, then speedups over oblivious planning."""
    lines = [
        "| model | footprint | K | compute | oblivious | tmo-disjoint | tmo-ordered | tmo | best heuristic | which | "
        "gradient | bound: at most |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found, gained = times(row), speedups(row)
        base = f"{found[BASELINE] / row['micro_batches']:.4f}" if BASELINE in found else "-"
        cells = [_percent(gained.get(name)) for name in (*TMO, "best heuristic")]
        lines.append(
            "| " + " | ".join((
                row["model"], f"{row['footprint']:g} x", str(row["micro_batches"]), f"{row['compute_s']:.4f}", base,
                *cells, best_heuristic_name(row), _percent(gained.get("gradient")), _percent(gained.get("bound")),
            )) + " |"
        )  # fmt: skip
    return lines


def averages(rows: list[Row]) -> dict[tuple[float, int], dict[str, float]]:
    """Mean speedups over the models, by footprint and K, as far as every model of the pair has that column."""
    pairs = sorted({(row["footprint"], row["micro_batches"]) for row in rows})
    found: dict[tuple[float, int], dict[str, float]] = {}
    for pair in pairs:
        gained = [speedups(row) for row in rows if (row["footprint"], row["micro_batches"]) == pair]
        found[pair] = {name: fmean(g[name] for g in gained) for name in COLUMNS if all(name in g for g in gained)}
    return found


def average_table(rows: list[Row]) -> list[str]:
    lines = [
        "| footprint | K | models | tmo-disjoint | tmo-ordered | tmo | best of TMO's three | best heuristic | "
        "gradient | bound: at most | the paper, on average |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (footprint, count), gained in averages(rows).items():
        models = sum((row["footprint"], row["micro_batches"]) == (footprint, count) for row in rows)
        cells = [_percent(gained.get(name)) for name in COLUMNS]
        paper = _percent(PAPER.get(footprint))
        lines.append("| " + " | ".join((f"{footprint:g} x", str(count), str(models), *cells, paper)) + " |")
    return lines


def facts(rows: list[Row], of: int) -> list[str]:
    """Where and when the rows were made."""
    if not rows:
        return ["No rows."]
    first, dates = rows[0]["provenance"], sorted({row["date"] for row in rows})
    names = ("python", "jax", "jaxlib", "numpy", "numba", "highspy")
    versions = ", ".join(f"{name} {first['versions'][name]}" for name in names if name in first["versions"])
    commits = sorted({(row["provenance"]["git_commit"] or "none")[:7] for row in rows})
    limited = [f"{row['name']} ({plan['planner']})" for row in rows for plan in row["plans"] if plan["time_limited"]]
    refused = sum(len(row["mistakes"]) for row in rows)
    return [
        f"{len(rows)} of {of} rows, made in {sum(row['wall_s'] for row in rows) / 60:.0f} minutes on "
        f"{first['cpu_count']} CPU cores ({first['platform']}), {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; "
        f"{versions}. Commits {', '.join(commits)} (each row names its own). "
        + (f"**{refused} mistakes, see the rows.** " if refused else "The checker accepted every plan. ")
        + f"Plans that a time limit of a solver ended: {'; '.join(dict.fromkeys(limited)) or 'none'}."
    ]


def write_table(rows: list[Row], of: int, folder: Path, readme: Path | None) -> None:
    """Write table.md and table.svg into `folder`, and the tables between the marks of `readme`."""
    text = "\n".join([
        *facts(rows, of), "", "Mean speedups over the models:", "", *average_table(rows), "",
        "Every row (compute and oblivious: seconds per micro-batch; the others: speedup over oblivious):", "",
        *main_table(rows), "",
    ])  # fmt: skip
    write_text(folder / "table.md", text)
    if rows:
        write_svg(folder / "table.svg", svg_text(draw(rows)))
    if readme is not None:
        head, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
        write_text(readme, f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def draw(rows: list[Row]) -> Figure:
    """Mean speedup against K, one panel for each footprint."""
    found = averages(rows)
    footprints = sorted({footprint for footprint, _ in found})
    with figure_settings():
        figure = Figure(figsize=(3.2 * len(footprints) + 0.4, 3.2))
        panels = figure.subplots(1, len(footprints), sharey=True, squeeze=False)[0]
        for axes, footprint in zip(panels, footprints, strict=True):
            counts = sorted(count for f, count in found if f == footprint)
            for name, colour in COLOURS.items():
                points = [(k, 100 * found[footprint, k][name]) for k in counts if name in found[footprint, k]]
                if not points:  # rows made without the searches
                    continue
                style = "--" if name == "bound" else "-"
                axes.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=3, label=name)
            if footprint in PAPER:
                axes.axhline(100 * PAPER[footprint], color="black", linewidth=0.8, linestyle=":", label="the paper")
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.set_xlabel("micro-batches per synchronisation")
            axes.set_title(f"footprint {footprint:g} x")
            axes.grid(axis="y")
        panels[0].set_ylabel("mean speedup over oblivious, %")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        return figure
