"""Of plans that are nearly equally fast, the one that jitter hurts least; never at the cost of a guarantee."""

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import cases, transformer

from tmojax.planners.gradient import LocalSearch
from tmojax.planners.local_search import SearchSettings, local_search, robust_choice
from tmojax.planners.ratio import RatioSweep
from tmojax.planners.robust import LEAST_SAMPLES, NEAR, most_robust
from tmojax.planners.simple import OffloadAll, offload_everything
from tmojax.planners.workbench import Workbench
from tmojax.problem import LinkPolicyKind
from tmojax.relax.coordinate import Coordination, together
from tmojax.simulate import jitter

CASES = cases()


@pytest.fixture(scope="module")
def bench():
    return Workbench(transformer("prototype-4gpu-12.5", factor=1.4))


@pytest.fixture(scope="module")
def pair(bench):
    """(fast in name, steady): the first is 0.4 % faster by what it says and 10 % slower under jitter. Both say so short
    a time that nothing else is near."""
    decisions = tuple(offload_everything(bench.view(device)) for device in range(4))
    quick = bench.evaluate(decisions, Coordination((0.0, 0.2, 0.4, 0.6), LinkPolicyKind.FCFS))
    slow = bench.evaluate(decisions, together(bench.problem))
    assert slow.step_s > 1.1 * quick.step_s
    return replace(slow, step_s=1e-6), replace(quick, step_s=1.004e-6)


def test_the_steadier_of_two_that_are_near(bench, pair):
    choice = most_robust(bench, pair, limit_s=1.01e-6, simulations=200, seed=0)
    assert choice.plan is pair[1]
    assert choice.figures["chosen"]["step_s"] == 1.004e-6 and choice.figures["fastest"]["step_s"] == 1e-6
    assert choice.figures["chosen"]["p95_s"] < choice.figures["fastest"]["p95_s"] / 1.1


def test_what_is_not_near_does_not_count(bench, pair):
    far = replace(pair[1], step_s=1e-6 * (1 + 1.01 * NEAR))
    assert most_robust(bench, (pair[0], far), limit_s=2.0, simulations=200, seed=0).plan is pair[0]


def test_nor_what_is_no_faster_than_what_was_there_before(bench, pair):
    assert most_robust(bench, pair, limit_s=1.004e-6, simulations=200, seed=0).plan is pair[0]
    assert most_robust(bench, pair, limit_s=0.5e-6, simulations=200, seed=0).plan is pair[0]


def test_too_few_simulations_for_a_comparison(bench, pair):
    choice = most_robust(bench, pair, limit_s=2.0, simulations=2 * LEAST_SAMPLES - 1, seed=0)
    assert choice.plan is pair[0] and choice.figures == {"compared": 1}


def test_the_other_link_policies_are_compared(bench):
    decisions = tuple(offload_everything(bench.view(device)) for device in range(4))
    plan = bench.evaluate(decisions, Coordination((0.0, 0.25, 0.5, 0.75), LinkPolicyKind.FCFS))
    choice = most_robust(bench, [plan], limit_s=np.inf, simulations=200, seed=0)
    assert choice.figures["compared"] > 1
    assert choice.plan.step_s <= plan.step_s * (1 + NEAR)


@pytest.mark.parametrize("case", sorted(CASES))
def test_within_half_a_per_cent_and_the_same_twice(case):
    bench = Workbench(CASES[case])
    decisions = tuple(offload_everything(bench.view(device)) for device in range(bench.device_count))
    start = bench.evaluate(decisions, together(bench.problem))
    if not hasattr(start, "step_s"):
        return
    settings = SearchSettings(evaluations=160)
    fastest, log = local_search(bench, start, settings, 0)
    plan, figures = robust_choice(bench, log, settings, start.step_s, 0)
    again, same_figures = robust_choice(Workbench(CASES[case]), log, settings, start.step_s, 0)
    assert plan.step_s <= min(start.step_s, fastest.step_s * (1 + NEAR))
    assert (plan.step_s, figures) == (again.step_s, same_figures)
    if figures["compared"] > 1:
        assert figures["chosen"]["p95_s"] <= figures["fastest"]["p95_s"]
        # The run reports another sample of the same distribution.
        p95_s = jitter(bench.problem, plan.schedule, samples=60)[1]
        assert p95_s == pytest.approx(figures["chosen"]["p95_s"], rel=0.03)


def test_searches_say_what_they_compared_and_stay_ahead_of_their_seeds():
    problem = transformer("dual-socket-v100x4", factor=1.4)
    seeds = tuple(planner.plan(problem) for planner in (OffloadAll(), RatioSweep()))
    found = LocalSearch(search=SearchSettings(evaluations=200)).plan(problem, seeds=seeds)
    assert found.step_s <= min(seed.step_s for seed in seeds)
    robust = found.details["robust"]
    assert found.step_s <= found.details["after_local_search_step_s"] * (1 + NEAR)
    if robust["compared"] > 1:
        assert robust["chosen"]["step_s"] == found.step_s
