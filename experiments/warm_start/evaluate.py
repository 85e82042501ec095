"""The learned warm start on networks that it has not seen, next to what ratio-sweep and the gradient planner found in
the quality experiment."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from experiments.quality.run import SUITE
from experiments.recorded import put_between_marks
from tmojax.build import build_problem
from tmojax.check import check
from tmojax.config import load_config
from tmojax.errors import InputError
from tmojax.learned.warm_start import warm_start
from tmojax.learned.weights import Weights
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Problem
from tmojax.problem.strict_json import readable_text, write_text
from tmojax.report.provenance import provenance

HERE = Path(__file__).resolve().parent
EXPERIMENTS = HERE.parent
INSTANCES = (
    "gpt2-4gpu-k1-f1.33", "gpt2-4gpu-k4-f2", "gpt2-4gpu-half-k4-f2", "gpt2-1gpu-k4-f3", "convnext-4gpu-k4-f2",
    "vit-b16-4gpu-k4-f3", "bert-large-2gpu-nvlink-k4-f2", "gpt2-2gpu-k4-f2", "convnext-4gpu-nvlink-pairs-k4-f3",
)  # fmt: skip
REPEATS = 2  # of a timing; the least counts


def of_quality(folder: Path, name: str, planner: str) -> dict[str, Any]:
    """The run of a planner on an instance in the quality experiment."""
    path = folder / "runs" / name / f"{planner}.json"
    if not path.exists():
        raise InputError(f"{path}: missing; sh experiments/quality/run.sh --instance {name} --rival {planner}")
    return json.loads(path.read_text())


def measured(problem: Problem, weights: Weights | None) -> tuple[Candidate | None, float, float]:
    """(plan, CPU seconds, clock seconds), views and features included; compiled code and file caches are warm."""
    found, cpu_s, wall_s = None, float("inf"), float("inf")
    for _ in range(REPEATS):
        cpu_begin, begin = time.process_time(), time.perf_counter()
        found = warm_start(Workbench(problem), weights)
        cpu_s, wall_s = min(cpu_s, time.process_time() - cpu_begin), min(wall_s, time.perf_counter() - begin)
    return (found if isinstance(found, Candidate) else None), cpu_s, wall_s


def main() -> int:
    parser = argparse.ArgumentParser(prog="experiments.warm_start.evaluate", description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--instance", action="append", default=[], help="of configs/bench (repeatable)")
    quality = EXPERIMENTS / "quality" / "results"
    parser.add_argument("--quality", type=Path, default=quality, help="results of the quality experiment")
    parser.add_argument("--out", type=Path, help="folder for results.json; with that of the experiment, its README too")
    arguments = parser.parse_args()
    weights = Weights(arguments.weights)
    rows: list[dict[str, Any]] = []
    for name in arguments.instance or INSTANCES:
        problem = build_problem(load_config(SUITE / f"{name}.toml")).problem
        ratio, final = (of_quality(arguments.quality, name, planner) for planner in ("ratio-sweep", "gradient"))
        found, cpu_s, wall_s = measured(problem, weights)
        prior, prior_s, _ = measured(problem, None)
        row: dict[str, Any] = {
            "instance": name,
            "ratio_step_s": ratio["step_s"],
            "ratio_cpu_s": ratio["plan_cpu_s"],
            "prior_step_s": None if prior is None else prior.step_s,
            "prior_cpu_s": prior_s,
            "step_s": None if found is None else found.step_s,
            "valid": found is not None and check(problem, found.schedule).valid,
            "cpu_s": cpu_s,
            "wall_s": wall_s,
            "final_step_s": final["step_s"],
            "final_cpu_s": final["plan_cpu_s"],
            "final_commit": final["commit"],
        }
        rows.append(row)
        print(line(row), file=sys.stderr, flush=True)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        seen = provenance(seed=0, command_line=())
        write_text(
            arguments.out / "results.json",
            readable_text(
                {"commit": seen["git_commit"], "platform": seen["platform"], "versions": seen["versions"], "rows": rows}
            ),
        )
        if arguments.out.resolve() == HERE / "results":
            names = ("ratio-sweep above it", "without network", "learned")
            head = ["| instance | final, s | CPU s | " + "".join(f"{name} | CPU s | " for name in names) + "valid |",
                    "|" + "---|" * 10]  # fmt: skip
            put_between_marks(HERE / "README.md", "\n".join([*head, *map(line, rows)]))
    return 0


def line(row: dict[str, Any]) -> str:
    def above(step_s: float | None) -> str:
        return "none" if step_s is None else f"{100 * (step_s / row['final_step_s'] - 1):.2f} %"

    final = f"{row['final_step_s']:.4g} | {row['final_cpu_s']:.0f}"
    cells = (row["instance"], final, above(row["ratio_step_s"]), f"{row['ratio_cpu_s']:.1f}",
             above(row["prior_step_s"]), f"{row['prior_cpu_s']:.2f}", above(row["step_s"]), f"{row['cpu_s']:.2f}",
             "yes" if row["valid"] else "no")  # fmt: skip
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
