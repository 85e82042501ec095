"""The settings of conftest.py are really on."""

import jax
import pytest

import tmojax.jax_setup  # noqa: F401  (before the first use of a backend)


def test_old_style_random_keys_are_errors():
    with pytest.raises(ValueError, match="key"):
        jax.random.uniform(jax.random.PRNGKey(0))
    assert jax.random.uniform(jax.random.key(0)).shape == ()


def test_compiled_programmes_are_kept():
    assert jax.config.jax_compilation_cache_dir
