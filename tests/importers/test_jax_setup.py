"""The workaround for wrong CPU results is on where needed, and jit agrees with NumPy on the shapes that failed."""

import os
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tmojax import jax_setup


@pytest.mark.parametrize(
    ("installed", "needed"),
    [("0.10.1", True), ("0.10.2", True), ("0.11.1", True), ("0.11.2", False), ("0.12.0.1", False), ("1.0.0", False)],
)
def test_which_versions_need_it(installed, needed):
    assert jax_setup.needs_workaround(installed) is needed


def test_setup_is_idempotent():
    before = os.environ.get("XLA_FLAGS", "")
    jax_setup.setup()
    assert os.environ.get("XLA_FLAGS", "") == before
    assert ("ynn_fusion" in before) is jax_setup.needs_workaround(version("jax"))


# Canary: vmapped products of small matrices with a reduction behind them (jax#39103).
@pytest.mark.parametrize("rows", [1000, 40_000])
@pytest.mark.parametrize("size", [3, 8, 64])
def test_jit_agrees_with_numpy_on_vmapped_products(rows, size):
    rng = np.random.default_rng(rows + size)
    matrix = rng.standard_normal((size, size)).astype(np.float32)
    vectors = rng.standard_normal((rows, size)).astype(np.float32)
    exact = vectors.astype(np.float64) @ matrix.T.astype(np.float64)
    largest = jax.jit(jax.vmap(lambda r: jnp.max(matrix @ r)))(vectors)
    np.testing.assert_allclose(largest, exact.max(1), rtol=1e-4, atol=1e-4)
    summed = jax.jit(jax.vmap(lambda r: jnp.sum(jnp.square(matrix @ r))))(vectors)
    np.testing.assert_allclose(summed, np.square(exact).sum(1), rtol=1e-4)
