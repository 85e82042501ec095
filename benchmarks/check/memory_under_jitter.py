"""Do plans keep to every memory limit when nothing takes as long as planned?

    python benchmarks/check/memory_under_jitter.py [--draws 20] [--planner KIND]... [--problem NAME]...

Every planner plans full-size steps. Then durations of all instructions and rates of all links are changed by random
factors, log-uniform in 0.2 .. 5, one for each instruction and link, and the largest number of bytes that are in each
memory at one time is counted from the times of the instructions (tests/check/occupancy.py), independently of checker
and simulator. A plan that exceeds the capacity of a device, a host, its pinned limit or a loan ends the script.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "imported"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "check"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "relax"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "planners"))

from jitter_runs import under_jitter, with_tight_pinned_limits
from planner_cases import light
from steps import imported

from tmojax.check import check
from tmojax.planners.base import PlanResult
from tmojax.planners.registry import PLANNERS
from tmojax.problem import MemoryKind, Problem

PROBLEMS = ("GPT-2, 4 GPUs, K=8", "GPT-2 XL, 4 GPUs, K=4", "GPT-2, half-duplex, K=2", "GPT-2, uneven risers, K=2")


def plans(problem: Problem, kinds: Iterable[str]) -> Iterable[tuple[str, PlanResult, float]]:
    """(planner, result, seconds); planners that start from others get what was found before."""
    seeds: list[PlanResult] = []
    for kind in kinds:
        start = time.perf_counter()
        result = light(kind).plan(problem, seed=0, seeds=tuple(seeds))
        if result.schedule is not None:
            seeds.append(result)
        yield kind, result, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--planner", action="append", choices=list(PLANNERS))
    parser.add_argument("--problem", action="append", choices=PROBLEMS)
    options = parser.parse_args()
    print("| step | planner | instructions | draws | device | host | step s, planned | fastest | slowest |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.problem or PROBLEMS:
        problem = imported(name)
        for kind, result, took_s in plans(problem, options.planner or PLANNERS):
            print(f"{name}, {kind}: {result.status} in {took_s:.0f} s", file=sys.stderr, flush=True)
            if result.schedule is None:
                print(f"| {name} | {kind} |  | no plan |  |  |  |  |  |", flush=True)
                continue
            tight = with_tight_pinned_limits(problem, result.schedule)
            report = check(tight, result.schedule)
            assert report.valid, report.text()
            found = under_jitter(tight, result.schedule, options.draws)
            print(f"| {name} | {kind} | {report.instructions} | {found.draws} | {found.shares[MemoryKind.DEVICE]:.1%} "
                  f"| {found.shares[MemoryKind.HOST]:.1%} | {result.step_s:.2f} | {found.fastest_s:.2f} "
                  f"| {found.slowest_s:.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
