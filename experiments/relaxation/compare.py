"""Rank correlation and errors of the estimators, from the files that run.py has written. Pure functions of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from estimate import ESTIMATORS
from matplotlib.figure import Figure
from problems import ALL_PROBLEMS
from scipy.stats import spearmanr

from tmojax.problem.strict_json import write_text
from tmojax.report.figure_style import DEVICE_COLOUR, GREY, figure_settings, svg_text, write_svg

BEGIN, END = "<!-- written by run.py: begin -->\n", "<!-- written by run.py: end -->\n"
TARGETS = {"near": 0.9, "contended": 0.98}
KINDS = {"near": "within 10 % of the best known", "contended": "contended, random"}
APART = 0.01  # pairs of plans whose exact times differ by more are counted as ordered right or wrong
WORST = 8
LEFT = ("link_over",)

Record = dict[str, Any]


def load(folder: Path) -> list[Record]:
    """All plans that every estimator has estimated, with their problem's name and best time."""
    records: list[Record] = []
    for name in ALL_PROBLEMS:
        paths = {e: folder / "estimates" / f"{name}-{e}.json" for e in ESTIMATORS}
        if not all(path.exists() for path in paths.values()):
            continue
        sampled = json.loads((folder / "plans" / f"{name}.json").read_text())
        found = {e: json.loads(path.read_text()) for e, path in paths.items()}
        for number, plan in enumerate(sampled["plans"]):
            estimates = {e: found[e]["step_s"][number] for e in ESTIMATORS}
            over = {key: found["relaxed"][key][number] for key in LEFT}
            records.append({**plan, **over, "problem": name, "number": number, "best_s": sampled["best_known_s"],
                            "estimates": estimates})  # fmt: skip
    return records


def rank_correlation(records: list[Record], estimator: str) -> float:
    """Spearman's, of times relative to the best known of each problem; NaN for fewer than three plans."""
    if len(records) < 3:
        return float("nan")
    exact = [r["step_s"] / r["best_s"] for r in records]
    guess = [r["estimates"][estimator] / r["best_s"] for r in records]
    return float(spearmanr(np.round(exact, 9), np.round(guess, 9)).statistic)


def errors(records: list[Record], estimator: str) -> np.ndarray:
    return np.array([r["estimates"][estimator] / r["step_s"] - 1 for r in records])


def pairs_right(records: list[Record], estimator: str) -> float:
    """Share of the pairs of plans of one problem that differ by more than `APART` and are ordered right."""
    right = total = 0
    for index, a in enumerate(records):
        for b in records[:index]:
            if a["problem"] == b["problem"] and abs(a["step_s"] / b["step_s"] - 1) > APART:
                total += 1
                right += (a["estimates"][estimator] < b["estimates"][estimator]) == (a["step_s"] < b["step_s"])
    return right / total if total else float("nan")


