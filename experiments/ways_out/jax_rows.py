"""The JAX networks by plans: with the runtime, op by op and joined, and inside one jitted step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
from networks import Network, mlp_block, mlp_of, network
from rows import FINE_SHARES, JOINED, ONE_BY_ONE, WITH_ROOM, Row, least, machine_of

from tmojax import Action, Problem, import_train_step
from tmojax.check import check
from tmojax.execute import (
    CompiledStep,
    JittedStep,
    PlannedStep,
    explicit_step,
    jitted_step,
    named_chain,
    named_modules,
    named_scan_inputs,
    planner_for,
    planner_for_chain,
)
from tmojax.execute.planned_step import StepResult
from tmojax.planners.registry import PLANNERS
from tmojax.problem import Schedule, Workload, keep_all_footprint_bytes

OPTIMIZER = optax.adamw(1e-3)
GPU = "A100-SXM4-40GB"
SLOWER = 100  # ops of test size are too fast to hide a copy behind them
TIMED_STEPS = 25
ROOM = 0.1  # of the footprint
ROOMY_PLANNERS = ("keep-all", "ratio-sweep")
RUNTIME_PLANNERS = ("keep-all", "offload-all", "recompute-all", "ratio-sweep")


def problem_of(name: str, workload: Workload, share: float) -> Problem:
    """The workload, its ops slower, on one GPU with `share` of what keeping everything takes."""
    programs = tuple(
        replace(p, ops=tuple(replace(op, duration_s=op.duration_s * SLOWER) for op in p.ops)) for p in workload.programs
    )
    workload = replace(workload, programs=programs)
    actions = frozenset({Action.OFFLOAD, Action.RECOMPUTE})
    problem = Problem(name, workload, machine_of("prototype-4gpu-12.5", 1), actions)
    return problem.with_device_capacity(int(keep_all_footprint_bytes(workload, 0) * share))


def parameters(shapes: Any) -> Any:
    """Small random numbers in the shapes of the parameters."""
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tree.unflatten([0.1 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)])


def by_name(tree: Any) -> dict[str, np.ndarray]:
    """Leaves by their paths, as the importer names weights."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


