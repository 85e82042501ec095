"""One transformer, three times: the ordinary step, a plan with the runtime, a plan in a jitted step.

The plans are for a share of the memory that keeping everything takes. Each form runs in a process of its own, because
the peak that a device reports is that of the whole process. The runtime goes first: it measures how long the ops take,
both plans are made with these durations, and the simulator predicts both steps. Results go to --out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tmojax import PLANNERS, Action, Problem, import_train_step, load_machine, read_problem
from tmojax.check import check
from tmojax.execute import (
    CompiledStep,
    MeasuredTimes,
    PlannedStep,
    compare,
    comparison_text,
    jitted_step,
    named_modules,
    planner_for,
    segments_text,
    with_measured_durations,
    write_measured_trace,
)
from tmojax.models import build_model
from tmojax.problem import Machine, Schedule, keep_all_footprint_bytes
from tmojax.problem.io import write_problem
from tmojax.problem.strict_json import write_text
from tmojax.report.trace import write_trace
from tmojax.simulate import simulate

FORMS = ("runtime", "jitted", "ordinary")
SIZES = {
    "medium": {"batch": 8, "dtype": "bfloat16", "layers": 24, "width": 1024, "heads": 16, "sequence": 1024},
    "small": {"batch": 8, "dtype": "float32", "layers": 3, "width": 32, "heads": 4, "sequence": 32, "vocabulary": 64},
}
OPTIMIZER = optax.adamw(1e-4)
TRIED = 0.05  # steps of the share in which a plan is looked for


def machine_of(name: str) -> Machine:
    """The first GPU of a preset."""
    machine = load_machine(name)
    gone = {device.memory for device in machine.devices[1:]}
    routes = tuple(r for r in machine.routes if not {r.source, r.destination} & gone)
    return replace(machine, devices=machine.devices[:1], routes=routes)


class Setting:
    """The network with numbers, and its imported step."""

    def __init__(self, given: argparse.Namespace) -> None:
        sizes: dict[str, Any] = SIZES[given.size]
        model = build_model("gpt2", **sizes)
        self.loss = named_modules(model.loss)
        leaves, tree = jax.tree.flatten(model.params)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        self.params = tree.unflatten(
            [0.02 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
        )
        rng = np.random.default_rng(0)
        words = sizes.get("vocabulary", 50257)
        self.batch = jax.tree.map(lambda x: rng.integers(0, words, x.shape).astype(x.dtype), model.batch)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (self.params, self.batch))
        self.imported = import_train_step(self.loss, *shapes, OPTIMIZER, gpu=given.gpu, gpus=1, name="gpt2")
        self.machine = machine_of(given.machine)

    def problem(self, workload: Any, share: float) -> Problem:
        problem = Problem("gpt2", workload, self.machine, frozenset({Action.OFFLOAD, Action.RECOMPUTE}))
        return problem.with_device_capacity(int(keep_all_footprint_bytes(workload, 0) * share))


def planned(
    make: Callable[[float], Problem], planners: list[Any], share: float
) -> tuple[Problem, Schedule, float, str]:
    """(problem, plan, share, planner): the fastest plan of the planners in the least share from `share` on."""
    while share <= 1.0:
        problem = make(share)
        results = [planner.plan(problem) for planner in planners]
        found = [result for result in results if result.schedule is not None]
        if found:
            best = min(found, key=lambda result: result.step_s)
            assert best.schedule is not None and check(problem, best.schedule).valid
            return problem, best.schedule, share, best.planner
        share = round(share + TRIED, 2)
    raise SystemExit("no planner has a plan, not even for the whole footprint")


def seconds(step: Callable[[], Any], steps: int) -> float:
    """Median time of a step, after one that is not counted."""
    step()
    taken = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken))


def peak_in_use() -> int | None:
    """Most bytes that the device has had in use in this process, as it says itself."""
    stats = jax.devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] if stats else None


def run_runtime(setting: Setting, given: argparse.Namespace) -> dict[str, Any]:
    compiled = CompiledStep(setting.imported, jax.devices()[:1])
    planners = [PLANNERS[name]() for name in given.planners]

    def loaded(problem: Problem, schedule: Schedule) -> PlannedStep:
        step = PlannedStep(compiled, problem, schedule)
        step.load(setting.params, OPTIMIZER.init(setting.params))
        return step

    problem, schedule, _, _ = planned(lambda s: setting.problem(compiled.workload, s), planners, given.share)
    step = loaded(problem, schedule)
    step.step([[setting.batch]])
    times = MeasuredTimes(problem, schedule, step.step([[setting.batch]], measure=True))
    measured = with_measured_durations(problem, schedule, times).workload
    problem, schedule, share, planner = planned(lambda s: setting.problem(measured, s), planners, given.share)
    write_problem(given.out / "problem.measured.json", problem)
    step = loaded(problem, schedule)
    step_s = seconds(lambda: step.step([[setting.batch]]), given.steps)
    result = step.step([[setting.batch]], measure=True)
    times, prediction = MeasuredTimes(problem, schedule, result), simulate(problem, schedule, record=True)
    comparison = compare(problem, schedule, prediction, times)
    print(segments_text(problem, step.segments), file=sys.stderr)
    print(comparison_text(comparison), file=sys.stderr)
    write_measured_trace(given.out / "measured.json", problem, schedule, times)
    write_trace(given.out / "predicted.json", problem, schedule, prediction)
    count = result.memory[0][problem.machine.devices[0].memory]
    return {
        "planner": planner, "share": share, "capacity_bytes": problem.capacity_bytes(0), "step_s": step_s,
        "predicted_s": prediction.step_s, "planned_bytes": count.planned_peak_bytes,
        "counted_bytes": count.counted_peak_bytes, "loss": result.loss,
        "categories": {row.category: [row.predicted_s, row.measured_s] for row in comparison},
    }  # fmt: skip


def run_jitted(setting: Setting, given: argparse.Namespace) -> dict[str, Any]:
    measured = read_problem(given.out / "problem.measured.json").workload
    planner = planner_for(setting.loss, setting.params, setting.batch, setting.imported)
    problem, schedule, share, name = planned(lambda s: setting.problem(measured, s), [planner], given.share)
    step = jitted_step(
        setting.loss, setting.params, setting.batch, OPTIMIZER, setting.imported, problem, schedule
    )  # fmt: skip
    print("\n".join(step.verification.lines()), file=sys.stderr)
    return {
        "planner": name, "share": share, "capacity_bytes": problem.capacity_bytes(0),
        "predicted_s": float(simulate(problem, schedule).step_s),
        "planned_bytes": check(problem, schedule).peak_bytes[problem.machine.memories[0].name],
        "host_bytes": step.verification.jaxpr_host_bytes, "verification": step.verification.lines(),
        **timed(step.step, setting, given),
    }  # fmt: skip


def run_ordinary(setting: Setting, given: argparse.Namespace) -> dict[str, Any]:
    def step(params, state, batch):
        value, gradients = jax.value_and_grad(setting.loss)(params, batch)
        changes, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, value

    footprint = keep_all_footprint_bytes(setting.imported.workload, 0)
    return {"planned_bytes": footprint, **timed(jax.jit(step, donate_argnums=(0, 1)), setting, given)}


def timed(step: Any, setting: Setting, given: argparse.Namespace) -> dict[str, Any]:
    """Times of a jitted step, and what its compiler says of its memory."""
    state = [setting.params, OPTIMIZER.init(setting.params), jnp.zeros(())]
    memory = step.lower(state[0], state[1], setting.batch).compile().memory_analysis()

    def once() -> None:
        state[:] = jax.block_until_ready(step(state[0], state[1], setting.batch))

    step_s = seconds(once, given.steps)
    once()  # as many steps as the runtime has taken
    return {
        "step_s": step_s, "loss": float(state[2]),
        "compiled_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "compiled_host_bytes": memory.host_temp_size_in_bytes,
    }  # fmt: skip


RUN = {"runtime": run_runtime, "jitted": run_jitted, "ordinary": run_ordinary}


def table(rows: list[dict[str, Any]]) -> str:
    """Figures of all forms; "compiled" is what XLA says, "in use" what the device says."""

    def number(row: dict[str, Any], key: str) -> str:
        value = row.get(key)
        return "" if value is None else f"{value:,}"

    lines = [
        "| form | planner | share | step ms | predicted ms | error | planned | counted | compiled | in use | loss |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        predicted = row.get("predicted_s")
        error = f"{row['step_s'] / predicted - 1:+.0%}" if predicted else ""
        lines.append(
            f"| {row['form']} | {row.get('planner', '')} | {row.get('share', '')} | {row['step_s'] * 1e3:.2f} | "
            f"{f'{predicted * 1e3:.2f}' if predicted else ''} | {error} | {number(row, 'planned_bytes')} | "
            f"{number(row, 'counted_bytes')} | {number(row, 'compiled_bytes')} | {number(row, 'peak_in_use_bytes')} | "
            f"{row['loss']:.6g} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=FORMS, help="run this form only, and print its figures as JSON")
    parser.add_argument("--size", choices=SIZES, help="default: medium on a GPU, small without one")
    parser.add_argument("--share", type=float, default=0.5, help="of the footprint, that plans may use (default: 0.5)")
    parser.add_argument("--planners", nargs="+", default=["offload-all", "ratio-sweep"], help="of the runtime's plan")
    parser.add_argument("--machine", default="prototype-4gpu-12.5", help="preset whose first GPU is planned for")
    parser.add_argument("--gpu", default="A100-SXM4-40GB", help="row of the GPU table: durations of the first plan")
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed")
    parser.add_argument("--out", type=Path, default=Path("experiments/gpu/results"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.form:
        # Only here is a device touched: the first process would take most of its memory away from these.
        given.size = given.size or ("medium" if jax.default_backend() == "gpu" else "small")
        about = {"form": given.form, "size": given.size, "device": jax.devices()[0].device_kind}
        row = {**about, **RUN[given.form](Setting(given), given), "peak_in_use_bytes": peak_in_use()}
        print(json.dumps(row))
        return
    rows = []
    for form in FORMS:
        command = [sys.executable, __file__, *sys.argv[1:], "--form", form]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    about = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"), "jax": jax.__version__,
        "device": rows[0]["device"], "arguments": sys.argv[1:], "size": SIZES[rows[0]["size"]], "rows": rows,
    }  # fmt: skip
    write_text(given.out / "results.json", json.dumps(about, indent=1) + "\n")
    write_text(given.out / "table.md", table(rows))
    print(table(rows), end="")


if __name__ == "__main__":
    main()
