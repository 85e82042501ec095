"""More memory never gives a slower plan; of bandwidths, the better of neighbouring plans counts."""

from dataclasses import replace
from itertools import pairwise

import pytest
from planner_cases import transformer
from random_steps import random_problem

from tmojax.check import check
from tmojax.importers.synthetic import SyntheticTransformer
from tmojax.planners.base import Planner, PlanResult, Status
from tmojax.planners.fluid import Oblivious
from tmojax.planners.gradient import Gradient, LocalSearch
from tmojax.planners.local_search import SearchSettings
from tmojax.planners.points import Offer, by_size, exchange, plan_points, taken_over
from tmojax.planners.ratio import RatioSweep
from tmojax.planners.simple import KeepAll, OffloadAll, RecomputeAll, SqrtCheckpointing
from tmojax.problem import Action, keep_all_footprint_bytes
from tmojax.simulate import simulate

TINY = SyntheticTransformer(layers=2, tokens=1024, width=256, compute_s=0.002, parameters=10**5)
SIMPLE = (KeepAll(), OffloadAll(), RecomputeAll(), SqrtCheckpointing())
QUICK = (*SIMPLE, RatioSweep(link_loads=(0.0, 0.5, 1.0, 1000.0), finalists=1),
         LocalSearch(search=SearchSettings(evaluations=8)))  # fmt: skip


def two_gpus():
    return transformer("dual-socket-v100x4", factor=1.0, micro_batches=2, spec=TINY)


def over_memory(problem, count, least=1.0, most=2.0):
    """Problems from footprint / most to footprint / least, their labels, from much memory to little."""
    factors = [least + (most - least) * point / (count - 1) for point in range(count)]
    footprint = keep_all_footprint_bytes(problem.workload, 0)
    return [problem.with_device_capacity(int(footprint / factor)) for factor in factors], [
        f"capacity.footprint_factor={factor:.2f}" for factor in factors
    ]


def over_bandwidth(problem, count):
    """All links from a half to twice as fast."""
    scales = [0.5 * 4 ** (point / (count - 1)) for point in range(count)]
    problems = []
    for scale in scales:
        links = tuple(
            replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * scale) for link in problem.machine.links
        )
        problems.append(replace(problem, machine=replace(problem.machine, links=links)))
    return problems, [f"rate={scale:.2f}" for scale in scales]


def best_times(points):
    return [min((plan.step_s for plan in plans), default=float("inf")) for plans in points]


def promises_hold(problems, points, searches):
    """Valid, timed exactly, and a search no slower than anything of the same point that it was given."""
    for problem, plans in zip(problems, points, strict=True):
        for place, plan in enumerate(plans):
            report = check(problem, plan.schedule)
            assert report.valid, report.text()
            assert plan.step_s == simulate(problem, plan.schedule).step_s
            if plan.planner in searches:
                assert plan.step_s <= min(earlier.step_s for earlier in plans[:place])


@pytest.mark.parametrize(
    "actions",
    [
        pytest.param({Action.OFFLOAD, Action.RECOMPUTE}, id="both"),
        pytest.param({Action.OFFLOAD}, id="offload", marks=pytest.mark.long),
    ],
)
def test_twenty_points_of_memory(actions):
    problems, labels = over_memory(replace(two_gpus(), actions=frozenset(actions)), 20)
    points = plan_points(problems, labels, QUICK if Action.RECOMPUTE in actions else (*SIMPLE, QUICK[-1]))
    promises_hold(problems, points, {"local-search"})
    times_s = best_times(points)  # from much memory to little
    assert all(more <= less for more, less in pairwise(times_s))
    assert times_s[0] < times_s[-1] and times_s[0] < float("inf")


def test_planners_alone_are_not_monotone_so_that_plans_are_taken_over():
    problems, labels = over_memory(two_gpus(), 10)
    points = plan_points(problems, labels, (Jumpy(),))
    alone_s = best_times([[plan for plan in plans if "@" not in plan.planner] for plans in points])
    assert any(more > less for more, less in pairwise(alone_s))
    assert all(more <= less for more, less in pairwise(best_times(points)))
    taken = [plan for plans in points for plan in plans if "@" in plan.planner]
    assert all(plan.message == f"the plan of jumpy for {plan.details['taken_over_from']}" for plan in taken)
    assert {plan.details["taken_over_from"] for plan in taken} <= set(labels)


class Jumpy(Planner):
    """A good plan at every other point only."""

    name = "jumpy"

    def __init__(self):
        self._calls = 0

    def plan(self, problem, *, seed=0, seeds=()):
        self._calls += 1
        plans = [planner.plan(problem) for planner in (OffloadAll(), QUICK[-2])]
        with_plan = sorted((plan for plan in plans if plan.status.has_plan), key=lambda plan: plan.step_s)
        if not with_plan:
            return PlanResult(self.name, Status.NOT_FOUND)
        return replace(with_plan[0 if self._calls % 2 else -1], planner=self.name)