def largest_difference(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Of the gradients, relative to the largest number of each."""
    assert found.keys() == expected.keys()
    return max(
        float(np.abs(found[name] - value).max()) / max(float(np.abs(value).max()), 1e-6)
        for name, value in expected.items()
    )


def jax_rows(name: str) -> Iterator[Row]:
    """All rows of one network."""
    net = network(name)
    batch = net.batch(np.random.default_rng(0))
    params = parameters(net.params)
    expected = by_name(jax.jit(jax.grad(net.loss))(params, batch))
    yield from runtime_rows(net, params, batch, expected)
    yield jitted_row(net, params, batch, expected)
    if name == "mlp":
        yield explicit_row(net, params, batch, expected)


def shapes_of(batch: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch)


def runtime_rows(net: Network, params: Any, batch: Any, expected: dict[str, np.ndarray]) -> Iterator[Row]:
    """The runtime: by every planner op by op and with joined ops, and with joined ops in plans that leave more room."""
    imported = import_train_step(net.loss, net.params, shapes_of(batch), OPTIMIZER, gpu=GPU, gpus=1, name=net.name)
    begin = time.process_time()
    compiled = CompiledStep(imported, jax.devices()[:1])
    workload = compiled.workload
    ops_s = time.process_time() - begin
    roomy = compiled.workload_with_room(int(ROOM * keep_all_footprint_bytes(workload, 0)))
    kept = None
    for planner, planned_for, ways in (
        *((planner, workload, (ONE_BY_ONE, JOINED)) for planner in RUNTIME_PLANNERS),
        *((planner, roomy, (WITH_ROOM,)) for planner in ROOMY_PLANNERS),
    ):

        def problem_with(share: float, planned_for: Workload = planned_for) -> Problem:
            return problem_of(net.name, planned_for, share)

        problem, schedule, share = least(problem_with, PLANNERS[planner]())
        for way in ways:
            segments = "ops" if way == ONE_BY_ONE else "joined"
            begin = time.process_time()
            step = PlannedStep(compiled, problem, schedule, segments=segments)
            compile_s = ops_s if segments == "ops" else time.process_time() - begin
            step.load(params, OPTIMIZER.init(params))
            result = step.step([[batch]], gradients=True)
            state = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(step.state())]
            kept = kept or state
            found = {key.removesuffix(".grad"): value for key, value in result.gradients[0].items()}
            planned = check(problem, schedule).peak_bytes
            device, host = (problem.machine.devices[0].memory, problem.machine.devices[0].host_memory)
            names = [memory.name for memory in problem.machine.memories]
            counts, own = result.memory[0], step.segments[0]
            yield Row(
                net.name, way, planner, share, state == kept if segments == "ops" else None,
                largest_difference(found, expected),
                planned[names[device]], counts[device].counted_peak_bytes,
                planned[names[host]], counts[host].counted_peak_bytes, within(result),
                ops=sum(len(segment.nodes) for segment in own), programs=len(own),
                different=len({id(segment.compiled.executable) for segment in own}),
                temporary_bytes=max(segment.compiled.workspace_bytes for segment in own),
                compile_s=compile_s, step_s=fastest_s(step, batch),
            )  # fmt: skip


def fastest_s(step: PlannedStep, batch: Any) -> float:
    """Time of the fastest of some steps: what other work on the computer disturbs least."""
    taken = []
    for _ in range(TIMED_STEPS):
        begin = time.perf_counter()
        step.step([[batch]])
        taken.append(time.perf_counter() - begin)
    return min(taken)


def within(result: StepResult) -> bool:
    """Never more live bytes than the plan counts at that position, in any memory."""
    return all(
        size <= count.planned_bytes[at]
        for counts in result.memory for count in counts for at, size in count.counted_bytes.items()
    )  # fmt: skip


def by_policy(net: Network, shapes: Any) -> tuple[Problem, Schedule, float, JittedStep]:
    """(problem, plan, share, step) of a policy of names; every layer is decided for itself."""
    loss = named_scan_inputs(named_modules(net.loss))
    imported = import_train_step(loss, net.params, shapes, OPTIMIZER, gpu=GPU, gpus=1, name=net.name)
    planner = planner_for(loss, net.params, shapes, imported, tie_layers=False)
    problem, schedule, share = least(
        lambda share: problem_of(net.name, imported.workload, share), planner, offloading=True
    )
    # As on a GPU, where a form that XLA would void is an error; compiled.py compiles for two of them.
    step = jitted_step(
        loss, net.params, shapes, OPTIMIZER, imported, problem, schedule, platform="gpu", compile_for=None
    )  # fmt: skip
    return problem, schedule, share, step


def jitted_row(net: Network, params: Any, batch: Any, expected: dict[str, np.ndarray]) -> Row:
    """The jitted step, by a policy of names."""
    problem, schedule, share, step = by_policy(net, shapes_of(batch))
    return row_of(net, "jitted policy", problem, schedule, share, step, params, batch, expected)


def explicit_row(net: Network, params: Any, batch: Any, expected: dict[str, np.ndarray]) -> Row:
    """The jitted step whose copies are written out; of the MLP only."""
    loss, shapes = mlp_of(named_chain(mlp_block)), shapes_of(batch)
    imported = import_train_step(loss, net.params, shapes, OPTIMIZER, gpu=GPU, gpus=1, name=net.name)
    problem, schedule, share = least(
        lambda share: problem_of(net.name, imported.workload, share), planner_for_chain(imported), True, FINE_SHARES
    )  # fmt: skip
    step, _ = explicit_step(
        mlp_of, mlp_block, net.params, shapes, OPTIMIZER, imported, problem, schedule, platform="gpu"
    )  # fmt: skip
    return row_of(net, "jitted explicit", problem, schedule, share, step, params, batch, expected)


def row_of(
    net: Network, way: str, problem: Problem, schedule: Schedule, share: float, step: JittedStep, params: Any,
    batch: Any, expected: dict[str, np.ndarray],
) -> Row:  # fmt: skip
    """What a jitted step gives: bytes to the host are read from the jaxpr."""
    found = by_name(jax.jit(jax.grad(step.loss))(params, batch))
    planned = check(problem, schedule).peak_bytes
    verification = step.verification
    return Row(
        net.name, way, "by-name", share, None, largest_difference(found, expected),
        planned[problem.machine.memories[problem.machine.devices[0].memory].name], 0,
        verification.planned_host_bytes, verification.jaxpr_host_bytes, True,
    )  # fmt: skip
