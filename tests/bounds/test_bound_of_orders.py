"""The bound of a problem that offers orders of micro-batches."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offered_orders import layers_with_weights, offering
from random_steps import random_problem

from tmojax.bounds import BoundStatus, bound
from tmojax.importers.micro_batch_orders import BreadthFirst
from tmojax.planners.orders import Orders
from tmojax.planners.registry import PLANNERS
from tmojax.planners.simple import KeepAll
from tmojax.problem.in_order import offered_orders


def test_weights_cross_once_for_each_micro_batch_or_for_all():
    """The loss needs 2000 bytes next to weights of 5000, of 5200: 1800 bytes leave before it and come back behind
    it, which takes 18 s each way. That is for every micro-batch, of 11 s, or once in 44 s for all of them."""
    problem = layers_with_weights(4)
    offers = offering(problem, BreadthFirst())
    default, breadth_first = (bound(offers, order=name).bound_s for name in offered_orders(offers.workload))
    assert default == bound(problem).bound_s
    assert default > 1.5 * breadth_first
    report = bound(offers)
    assert report.bound_s == breadth_first and report.status is BoundStatus.COMPLETE
    assert report.details["order"] == "breadth-first" and report.details["default_bound_s"] == default
    assert report.micro_batches == 4 and report.micro_batch_s == pytest.approx(breadth_first / 4)
    assert all(part.micro_batch_s == pytest.approx(part.step_s / 4) for part in report.parts)


def test_infeasible_is_proved_only_if_it_is_in_every_order():
    problem = offering(layers_with_weights(2), BreadthFirst())
    assert bound(problem.with_device_capacity(2000)).status is BoundStatus.INFEASIBLE
    report = bound(problem)
    assert report.bound_s <= Orders(problem).plan(PLANNERS["ratio-sweep"]()).step_s


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), squeeze=st.sampled_from([1.0, 1.15]))
def test_no_plan_in_any_order_is_faster(seed, squeeze):
    problem = random_problem(seed, factor=squeeze)
    if problem.workload.micro_batches == 1:
        return
    problem = offering(problem, BreadthFirst())
    proved_s = {name: bound(problem, order=name).bound_s for name in offered_orders(problem.workload)}
    assert bound(problem).bound_s == min(proved_s.values())
    for planner in (KeepAll(), replace(PLANNERS["ratio-sweep"](), finalists=1, refinements=0)):
        times = Orders(problem).plan(planner).details["order_step_s"]
        assert all(step_s >= proved_s[name] * (1 - 1e-9) for name, step_s in times.items() if step_s is not None)
