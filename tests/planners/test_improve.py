"""Large-neighbourhood search: never slower than its start, strictly faster where it says so, the same twice."""

import dataclasses

import numpy as np
import pytest
from planner_cases import cases, transformer
from random_steps import random_problem

from tmojax.check import check
from tmojax.errors import InputError
from tmojax.ilp.cp_sat import CpSettings, solve_cp_sat
from tmojax.ilp.cp_sat_start import read_schedule
from tmojax.ilp.cp_sat_times import model_of, step_ticks
from tmojax.ilp.neighbourhood import Neighbourhood, choose, offered
from tmojax.planners.base import PlanResult, Status
from tmojax.planners.improve import Improve
from tmojax.planners.ratio import RatioSweep
from tmojax.planners.simple import OffloadAll, RecomputeAll
from tmojax.planners.workbench import Workbench
from tmojax.problem import Kind, LinkPolicyKind
from tmojax.simulate import simulate

FEW = {"iterations": 4, "free": 12, "sub_limit": 0.02}


def with_start(problem):
    """(model, solution) of a plan that offloads everything."""
    seed = OffloadAll().plan(problem)
    bench = Workbench(problem)
    views = tuple(bench.view(device) for device in range(bench.device_count))
    model = model_of(problem, views, seed.step_s / 1e6)
    return model, read_schedule(model, seed.schedule)


def test_it_improves_what_is_poorly_coordinated():
    """Everything offloaded at once on fairly shared links: the copies' turns alone are worth several per cent."""
    problem = random_problem(4, factor=1.15)
    seed = OffloadAll().plan(problem)
    result = Improve(**FEW).plan(problem, seeds=(seed,))
    assert result.status is Status.FEASIBLE and not result.time_limited
    assert result.step_s < 0.98 * seed.step_s
    assert result.details["start"] == {"from": "offload-all", "step_s": seed.step_s}
    assert result.details["end_step_s"] == result.step_s == simulate(problem, result.schedule).step_s
    assert sum(result.details["improvements"].values()) >= 1
    assert check(problem, result.schedule).valid


@pytest.mark.parametrize("case", ["offload-only", "random-4", "half-duplex"])
def test_it_is_never_slower_than_its_start(case):
    problem = cases()[case]
    seeds = tuple(planner.plan(problem) for planner in (OffloadAll(), RecomputeAll(), RatioSweep()))
    best = min((seed for seed in seeds if seed.schedule is not None), key=lambda seed: seed.step_s)
    result = Improve(**FEW).plan(problem, seeds=seeds)
    assert result.details["start"]["from"] == best.planner
    assert result.step_s <= best.step_s
    if not result.details["improvements"]:
        assert result.schedule.same_as(best.schedule) and "no improvement" in result.message


def test_the_planner_to_improve_is_named():
    problem = cases()["half-duplex"]
    seeds = tuple(planner.plan(problem) for planner in (OffloadAll(), RatioSweep()))
    result = Improve(of="offload-all", **FEW).plan(problem, seeds=seeds)
    assert result.details["start"]["from"] == "offload-all"
    missing = Improve(of="nobody", **FEW).plan(problem, seeds=seeds)
    assert missing.status is Status.NOT_FOUND and "'nobody'" in missing.message


def test_a_part_that_is_fixed_keeps_its_decisions():
    """Only the free part may leave, stay or come back otherwise."""
    model, times = with_start(cases()["random-1"])
    rng = np.random.default_rng(3)
    part = choose(model, times, Neighbourhood.WINDOW, 3, rng)
    answer = solve_cp_sat(model, CpSettings(deterministic_limit=0.05, workers=1), start=times, free=part)
    assert answer.times is not None and answer.objective <= step_ticks(model, times)
    for device, (mine, now) in enumerate(zip(times, answer.times, strict=True)):
        for gap in range(len(model.steps[device].gaps)):
            if (device, gap) not in part:
                assert (gap in mine.into, gap in mine.again) == (gap in now.into, gap in now.again)


