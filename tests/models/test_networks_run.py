"""Small networks of every family compute: finite losses and gradients, every parameter used, samples kept apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_networks import SMALL, numbers, small

from tmojax.models.conformer import by_key, relative_positions
from tmojax.models.convolution import BatchNorm

QUICK = ("dlrm",)
# Compiling takes most of the time of these tests.
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in SMALL])
def test_loss_and_gradients_are_finite_and_every_parameter_has_one(name):
    model = small(name, dtype="bfloat16" if name in ("bert-base", "conformer-s") else "float32")
    params, batch = numbers(model)
    step = jax.jit(jax.value_and_grad(model.loss), compiler_options=FAST_COMPILE)
    loss, gradients = step(params, batch)
    assert loss.shape == () and loss.dtype == jnp.float32 and 0 < float(loss) < 20
    for path, gradient in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        assert bool(jnp.isfinite(gradient).all()), path
        assert bool((gradient != 0).any()), path


def test_batch_norm_normalises_every_channel_over_the_batch():
    x = np.random.default_rng(0).normal(3, 2, (5, 4, 4, 3)).astype("float32")
    params = {"scale": jnp.ones(3), "bias": jnp.asarray([0.0, 1.0, 2.0])}
    y = np.asarray(BatchNorm(jnp.float32).apply({"params": params}, x))
    np.testing.assert_allclose(y.mean((0, 1, 2)), [0, 1, 2], atol=1e-5)
    np.testing.assert_allclose(y.std((0, 1, 2)), 1, atol=1e-4)
    np.testing.assert_allclose(y, (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + 1e-5) + [0, 1, 2], atol=1e-4)


def test_scores_by_distance_become_scores_by_key():
    steps = 5
    scores = np.random.default_rng(0).random((2, 3, steps, 2 * steps - 1)).astype("float32")
    shifted = np.asarray(by_key(jnp.asarray(scores)))
    for query in range(steps):
        for key in range(steps):
            # Column 0 is distance steps - 1, so that distance query - key is in column steps - 1 - (query - key).
            np.testing.assert_array_equal(shifted[..., query, key], scores[..., query, steps - 1 - query + key])


def test_position_zero_is_in_the_middle():
    positions = np.asarray(relative_positions(4, 6))
    assert positions.shape == (7, 6)
    np.testing.assert_allclose(positions[3], [0, 0, 0, 1, 1, 1])
    np.testing.assert_allclose(positions[0, 0], np.sin(3), rtol=1e-6)


def test_dlrm_looks_up_the_rows_of_each_sample():
    model = small("dlrm")
    params, batch = numbers(model)
    gradients = jax.jit(jax.grad(model.loss), compiler_options=FAST_COMPILE)(params, batch)
    for table in range(4):
        touched = np.flatnonzero(np.abs(np.asarray(gradients[f"table{table}"]["embedding"])).sum(1))
        assert set(touched) <= set(np.asarray(batch["rows"])[:, table])
