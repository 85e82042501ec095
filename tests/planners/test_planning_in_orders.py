"""Planners in the orders of micro-batches that a problem offers."""

import math
from dataclasses import replace

import pytest
from offered_orders import layers_with_weights, offering
from planner_cases import light
from random_steps import random_problem

from tmojax.bounds import BoundStatus, bound
from tmojax.check import check
from tmojax.importers.micro_batch_orders import BreadthFirst
from tmojax.planners.base import PlanResult, Status
from tmojax.planners.orders import Orders
from tmojax.planners.registry import PLANNERS
from tmojax.planners.simple import KeepAll, RecomputeAll
from tmojax.problem import Problem
from tmojax.problem.in_order import in_order, offered_orders
from tmojax.simulate import simulate


def test_weights_that_leave_cross_once_for_all_micro_batches():
    problem = layers_with_weights(4)
    offers = offering(problem, BreadthFirst())
    plain = PLANNERS["ratio-sweep"]().plan(problem)
    result = Orders(offers).plan(PLANNERS["ratio-sweep"]())
    assert result.schedule is not None and result.schedule.order == result.details["order"] == "breadth-first"
    assert check(offers, result.schedule).valid
    assert simulate(offers, result.schedule).step_s == result.step_s
    assert result.details["order_step_s"] == {"default": plain.step_s, "breadth-first": result.step_s}
    assert result.step_s < 0.8 * plain.step_s
    proved = bound(offers)
    assert proved.bound_s <= result.step_s
    assert proved.bound_s == min(bound(offers, order=name).bound_s for name in offered_orders(offers.workload))
    assert bound(offers, order="default").bound_s == bound(problem).bound_s


SLOW = ("local-search", "gradient", "checkmate", "checkmate-lp", "poet", "cp-sat", "budget-milp", "lockstep-milp",
        "improve", "tmo-milp", "time-indexed-milp", "exhaustive", "outer-lp", "offmate", "by-name")  # fmt: skip


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind in SLOW)) for kind in sorted(PLANNERS)]
)
def test_every_planner_plans_in_every_order(kind):
    """Plans are valid in the order that they name, take the time that they say, and no order that the planner planned
    has a faster one."""
    problem = offering(random_problem(6, factor=1.1), BreadthFirst())
    orders = Orders(problem)
    seeds = (orders.plan(light("ratio-sweep")),)
    result = orders.plan(light(kind), seeds=tuple(seed for seed in seeds if seed.schedule is not None))
    assert set(result.details["order_step_s"]) | set(result.details["orders_left_out"]) == {"default", "breadth-first"}
    if result.schedule is None:
        assert all(step_s is None for step_s in result.details["order_step_s"].values())
        return
    assert result.schedule.order == result.details["order"]
    assert check(problem, result.schedule).valid
    assert simulate(problem, result.schedule).step_s == result.step_s
    assert result.step_s == min(s for s in result.details["order_step_s"].values() if s is not None)
    assert bound(problem, time_limit_s=5).bound_s <= result.step_s * (1 + 1e-9)


def test_long_searches_go_on_in_the_order_of_the_fastest_plan():
    problem = offering(layers_with_weights(4), BreadthFirst(), BreadthFirst(group=2))
    orders = Orders(problem)
    first = orders.plan(light("ratio-sweep"))
    assert first.details["order"] == "breadth-first"
    found = orders.plan(light("improve"), seeds=(first,))
    assert set(found.details["order_step_s"]) == {"breadth-first"}
    assert found.details["orders_left_out"].keys() == {"default", "breadth-first-2"}
    # Seeds of others, as of another point of a sweep, are known by their schedules alone.
    assert first.schedule is not None
    stranger = replace(first, planner="stranger", schedule=replace(first.schedule), candidate=None)
    found = Orders(problem).plan(light("improve"), seeds=(stranger,))
    assert set(found.details["order_step_s"]) == {"breadth-first"} and found.step_s <= first.step_s
    # Without seeds, nothing is known to be promising.
    alone = Orders(problem).plan(light("improve"))
    assert set(alone.details["order_step_s"]) == {"default", "breadth-first", "breadth-first-2"}


def test_no_plan_says_why_for_every_order():
    problem = offering(layers_with_weights(2), BreadthFirst())
    problem = problem.with_device_capacity(3500)
    result = Orders(problem).plan(KeepAll())
    assert result.status is Status.NOT_FOUND and math.isinf(result.step_s)
    assert "order 'default': " in result.message and "order 'breadth-first': " in result.message
    assert "order" not in result.details


def test_a_bug_in_one_order_is_not_hidden_by_a_plan_in_another():
    class Broken(RecomputeAll):
        def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
            found = KeepAll().plan(problem)
            if problem.workload.micro_batches == 1:
                assert found.schedule is not None
                rows = found.schedule.lists[0][:-1]
                found = replace(found, schedule=replace(found.schedule, lists=(rows,)), step_s=found.step_s + 1)
            return found

    problem = offering(layers_with_weights(2), BreadthFirst()).with_device_capacity(10**6)
    result = Orders(problem).plan(Broken())
    assert result.schedule is not None and not check(problem, result.schedule).valid


def test_gpus_that_plan_alone_do_so_in_every_order():
    problem = offering(layers_with_weights(2, gpus=2), BreadthFirst())
    result = Orders(problem).plan(light("ratio-sweep"), alone=True)
    assert result.schedule is not None and result.schedule.order == "breadth-first"
    assert check(problem, result.schedule).valid and "alone_step_s" in result.details


def test_a_default_order_that_the_workload_redefines():
    """What a workload calls `default` is its default order, whatever the table says."""
    problem = random_problem(4, factor=0.2)
    other = offering(problem, BreadthFirst()).workload.programs[0]
    program = replace(other, orders={"default": other.orders["breadth-first"]})
    problem = replace(problem, workload=replace(problem.workload, programs=(program,)))
    result = Orders(problem).plan(KeepAll())
    assert result.schedule is not None and result.schedule.order == "default"
    assert check(problem, result.schedule).valid
    assert bound(problem).status is BoundStatus.COMPLETE
    assert in_order(problem, "default").together == problem.workload.micro_batches
