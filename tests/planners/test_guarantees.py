"""What every search promises: a valid plan wherever a seed has one, never slower than any of them, the same twice."""

from functools import cache

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from planner_cases import cases, light, transformer
from random_steps import random_problem

from tmojax.check import check
from tmojax.planners.base import PlanResult, Status
from tmojax.planners.gradient import LocalSearch
from tmojax.planners.local_search import SearchSettings
from tmojax.planners.ratio import RatioSweep
from tmojax.planners.registry import PLANNERS
from tmojax.planners.simple import KeepAll, OffloadAll, RecomputeAll, SqrtCheckpointing
from tmojax.problem import Action, Problem
from tmojax.simulate import simulate

SEARCHES = ("local-search", "improve", "gradient")
QUICK = (KeepAll(), OffloadAll(), RecomputeAll(), SqrtCheckpointing(), RatioSweep(link_loads=(0.0, 0.7, 1000.0)))
CASES = {**cases(), "two-sockets": transformer("dual-socket-v100x4", factor=1.4, micro_batches=2)}
# Enough for the comparison under jitter, which a search of fewer simulations leaves out.
SEARCH = LocalSearch(search=SearchSettings(evaluations=160))


def promises_hold(problem: Problem, found: PlanResult, seeds: tuple[PlanResult, ...]):
    best_s = min((seed.step_s for seed in seeds if seed.status.has_plan), default=float("inf"))
    assert found.step_s <= best_s
    if not found.status.has_plan:
        assert found.status is Status.NOT_FOUND and found.message and best_s == float("inf")
        return
    assert found.schedule is not None
    report = check(problem, found.schedule)
    assert report.valid, report.text()
    assert found.step_s == simulate(problem, found.schedule).step_s
    assert found.candidate is None or found.candidate.step_s == found.step_s


@settings(
    max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # shrinking takes minutes
@given(
    number=st.integers(0, 10_000),
    factor=st.floats(0.95, 1.4),
    actions=st.sampled_from([{Action.OFFLOAD, Action.RECOMPUTE}, {Action.OFFLOAD}, {Action.RECOMPUTE}]),
    without_decisions=st.booleans(),
    seed=st.integers(0, 3),
)
def test_local_search_of_random_steps(number, factor, actions, without_decisions, seed):
    """Also where all that is known of the plans before is their schedules."""
    problem = random_problem(number, factor=factor, actions=tuple(sorted(actions)))
    seeds = tuple(planner.plan(problem) for planner in QUICK)
    if without_decisions:
        seeds = tuple(
            PlanResult(plan.planner, plan.status, plan.schedule, plan.step_s, message=plan.message) for plan in seeds
        )
    found = SEARCH.plan(problem, seed=seed, seeds=seeds)
    promises_hold(problem, found, seeds)
    again = SEARCH.plan(problem, seed=seed, seeds=seeds)
    timed = "improvements_over_time"  # of the details, the only one that the clock changes
    assert again.step_s == found.step_s
    assert {**again.details, timed: None} == {**found.details, timed: None}
    if found.schedule is not None:
        assert again.schedule is not None and again.schedule.same_as(found.schedule)


@cache
def heuristics(case: str) -> tuple[PlanResult, ...]:
    """Every planner that does not search, integer programmes and TMO's mechanisms included."""
    kinds = PLANNERS.keys() - {*SEARCHES, "exhaustive", "cp-sat", "time-indexed-milp"}
    return tuple(light(kind).plan(CASES[case]) for kind in sorted(kinds))


EVERY = [
    pytest.param(kind, case, marks=[] if (kind, case) == ("local-search", "two-sockets") else [pytest.mark.long])
    for kind in SEARCHES
    for case in CASES
    if kind != "gradient" or case in ("shared-path", "two-sockets", "offload-only")  # it compiles for every shape
]


@pytest.mark.parametrize(("kind", "case"), EVERY)
def test_no_search_is_slower_than_any_heuristic_of_the_run(kind, case):
    planner = SEARCH if kind == "local-search" else light(kind)
    promises_hold(CASES[case], planner.plan(CASES[case], seeds=heuristics(case)), heuristics(case))


@pytest.mark.parametrize("number", [6, 11])
@pytest.mark.parametrize("kind", ["local-search", "cp-sat"])
def test_searches_alone_find_a_plan_where_only_state_at_home_on_the_host_fits(number, kind):
    """None of the simple strategies, which searches start from alone, gets by with so little memory."""
    problem = random_problem(number, factor=1.5 if number == 6 else 1.7)
    assert not any(planner.plan(problem).status.has_plan for planner in QUICK[:4])
    found = light(kind).plan(problem)
    promises_hold(problem, found, ())
    assert found.status.has_plan
