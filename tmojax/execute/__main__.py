"""`python -m tmojax.execute CONFIG [-o key.path=value]... [options]` (docs/run-a-plan.md).

Plans the model of a configuration with its planners, and runs the fastest plan on the devices of this process, with
random parameters and inputs: for bytes and times, not for learning.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

import tmojax.jax_setup  # noqa: F401
from tmojax.build import build_problem
from tmojax.check import check
from tmojax.config import FileWorkload, RunConfig, load_config
from tmojax.errors import InfeasibleError, InputError, TmojaxError
from tmojax.execute.compiled_step import CompiledStep
from tmojax.execute.joined import segments_text
from tmojax.execute.measured import (
    MeasuredTimes,
    compare,
    comparison_text,
    with_measured_durations,
    write_measured_trace,
)
from tmojax.execute.planned_step import PlannedStep
from tmojax.importers.model_zoo import ModelWorkload, import_traced_model
from tmojax.problem import Problem, Schedule
from tmojax.problem.io import PlanFile, problem_hash, write_plan, write_problem
from tmojax.report.figures import write_figures
from tmojax.report.plots import plot_plan
from tmojax.report.trace import write_trace
from tmojax.simulate import Simulation, simulate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for wrong input, 3 when no planner has a plan."""
    parser = argparse.ArgumentParser(prog="python -m tmojax.execute", description="Plan a model and run the plan.")
    parser.add_argument("config", metavar="CONFIG", help="TOML file of the run; its workload must be a model")
    parser.add_argument("-o", dest="overrides", metavar="KEY.PATH=VALUE", action="append", default=[],
                        help="replace one value of the configuration (repeatable)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=2, help="steps to run (default: 2)")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="time two more steps: the first gives durations of ops, "
        "the second is compared with what the simulator makes of them",
    )
    parser.add_argument(
        "--segments",
        choices=("joined", "ops"),
        default="joined",
        help="ops between two transfer points as one program (default), or each alone",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/execute"), help="folder for problem, plan, traces and pictures"
    )
    given = parser.parse_args(arguments)
    try:
        if given.steps < 1:
            raise InputError(f"--steps: {given.steps} must be at least 1")
        _run(load_config(given.config, given.overrides), given.steps, given.measure, given.segments, given.out)
    except TmojaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _run(config: RunConfig, steps: int, measure: bool, segments: str, out: Path) -> None:
    if not isinstance(config.workload, ModelWorkload):
        raise InputError('workload.kind: only a "model" can be executed; a file or a synthetic workload has no step')
    if config.pipeline is not None:
        raise InputError("pipeline: stages cannot be executed yet; leave it out")
    assert config.machine is not None and config.actions is not None and config.micro_batches is not None
    imported = import_traced_model(config.workload, config.machine, config.micro_batches)
    compiled = CompiledStep(imported)
    out.mkdir(parents=True, exist_ok=True)
    write_problem(out / "problem.json", Problem(config.name, compiled.workload, config.machine, config.actions))
    # From here on the compiled workload is read as any other, so capacities mean the same.
    problem = build_problem(
        replace(config, workload=FileWorkload(str((out / "problem.json").resolve())), folder=Path("/"))
    ).problem
    write_problem(out / "problem.json", problem)
    name, schedule, step_s = _fastest(config, problem)
    write_plan(out / "plan.json", PlanFile(schedule, problem_hash(problem), name, "feasible", step_s, seed=config.seed))
    step = PlannedStep(compiled, problem, schedule, segments=segments)
    rng = np.random.default_rng(config.seed)
    traced = imported.traced
    state = _filled(rng, traced.state_tree, compiled, 0)
    step.load(*state[:2])
    inputs = traced.state_tree.num_leaves
    batches = [
        [_filled(rng, traced.batch_tree, compiled, inputs) for _ in range(config.micro_batches)]
        for _ in compiled.devices
    ]
    result = None
    for number in range(steps):
        result = step.step(batches)
        print(f"step {number}: loss {result.loss:.6g}")
    assert result is not None
    print(segments_text(problem, step.segments))
    for device, counts in enumerate(result.memory):
        for memory, count in zip(problem.machine.memories, counts, strict=True):
            if count.counted_peak_bytes:
                print(f"{problem.machine.devices[device].name} in {memory.name}: {count.counted_peak_bytes} bytes at "
                      f"most, planned {count.planned_peak_bytes}")  # fmt: skip
    if measure:
        _measure(step, problem, schedule, batches, out)
    print(out)


def _measure(step: PlannedStep, problem: Problem, schedule: Schedule, batches: Any, out: Path) -> None:
    """Time two steps, compare the second with its prediction, and write traces, pictures and the measured problem."""
    durations = MeasuredTimes(problem, schedule, step.step(batches, measure=True))
    problem = with_measured_durations(problem, schedule, durations)
    times = MeasuredTimes(problem, schedule, step.step(batches, measure=True))
    simulation = simulate(problem, schedule, record=True)
    print(comparison_text(compare(problem, schedule, simulation, times)))
    write_measured_trace(out / "measured.json", problem, schedule, times)
    write_trace(out / "predicted.json", problem, schedule, simulation)
    both = {"predicted": simulation, "measured": cast(Simulation, times)}
    write_figures(out, {name: plot_plan(problem, schedule, each) for name, each in both.items()}, png=True)
    write_problem(out / "problem.measured.json", problem)


def _fastest(config: RunConfig, problem: Problem) -> tuple[str, Schedule, float]:
    """(planner, schedule, seconds) of the fastest valid plan of the planners, in simulated time."""
    seeds: list[Any] = []
    for planner in config.planners:
        result = planner.plan(problem, seed=config.seed, seeds=tuple(seeds))
        if result.schedule is not None and check(problem, result.schedule).valid:
            seeds.append(result)
            print(f"{planner.name}: {result.step_s:.6g} s a step by the simulator", file=sys.stderr)
    if not seeds:
        raise InfeasibleError("no planner has a plan in this memory; raise capacity or add planners")
    best = min(seeds, key=lambda result: result.step_s)
    return best.planner, best.schedule, best.step_s


def _filled(rng: np.random.Generator, tree: Any, compiled: CompiledStep, first: int) -> Any:
    """Random numbers in the shapes of the arguments from `first` on: small, and 0 or 1 for integers."""
    graph = compiled.functions[0].graph
    leaves = []
    for storage in graph.arguments[first : first + tree.num_leaves]:
        made = graph.storages[storage]
        if np.issubdtype(made.array_dtype, np.integer):
            leaves.append(rng.integers(0, 2, made.shape).astype(made.array_dtype))
        else:
            leaves.append((0.05 * rng.random(made.shape)).astype(made.array_dtype))
    return jax.tree.unflatten(tree, leaves)


if __name__ == "__main__":
    sys.exit(main())
