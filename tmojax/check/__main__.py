"""`python -m tmojax.check PLAN.json [--problem FILE]`: check a plan file, print everything that is wrong with it.

Exit codes: 0 valid, 5 invalid, 2 a file that cannot be read or a plan that names another problem by its hash.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tmojax.check.checker import check
from tmojax.errors import InputError
from tmojax.problem.io import problem_hash, read_plan, read_problem

INVALID = 5


def _find_problem(plan: Path) -> Path:
    """`problem.json` beside the plan, or in the folder above (the layout of a run folder). Raises InputError."""
    folder = plan.resolve().parent
    for place in (folder, folder.parent):
        if (place / "problem.json").is_file():
            return place / "problem.json"
    raise InputError(f"{plan}: no problem.json in {folder} or {folder.parent}; name it with --problem")


def main(arguments: list[str] | None = None) -> int:
    description = "Check a plan file against its problem."
    parser = argparse.ArgumentParser(prog="python -m tmojax.check", description=description)
    parser.add_argument("plan", type=Path, help="plan file (JSON)")
    parser.add_argument("--problem", type=Path, help="problem file; default: problem.json beside the plan or above it")
    options = parser.parse_args(arguments)
    try:
        plan = read_plan(options.plan)
        file = options.problem or _find_problem(options.plan)
        problem = read_problem(file)
        found = problem_hash(problem)
        if found != plan.problem_hash:
            raise InputError(f"{options.plan}: made for problem {plan.problem_hash}, and {file} has hash {found}")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    report = check(problem, plan.schedule)
    try:
        print(report.text(limit=None), flush=True)
    except BrokenPipeError:  # whoever reads has seen enough; Python must not try to flush it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if report.valid else INVALID


if __name__ == "__main__":
    sys.exit(main())
