"""Planning a problem that offers orders of micro-batches: every planner, in each order, and the fastest plan counts.

In each order the problem is one of its own (`tmojax.problem.in_order`), so planners need not know of orders. What is
found in an order is a seed for the planners after it in that order. The searches that take longest get the most
promising orders only, those with the fastest seeds; `local-search` plans in all of them, so that it is known which
these are.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

from tmojax.check import check
from tmojax.planners.alone import Alone
from tmojax.planners.base import Planner, PlanResult, Status, Stopwatch
from tmojax.planners.cp_sat import CpSat
from tmojax.planners.gradient import Gradient
from tmojax.planners.improve import Improve
from tmojax.problem import Problem
from tmojax.problem.in_order import InOrder, in_order, offered_orders

# These go on from what others have found, and take long.
LONG_SEARCHES = (Gradient, Improve, CpSat)
# So many orders they get: the most promising one, and others whose seeds are hardly slower.
MOST_SEARCHED, NEARLY = 2, 1.01


class _Order:
    """One order: the problem that it is, and what is known there."""

    def __init__(self, written: InOrder) -> None:
        self.written = written
        # By the schedule of the original problem: valid results of this one, their decisions included.
        self.found: dict[int, tuple[object, PlanResult]] = {}

    @cached_property
    def alone(self) -> Alone:
        """Plans in which no GPU knows of the others."""
        return Alone(self.written.problem)

    @property
    def seeds(self) -> tuple[PlanResult, ...]:
        return tuple(result for _, result in self.found.values())

    @property
    def best_s(self) -> float:
        return min((seed.step_s for seed in self.seeds if seed.status.has_plan), default=math.inf)

    def learn(self, result: PlanResult) -> None:
        """A valid plan of the original problem in this order; nothing new if it was found here."""
        if result.schedule is not None and id(result.schedule) not in self.found:
            inside = replace(result, schedule=self.written.there(result.schedule), candidate=None)
            self.found[id(result.schedule)] = result.schedule, inside

    def plan(self, planner: Planner, seed: int, alone: bool) -> tuple[PlanResult, bool]:
        """What the planner finds, for the original problem; and whether a plan is valid."""
        if alone:
            inside = self.alone.plan(planner, seed=seed)
        else:
            inside = planner.plan(self.written.problem, seed=seed, seeds=self.seeds)
        if inside.schedule is None:
            return inside, True
        # Decisions are numbered as the problem of this order has them, so they stay here.
        outside = replace(inside, schedule=self.written.back(inside.schedule), candidate=None)
        valid = check(self.written.problem, inside.schedule).valid
        if valid and not alone:
            self.found[id(outside.schedule)] = outside.schedule, inside
        return outside, valid


class Orders:
    """Plans of one problem in all orders that it offers."""

    def __init__(self, problem: Problem) -> None:
        self._orders = {name: _Order(in_order(problem, name)) for name in offered_orders(problem.workload)}

    def plan(
        self, planner: Planner, *, seed: int = 0, seeds: tuple[PlanResult, ...] = (), alone: bool = False
    ) -> PlanResult:
        """The fastest plan of `planner` in any order; `seeds` are valid plans of this problem, in any order as well.

        `details` has those of the planner and `order`; `order_step_s`: step time of its plan in every order, None where
        it has none; `orders_left_out`: those in which a long search did not plan, with the times of their fastest
        seeds. Every order is planned on its own, so time limits are for each. With `alone`, GPUs plan without
        knowing of each other (`tmojax.planners.alone`), from seeds of their own.
        """
        watch = Stopwatch()
        for found in seeds:
            if found.schedule is not None:
                self._orders[found.schedule.order].learn(found)
        names = self._promising() if isinstance(planner, LONG_SEARCHES) and not alone else list(self._orders)
        plans: dict[str, PlanResult] = {}
        broken: list[str] = []
        for name in names:
            plans[name], valid = self._orders[name].plan(planner, seed, alone)
            broken += [] if valid else [name]
        # A plan that the checker rejects is an error of the planner, which must not hide behind the plan of an order.
        best = broken[0] if broken else min(plans, key=lambda name: plans[name].step_s)
        left_out = {name: order.best_s for name, order in self._orders.items() if name not in plans}
        return self._result(plans, best, left_out, watch)

    def _promising(self) -> list[str]:
        """The orders with the fastest seeds; all, where nothing is known."""
        by_time = sorted(self._orders, key=lambda name: self._orders[name].best_s)
        least_s = self._orders[by_time[0]].best_s
        if math.isinf(least_s):
            return list(self._orders)
        return [name for name in by_time[:MOST_SEARCHED] if self._orders[name].best_s <= least_s * NEARLY]

    def _result(
        self, plans: dict[str, PlanResult], best: str, left_out: dict[str, float], watch: Stopwatch
    ) -> PlanResult:
        result, found = plans[best], list(plans.values())
        status, message = result.status, result.message
        if result.schedule is None:
            message = "; ".join(f"order '{name}': {plan.message or plan.status}" for name, plan in plans.items())
            if status is Status.INFEASIBLE and not (all(p.status is status for p in found) and not left_out):
                status = Status.NOT_FOUND
        elif status is Status.OPTIMAL and not (
            all(p.status in (Status.OPTIMAL, Status.INFEASIBLE) for p in found) and not left_out
        ):
            status = Status.FEASIBLE
        details = {
            **result.details,
            **({"order": best} if result.schedule is not None else {}),
            "order_step_s": {name: p.step_s if p.schedule is not None else None for name, p in plans.items()},
            "orders_left_out": {name: s if math.isfinite(s) else None for name, s in left_out.items()},
        }
        return replace(
            result, status=status, message=message, details=details, plan_s=watch.read_s(),
            compile_s=sum(plan.compile_s for plan in found), time_limited=any(plan.time_limited for plan in found),
        )  # fmt: skip