@pytest.mark.parametrize("case", sorted(cases()))
def test_a_part_always_has_the_start_as_a_solution(case):
    """Set-ups, hand-overs and several rates included: what is fixed does not exclude what it was fixed from."""
    problem = cases()[case]
    seed = next(r for r in (planner.plan(problem) for planner in (OffloadAll(), RecomputeAll())) if r.status.has_plan)
    bench = Workbench(problem)
    model = model_of(problem, tuple(bench.view(d) for d in range(bench.device_count)), seed.step_s / 1e6)
    times = read_schedule(model, seed.schedule)
    rng = np.random.default_rng(1)
    for kind in offered(model):
        part = choose(model, times, kind, 5, rng)
        answer = solve_cp_sat(model, CpSettings(workers=1, hint_only=True), start=times, free=part)
        assert answer.status == "OPTIMAL" and answer.objective == step_ticks(model, times)


@pytest.mark.parametrize("case", ["random-1", "shared-path"])
def test_neighbourhoods_have_what_they_promise(case):
    model, times = with_start(cases()[case])
    rng = np.random.default_rng(0)
    assert set(offered(model)) == set(Neighbourhood)
    for _ in range(5):
        window = choose(model, times, Neighbourhood.WINDOW, 10, rng)
        assert len({device for device, _ in window}) <= 1
        layer = choose(model, times, Neighbourhood.LAYER, 10**6, rng)
        assert {device for device, _ in layer} == set(range(len(model.steps)))
        state = choose(model, times, Neighbourhood.STATE, 10**6, rng)
        stores = [model.steps[device].stores[model.steps[device].gaps[gap].store].kind for device, gap in state]
        assert set(stores) == {"state"}
        assert len(choose(model, times, Neighbourhood.CONGESTED, 7, rng)) <= 7 * 3  # with siblings of state


def test_a_large_step_is_improved_in_its_decisions():
    problem = transformer("prototype-4gpu-12.5", factor=1.4, micro_batches=4)
    seed = RecomputeAll().plan(problem)
    assert seed.candidate is not None
    result = Improve(iterations=12, most_items=10).plan(problem, seeds=(seed,))
    assert result.details["sub_models"] == ["fluid"] and "most_items" in result.details["cp_sat_not_used"]
    assert result.candidate is not None and result.step_s == result.candidate.step_s
    assert result.step_s < seed.step_s and check(problem, result.schedule).valid


def test_decisions_come_before_the_moments_of_copies():
    """Copies of an offloaded tensor can only be moved by the second kind; that recomputing it is better, the first
    kind sees."""
    problem = random_problem(4, factor=1.15)
    seed = OffloadAll().plan(problem)
    both = Improve(**FEW).plan(problem, seeds=(seed,))
    assert both.details["sub_models"] == ["fluid", "cp-sat"]
    assert both.step_s <= both.details["after_decisions_step_s"] <= seed.step_s
    bare = dataclasses.replace(seed, candidate=None)
    assert Improve(**FEW).plan(problem, seeds=(bare,)).details["sub_models"] == ["cp-sat"]


def test_a_plan_that_nothing_can_be_made_of_is_given_back():
    """Not in the constraint model, and without decisions behind it."""
    problem = cases()["half-duplex"]
    plan = OffloadAll().plan(problem)
    first = plan.schedule.lists[0].copy()
    first["owner"][first["kind"] == Kind.OFFLOAD] = 0  # device 0 by its number; the model reads only what has none
    schedule = dataclasses.replace(plan.schedule, lists=(first, *plan.schedule.lists[1:]))
    seed = PlanResult("foreign", Status.FEASIBLE, schedule, simulate(problem, schedule).step_s)
    result = Improve(**FEW).plan(problem, seeds=(seed,))
    assert result.details["sub_models"] == [] and result.schedule is schedule
    assert "no improvement" in result.message


def test_a_clock_that_ends_it_is_told():
    problem = random_problem(4, factor=1.15)
    result = Improve(time_limit_s=1e-6).plan(problem, seeds=(OffloadAll().plan(problem),))
    assert result.time_limited and result.details["iterations"] == 0


def test_turns_of_the_solution_become_an_order_policy():
    problem = cases()["half-duplex"]
    result = Improve(**FEW).plan(problem, seeds=(OffloadAll().plan(problem),))
    assert result.details["improvements"]
    kinds = {policy.kind for policy in result.schedule.link_policies}
    assert LinkPolicyKind.ORDER in kinds


@pytest.mark.parametrize(
    ("setting", "value"),
    [("iterations", 0), ("free", 0), ("most_items", 0), ("sub_limit", 0.0), ("time_limit_s", -1.0), ("ticks", 1)],
)
def test_settings_out_of_range(setting, value):
    with pytest.raises(InputError, match=setting):
        Improve(**{setting: value})
