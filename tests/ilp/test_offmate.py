"""OffMate's step model: by hand on chains of layers, and on random problems."""

import numpy as np
import pytest
from layer_chains import layer_chain
from random_steps import random_problem

from tmojax.bounds import bound
from tmojax.check import check
from tmojax.errors import InputError
from tmojax.ilp.offmate import layer_options
from tmojax.ilp.outer_lp_layers import layers_of
from tmojax.planners.base import Status
from tmojax.planners.offmate import OffMate
from tmojax.problem import Action, Kind
from tmojax.problem.step_view import view_step


def only_solve(result):
    assert len(result.details["solves"]) == 1
    return result.details["solves"][0]


def test_options_of_a_layer():
    """What the next layer would have to run again from is kept; the inner tensor may be dropped."""
    problem = layer_chain(3, 100, 1.0, inner_bytes=8)
    view = view_step(problem, 0)
    names = [problem.workload.programs[0].tensors[t].name for t in view.tensor]
    options = layer_options(view, layers_of(problem, view), True)
    found = [[[names[i] for i in dropped] for dropped in layer] for layer in options]
    assert found[0] == [[], ["inner0"]] and found[1] == [[], ["inner1"]]
    assert found[2][0] == [] and found[2][-1] == ["inner2", "outer2"]
    assert all(len(layer) == 1 for layer in layer_options(view, layers_of(problem, view), False))


def test_with_room_for_everything_it_takes_the_compute_time():
    result = OffMate().plan(layer_chain(5, 1000, 1.0, inner_bytes=8, micro_batches=2))
    assert only_solve(result)["claimed_step_s"] == pytest.approx(40.0) and result.step_s == pytest.approx(40.0)


def test_copies_that_hide_cost_nothing():
    """Six layers of four bytes in memory for four of them; copies hide in the steps between."""
    problem = layer_chain(6, 16, 4.0, actions=(Action.OFFLOAD,))
    result = OffMate().plan(problem)
    assert only_solve(result)["claimed_step_s"] == pytest.approx(12.0, rel=1e-5)
    assert result.step_s == pytest.approx(12.0) and only_solve(result)["offloaded_bytes"] > 0


def test_recomputation_is_claimed_and_simulated_alike():
    """Four layers of 8 + 2 bytes, no copies, 30 bytes: one inner tensor runs again, a second for it."""
    problem = layer_chain(4, 30, 4.0, inner_bytes=8, outer_bytes=2, actions=(Action.RECOMPUTE,))
    result = OffMate(gap=0.0).plan(problem)
    assert result.schedule is not None and check(problem, result.schedule).valid
    assert result.step_s == pytest.approx(only_solve(result)["claimed_step_s"])
    assert 16.0 < result.step_s <= 20.0


def test_optimizer_state_goes_to_the_host_where_that_is_all_that_helps():
    """Moments of 20 bytes do not fit beside the activations: they cross twice, at the update."""
    problem = layer_chain(2, 30, 4.0, outer_bytes=10, moment_bytes=20, actions=(Action.OFFLOAD,))
    result = OffMate(gap=0.0).plan(problem)
    solve = only_solve(result)
    assert solve["resting_bytes"] >= 30.0 - 1e-6
    assert result.schedule is not None and check(problem, result.schedule).valid
    assert solve["claimed_step_s"] >= 4.0 + 30.0 / 4.0 - 1e-6


def test_weights_leave_between_forward_and_backward():
    """Six layers with weights of ten bytes each in memory for less than all: part of them is away at some time."""
    problem = layer_chain(6, 24 + 45, 20.0, weight_bytes=10, actions=(Action.OFFLOAD,))
    result = OffMate().plan(problem)
    assert result.status.has_plan and result.schedule is not None, result.message
    assert check(problem, result.schedule).valid
    rows = result.schedule.lists[0]
    moved = {problem.workload.programs[0].tensors[t].name[0] for t in rows["tensor"][rows["kind"] == Kind.PREFETCH]}
    assert "w" in moved or "o" in moved
    assert only_solve(result)["claimed_step_s"] >= 12.0 - 1e-6


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 50))])
def test_every_plan_of_random_problems_is_valid(seed):
    problem = random_problem(seed, factor=1.5)
    for rates in ("alone", "equal-share"):
        result = OffMate(rates=rates).plan(problem)
        if result.schedule is None:
            assert result.status is Status.NOT_FOUND and result.message
            continue
        report = check(problem, result.schedule)
        assert report.valid, report.text()
        assert result.step_s >= bound(problem).bound_s * (1 - 1e-6)
        assert all(solve["claimed_step_s"] >= solve["model_bound_s"] * (1 - 1e-6) for solve in result.details["solves"])


@pytest.mark.parametrize(("setting", "value"), [("rates", "log2"), ("gap", -1.0), ("solver", "cbc")])
def test_settings_out_of_range(setting, value):
    with pytest.raises(InputError, match=setting):
        OffMate(**{setting: value})


def test_less_memory_than_an_op_needs_names_it():
    result = OffMate().plan(layer_chain(6, 3, 4.0))
    assert result.status is Status.NOT_FOUND and "at op" in result.message
    assert np.isinf(result.step_s)
