"""Run networks by plans on the devices of this process: numbers equal, bytes within the plan, times measured.

For each network: compile its step op by op, plan it for GPUs that have a share of the footprint, run it, compare with
the step that keeps everything (bit for bit) and with the ordinary jitted step (largest relative difference of the
gradients), and compare the bytes that the runtime counted with those that the checker counts. With --measure each step
is timed too and compared with the simulator; traces go to --out.
"""

import argparse
import json
import platform
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from networks import NETWORKS, Network, network

from tmojax import PLANNERS, Action, Problem, import_train_step, load_machine
from tmojax.check import check
from tmojax.execute import (
    CompiledStep,
    MeasuredTimes,
    PlannedStep,
    compare,
    comparison_text,
    with_measured_durations,
    write_measured_trace,
)
from tmojax.problem import Machine, keep_all_footprint_bytes
from tmojax.report.trace import write_trace
from tmojax.simulate import simulate

OPTIMIZER = optax.adamw(1e-3)
SHARES = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)


def machine_of(name: str, gpus: int) -> Machine:
    """The first GPUs of a preset."""
    machine = load_machine(name)
    gone = {device.memory for device in machine.devices[gpus:]}
    routes = tuple(r for r in machine.routes if not {r.source, r.destination} & gone)
    return replace(machine, devices=machine.devices[:gpus], routes=routes)


def parameters(shapes):
    """Small random numbers in the shapes of the parameters."""
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tree.unflatten([0.1 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)])


def ordinary_gradients(net: Network, params, batches) -> dict[str, np.ndarray]:
    """Mean gradient over all rows, by the name of the weight."""

    def mean(params):
        each = [jax.grad(net.loss)(params, batch) for own in batches for batch in own]
        return jax.tree.map(lambda *g: sum(g) / len(g), *each)

    leaves = jax.tree_util.tree_leaves_with_path(jax.jit(mean)(params))
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


def largest_difference(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], micro_batches: int) -> float:
    """Of the gradients, relative to the largest number of each."""
    worst = 0.0
    for name, value in expected.items():
        ours = found[f"{name}.grad"] / micro_batches
        worst = max(worst, float(np.abs(ours - value).max()) / max(float(np.abs(value).max()), 1e-6))
    return worst


def smallest_plan(problem: Problem, planner: str, footprint_bytes: int):
    """(problem, schedule) of the smallest of SHARES of the footprint in which the planner has a plan."""
    for share in SHARES:
        limited = problem.with_device_capacity(int(footprint_bytes * share))
        result = PLANNERS[planner]().plan(limited)
        if result.schedule is not None:
            return limited, result.schedule, share
    raise SystemExit(f"{problem.name}: {planner} has no plan in the whole footprint")


