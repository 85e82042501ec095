"""The compiled loops and the same functions run as plain Python give the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from building import random_case

from tmojax.simulate import hazards, jit, kernel, lower, prepare


def uncompiled(monkeypatch, *modules):
    """Replace every compiled function of the modules by its Python original."""
    for module in modules:
        for name, value in vars(module).copy().items():
            if hasattr(value, "py_func"):
                monkeypatch.setattr(module, name, value.py_func)


def everything(case):
    problem, schedule, policies, steps = case
    result = prepare(problem, schedule).run(link_policies=policies, steps=steps, record=True)
    assert result.segments is not None
    arrays = [*result.start_s, *result.end_s, *result.transfer_start_s, result.busy_s, result.moved_bytes]
    arrays += [array for segment in result.segments for array in segment]
    return [array.tobytes() for array in arrays], result.events


@pytest.mark.parametrize("seed", range(25))
def test_plain_python_gives_the_same_bits(seed, monkeypatch):
    case = random_case(seed)
    compiled = everything(case)
    uncompiled(monkeypatch, kernel, hazards, lower)
    from tmojax.simulate import prepared

    monkeypatch.setattr(prepared, "run_events", kernel.run_events)
    assert not hasattr(kernel.run_events, "py_func")
    assert not hasattr(hazards._order_list, "py_func")
    assert everything(case) == compiled


def test_compiles_without_a_cache_directory(monkeypatch):
    """numba raises RuntimeError at decoration if it finds no place to write."""
    calls = []

    def njit(cache=False, **options):
        calls.append(cache)
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return lambda function: function

    monkeypatch.setattr(jit, "njit", njit)
    assert jit.compiled(np.add) is np.add
    assert jit.compiled_inner(np.add) is np.add
    assert calls == [True, False, True, False]
