"""Simulate and check plans of imported training steps, op by op, without merging anything.

    python benchmarks/imported/speed.py [--repeats 5]

Imports the networks from JAX (10 to 30 s), makes one plan with a simple planner and times what a user's run calls:
`simulate` and `check` of the schedule, tables of the problem included. Also many variants of one schedule in a batch.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from dataclasses import replace

import numpy as np
from steps import imported

from tmojax.check import check, checker
from tmojax.planners.registry import PLANNERS
from tmojax.problem import Problem, Schedule
from tmojax.simulate import prepare, simulate

# name: (planner, seconds that simulate and check may take)
CASES = {
    "GPT-2, 4 GPUs, K=8": ("offload-all", None),
    "GPT-2 XL, 4 GPUs, K=4": ("offload-all", 0.3),
    "Llama-7B, 8 GPUs, K=16": ("ratio-sweep", 5.0),
}


def plan(problem: Problem, planner: str) -> Schedule:
    result = PLANNERS[planner]().plan(problem)
    assert result.schedule is not None, result.message
    return result.schedule


def fastest(function, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def both_of_a_new_problem(problem: Problem, schedule: Schedule) -> float:
    """Seconds of one simulate and check of a problem that was not seen before."""
    fresh = replace(problem)
    start = time.perf_counter()
    simulate(fresh, schedule)
    report = check(fresh, schedule)
    took = time.perf_counter() - start
    assert report.valid, report.text()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--variants", type=int, default=1000, help="of one schedule, in a batch")
    options = parser.parse_args()
    repeats = options.repeats
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; best of {repeats}\n")
    problems = {}
    for name, (planner, _) in CASES.items():
        problem = imported(name)
        problems[name] = (problem, plan(problem, planner))
        print(f"{name}: imported and planned", file=sys.stderr, flush=True)
    late = []
    print("| step | planner | ops | instructions | events | prepare ms | run ms | events/s | check ms | detailed ms "
          "| simulate and check ms | limit ms |\n|---|---|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    quick_report = checker.quick_report
    for name, (planner, limit_s) in CASES.items():
        problem, schedule = problems[name]
        both_s = min(both_of_a_new_problem(problem, schedule) for _ in range(repeats))
        prepared = prepare(problem, schedule)
        prepare_s = fastest(lambda p=problem, s=schedule: prepare(p, s), repeats)
        run_s = fastest(lambda p=prepared: p.run().step_s, repeats)
        check_s = fastest(lambda p=problem, s=schedule: check(p, s), repeats)
        checker.quick_report = lambda static, schedule: None
        detailed_s = fastest(lambda p=problem, s=schedule: check(p, s), 1)
        checker.quick_report = quick_report
        events = prepared.run().events
        ops = sum(len(problem.workload.program(d).ops) for d in range(problem.workload.device_count))
        print(f"| {name} | {planner} | {ops} | {sum(map(len, schedule.lists))} | {events} | {prepare_s * 1e3:.0f} "
              f"| {run_s * 1e3:.0f} | {events / run_s / 1e6:.1f} M | {check_s * 1e3:.0f} | {detailed_s * 1e3:.0f} "
              f"| {both_s * 1e3:.0f} | {'' if limit_s is None else f'{limit_s * 1e3:.0f}'} |", flush=True)  # fmt: skip
        if limit_s is not None and both_s > limit_s:
            late.append(name)
    print()
    problem, schedule = next(iter(problems.values()))
    rng = np.random.default_rng(0)
    count = options.variants
    prepared = prepare(problem, schedule)
    link_scale = rng.uniform(0.2, 5.0, (count, len(problem.machine.links)))
    start = time.perf_counter()
    step_s = prepared.run_batch(link_scale=link_scale)
    took = time.perf_counter() - start
    print(f"{count} variants of link rates of {next(iter(problems))}: {took:.1f} s, {took / count * 1e3:.1f} ms each, "
          f"{sum(map(len, schedule.lists)) * count / took / 1e6:.1f} M instructions/s; step time {step_s.min():.2f} to "
          f"{step_s.max():.2f} s")  # fmt: skip
    if late:
        sys.exit(f"over the limit: {', '.join(late)}")


if __name__ == "__main__":
    main()
