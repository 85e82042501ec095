"""Plan every row of the table, keep what each row found, and draw the table. See README.md.

A row is written when it is complete, and is not computed again while its configuration is the same; so a run that was
stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
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
from tmojax.planners.local_search import SearchSettings
from tmojax.planners.sweep import POLICIES, SHARES
from tmojax.problem import Problem
from tmojax.problem.io import problem_hash
from tmojax.problem.strict_json import readable_text, write_text
from tmojax.report.provenance import provenance
from tmojax.report.summary import json_values
from tmojax.simulate import jitter, simulate

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parents[1] / "configs" / "runs" / "coordination.toml"
# Rows whose best heuristic is further above the bound are searched with several seeds: there the gradient is judged.
WORTH_SEARCHING = 0.05
SEEDS = (0, 1, 2)


def main() -> int:
    arguments = _arguments()
    chosen = [case for case in CASES if not arguments.case or case.name in arguments.case]
    unknown = set(arguments.case) - {case.name for case in CASES}
    if unknown:
        names = ", ".join(case.name for case in CASES)
        print(f"--case: there is no {', '.join(sorted(unknown))}; choose from {names}", file=sys.stderr)
        return 2
    rows = arguments.out / "rows"
    rows.mkdir(parents=True, exist_ok=True)
    for case in chosen:
        path = rows / f"{case.name}.json"
        document = load_config(CONFIG, (*case.overrides, *arguments.override)).document
        definition = json_values({"configuration": document, "seeds": SEEDS, "worth_searching": WORTH_SEARCHING})
        if path.exists() and json.loads(path.read_text())["definition"] == definition:
            print(f"{case.name}: done before", file=sys.stderr)
            continue
        row = plan_row(case, tuple(arguments.override)) | {"definition": definition}
        write_text(path, readable_text(json_values(row)))
    found = [json.loads((rows / f"{c.name}.json").read_text()) for c in CASES if (rows / f"{c.name}.json").exists()]
    write_table(found, arguments.out, HERE / "README.md" if arguments.out == HERE / "results" else None)
    mistakes = [f"{row['case']['name']}: {mistake}" for row in found for mistake in row["mistakes"]]
    print("\n".join(mistakes) or f"{len(found)} rows in {arguments.out}; every plan is valid")
    return 1 if mistakes else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", default=[], help="only this row (repeatable)")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument("-o", dest="override", action="append", default=[], metavar="KEY=VALUE",
                        help="as for tmojax.run, in every row")  # fmt: skip
    return parser.parse_args()


def plan_row(case: Case, overrides: tuple[str, ...]) -> dict[str, Any]:
    """All planners on one problem: heuristics one after the other, then both searches from what these have found."""
    begin = time.perf_counter()
    config = load_config(CONFIG, (*case.overrides, *overrides))
    built = build_problem(config)
    problem = built.problem
    found_bound = bound(problem)
    _say(case, f"bound {found_bound.micro_batch_s:.4f} s per micro-batch, {found_bound.status}")
    judge = _Judge(case, problem, found_bound.bound_s)
    seeds: tuple[PlanResult, ...] = ()
    heuristics = [p for p in config.planners if not isinstance(p, LocalSearch | Gradient)]
    for planner in heuristics:
        result = planner.plan(problem, seed=config.seed, seeds=seeds)
        if judge.accept(planner, result, config.seed)["valid"]:
            seeds += (result,)
    best_s = min(plan["step_s"] for plan in judge.plans if plan["valid"])
    several = best_s > (1 + WORTH_SEARCHING) * found_bound.bound_s
    for seed in SEEDS if several else SEEDS[:1]:
        _search(config.planners, problem, seeds, seed, judge)
    for plan in judge.plans:
        if plan["search"] and plan["valid"] and plan["step_s"] > best_s * (1 + 1e-12):
            judge.mistakes.append(f"{plan['planner']} (seed {plan['seed']}) is slower than the best heuristic")
    return {
        "case": vars(case),
        "mistakes": judge.mistakes,
        "provenance": provenance(seed=config.seed, command_line=sys.argv[1:]),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "problem_hash": problem_hash(problem),
        "footprint_bytes": built.footprint_bytes,
        "capacity_bytes": problem.capacity_bytes(0),
        "notes": built.notes,
        "bound": {
            "step_s": found_bound.bound_s,
            "status": found_bound.status,
            "parts_s": {part.name: part.step_s for part in found_bound.parts},
            "solve_s": found_bound.solve_s,
        },
        "plans": judge.plans,
        "wall_s": time.perf_counter() - begin,
    }


def _search(planners: tuple[Planner, ...], problem: Problem, seeds: tuple[PlanResult, ...], seed: int,
            judge: _Judge) -> None:  # fmt: skip
    """The gradient planner, and local search alone from the same start with at least as many simulations."""
    gradient = next((p for p in planners if isinstance(p, Gradient)), None)
    search = next((p for p in planners if isinstance(p, LocalSearch)), None)
    if gradient is not None:
        result = gradient.plan(problem, seed=seed, seeds=seeds)
        judge.accept(gradient, result, seed)
        if search is not None and result.details:
            search = replace(search, search=_as_many(gradient, result, search.search))
    if search is not None:
        judge.accept(search, search.plan(problem, seed=seed, seeds=seeds), seed)


def _as_many(gradient: Gradient, result: PlanResult, settings: SearchSettings) -> SearchSettings:
    """Local search with as many simulations as the gradient planner may have used: one for each policy of every
    rounding, policy and stagger of every finalist, and its own local search."""
    swept = min(gradient.finalists, result.details["roundings"]) * (len(SHARES) + 1)
    count = len(POLICIES) * (result.details["roundings"] + swept) + result.details["evaluations"]
    return replace(settings, evaluations=count, instructions=2**62)


class _Judge:
    """Checks, simulates and records plans of one problem."""

    def __init__(self, case: Case, problem: Problem, bound_s: float) -> None:
        self.plans: list[dict[str, Any]] = []
        self.mistakes: list[str] = []
        self._case, self._problem, self._bound_s = case, problem, bound_s

    def accept(self, planner: Planner, result: PlanResult, seed: int) -> dict[str, Any]:
        """The record of a result; its time is that of a simulation made here, and counts only if the checker agrees."""
        step_s, valid, varied = None, False, None
        if result.schedule is not None:
            report = check(self._problem, result.schedule)
            valid, step_s = report.valid, simulate(self._problem, result.schedule).step_s
            if not valid:
                self.mistakes.append(f"{result.planner}: the checker rejects the plan: {report.counts()}")
            elif step_s < self._bound_s * (1 - 1e-9):
                self.mistakes.append(f"{result.planner}: {step_s} s is less than the lower bound {self._bound_s} s")
            else:
                median_s, late_s = jitter(self._problem, result.schedule, percent=5.0, samples=20, seed=0)
                varied = {"spread": 0.05, "samples": 20, "median_s": median_s, "p95_s": late_s}
        coordination = result.candidate.coordination if result.candidate is not None else None
        record = {
            "planner": result.planner,
            "search": isinstance(planner, LocalSearch | Gradient),
            "seed": seed,
            "settings": vars(planner) | ({"search": vars(planner.search)} if hasattr(planner, "search") else {}),
            "status": result.status,
            "message": result.message,
            "valid": valid,
            "step_s": step_s,
            "policy": coordination.policy if coordination else None,
            "start_share": coordination.start_share if coordination else None,
            "jitter": varied,
            "plan_s": result.plan_s,
            "compile_s": result.compile_s,
            "time_limited": result.time_limited,
            "details": result.details,
        }
        self.plans.append(record)
        micro_batch = f"{step_s / self._case.micro_batches:.4f} s per micro-batch" if step_s else str(result.status)
        _say(self._case, f"{result.planner}: {micro_batch}, planned in {result.plan_s:.1f} s")
        return record


def _say(case: Case, text: str) -> None:
    print(f"{case.name}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
