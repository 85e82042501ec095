"""Plan every row of the table, keep what each row found, and draw the table. See README.md.

A row is written when it is complete, and is not computed again while its configuration is the same; so a run that was
stopped goes on where it was. With --no-search the two searches, which take most of the time, are left out; a later
run without it makes such rows again, complete.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cases import CASES, Case
from table import write_table

from tmojax.bounds import bound
from tmojax.build import build_problem
from tmojax.check import check
from tmojax.config import load_config
from tmojax.errors import InputError
from tmojax.planners.base import Planner, PlanResult
from tmojax.planners.gradient import Gradient, LocalSearch
from tmojax.problem import Problem
from tmojax.problem.io import problem_hash
from tmojax.problem.strict_json import readable_text, write_text
from tmojax.report.provenance import provenance
from tmojax.report.summary import json_values
from tmojax.simulate import simulate

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parents[1] / "configs" / "runs" / "tmo.toml"


def main() -> int:
    arguments = _arguments()
    chosen = [case for case in CASES if _wanted(case, arguments)]
    if not chosen:
        names = ", ".join(case.name for case in CASES)
        print(f"no row is left by --case, --footprint and --micro-batches; there are {names}", file=sys.stderr)
        return 2
    rows = arguments.out / "rows"
    rows.mkdir(parents=True, exist_ok=True)
    for case in chosen:
        path = rows / f"{case.name}.json"
        overrides = (*case.overrides, *arguments.override)
        definition = json_values(load_config(CONFIG, overrides).document)
        before = json.loads(path.read_text()) if path.exists() else {"definition": None}
        if before["definition"] == definition and (before["searched"] or arguments.no_search):
            _say(case, "done before")
            continue
        row = plan_row(case, overrides, not arguments.no_search) | {"definition": definition}
        write_text(path, readable_text(json_values(row)))
    found = [json.loads((rows / f"{c.name}.json").read_text()) for c in CASES if (rows / f"{c.name}.json").exists()]
    write_table(found, len(CASES), arguments.out, HERE / "README.md" if arguments.out == HERE / "results" else None)
    mistakes = [f"{row['name']}: {mistake}" for row in found for mistake in row["mistakes"]]
    print("\n".join(mistakes) or f"{len(found)} of {len(CASES)} rows in {arguments.out}; every plan is valid")
    return 1 if mistakes else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", default=[], help="only this row (repeatable)")
    parser.add_argument("--footprint", action="append", type=float, default=[], help="only rows with it (repeatable)")
    parser.add_argument("--micro-batches", action="append", type=int, default=[], help="only rows with it (repeatable)")
    parser.add_argument("--no-search", action="store_true", help="without local-search and gradient")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument("-o", dest="override", action="append", default=[], metavar="KEY=VALUE",
                        help="as for tmojax.run, in every row")  # fmt: skip
    return parser.parse_args()


def _wanted(case: Case, arguments: argparse.Namespace) -> bool:
    wanted = ((case.name, arguments.case), (case.footprint, arguments.footprint),
              (case.micro_batches, arguments.micro_batches))  # fmt: skip
    return all(not choice or value in choice for value, choice in wanted)


def plan_row(case: Case, overrides: tuple[str, ...], search: bool) -> dict[str, Any]:
    """All planners of the configuration (the searches if `search`) on one problem; each may start from those before."""
    begin = time.perf_counter()
    config = load_config(CONFIG, overrides)
    built = build_problem(config)
    problem = built.problem
    found = bound(problem)
    _say(case, f"bound {found.micro_batch_s:.4f} s per micro-batch, {found.status}")
    mistakes: list[str] = []
    plans: list[dict[str, Any]] = []
    seeds: tuple[PlanResult, ...] = ()
    for planner in config.planners:
        if isinstance(planner, LocalSearch | Gradient) and not search:
            continue
        result = planner.plan(problem, seed=config.seed, seeds=seeds)
        plan = judge(problem, planner, result, found.bound_s, mistakes)
        plans.append(plan)
        if plan["valid"]:
            seeds += (result,)
        _say(case, f"{planner.name}: {_time_text(plan, case)}, planned in {result.plan_s:.1f} s")
    best_s = min((plan["step_s"] for plan in plans if plan["valid"] and not plan["search"]), default=None)
    for plan in plans:
        if plan["search"] and plan["valid"] and best_s is not None and plan["step_s"] > best_s * (1 + 1e-12):
            mistakes.append(f"{plan['planner']} is slower than the best heuristic")
    return {
        "name": case.name,
        "model": case.model,
        "footprint": case.footprint,
        "micro_batches": case.micro_batches,
        "searched": search,
        "mistakes": mistakes,
        "provenance": provenance(seed=config.seed, command_line=sys.argv[1:]),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "problem_hash": problem_hash(problem),
        "footprint_bytes": max(built.footprint_bytes),
        "capacity_bytes": problem.capacity_bytes(0),
        "compute_s": sum(op.duration_s for op in problem.workload.programs[0].ops if not op.step_op),
        "synchronised_bytes": sum(collective.size_bytes for collective in problem.workload.collectives),
        "bound_s": found.bound_s,
        "bound_status": str(found.status),
        "plans": plans,
        "wall_s": time.perf_counter() - begin,
    }


def judge(
    problem: Problem, planner: Planner, result: PlanResult, bound_s: float, mistakes: list[str]
) -> dict[str, Any]:
    """The record of a result; its time is that of a simulation made here, and counts only if the checker agrees."""
    step_s, valid = None, False
    if result.schedule is not None:
        report = check(problem, result.schedule)
        valid, step_s = report.valid, simulate(problem, result.schedule).step_s
        if not valid:
            mistakes.append(f"{result.planner}: the checker rejects the plan: {report.counts()}")
        elif step_s < bound_s * (1 - 1e-9):
            mistakes.append(f"{result.planner}: {step_s} s is less than the lower bound {bound_s} s")
    return {
        "planner": result.planner,
        "search": isinstance(planner, LocalSearch | Gradient),
        "status": str(result.status),
        "message": result.message,
        "valid": valid,
        "step_s": step_s,
        "plan_s": result.plan_s,
        "compile_s": result.compile_s,
        "time_limited": result.time_limited,
        "details": {
            key: result.details[key]
            for key in ("movers", "block_share", "policy", "state_rests", "start", "after_gradient_step_s")
            if key in result.details
        },
    }


def _time_text(plan: dict[str, Any], case: Case) -> str:
    if plan["step_s"] is None:
        return f"{plan['status']} {plan['message']}"
    return f"{plan['step_s'] / case.micro_batches:.4f} s per micro-batch"


def _say(case: Case, text: str) -> None:
    print(f"{case.name}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
