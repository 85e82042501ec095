"""Gradient descent finds optima that are known by hand, is deterministic, and keeps its restarts apart."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "cost"))

from periodic_cases import one_tensor_problem, transformer_problem, views_of

from tmojax.errors import InputError
from tmojax.relax.decisions import Choice, DeviceDecision, keep_everything
from tmojax.relax.periodic import Descent, machine_sensitivity, optimise, relax_problem


def solve(problem, most_slots=160, **options):
    views = views_of(problem)
    model = relax_problem(problem, views, most_slots=most_slots)
    return model, optimise(model, **options)


def test_one_tensor_leaves_and_costs_its_way_out():
    model, solution = solve(one_tensor_problem(capacity_gb=1.1), restarts=2, steps=1500)
    best = int(np.argmin(solution.step_s))
    assert solution.step_s[best] == pytest.approx(7.25, rel=0.01)
    assert solution.memory_over_bytes[best] < 0.01e9
    idle = int(np.argmax(np.asarray(model.allowed)[0, :, Choice.OFFLOAD]))
    assert solution.choice[best, 0, idle, Choice.OFFLOAD] > 0.9
    # 0.9 GB must cross at B = 0.8 GB/s each way: a faster path saves 0.9 / B^2 = 1.41 s per GB/s each way, a larger
    # memory 2 / B = 2.5 s per GB.
    sensitivity = machine_sensitivity(model, solution)
    np.testing.assert_allclose(sensitivity.lane_s_per_byte_per_s[0] * 1e9, -1.40625, rtol=0.15)
    assert sensitivity.capacity_s_per_byte[0] * 1e9 == pytest.approx(-2.5, rel=0.15)
    assert solution.memory_price_s_per_byte[best].sum() * 1e9 == pytest.approx(2.5, rel=0.15)


def test_two_gpus_share_the_path_one_after_the_other():
    _, solution = solve(one_tensor_problem(gpus=2), restarts=4, steps=1500)
    assert solution.step_s.min() == pytest.approx(8.75, rel=0.015)
    assert solution.link_over[np.argmin(solution.step_s)] < 0.1


def test_what_fits_stays():
    _, solution = solve(one_tensor_problem(capacity_gb=3.0), restarts=1, steps=400)
    assert solution.step_s[0] == pytest.approx(7.0, rel=1e-3)


def test_same_seed_same_result_and_restarts_do_not_leak():
    problem = transformer_problem(2, 2, 2, 1.4, ("offload", "recompute"))
    views = views_of(problem)
    model = relax_problem(problem, views, most_slots=40)
    options = {"restarts": 3, "steps": 60, "settings": Descent(bins=24)}
    first = optimise(model, seed=5, **options)
    again = optimise(model, seed=5, **options)
    for name in ("choice", "phase", "step_s", "history", "memory_price_s_per_byte"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    other = optimise(model, seed=6, **options)
    assert not np.array_equal(first.choice[0], other.choice[0])
    warm = (tuple(keep_everything(view) for view in views), (0.0, 0.25))
    changed = optimise(model, seed=5, warm_starts=[warm], **options)
    assert not np.array_equal(first.choice[0], changed.choice[0])
    np.testing.assert_array_equal(first.choice[1:], changed.choice[1:])
    np.testing.assert_array_equal(first.step_s[1:], changed.step_s[1:])
    assert len({step for step in first.step_s.tolist()}) == 3  # all restarts differ


def test_bad_arguments_are_named():
    problem = one_tensor_problem()
    model = relax_problem(problem, views_of(problem))
    keep = keep_everything(views_of(problem)[0])
    for options, word in (
        ({"restarts": 0}, "restarts"),
        ({"steps": 3}, "steps"),
        ({"restarts": 1, "warm_starts": [((keep,), (0.0,))] * 2}, "warm_starts"),
        ({"warm_starts": [((keep, keep), (0.0,))]}, "warm start"),
        ({"warm_starts": [((DeviceDecision(keep.choice[:0], keep.state_out),), (0.0,))]}, "GPU 0"),
    ):
        with pytest.raises(InputError, match=word):
            optimise(model, **options)
    with pytest.raises(InputError, match="views"):
        relax_problem(problem, [])
    with pytest.raises(InputError, match="learning_rate"):
        Descent(learning_rate=-1.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("micro_batches", "factor", "actions", "most_s"),
    [(1, 1.33, ("offload",), 0.645), (8, 1.33, ("offload",), 0.437), (8, 3.0, ("offload", "recompute"), 0.392)],
)
def test_prototype_figures(micro_batches, factor, actions, most_s):
    problem = transformer_problem(12, 4, micro_batches, factor, actions)
    _, solution = solve(problem, restarts=4, steps=1500)
    best = int(np.argmin(solution.step_s))
    assert solution.step_s[best] / micro_batches < most_s
    assert solution.memory_over_bytes[best] < 0.01e9
    assert solution.link_over[best] < 0.15
