"""Networks of test size with names, their imported steps, and plans for small capacities."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

from tmojax import import_train_step, load_machine
from tmojax.execute.jitted_names import named_modules, planner_for
from tmojax.execute.jitted_scans import named_scan_inputs, scan_in_segments
from tmojax.models import build_model
from tmojax.problem import Action, Problem, keep_all_footprint_bytes

OPTIMIZER = optax.sgd(1e-2)
BOTH = frozenset({Action.OFFLOAD, Action.RECOMPUTE})
SLOWER = 100  # ops of test size are too fast to hide a copy behind them


@dataclass(frozen=True)
class Named:
    """`plain` is the loss without anything of a plan; `loss` the same with names."""

    plain: Any
    loss: Any
    params: Any
    batch: Any


def filled(shapes, seed=0):
    rng = np.random.default_rng(seed)

    def fill(shape):
        if shape.dtype == jnp.int32:
            return rng.integers(0, 30, shape.shape).astype(np.int32)
        return (rng.normal(size=shape.shape) * 0.3).astype(shape.dtype)

    return jax.tree.map(fill, shapes)


def layer(x, weights):
    """Two matrices around a tanh, with a shortcut; its input and the inner matrix product have names."""
    x = checkpoint_name(x, "x")
    inner = checkpoint_name(x @ weights[0], "inner")
    return x + jnp.tanh(inner) @ weights[1]


def mlp() -> Named:
    def loss(params, batch):
        x = batch["x"]
        for index, weight in enumerate(params):
            x = checkpoint_name(nn.relu(x @ weight), f"relu{index}")
        return ((x - batch["y"]) ** 2).mean()

    rows = jax.ShapeDtypeStruct((256, 16), jnp.float32)
    shapes = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 5
    return Named(loss, loss, filled(shapes), filled({"x": rows, "y": rows}, 1))


def gpt2() -> Named:
    model = build_model("gpt2", batch=8, dtype="float32", layers=2, width=16, heads=2, vocabulary=32, sequence=16)
    return Named(model.loss, named_modules(model.loss), filled(model.params), filled(model.batch, 1))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(name="norm")(x)
        scores = jax.nn.softmax(y @ y.swapaxes(1, 2) / x.shape[-1])
        x = x + nn.Dense(x.shape[-1], name="proj")(scores @ y)
        return x + nn.Dense(x.shape[-1], name="out")(nn.gelu(nn.Dense(2 * x.shape[-1], name="fc")(x)))


class Scanned(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            lambda block, x, _: (block(x), None), variable_axes={"params": 0}, split_rngs={"params": True},
            length=self.layers,
        )  # fmt: skip
        x = nn.Dense(x.shape[-1], name="embed")(x)
        return nn.Dense(x.shape[-1], name="head")(scan(Block(name="blocks"), x, None)[0])


def scanned() -> Named:
    module = Scanned(6)
    x = jax.ShapeDtypeStruct((16, 16, 16), jnp.float32)
    params = jax.eval_shape(module.init, jax.random.key(0), x)["params"]

    def loss(params, batch):
        return ((jnp.asarray(module.apply({"params": params}, batch["x"])) - batch["y"]) ** 2).mean()

    return Named(loss, named_scan_inputs(named_modules(loss)), filled(params), filled({"x": x, "y": x}, 1))


def segments() -> Named:
    def with_lengths(lengths):
        def loss(params, batch):
            x = batch["x"] @ params["in"]
            x, _ = scan_in_segments(lambda x, w: (layer(x, w), None), x, params["layers"], lengths)
            return ((x - batch["y"]) ** 2).mean()

        return loss

    rows = jax.ShapeDtypeStruct((256, 16), jnp.float32)
    stack = jax.ShapeDtypeStruct((6, 16, 16), jnp.float32)
    shapes = {"in": jax.ShapeDtypeStruct((16, 16), jnp.float32), "layers": (stack, stack)}
    return Named(with_lengths((6,)), with_lengths((2, 4)), filled(shapes), filled({"x": rows, "y": rows}, 1))


NETWORKS = {"mlp": mlp, "gpt2": gpt2, "scanned": scanned, "segments": segments}
network = cache(lambda name: NETWORKS[name]())


@cache
def imported(name, micro_batches=1):
    net = network(name)
    return import_train_step(
        net.loss, net.params, net.batch, OPTIMIZER, gpu="A100-SXM4-40GB", gpus=4, micro_batches=micro_batches
    )


def problem_of(step, factor, actions=BOTH):
    """The step with slower ops, on GPUs with `factor` of what keeping everything takes."""
    programs = tuple(
        replace(p, ops=tuple(replace(op, duration_s=op.duration_s * SLOWER) for op in p.ops))
        for p in step.workload.programs
    )
    workload = replace(step.workload, programs=programs)
    capacity = int(keep_all_footprint_bytes(workload, 0) * factor)
    return Problem("test", workload, load_machine("prototype-4gpu-12.5"), actions).with_device_capacity(capacity)


@cache
def planned(name, factor, micro_batches=1, tie_layers=True):
    """(imported step, problem, schedule of the planner `by-name`)."""
    net, step = network(name), imported(name, micro_batches)
    problem = problem_of(step, factor)
    planner = planner_for(net.loss, net.params, net.batch, step, tie_layers=tie_layers)
    result = planner.plan(problem)
    assert result.schedule is not None, result.message
    return step, problem, result.schedule
