"""torchtitan's outer linear programme: by hand on chains of layers, and on random problems."""

import numpy as np
import pytest
from layer_chains import layer_chain
from random_steps import random_problem

from tmojax.bounds import bound
from tmojax.check import check
from tmojax.errors import InputError
from tmojax.ilp.outer_lp_layers import layers_of
from tmojax.planners.base import Status
from tmojax.planners.outer_lp import OuterLp, layer_rates
from tmojax.problem import Action, Kind
from tmojax.problem.step_view import view_step


def test_layers_of_a_chain():
    problem = layer_chain(3, 100, 1.0, inner_bytes=5)
    layers = layers_of(problem, view_step(problem, 0))
    assert layers.saved_bytes.tolist() == [9, 9, 9]
    assert layers.forward_s.tolist() == layers.backward_s.tolist() == [2.0, 2.0, 2.0]
    assert layers.forward_bytes.tolist() == layers.backward_bytes.tolist() == [0, 0, 0]
    assert layers.slot_layer.tolist() == [0, 0, 1, 1, 2, 2, 2, 2, 1, 1, 0, 0]


def test_copies_that_hide_cost_nothing():
    """Six layers of four bytes in memory for four of them: two leave, each in the second of its own layer."""
    problem = layer_chain(6, 16, 4.0, actions=(Action.OFFLOAD,))
    result = OuterLp(rates="alone").plan(problem)
    assert result.status is Status.FEASIBLE and result.schedule is not None
    solve = result.details["solves"][0]
    assert sum(solve["offload"]) == pytest.approx(2.0) and solve["offload"][-1] == 0
    assert solve["claimed_step_s"] == pytest.approx(12.0, rel=1e-5)
    assert result.step_s == pytest.approx(12.0)


def test_recomputation_is_claimed_and_simulated_alike():
    """Without copies two layers run again, a second each."""
    problem = layer_chain(6, 16, 4.0, actions=(Action.RECOMPUTE,))
    result = OuterLp().plan(problem)
    solve = result.details["solves"][0]
    assert sum(solve["recompute"]) == pytest.approx(2.0)
    assert solve["claimed_step_s"] == solve["model_bound_s"] == pytest.approx(14.0)
    assert result.schedule is not None and check(problem, result.schedule).valid
    assert result.step_s == pytest.approx(14.0)


def test_what_does_not_hide_in_its_layer_is_recomputed():
    """At a quarter of the rate a layer offloads a quarter at most: of two layers that have to go, three quarters of one
    can be copies (three layers have a neighbour's copy in flight against them), the rest runs again."""
    problem = layer_chain(6, 16, 1.0)
    solve = OuterLp(rates="alone").plan(problem).details["solves"][0]
    assert max(solve["offload"]) <= 0.25 + 1e-9
    assert sum(solve["offload"]) + sum(solve["recompute"]) >= 2.0 - 1e-9
    assert solve["claimed_step_s"] == pytest.approx(12.0 + sum(solve["recompute"]), rel=1e-5)


def test_an_offload_price_is_weighed_against_recomputation():
    free, dear = (
        OuterLp(rates="alone", offload_price=price).plan(layer_chain(6, 16, 4.0)).details["solves"][0]
        for price in (0.0, 5.0)
    )
    assert sum(free["recompute"]) == pytest.approx(0.0) and sum(dear["offload"]) == pytest.approx(0.0)


def test_the_logarithm_of_the_ranks_divides_the_rate():
    problem = layer_chain(2, 100, 8.0, gpus=3)
    alone, log2, share = (layer_rates(problem, 0, rates) for rates in ("alone", "log2", "equal-share"))
    assert log2.out_bytes_per_s == pytest.approx(alone.out_bytes_per_s / np.log2(3))
    assert share.out_bytes_per_s == pytest.approx(alone.out_bytes_per_s / 3)
    assert layer_rates(layer_chain(2, 100, 8.0), 0, "log2").out_bytes_per_s == 8.0


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 60))])
def test_every_plan_of_random_problems_is_valid(seed):
    problem = random_problem(seed, factor=1.4)
    result = OuterLp().plan(problem)
    if result.schedule is None:
        assert result.status is Status.NOT_FOUND and result.message
        return
    report = check(problem, result.schedule)
    assert report.valid, report.text()
    assert result.step_s >= bound(problem).bound_s * (1 - 1e-6)
    for solve in result.details["solves"]:
        parts = np.array([solve["keep"], solve["recompute"], solve["offload"]])
        assert (parts >= 0).all() and np.allclose(parts.sum(0), 1.0, atol=1e-6)


def test_without_solution_or_memory_it_says_why():
    """One layer alone fits, all its neighbours' copies do not hide: a model without a solution. Less than an op needs:
    the op and the bytes."""
    result = OuterLp(rates="alone").plan(layer_chain(6, 8, 0.1, actions=(Action.OFFLOAD,)))
    assert result.status is Status.NOT_FOUND and "no solution in this memory" in result.message
    result = OuterLp().plan(layer_chain(6, 3, 4.0))
    assert result.status is Status.NOT_FOUND and "at op" in result.message
    assert not any(
        np.isin(rows["kind"], [Kind.OFFLOAD]).any() for rows in (result.schedule.lists if result.schedule else ())
    )


@pytest.mark.parametrize(("setting", "value"), [("rates", "half"), ("offload_price", -1.0), ("solver", "gurobi")])
def test_settings_out_of_range(setting, value):
    with pytest.raises(InputError, match=setting):
        OuterLp(**{setting: value})