def test_twenty_points_of_bandwidth():
    problem = transformer("dual-socket-v100x4", factor=1.4, micro_batches=2, spec=TINY)
    problems, labels = over_bandwidth(problem, 20)
    points = plan_points(problems, labels, (*SIMPLE, QUICK[-1]))
    promises_hold(problems, points, {"local-search"})
    best = [min(plans, key=lambda plan: plan.step_s) for plans in points]
    for here, there in pairwise(range(20)):
        for target, source in ((here, there), (there, here)):
            assert best[target].step_s <= simulate(problems[target], best[source].schedule).step_s
    # A plan is hardly ever slower on faster links, but it can be; what a point found stays at least as good as theirs.
    assert best[-1].step_s < best[0].step_s


@pytest.mark.long
@pytest.mark.parametrize("preset", ["prototype-4gpu-12.5", "dual-socket-v100x4", "uneven-risers-x6", "gh200"])
def test_twenty_points_of_memory_with_integer_programmes(preset):
    problem = transformer(preset, factor=1.0, micro_batches=2)
    problems, labels = over_memory(problem, 20, most=3.0)
    planners = (*SIMPLE, Oblivious(), RatioSweep(), LocalSearch(search=SearchSettings(evaluations=20)))
    points = plan_points(problems, labels, planners)
    promises_hold(problems, points, {"local-search"})
    assert all(more <= less for more, less in pairwise(best_times(points)))


@pytest.mark.long
def test_points_of_memory_with_the_gradient():
    problems, labels = over_memory(two_gpus(), 5, least=1.2)
    gradient = Gradient(restarts=2, steps=40, roundings=6, search=SearchSettings(evaluations=20))
    points = plan_points(problems, labels, (*QUICK, gradient))
    promises_hold(problems, points, {"local-search", "gradient"})
    of_gradient = [next((p.step_s for p in plans if p.planner == "gradient"), float("inf")) for plans in points]
    assert all(more <= less for more, less in pairwise(of_gradient))


@pytest.mark.parametrize("seed", [1, 4, 7])
def test_random_steps_over_memory(seed):
    problem = random_problem(seed, factor=1.0)
    problems, labels = over_memory(problem, 6, most=1.6)
    points = plan_points(problems, labels, (*SIMPLE, LocalSearch(search=SearchSettings(evaluations=10))))
    promises_hold(problems, points, {"local-search"})
    assert all(more <= less for more, less in pairwise(best_times(points)))


def test_a_plan_for_more_memory_is_taken_only_where_it_fits():
    problems, labels = over_memory(two_gpus(), 2)
    roomy = KeepAll().plan(problems[0])
    assert roomy.status.has_plan
    assert taken_over(problems[1], Offer(roomy, problems[0], labels[0])) is None
    tight = OffloadAll().plan(problems[1])
    taken = taken_over(problems[0], Offer(tight, problems[1], labels[1]))
    assert taken.planner == "offload-all@2.00" and taken.step_s == tight.step_s
    assert taken.candidate is not None and taken.status is Status.FEASIBLE
    # Handed on once more, it keeps the name of where it was found.
    again = taken_over(problems[0], Offer(taken, problems[0], labels[0]))
    assert (again.planner, again.details) == (taken.planner, taken.details)


def test_a_plan_of_another_workload_is_not_taken():
    problem = two_gpus()
    other = replace(problem, workload=replace(problem.workload, micro_batches=3))
    plan = OffloadAll().plan(problem)
    assert taken_over(other, Offer(plan, problem, "micro_batches=2")) is None


def test_points_are_ordered_by_memory_then_by_speed():
    problems, _ = over_memory(two_gpus(), 4)
    assert by_size(problems) == [3, 2, 1, 0]
    faster, _ = over_bandwidth(problems[3], 3)
    assert by_size([*reversed(faster), problems[0]]) == [2, 1, 0, 3]


def test_neighbours_exchange_until_nothing_gets_faster():
    """Plan p takes |p - point| + 1 at any point; only point 6 has found plan 3. At 6, plan 9 is no faster, so that it
    does not get to 7."""
    plans = [{0}, {0}, {0}, {0}, {9}, {9}, {3}, set()]

    def best(point):
        return min(plans[point], key=lambda plan: (abs(plan - point), plan), default=None)

    def best_s(point):
        return float("inf") if best(point) is None else abs(best(point) - point) + 1.0

    exchange(len(plans), best_s, lambda source, target: plans[target].add(best(source)))
    assert [best(point) for point in range(8)] == [0, 0, 3, 3, 3, 3, 3, 3]
