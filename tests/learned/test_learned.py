"""Features, network and roundings of the learned warm start."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import transformer
from random_steps import random_problem

from tmojax.check import check
from tmojax.learned.features import FEATURES, interval_features, surroundings_of
from tmojax.learned.network import ChoiceNetwork
from tmojax.learned.warm_start import warm_start
from tmojax.learned.weights import Weights, save_weights
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action
from tmojax.problem.step_view import view_step
from tmojax.relax.decisions import Choice


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Weights:
    """Of an untrained network: whatever it says has to become a valid plan."""
    import jax

    parameters = ChoiceNetwork().init(jax.random.key(3), np.zeros((2, FEATURES)), np.ones(2))
    path = tmp_path_factory.mktemp("weights") / "weights.npz"
    rng = np.random.default_rng(0)
    save_weights(path, parameters, rng.normal(size=FEATURES), rng.uniform(0.5, 2, FEATURES))
    return Weights(path)


@pytest.mark.parametrize("seed", range(4))
def test_features_are_finite_and_of_order_one(seed: int) -> None:
    problem = random_problem(seed, factor=1.2)
    for device in range(problem.workload.device_count):
        view = view_step(problem, device)
        found = interval_features(view, surroundings_of(problem, device))
        assert found.shape == (len(view.size_bytes), FEATURES)
        assert np.isfinite(found).all() and np.abs(found).max() < 100


def test_a_step_in_other_units_looks_the_same() -> None:
    """Half as fast, on links half as fast; twice the bytes on links twice as fast, in twice the memory (nearly: no size
    counts as less than a byte)."""
    problem = transformer("prototype-4gpu-12.5", factor=1.5)
    view, around = view_step(problem, 0), surroundings_of(problem, 0)
    slower = replace(view, slot_s=2 * view.slot_s, recompute_s=2 * view.recompute_s)
    rates = [name for name in around._fields if name.startswith(("alone", "share"))]
    halved = around._replace(**{name: getattr(around, name) / 2 for name in rates})
    expected = interval_features(view, around)
    np.testing.assert_allclose(interval_features(slower, halved), expected, rtol=1e-9, atol=1e-9)
    larger = replace(
        view, size_bytes=2 * view.size_bytes, keep_bytes=2 * view.keep_bytes, base_bytes=2 * view.base_bytes
    )
    doubled = around._replace(**{name: getattr(around, name) * 2 for name in (*rates, "capacity_bytes", "taken_bytes")})
    np.testing.assert_allclose(interval_features(larger, doubled), expected, rtol=1e-4, atol=1e-5)


def test_the_forward_pass_is_that_of_the_network(tmp_path) -> None:
    import jax

    rng = np.random.default_rng(5)
    features, weight = rng.normal(size=(17, FEATURES)), rng.uniform(size=17)
    mean, scale = rng.normal(size=FEATURES), rng.uniform(0.5, 2, FEATURES)
    parameters = ChoiceNetwork().init(jax.random.key(0), features, weight)
    save_weights(tmp_path / "w.npz", parameters, mean, scale)
    expected = ChoiceNetwork().apply(parameters, (features - mean) / scale, weight)
    found = Weights(tmp_path / "w.npz").logits(features, weight)
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)  # the file has half precision
    assert (tmp_path / "w.npz").stat().st_size < 200_000


@pytest.mark.parametrize("preset", ["prototype-4gpu-12.5", "uneven-risers-x6"])
def test_any_logits_become_a_valid_plan(weights: Weights, preset: str) -> None:
    problem = transformer(preset, factor=1.5)
    found = warm_start(Workbench(problem), weights)
    assert isinstance(found, Candidate) and check(problem, found.schedule).valid
    again = warm_start(Workbench(problem), weights)
    assert isinstance(again, Candidate) and again.step_s == found.step_s


@pytest.mark.parametrize(("action", "never"), [(Action.OFFLOAD, Choice.RECOMPUTE), (Action.RECOMPUTE, Choice.OFFLOAD)])
def test_only_allowed_actions(weights: Weights, action: Action, never: Choice) -> None:
    problem = transformer("prototype-4gpu-12.5", factor=1.05, actions=frozenset({action}))
    found = warm_start(Workbench(problem), weights)
    assert isinstance(found, Candidate)
    for device, decision in enumerate(found.decisions):
        assert not (decision.choice == never)[view_step(problem, device).needed].any()