def correlation_table(records: list[Record]) -> list[str]:
    lines = [
        "| problem | plans | kind | rank correlation | of the crude figure | of the replay | pairs right | "
        "median error | median size of error | worst error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, words in KINDS.items():
        chosen = [r for r in records if r["kind"] == kind]
        groups = [(name, [r for r in chosen if r["problem"] == name]) for name in ALL_PROBLEMS]
        for name, group in [*groups, ("**all**", chosen)]:
            if not group:
                continue
            error = errors(group, "relaxed")
            worst = error[np.argmax(np.abs(error))]
            lines.append(
                f"| {name} | {len(group)} | {words} | {rank_correlation(group, 'relaxed'):.3f} | "
                f"{rank_correlation(group, 'crude'):.3f} | {rank_correlation(group, 'replay'):.3f} | "
                f"{100 * pairs_right(group, 'relaxed'):.1f} % | "
                f"{100 * np.median(error):+.1f} % | {100 * np.median(np.abs(error)):.1f} % | {100 * worst:+.1f} % |"
            )
    return lines


def verdict(records: list[Record]) -> list[str]:
    """The relaxed model's rank correlations against their targets: of all plans, and problem by problem."""
    lines = []
    for kind, target in TARGETS.items():
        chosen = [r for r in records if r["kind"] == kind]
        found = rank_correlation(chosen, "relaxed")
        own = [rank_correlation([r for r in chosen if r["problem"] == name], "relaxed") for name in ALL_PROBLEMS]
        own = [value for value in own if np.isfinite(value)]
        within = f"; inside one problem {min(own):.3f} to {max(own):.3f}, mean {np.mean(own):.3f}" if own else ""
        lines.append(
            f"- {KINDS[kind]}: {found:.3f}, target {target}: {'met' if found >= target else '**missed**'}{within}"
        )
    return lines


def mechanism_table(records: list[Record]) -> list[str]:
    """Errors by what a plan does, to see which mechanism the model lacks."""
    tests = {
        **{f"policy {policy}": (lambda r, p=policy: r["policy"] == p) for policy in ("fair", "fcfs", "priority")},
        "all start together": lambda r: not any(r["start_share"]),
        "staggered": lambda r: any(r["start_share"]),
        "GPUs decide alike": lambda r: len(set(zip(r["choice"], r["state_out"], strict=True))) == 1,
        "GPUs decide differently": lambda r: len(set(zip(r["choice"], r["state_out"], strict=True))) > 1,
        "links still exceeded by more than 2 %": lambda r: r["link_over"] > 0.02,
    }
    lines = [
        "| plans with | kind | plans | median error | median size of error | worst error |",
        "|---|---|---|---|---|---|",
    ]
    for kind, words in KINDS.items():
        for label, test in tests.items():
            error = errors([r for r in records if r["kind"] == kind and test(r)], "relaxed")
            if len(error):
                worst = error[np.argmax(np.abs(error))]
                lines.append(f"| {label} | {words} | {len(error)} | {100 * np.median(error):+.1f} % | "
                             f"{100 * np.median(np.abs(error)):.1f} % | {100 * worst:+.1f} % |")  # fmt: skip
    return lines


def worst_table(records: list[Record]) -> list[str]:
    lines = [
        "| problem | plan | kind | policy | starts | exact (s) | relaxed (s) | error | alone (s) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ranked = sorted(zip(errors(records, "relaxed"), records, strict=True), key=lambda pair: -abs(pair[0]))
    for error, r in ranked[:WORST]:
        starts = " ".join(f"{share:.2f}" for share in r["start_share"])
        lines.append(
            f"| {r['problem']} | {r['number']} | {r['kind']} | {r['policy']} | {starts} | {r['step_s']:.4f} | "
            f"{r['estimates']['relaxed']:.4f} | {100 * error:+.1f} % | {r['alone_s']:.4f} |"
        )
    return lines


def facts(folder: Path) -> str:
    read = [json.loads(path.read_text()) for path in sorted((folder / "estimates").glob("*-relaxed.json"))]
    if not read:
        return "No plans."
    origin = read[0]["provenance"]
    names = ("python", "jax", "jaxlib", "optax", "numpy", "numba", "highspy")
    versions = ", ".join(f"{name} {origin['versions'][name]}" for name in names if name in origin["versions"])
    dates = sorted({found["date"] for found in read})
    compile_s, run_s = (sum(found[key] for found in read) for key in ("compile_s", "run_s"))
    return (
        f"{origin['cpu_count']} CPU cores ({origin['platform']}), {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; "
        f"{versions}. Estimates took {run_s:.0f} s, compilation {compile_s:.0f} s."
    )


def write_comparison(folder: Path, readme: Path | None) -> None:
    """Write comparison.md and comparison.svg into `folder`; put the tables between the marks of `readme`."""
    records = load(folder)
    if not records:
        return
    text = "\n".join([
        facts(folder), "", *verdict(records), "", *correlation_table(records), "", "Errors by what a plan does:", "",
        *mechanism_table(records), "", "The largest errors:", "", *worst_table(records), "",
    ])  # fmt: skip
    write_text(folder / "comparison.md", text)
    write_svg(folder / "comparison.svg", svg_text(draw_scatter(records)))
    if readme is not None:
        page = readme.read_text(encoding="utf-8")
        head, _, rest = page.partition(BEGIN)
        _, _, tail = rest.partition(END)
        write_text(readme, f"{head}{BEGIN}\n{text}\n{END}{tail}")


def draw_scatter(records: list[Record]) -> Figure:
    """Estimate over exact time, both relative to the best plan known of the problem; one panel for each kind."""
    with figure_settings():
        figure = Figure(figsize=(9.0, 4.6))
        panels = figure.subplots(1, 2)
        for axes, (kind, words) in zip(panels, KINDS.items(), strict=True):
            chosen = [r for r in records if r["kind"] == kind]
            low, high = 0.99, max([r["step_s"] / r["best_s"] for r in chosen], default=1.1) * 1.02
            if kind == "contended":
                axes.set_xscale("log")
                axes.set_yscale("log")
                axes.set_xlim(0.95, high)
            axes.plot((low, high), (low, high), color=GREY, linewidth=0.8)
            for name, colour in zip(ALL_PROBLEMS, DEVICE_COLOUR, strict=False):
                own = [r for r in chosen if r["problem"] == name]
                if not own:
                    continue
                exact = [r["step_s"] / r["best_s"] for r in own]
                axes.scatter(exact, [r["estimates"]["relaxed"] / r["best_s"] for r in own], s=12, color=colour,
                             alpha=0.8, linewidths=0, label=name)  # fmt: skip
            axes.set_title(f"{words}: rank correlation {rank_correlation(chosen, 'relaxed'):.3f}")
            axes.set_xlabel("exact time / best known")
            axes.set_ylabel("relaxed model / best known")
            axes.grid(True)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_minor_formatter(lambda value, _: f"{value:.3g}")
                axis.set_major_formatter(lambda value, _: f"{value:.3g}")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        return figure
