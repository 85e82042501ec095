"""What the experiments share that put one planner after the other on a problem: options and end of the command, the
record of a plan, the marks of a README."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tmojax.check import check
from tmojax.errors import InputError
from tmojax.planners.base import Planner, PlanResult
from tmojax.planners.orders import Orders
from tmojax.problem import Problem
from tmojax.problem.strict_json import write_text
from tmojax.simulate import simulate

BEGIN, END = "<!-- written by run.py: begin -->\n", "<!-- written by run.py: end -->\n"


def parsed(parser: argparse.ArgumentParser, results: Path, quick: str) -> argparse.Namespace:
    """The command line, with the options that all have. `results`: folder of the committed results; `quick`: what a
    quick run is, for the help."""
    parser.add_argument("--out", type=Path, default=results, help="folder of the results")
    parser.add_argument("--quick", action="store_true", help=f"{quick}; needs --out")
    parser.add_argument("--table", action="store_true", help="plan nothing, draw tables and figures")
    arguments = parser.parse_args()
    if arguments.quick and arguments.out == results:
        parser.error("--quick: name another folder with --out, the committed results are of full runs")
    return arguments


def exit_with(main: Callable[[], int]) -> NoReturn:
    """End the process as `main` says; with 2 and one line for a wrong input."""
    try:
        sys.exit(main())
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def planned(
    planner: Planner,
    problem: Problem,
    bound_s: float,
    seeds: tuple[PlanResult, ...],
    seed: int,
    orders: Orders | None = None,
) -> tuple[PlanResult | None, dict[str, Any], float]:
    """(what the planner returns, None if it failed; the record; CPU seconds of the planning, which other load on the
    machine hardly changes, in contrast to `plan_s` of the record).

    The plan is checked and simulated here, and what does not agree is a mistake. `bound_s`: proved for the problem.
    `orders`: of the problem, if it offers any.
    """
    mistakes: list[str] = []
    begin, cpu_begin = time.perf_counter(), time.process_time()
    result: PlanResult | None = None
    try:
        if orders is None:
            result = planner.plan(problem, seed=seed, seeds=seeds)
        else:
            result = orders.plan(planner, seed=seed, seeds=seeds)
    except Exception as error:
        traceback.print_exc()
        mistakes.append(f"failed with {type(error).__name__}: {error}")
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
    step_s, valid = None, False
    if result is not None and result.schedule is not None:
        valid = check(problem, result.schedule).valid
        step_s = simulate(problem, result.schedule).step_s
        if not valid:
            mistakes.append("the checker rejects the plan")
        if step_s != result.step_s:
            mistakes.append(f"says {result.step_s} s, the simulator {step_s} s")
        if step_s < bound_s * (1 - 1e-6):
            mistakes.append(f"{step_s} s is faster than the bound {bound_s} s")
    record = {
        "status": result.status if result is not None else "failed",
        "message": result.message if result is not None else "",
        "valid": valid,
        "step_s": step_s,
        "plan_s": wall_s,
        "time_limited": result.time_limited if result is not None else False,
        "details": result.details if result is not None else {},
        "mistakes": mistakes,
    }
    return result, record, cpu_s


def put_between_marks(readme: Path, text: str) -> None:
    """Replace what stands between the marks of a README."""
    head, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    write_text(readme, f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
