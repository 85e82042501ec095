"""Problems that differ in one number, such as device memory or bandwidth: plans of one point are offered to the others.

A plan for less memory is a plan for more. With points in the order of their memory, each of which is offered the best
plan of those before it, more memory never gives a slower plan; with bandwidths, the better of neighbouring plans
counts. What is offered is checked and simulated again, and has to be for the same workload.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tmojax.check import check
from tmojax.planners.base import Planner, PlanResult, Status, Stopwatch
from tmojax.problem import Problem
from tmojax.simulate import simulate


@dataclass(frozen=True, eq=False)
class Offer:
    """A plan of another point. label: of the point, as people name it, such as `capacity.footprint_factor=2`."""

    plan: PlanResult
    made_for: Problem
    label: str


def taken_over(problem: Problem, offer: Offer) -> PlanResult | None:
    """The plan as one for `problem`, checked and simulated there; None where it is not valid, for another workload, or
    from a point where more actions are allowed.

    It is named `PLANNER@VALUE` and says in `message` and `details` from where it is. A plan that its point had taken
    over itself keeps the name of the point that found it.
    """
    watch, plan = Stopwatch(), offer.plan
    if plan.schedule is None or problem.workload != offer.made_for.workload:
        return None
    if not offer.made_for.actions <= problem.actions:
        return None
    if not check(problem, plan.schedule).valid:
        return None
    step_s = simulate(problem, plan.schedule).step_s
    if not math.isfinite(step_s):
        return None
    origin = {"taken_over_from": offer.label, "planner": plan.planner, "step_s_there": plan.step_s}
    origin = {key: plan.details[key] if "taken_over_from" in plan.details else value for key, value in origin.items()}
    value = re.sub(r"[^A-Za-z0-9._+-]+", "", origin["taken_over_from"].rpartition("=")[2])
    return replace(
        plan,
        planner=f"{origin['planner']}@{value}",
        status=Status.TIME_LIMIT if plan.time_limited else Status.FEASIBLE,
        step_s=step_s,
        plan_s=watch.read_s(),
        compile_s=0.0,
        message=f"the plan of {origin['planner']} for {origin['taken_over_from']}",
        candidate=None if plan.candidate is None else replace(plan.candidate, step_s=step_s),
        details=origin,
    )


def by_size(problems: Sequence[Problem]) -> list[int]:
    """Positions of the problems from the least device memory to the most; of equals, from the slowest links."""

    def size(position: int) -> tuple[int, float]:
        problem = problems[position]
        memory = sum(problem.capacity_bytes(device) for device in range(problem.workload.device_count))
        return memory, sum(link.bandwidth_bytes_per_s for link in problem.machine.links)

    return sorted(range(len(problems)), key=size)


def exchange(count: int, best_s: Callable[[int], float], offer: Callable[[int, int], object]) -> None:
    """Let points 0 .. count-1 take over plans of their neighbours until none is faster than what a point has.

    `best_s(point)`: the step time of its best plan, inf without one. `offer(source, target)`: the target may take over
    the source's best plan; it only does if that is faster there.
    """
    offered: set[tuple[int, int, float]] = set()
    changed = True
    while changed:
        changed = False
        for target in [*range(count), *reversed(range(count))]:
            for source in (target - 1, target + 1):
                if not 0 <= source < count or not math.isfinite(best_s(source)):
                    continue
                if (source, target, best_s(source)) in offered:
                    continue
                offered.add((source, target, best_s(source)))
                before_s = best_s(target)
                offer(source, target)
                changed |= best_s(target) < before_s


def plan_points(
    problems: Sequence[Problem], labels: Sequence[str], planners: Sequence[Planner], *, seed: int = 0
) -> list[list[PlanResult]]:
    """The valid plans of every problem, in the order given: what planners find, and what is taken over from neighbours.

    Every point starts with the best plan of the point before it (`by_size`), which planners get among their seeds.
    After the last point neighbours exchange their best plans.
    """
    order = by_size(problems)
    found: dict[int, list[PlanResult]] = {point: [] for point in order}

    def best(point: int) -> PlanResult | None:
        return min(found[point], key=lambda plan: plan.step_s, default=None)

    def best_s(place: int) -> float:
        plan = best(order[place])
        return math.inf if plan is None else plan.step_s

    def hand_on(source: int, target: int) -> None:
        plan = best(order[source])
        assert plan is not None
        point = order[target]
        taken = taken_over(problems[point], Offer(plan, problems[order[source]], labels[order[source]]))
        if taken is not None and taken.step_s < best_s(target):
            found[point].append(taken)

    for place, point in enumerate(order):
        earlier = next((other for other in reversed(range(place)) if math.isfinite(best_s(other))), None)
        if earlier is not None:
            hand_on(earlier, place)
        for planner in planners:
            plan = planner.plan(problems[point], seed=seed, seeds=tuple(found[point]))
            if plan.schedule is not None and check(problems[point], plan.schedule).valid:
                found[point].append(plan)
    exchange(len(order), best_s, hand_on)
    return [found[point] for point in range(len(problems))]
