"""Speed of the checker: the quick path against the detailed one, and simulate-and-check of one schedule.

    python benchmarks/check/speed.py [--repeats 5]

The steps are those of benchmarks/simulate/speed.py: synthetic, in the shape of GPT-2's, every activation offloaded.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "simulate"))

from speed import CASES, fastest, step

from tmojax.check import check, checker
from tmojax.problem import Interference
from tmojax.simulate import simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    small, schedule = step(2, 1, 1, Interference())
    start = time.perf_counter()
    check(small, schedule)
    print(f"first call: {time.perf_counter() - start:.1f} s")
    simulate(small, schedule)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; best of {repeats}")
    print("| case | instructions | check ms | detailed ms | simulate and check ms |\n|---|---|---|---|---|")
    quick_report = checker.quick_report
    for name, shape in CASES.items():
        problem, schedule = step(*shape, Interference())
        quick_s = fastest(lambda p=problem, s=schedule: check(p, s), repeats)
        both_s = fastest(lambda p=problem, s=schedule: (simulate(p, s).step_s, check(p, s)), repeats)
        report = check(problem, schedule)
        checker.quick_report = lambda static, schedule: None
        detailed_s = fastest(lambda p=problem, s=schedule: check(p, s), min(2, repeats))
        assert check(problem, schedule) == report
        checker.quick_report = quick_report
        print(f"| {name} | {report.instructions} | {quick_s * 1e3:.0f} | {detailed_s * 1e3:.0f} | {both_s * 1e3:.0f} |")


if __name__ == "__main__":
    main()
