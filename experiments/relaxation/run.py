"""Compare the relaxed model with the exact simulator, plan by plan. See README.md.

First plans are drawn and simulated (results/plans), then estimated (results/estimates), one file for each problem and
estimator; files that are there are not made again. After a change of the model, delete results/estimates.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compare import write_comparison
from estimate import ESTIMATORS
from problems import ALL_PROBLEMS, PROBLEMS
from sample import draw, read_plan

from tmojax.build import build_problem
from tmojax.config import RunConfig, load_config
from tmojax.errors import InputError
from tmojax.planners.gradient import Gradient, LocalSearch
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Problem
from tmojax.problem.io import problem_hash
from tmojax.problem.strict_json import readable_text, write_text
from tmojax.report.provenance import provenance
from tmojax.report.summary import json_values

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parents[1] / "configs" / "runs" / "coordination.toml"


def main() -> int:
    arguments = _arguments()
    unknown = set(arguments.problem) - set(ALL_PROBLEMS)
    if unknown:
        names = ", ".join(ALL_PROBLEMS)
        print(f"--problem: there is no {', '.join(sorted(unknown))}; choose from {names}", file=sys.stderr)
        return 2
    for folder in ("plans", "estimates"):
        (arguments.out / folder).mkdir(parents=True, exist_ok=True)
    for name in arguments.problem or PROBLEMS:
        sampled = arguments.out / "plans" / f"{name}.json"
        wanted = {e: arguments.out / "estimates" / f"{name}-{e}.json" for e in ESTIMATORS}
        if sampled.exists() and all(path.exists() for path in wanted.values()):
            print(f"{name}: done before", file=sys.stderr)
            continue
        config = load_config(CONFIG, (*ALL_PROBLEMS[name], *arguments.override))
        problem = build_problem(config).problem
        if not sampled.exists():
            _write(sampled, sample(name, config, problem, arguments.plans))
        drawn = json.loads(sampled.read_text())
        if drawn["problem_hash"] != problem_hash(problem):
            print(f"{sampled}: is of another problem; delete it to draw new plans", file=sys.stderr)
            return 2
        bench = Workbench(problem)
        for estimator, path in wanted.items():
            if not path.exists():
                found = ESTIMATORS[estimator](bench, [read_plan(plan) for plan in drawn["plans"]])
                _write(path, {**found, **_origin()})
                print(f"{name}: {estimator} in {found['run_s']:.1f} s", file=sys.stderr)
    write_comparison(arguments.out, HERE / "README.md" if arguments.out == HERE / "results" else None)
    print(f"{arguments.out}/comparison.md")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problem", action="append", default=[], help="only this problem (repeatable)")
    parser.add_argument("--plans", type=int, default=20, help="plans of each kind and problem")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument("-o", dest="override", action="append", default=[], metavar="KEY=VALUE",
                        help="as for tmojax.run, in every problem")  # fmt: skip
    return parser.parse_args()


def sample(name: str, config: RunConfig, problem: Problem, count: int) -> dict[str, Any]:
    """Plans of a problem with their exact times, around the best that heuristics and local search find."""
    begin = time.perf_counter()
    best = best_known(config, problem)
    plans = draw(Workbench(problem), best, count, config.seed)
    print(f"{name}: {len(plans)} plans in {time.perf_counter() - begin:.1f} s", file=sys.stderr)
    return {
        "problem": name,
        "problem_hash": problem_hash(problem),
        "best_known_s": best.step_s,
        "wall_s": time.perf_counter() - begin,
        "plans": [plan.as_dict() for plan in plans],
        **_origin(),
    }


def best_known(config: RunConfig, problem: Problem) -> Candidate:
    """The best of the heuristics, improved by local search."""
    seeds = ()
    for planner in config.planners:
        if not isinstance(planner, LocalSearch | Gradient):
            result = planner.plan(problem, seed=config.seed, seeds=seeds)
            seeds += (result,) if result.status.has_plan else ()
    search = next(planner for planner in config.planners if isinstance(planner, LocalSearch))
    best = search.plan(problem, seed=config.seed, seeds=seeds).candidate
    assert best is not None
    return best


def _origin() -> dict[str, Any]:
    return {"date": f"{datetime.now(UTC):%Y-%m-%d}", "provenance": provenance(seed=0, command_line=sys.argv[1:])}


def _write(path: Path, value: dict[str, Any]) -> None:
    write_text(path, readable_text(json_values(value)))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