def run_network(net: Network, given: argparse.Namespace) -> list[dict]:
    """One row per planner."""
    rng = np.random.default_rng(0)
    batches = [[net.batch(rng) for _ in range(given.micro_batches)] for _ in range(given.gpus)]
    example = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batches[0][0])
    imported = import_train_step(
        net.loss, net.params, example, OPTIMIZER, gpu=given.gpu, gpus=given.gpus, micro_batches=given.micro_batches,
        bucket_bytes=given.bucket_bytes, name=net.name,
    )  # fmt: skip
    compiled = CompiledStep(imported, jax.devices()[: given.gpus])
    footprint = keep_all_footprint_bytes(compiled.workload, 0)
    actions = frozenset({Action.OFFLOAD, Action.RECOMPUTE})
    problem = Problem(net.name, compiled.workload, machine_of(given.machine, given.gpus), actions)
    params = parameters(net.params)
    expected = ordinary_gradients(net, params, batches)
    kept, rows = None, []
    for planner in ("keep-all", *given.planners):
        limited, schedule, share = smallest_plan(problem, planner, footprint)
        step = PlannedStep(compiled, limited, schedule)
        step.load(params, OPTIMIZER.init(params))
        first = step.step(batches, gradients=True)
        state = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(step.state())]
        kept = kept or state
        planned = check(limited, schedule).peak_bytes
        memories = limited.machine.memories
        devices = [limited.machine.devices[d].memory for d in range(given.gpus)]
        counted = max(first.memory[d][memory].counted_peak_bytes for d, memory in enumerate(devices))
        within = all(
            size <= count.planned_bytes[at]
            for counts in first.memory for count in counts for at, size in count.counted_bytes.items()
        )  # fmt: skip
        row = {
            "network": net.name, "planner": planner, "gpus": given.gpus, "ops": len(compiled.workload.programs[0].ops),
            "footprint_bytes": footprint, "share": share, "bits_of_keep_all": state == kept,
            "gradient_difference": largest_difference(first.gradients[0], expected, given.micro_batches),
            "planned_bytes": max(planned[memories[memory].name] for memory in devices),
            "counted_bytes": counted, "within_plan_everywhere": within,
            "host_bytes": planned[memories[limited.machine.devices[0].host_memory].name],
        }  # fmt: skip
        if given.measure:
            measure(step, limited, schedule, batches, row, given.out)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def measure(step: PlannedStep, problem: Problem, schedule, batches, row: dict, out: Path) -> None:
    """Time one step after a warm one; put both traces and the comparison beside each other."""
    step.step(batches)
    # The prediction takes the durations of ops from one step, and is compared with the next one.
    before = MeasuredTimes(problem, schedule, step.step(batches, measure=True))
    problem = with_measured_durations(problem, schedule, before)
    times = MeasuredTimes(problem, schedule, step.step(batches, measure=True))
    simulation = simulate(problem, schedule, record=True)
    table = compare(problem, schedule, simulation, times)
    out.mkdir(parents=True, exist_ok=True)
    stem = f"{row['network']}-{row['planner']}"
    write_measured_trace(out / f"{stem}.measured.json", problem, schedule, times)
    write_trace(out / f"{stem}.predicted.json", problem, schedule, simulation)
    row["measured_s"] = {entry.category: entry.measured_s for entry in table}
    row["predicted_s"] = {entry.category: entry.predicted_s for entry in table}
    peaks = [device.memory_stats() for device in jax.devices()[: row["gpus"]]]
    row["peak_bytes_in_use"] = [stats["peak_bytes_in_use"] if stats else None for stats in peaks]
    print(comparison_text(table), flush=True)


def markdown(rows: list[dict]) -> str:
    """The table of the documents."""
    lines = [
        "| network | plan | same bits as keep-all | gradients against the ordinary step | planned | counted | host |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['network']} | {row['planner']} | {'yes' if row['bits_of_keep_all'] else 'NO'} | "
            f"{row['gradient_difference']:.0e} | {row['planned_bytes']:,} | {row['counted_bytes']:,} | "
            f"{row['host_bytes']:,} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--planners", nargs="+", default=["offload-all", "recompute-all"])
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--bucket-bytes", type=int, default=25_000_000)
    parser.add_argument("--scale", type=int, default=1, help="multiplies widths and lengths of the networks")
    parser.add_argument("--machine", default="prototype-4gpu-12.5", help="preset whose first GPUs are planned for")
    parser.add_argument("--gpu", default="A100-SXM4-40GB", help="row of the GPU table that gives the durations")
    parser.add_argument("--measure", action="store_true", help="time the steps and compare them with the simulator")
    parser.add_argument("--out", type=Path, default=Path("experiments/gpu/results"))
    given = parser.parse_args()
    rows = [row for name in given.networks for row in run_network(network(name, given.scale), given)]
    given.out.mkdir(parents=True, exist_ok=True)
    about = {
        "jax": jax.__version__, "devices": [str(device.device_kind) for device in jax.devices()],
        "processor": platform.machine(), "dtype": str(jnp.float32.dtype), "rows": rows,
    }  # fmt: skip
    (given.out / "results.json").write_text(json.dumps(about, indent=1) + "\n")
    (given.out / "table.md").write_text(markdown(rows) + "\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
