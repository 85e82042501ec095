"""What `import tmojax` offers, and that it stays light."""

import subprocess
import sys

import pytest

import tmojax


def test_every_public_name_exists_and_is_that_of_its_home():
    assert sorted(tmojax.__all__) == sorted(tmojax._HOME)
    for name in tmojax.__all__:
        value = getattr(tmojax, name)
        assert value is getattr(tmojax, name)
        if hasattr(value, "__name__"):
            assert value.__name__ == name


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tmojax.nonsense
    assert {"bound", "__name__"} <= set(dir(tmojax))


def test_importing_tmojax_loads_neither_jax_nor_numpy():
    code = "import sys, tmojax; sys.exit(bool({'jax', 'numpy', 'numba', 'pydantic'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
