"""Solve the lessons: one file with features' raw material and the gradient planner's decisions for each."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from experiments.warm_start.instances import lessons
from tmojax.learned.features import surroundings_of
from tmojax.planners.gradient import Gradient
from tmojax.planners.local_search import SearchSettings
from tmojax.planners.ratio import RatioSweep
from tmojax.planners.workbench import Workbench
from tmojax.problem.step_view import StepView

# Less than the planner's defaults, for there are many to solve.
TEACHER = Gradient(restarts=3, steps=600, search=SearchSettings(evaluations=300, instructions=4_000_000))


def main() -> int:
    parser = argparse.ArgumentParser(prog="experiments.warm_start.solve", description=__doc__)
    parser.add_argument("count", type=int, help="lessons")
    parser.add_argument("--out", type=Path, required=True, help="folder of the solved ones")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for lesson in itertools.islice(lessons(), arguments.count):
        path = arguments.out / f"{lesson.name}.npz"
        if path.exists():
            continue
        begin_s = time.process_time()
        seeds = (RatioSweep().plan(lesson.problem),)
        found = TEACHER.plan(lesson.problem, seeds=seeds)
        if found.candidate is None:
            print(f"{lesson.name}: {found.status}", file=sys.stderr, flush=True)
            continue
        bench = Workbench(lesson.problem)
        arrays: dict[str, Any] = {"start_step_s": np.array(seeds[0].step_s), "step_s": np.array(found.step_s)}
        for device in sorted(set(bench.device_class)):
            decisions = [
                decision
                for first, decision in zip(bench.device_class, found.candidate.decisions, strict=True)
                if first == device
            ]
            arrays |= {f"{device}.choice": np.stack([decision.choice for decision in decisions])}
            arrays |= {f"{device}.last": np.stack([decision.in_last for decision in decisions])}
            arrays |= {f"{device}.{name}": value for name, value in packed(bench.view(device)).items()}
            arrays |= {f"{device}.surroundings": np.array(surroundings_of(lesson.problem, device))}
        np.savez_compressed(path.with_suffix(".part.npz"), **arrays)
        path.with_suffix(".part.npz").rename(path)
        gain = 100 * (1 - found.step_s / seeds[0].step_s)
        spent_s = time.process_time() - begin_s
        print(f"{lesson.name}: {gain:.2f} % faster than ratio-sweep, {spent_s:.1f} s", file=sys.stderr, flush=True)
    return 0


def packed(view: StepView) -> dict[str, np.ndarray]:
    """The view as arrays; lists of candidates as their lengths and all of them in a row."""
    found = {}
    for spec in fields(view):
        value = getattr(view, spec.name)
        if isinstance(value, tuple):
            found[f"{spec.name}.lengths"] = np.array([len(item) for item in value], np.int64)
            value = np.array([index for item in value for index in item], np.int64)
        found[spec.name] = np.asarray(value)
    return found


def unpacked(arrays: dict[str, np.ndarray]) -> StepView:
    """What `packed` made."""
    values = {}
    for spec in fields(StepView):
        value = arrays[spec.name]
        if f"{spec.name}.lengths" in arrays:
            ends = np.cumsum(arrays[f"{spec.name}.lengths"]).tolist()
            values[spec.name] = tuple(
                tuple(value[begin:end].tolist()) for begin, end in zip([0, *ends[:-1]], ends, strict=True)
            )
        else:
            values[spec.name] = value if value.ndim else value.item()
    return StepView(**values)


if __name__ == "__main__":
    sys.exit(main())
