"""The explicit form: copies tied to layers as the plan has them, gradients of the plain chain bit for bit."""

from functools import cache

import jax
import jax.numpy as jnp
import jitted_networks as networks
import numpy as np
import pytest

from tmojax import import_train_step
from tmojax.errors import InputError
from tmojax.execute.jitted_chain import (
    ChainTiming,
    chain_timing,
    explicit_chain,
    explicit_step,
    named_chain,
    planner_for_chain,
    reach_of_chain,
)
from tmojax.execute.jitted_names import NameAction
from tmojax.execute.jitted_scans import inner_jaxprs

LAYERS = 5
ROWS = jax.ShapeDtypeStruct((256, 16), jnp.float32)
MATRIX = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def block(layer, x):
    return x + jnp.tanh(x @ layer["a"]) @ layer["b"]


def loss_of(chain):
    def loss(params, batch):
        x = chain(params["layers"], batch["x"] @ params["in"])
        return ((x @ params["out"] - batch["y"]) ** 2).mean()

    return loss


PARAMS = networks.filled({"in": MATRIX, "layers": [{"a": MATRIX, "b": MATRIX}] * LAYERS, "out": MATRIX})
BATCH = networks.filled({"x": ROWS, "y": ROWS}, 1)


@cache
def planned(factor):
    step = import_train_step(
        loss_of(named_chain(block)), PARAMS, BATCH, networks.OPTIMIZER, gpu="A100-SXM4-40GB", gpus=4
    )
    problem = networks.problem_of(step, factor)
    result = planner_for_chain(step).plan(problem)
    assert result.schedule is not None, result.message
    return step, problem, result.schedule


@cache
def exported(factor):
    return explicit_step(loss_of, block, PARAMS, BATCH, networks.OPTIMIZER, *planned(factor))


def gradients(timing):
    return jax.jit(jax.value_and_grad(loss_of(explicit_chain(block, timing))))(PARAMS, BATCH)


def order(jaxpr):
    """Matrix products and copies in the order of the program, inner jaxprs inlined: 'dot', 'out' and 'in'."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append("dot")
        if equation.primitive.name == "device_put":
            found.append("out" if equation.params["devices"][0] is jax.memory.Space.Host else "in")
        for inner in inner_jaxprs(equation):
            found += order(inner)
    return found


@pytest.mark.parametrize("factor", [0.6, 0.5])
def test_the_plan_is_carried_out(factor):
    made, timing = exported(factor)
    offloaded = made.plan.names(NameAction.OFFLOAD)
    assert offloaded and {f"chain.input{i}" for i, gone in enumerate(timing.gone_after) if gone >= 0} == set(offloaded)
    found = made.verification
    assert found.jaxpr_host_bytes == found.planned_host_bytes == len(offloaded) * 256 * 16 * 4
    assert found.moves == found.placements_on_host == found.placements_on_device == len(offloaded)
    assert not found.void
    ours = jax.jit(jax.value_and_grad(made.loss))(PARAMS, BATCH)
    # The same layers, checkpointed without any copy, give the same bits; XLA fuses the plain chain otherwise.
    same = gradients(ChainTiming((-1,) * LAYERS, (-1,) * LAYERS))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(same), strict=True))
    plain = jax.jit(jax.value_and_grad(loss_of(named_chain(block))))(PARAMS, BATCH)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert float(jnp.abs(a - b).max()) <= 2e-6 * float(jnp.abs(b).max())


def test_the_step_updates():
    made, _ = exported(0.55)
    state = networks.OPTIMIZER.init(PARAMS)
    params, _, loss = made(jax.tree.map(jnp.array, PARAMS), state, BATCH)
    assert float(loss) == pytest.approx(float(loss_of(named_chain(block))(PARAMS, BATCH)), rel=1e-6)
    assert float(made.loss(params, BATCH)) < float(loss)


def test_copies_stand_where_the_timing_says():
    """Layer 0 leaves beside layers 0 and 1 and comes back beside backward of layer 2; a layer has two products."""
    nothing = jax.make_jaxpr(jax.grad(loss_of(explicit_chain(block, ChainTiming((-1,) * 5, (-1,) * 5)))))
    one = jax.make_jaxpr(
        jax.grad(loss_of(explicit_chain(block, ChainTiming((1, -1, -1, -1, -1), (2, -1, -1, -1, -1)))))
    )
    assert "out" not in order(nothing(PARAMS, BATCH).jaxpr)
    found = order(one(PARAMS, BATCH).jaxpr)
    forward = 1 + 2 * LAYERS + 1
    assert found.index("out") <= 1 + 2
    # Backward: two products of the head, then per layer two of recomputation and four of gradients.
    assert found.index("in") - 1 == forward + 2 + 2 * (2 + 4)
    text = str(one(PARAMS, BATCH))
    assert text.count("optimization_barrier") == 1 + LAYERS + 2  # gone; one per layer of backward; begin, arrived


def test_timing_follows_the_instructions():
    step, problem, schedule = planned(0.55)
    timing = chain_timing(step, problem, schedule, LAYERS)
    for index, (gone, back) in enumerate(zip(timing.gone_after, timing.back_from, strict=True)):
        assert (gone == -1) == (back == -1)
        assert gone == -1 or (gone >= index and back >= index)
    # The planner releases at once: after the layer that read the input, with its copy.
    assert all(gone in (-1, index) for index, gone in enumerate(timing.gone_after))


def test_mistakes_are_errors():
    with pytest.raises(
        InputError, match=r"layer 1: gone after layer 0 and back from layer 1; both must be one of 1\.\.1"
    ):
        ChainTiming((0, 0), (0, 1))
    with pytest.raises(InputError, match="back_from: 1 entries for 2 layers"):
        ChainTiming((-1, -1), (-1,))
    with pytest.raises(InputError, match="it has 5 layers, and the plan is for 2"):
        gradients(ChainTiming((-1, -1), (-1, -1)))
    with pytest.raises(InputError, match="it has no named_chain of layers"):
        reach_of_chain(networks.imported("mlp"))
