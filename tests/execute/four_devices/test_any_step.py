"""Steps that `import_step` takes as they are: constants, counters, several results, conversions, views."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import GPU, fewer_gpus, plan

from tmojax import Action, InputError, Problem, load_machine
from tmojax.execute import CompiledStep, PlannedStep
from tmojax.execute.functions import StepFunctions
from tmojax.importers.jax_importer import import_step
from tmojax.problem import keep_all_footprint_bytes

MASK = np.tril(np.ones((24, 24), np.float32))


def step(state, batch):
    """Momentum by hand in bfloat16 compute, on a transposed view, with a mask that the step closes over."""

    def loss(weight):
        x = (batch.T.astype(jnp.bfloat16) @ (weight * MASK).astype(jnp.bfloat16)).astype(jnp.float32)
        for _ in range(2):
            x = jnp.tanh(x @ (weight * MASK))
        return jnp.mean(x**2), x.sum(0)

    (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(state["weight"])
    momentum = 0.9 * state["momentum"] + gradient
    rate = 0.1 / (1 + state["count"])
    new = {"weight": state["weight"] - rate * momentum, "momentum": momentum, "count": state["count"] + 1}
    return new, {"loss": value, "sums": sums}


@pytest.fixture(scope="module")
def state():
    rng = np.random.default_rng(3)
    weight = rng.normal(size=(24, 24)).astype("float32") / 5
    return {"weight": weight, "momentum": np.zeros_like(weight), "count": np.zeros((), "float32")}


@pytest.fixture(scope="module")
def compiled(state):
    shape = jax.ShapeDtypeStruct((24, 16), "float32")
    return CompiledStep(import_step(step, state, shape, gpu=GPU), jax.devices()[2:3])


@pytest.mark.parametrize("segments", ["ops", "joined"])
@pytest.mark.parametrize("planner", ["keep-all", "offload-all"])
def test_any_step_runs_by_a_plan(state, compiled, planner, segments):
    rng = np.random.default_rng(4)
    batches = [rng.normal(size=(24, 16)).astype("float32") for _ in range(3)]
    problem = Problem(
        "step", compiled.workload, fewer_gpus(load_machine("prototype-4gpu-12.5"), 1), frozenset({Action.OFFLOAD})
    ).with_device_capacity(keep_all_footprint_bytes(compiled.workload, 0))
    planned = PlannedStep(compiled, problem, plan(problem, planner), segments=segments)
    planned.load(state)
    expected = state
    for batch in batches:
        expected, results = jax.jit(step)(expected, batch)
        values = planned.step([[batch]]).values[0][0]
        for ours, theirs in zip(values, jax.tree.leaves(results), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=5e-3)  # bfloat16 products, rounded elsewhere
    (reached,) = planned.state()
    assert float(reached["count"]) == 3.0
    for name in state:
        np.testing.assert_allclose(reached[name], expected[name], rtol=2e-2, atol=5e-3)


def test_results_must_be_computed():
    shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    imported = import_step(lambda w, x: (w - jax.grad(lambda v: (x @ v).sum())(w), x), shape, shape, gpu=GPU)
    with pytest.raises(InputError, match="step: result 1 is an argument or a constant"):
        StepFunctions(imported.traced, imported.workload.programs[0])
