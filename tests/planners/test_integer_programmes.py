"""Planners that select by an integer programme: what they say about their solver, and what they take over."""

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import transformer

from tmojax.errors import InputError
from tmojax.importers.synthetic import SyntheticTransformer
from tmojax.planners.base import Status
from tmojax.planners.fluid import BudgetMilp, LockstepMilp, Oblivious, path_rates
from tmojax.planners.registry import PLANNERS
from tmojax.problem import Kind, LinkPolicyKind

PROBLEM = transformer("prototype-4gpu-12.5", factor=1.4)


@pytest.mark.parametrize("planner", [Oblivious, LockstepMilp, BudgetMilp])
def test_figures_of_the_solver_are_reported(planner):
    result = planner().plan(PROBLEM)
    assert result.status is Status.FEASIBLE and not result.time_limited
    (solve,) = result.details["solves"]  # four equal GPUs are one class
    assert solve["solver"].startswith("HiGHS") and solve["threads"] == 1
    assert solve["model_bound_s"] <= solve["claimed_step_s"] * (1 + 1e-9)
    assert solve["model_gap"] <= planner().gap


@pytest.mark.parametrize("planner", [Oblivious, LockstepMilp, BudgetMilp])
def test_a_time_limit_that_is_met_is_told(planner):
    result = planner(time_limit_s=1e-4).plan(PROBLEM)
    assert result.time_limited
    assert result.status is Status.TIME_LIMIT or (result.status is Status.NOT_FOUND and "time limit" in result.message)


def test_one_solve_for_gpus_with_equal_paths():
    """Four paths of different rates: two GPUs share each of two rates."""
    problem = transformer("uneven-risers-x6", factor=1.3)
    result = LockstepMilp().plan(problem)
    rates = {tuple(path_rates(problem, device, shared=True).__dict__.values()) for device in range(6)}
    assert 1 < len(rates) == len(result.details["solves"])
    moved = [int(np.isin(rows["kind"], [Kind.OFFLOAD]).sum()) for rows in result.schedule.lists]
    assert moved[0] > moved[-1]  # 11.8 against 0.35 GB/s


@pytest.mark.parametrize("kind", ["oblivious", "lockstep-milp", "budget-milp", "ratio-sweep"])
def test_slow_risers_are_not_given_the_plan_of_the_fast_slot(kind):
    """Equal GPUs on unequal paths. The plan of the fast one on a path of 0.35 GB/s would take many times as long."""
    spec = SyntheticTransformer(layers=6, compute_s=0.2)
    problem = transformer("uneven-risers-x6", factor=1.6, micro_batches=4, spec=spec)
    assert PLANNERS[kind]().plan(problem).step_s < 1.1 * PLANNERS["recompute-all"]().plan(problem).step_s


def test_policy_and_stagger_take_over_the_selection():
    fair = Oblivious().plan(PROBLEM)
    later = Oblivious(name="later", policy="fcfs", stagger_share=1.0)
    taken = later.plan(PROBLEM, seeds=(fair,))
    assert taken.details["selection_from"] == "oblivious-fair"
    alone = later.plan(PROBLEM)
    assert "selection_from" not in alone.details
    for a, b in zip(taken.schedule.lists, alone.schedule.lists, strict=True):
        assert np.array_equal(a, b)
    assert taken.step_s == alone.step_s
    # The same tensors move; only the order on shared links and the starts differ.
    for a, b in zip(fair.schedule.lists, taken.schedule.lists, strict=True):
        assert np.array_equal(a[a["kind"] < Kind.SIGNAL], b[b["kind"] < Kind.SIGNAL])
    assert {policy.kind for policy in fair.schedule.link_policies} == {LinkPolicyKind.FAIR}
    assert LinkPolicyKind.FCFS in {policy.kind for policy in taken.schedule.link_policies}


def test_nobody_coordinates_one_gpu():
    problem = transformer("gh200", factor=1.4)
    times = {kind: PLANNERS[kind]().plan(problem).step_s for kind in ("oblivious", "lockstep-milp")}
    assert times["oblivious"] == times["lockstep-milp"]


@pytest.mark.parametrize("settings", [{"policy": "random"}, {"stagger_share": 1.5}, {"stagger_share": -0.1}])
def test_settings_out_of_range(settings):
    with pytest.raises(InputError, match=next(iter(settings))):
        Oblivious(**settings)


@pytest.mark.parametrize(("planner", "kind"), [(LockstepMilp, "offload-all"), (BudgetMilp, "ratio-sweep")])
def test_warm_start_from_any_plan(planner, kind):
    """With a gap that any solution meets, the claim shows that the start was taken."""
    problem = transformer("prototype-4gpu-12.5", factor=1.2)
    earlier = PLANNERS[kind]().plan(problem)
    cold = planner(gap=0.0).plan(problem)
    warm = planner(gap=0.0, warm_start=True).plan(problem, seeds=(earlier, PLANNERS["keep-all"]().plan(problem)))
    assert warm.details["warm_start_from"] == earlier.planner and "warm_start_from" not in cold.details
    (first,), (second,) = cold.details["solves"], warm.details["solves"]
    assert second["claimed_step_s"] == pytest.approx(first["claimed_step_s"], rel=1e-5)
    hasty = planner(gap=1e9, warm_start=True).plan(problem, seeds=(earlier,))
    assert hasty.status is Status.FEASIBLE and hasty.details["solves"][0]["claimed_step_s"] > 0


def test_warm_start_from_a_plan_that_only_has_a_schedule():
    problem = transformer("prototype-4gpu-12.5", factor=1.2)
    earlier = replace(PLANNERS["ratio-sweep"]().plan(problem), candidate=None)
    warm = LockstepMilp(gap=1e9, warm_start=True).plan(problem, seeds=(earlier,))
    assert warm.details["warm_start_from"] == "ratio-sweep" and warm.status is Status.FEASIBLE
