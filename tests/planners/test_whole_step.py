"""Selections that decide for state and activations at once: they fit, move state where it has to, and are the same
every time."""

from dataclasses import replace

import pytest
from planner_cases import transformer

from tmojax.check import check
from tmojax.importers.synthetic import SyntheticTransformer
from tmojax.planners.whole_step import selected_plans, whole_step_selections
from tmojax.planners.workbench import Workbench
from tmojax.problem import Action
from tmojax.relax.decode import DoesNotFit

# Weights and gradients are most of the memory, activations cheap to make again.
HEAVY = SyntheticTransformer(layers=2, tokens=1024, width=256, compute_s=0.002, parameters=6 * 10**6)


def heavy(factor: float, micro_batches: int = 1):
    return transformer("prototype-4gpu-12.5", factor=factor, micro_batches=micro_batches, spec=HEAVY)


@pytest.mark.parametrize("factor", [1.2, 1.6])
def test_they_fit_and_are_the_same_every_time(factor):
    problem = heavy(factor)
    bench = Workbench(problem)
    found = list(whole_step_selections(bench))
    assert found
    for decisions in found:
        assert not isinstance(bench.lists(decisions), DoesNotFit)
        assert all(decision.same_as(decisions[0]) for decision in decisions)  # equal GPUs
    again = list(whole_step_selections(Workbench(problem)))
    assert all(a[0].same_as(b[0]) for a, b in zip(found, again, strict=True))
    plans = selected_plans(Workbench(problem))
    assert plans and all(check(problem, plan.schedule).valid for plan in plans)


def test_state_leaves_where_it_does_not_fit_and_stays_where_it_does():
    tight, roomy = (next(whole_step_selections(Workbench(heavy(factor)))) for factor in (1.9, 0.9))
    assert tight[0].state_out.any()
    assert not roomy[0].state_out.any()


def test_there_are_none_for_several_micro_batches_or_without_offloading():
    assert not list(whole_step_selections(Workbench(heavy(1.5, micro_batches=2))))
    recompute_only = replace(heavy(1.5), actions=frozenset({Action.RECOMPUTE}))
    assert not list(whole_step_selections(Workbench(recompute_only)))


def test_only_the_fastest_is_a_plan_to_start_from_and_only_if_it_is_faster():
    bench = Workbench(heavy(1.6))
    (plan,) = selected_plans(bench)
    assert selected_plans(bench, plan.step_s) == []
    assert [other.step_s for other in selected_plans(bench, 1.001 * plan.step_s)] == [plan.step_s]
