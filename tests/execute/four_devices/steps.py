"""Compiled steps, plans and batches that the tests share."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tmojax import PLANNERS, Action, Problem, load_machine
from tmojax.execute.compiled_step import CompiledStep
from tmojax.execute.planned_step import PlannedStep
from tmojax.importers.jax_importer import import_train_step
from tmojax.problem import Schedule, keep_all_footprint_bytes

OPTIMIZER = optax.adamw(1e-3)
GPU = "A100-SXM4-40GB"


@dataclass(frozen=True, eq=False)
class Case:
    """A compiled step with real parameters; `batch(rng)` makes one micro-batch."""

    name: str
    loss: Any
    params: Any
    batch: Any
    compiled: CompiledStep
    micro_batches: int

    @property
    def gpus(self) -> int:
        return len(self.compiled.devices)

    @property
    def footprint_bytes(self) -> int:
        return keep_all_footprint_bytes(self.compiled.workload, 0)

    def problem(self, share: float = 1.0) -> Problem:
        """The step on a machine whose GPUs have `share` of the footprint."""
        machine = load_machine("prototype-4gpu-12.5")
        machine = machine if self.gpus == 4 else fewer_gpus(machine, self.gpus)
        actions = frozenset({Action.OFFLOAD, Action.RECOMPUTE})
        problem = Problem(self.name, self.compiled.workload, machine, actions)
        return problem.with_device_capacity(int(self.footprint_bytes * share))

    def batches(self, seed: int = 0) -> list[list[Any]]:
        rng = np.random.default_rng(seed)
        return [[self.batch(rng) for _ in range(self.micro_batches)] for _ in range(self.gpus)]

    def unplanned(self, batches: list[list[Any]]) -> tuple[Any, Any, Any]:
        """(new parameters, new optimizer state, gradients) of the ordinary step on all rows."""

        def step(params, state):
            each = [jax.grad(self.loss)(params, batch) for own in batches for batch in own]
            mean = jax.tree.map(lambda *g: sum(g) / len(g), *each)
            changes, state = OPTIMIZER.update(mean, state, params)
            return optax.apply_updates(params, changes), state, mean

        return jax.jit(step)(self.params, OPTIMIZER.init(self.params))


def fewer_gpus(machine, count):
    """The machine with its first GPUs only."""
    kept = machine.devices[:count]
    gone = {device.memory for device in machine.devices[count:]}
    routes = tuple(r for r in machine.routes if not {r.source, r.destination} & gone)
    return replace(machine, devices=kept, routes=routes)


def make_case(name, loss, shapes, example, batch, gpus=4, micro_batches=1, bucket_bytes=30_000, coarsen="none"):
    """Compile a step; parameters are small random numbers."""
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    params = tree.unflatten(
        [0.1 * jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    )
    imported = import_train_step(
        loss, shapes, example, OPTIMIZER, gpu=GPU, micro_batches=micro_batches, gpus=gpus, bucket_bytes=bucket_bytes,
        coarsen=coarsen, name=name,
    )  # fmt: skip
    compiled = CompiledStep(imported, jax.devices()[:gpus])
    return Case(name, loss, params, batch, compiled, micro_batches)


@cache
def perceptron(gpus=4, micro_batches=2, coarsen="none") -> Case:
    """Three dense layers with a ReLU between them; all of one size, so that little has to be compiled."""
    kernel, bias = jax.ShapeDtypeStruct((32, 32), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.float32)
    shapes = {f"dense{i}": {"kernel": kernel, "bias": bias} for i in range(3)}

    def loss(params, batch):
        x = batch["x"]
        for i in range(3):
            with jax.named_scope(f"dense{i}"):
                x = x @ params[f"dense{i}"]["kernel"] + params[f"dense{i}"]["bias"]
            if i < 2:
                with jax.named_scope(f"dense{i}/relu"):
                    x = jax.nn.relu(x)
        return jnp.mean((x - batch["y"]) ** 2)

    def batch(rng):
        return {name: rng.normal(size=(48, 32)).astype("float32") for name in ("x", "y")}

    example = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch(np.random.default_rng(0)))
    return make_case("perceptron", loss, shapes, example, batch, gpus, micro_batches, coarsen=coarsen)


def plan(problem: Problem, *names: str) -> Schedule:
    """The lists of one planner per device; one name for all of them alike."""
    by_name = {name: PLANNERS[name]().plan(problem).schedule for name in set(names)}
    assert all(schedule is not None for schedule in by_name.values()), by_name
    if len(names) == 1:
        return by_name[names[0]]
    return Schedule(
        lists=tuple(by_name[name].lists[device] for device, name in enumerate(names)),
        initial=tuple(by_name[name].initial[device] for device, name in enumerate(names)),
    )


def planned(case: Case, problem: Problem, schedule: Schedule, segments: str = "ops") -> PlannedStep:
    """A step that is ready to run; op by op unless a test is about joined ones, because that gives the same bits."""
    step = PlannedStep(case.compiled, problem, schedule, segments=segments)
    step.load(case.params, OPTIMIZER.init(case.params))
    return step


def largest_difference(trees, others) -> float:
    """Largest difference of two trees, relative to the largest number of each array."""
    pairs = zip(jax.tree.leaves(trees), jax.tree.leaves(others), strict=True)
    return max(float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)) for a, b in pairs)


def identical(trees, others) -> bool:
    """Bit for bit."""
    pairs = zip(jax.tree.leaves(trees), jax.tree.leaves(others), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
