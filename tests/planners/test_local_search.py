"""Local search never gets worse, depends on its seed only, and is judged against the same search without gradient."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from planner_cases import SMALL_TRANSFORMER, cases, light, transformer

from tmojax.importers.machine_build import load_machine
from tmojax.planners.base import Status
from tmojax.planners.gradient import LocalSearch, find_starts
from tmojax.planners.local_search import Guide, SearchSettings, local_search
from tmojax.planners.ratio import RatioSweep
from tmojax.planners.simple import KeepAll, OffloadAll, RecomputeAll, offload_everything
from tmojax.planners.workbench import Workbench
from tmojax.problem import Action, Lifetime, Op, Phase, Problem, Program, Tensor, TensorKind, Workload
from tmojax.relax.coordinate import Coordination
from tmojax.relax.decode import DoesNotFit

CASES = cases()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_never_slower_than_its_start(case, seed):
    bench = Workbench(CASES[case])
    start, *_ = find_starts(bench, ())
    found, log = local_search(bench, start.candidate, SearchSettings(evaluations=40), seed)
    assert found.step_s <= start.candidate.step_s
    assert log.evaluations == 40
    assert (found is start.candidate) == (sum(log.improvements.values()) == 0)


@pytest.mark.parametrize("kind", ["local-search", "gradient"])
def test_no_slower_than_a_plan_that_is_more_than_decisions(kind):
    problem = transformer("prototype-4gpu-12.5", factor=1.4)
    other = LocalSearch(search=SearchSettings(evaluations=60)).plan(problem, seed=3)
    # As a solver with an order of its own on the link gives it: a schedule, and no decisions to go on from.
    ordered = replace(other, planner="ordered", candidate=None, step_s=other.step_s * 0.5)
    found = light(kind).plan(problem, seeds=(ordered,))
    assert found.schedule is ordered.schedule and found.step_s == ordered.step_s
    assert "the plan of ordered" in found.message and found.details["start"] == "decisions of ordered"
    assert found.details["own_step_s"] > ordered.step_s


def test_same_seed_same_plan():
    problem = transformer("prototype-4gpu-12.5", factor=1.4)
    search = LocalSearch(search=SearchSettings(evaluations=60))
    first, again = (search.plan(problem, seed=3) for _ in range(2))
    assert [rows.tobytes() for rows in first.schedule.lists] == [rows.tobytes() for rows in again.schedule.lists]
    assert first.schedule.link_policies == again.schedule.link_policies
    assert first.step_s == again.step_s and not first.time_limited
    assert first.details["improvements"]  # the seed had something to decide


def test_more_evaluations_of_one_seed_are_spent():
    problem = transformer("prototype-4gpu-12.5", factor=1.4)
    few, many = (LocalSearch(search=SearchSettings(evaluations=n)).plan(problem) for n in (5, 50))
    assert (few.details["evaluations"], many.details["evaluations"]) == (5, 50)
    limited = LocalSearch(search=SearchSettings(evaluations=50, instructions=1)).plan(problem)
    assert limited.details["evaluations"] < 5


def test_starts_from_the_best_plan_of_others_and_says_so():
    problem = transformer("prototype-4gpu-12.5", factor=1.4)
    seeds = tuple(p.plan(problem) for p in (KeepAll(), OffloadAll(), RatioSweep(), RecomputeAll()))
    best = min((s for s in seeds if s.status.has_plan), key=lambda s: s.step_s)
    result = light("local-search").plan(problem, seeds=seeds)
    assert result.details["start"] == best.planner
    assert result.details["start_step_s"] == best.step_s >= result.step_s


def test_starts_are_distinct_and_fastest_first():
    problem = transformer("prototype-4gpu-12.5", factor=1.4)
    plan = RatioSweep().plan(problem)
    starts = find_starts(Workbench(problem), (plan, plan, OffloadAll().plan(problem)))
    assert [start.name for start in starts] == ["ratio-sweep", "offload-all"]


def test_without_a_start_there_is_no_plan():
    result = LocalSearch().plan(transformer("prototype-4gpu-12.5", factor=20.0))
    assert result.status is Status.NOT_FOUND and "fits" in result.message


def test_every_improvement_is_reported_with_time_and_simulations():
    problem = transformer("prototype-4gpu-12.5", factor=1.4)
    result = LocalSearch(search=SearchSettings(evaluations=60)).plan(problem, seed=3)
    curve = result.details["improvements_over_time"]
    assert len(curve) > 1
    assert curve[0][2] == result.details["start_step_s"]
    assert curve[-1][2] == result.details["after_local_search_step_s"]
    for earlier, later in pairwise(curve):
        assert later[0] >= earlier[0] and later[1] > earlier[1] and later[2] < earlier[2]
    assert curve[-1][0] <= result.plan_s


@pytest.mark.parametrize("case", ["shared-path", "uneven"])
def test_a_guided_search_takes_over_what_is_better(case):
    bench = Workbench(CASES[case])
    best, *rest = find_starts(bench, ())
    worst = (rest or [best])[-1]
    weight = {d: np.ones(len(bench.view(d).tensor)) for d in set(bench.device_class)}
    guide = Guide((best.candidate.decisions,), weight)
    settings = SearchSettings(evaluations=80, start_threshold=0.0)
    found, log = local_search(bench, worst.candidate, settings, 0, guide)
    again, _ = local_search(bench, worst.candidate, settings, 0, guide)
    assert found.step_s <= worst.candidate.step_s and again.step_s == found.step_s
    if rest:
        assert log.improvements.get("take-over", 0) > 0
    nothing, _ = local_search(bench, best.candidate, settings, 0, Guide((), {}))
    plain, _ = local_search(bench, best.candidate, settings, 0)
    assert nothing.step_s == plain.step_s  # a guide that says nothing changes nothing


WILD = SearchSettings(evaluations=200, start_threshold=100.0)  # accepts everything, so it wanders far


def test_nobody_starts_after_the_first_gpu_has_ended():
    """One micro-batch and no update: that is after less than one micro-batch."""
    spec = replace(SMALL_TRANSFORMER, parameters=0)
    bench = Workbench(transformer("prototype-4gpu-12.5", factor=1.2, micro_batches=1, spec=spec))
    decisions = tuple(offload_everything(bench.view(device)) for device in range(4))
    late = bench.evaluate(decisions, Coordination((0.0, 0.97, 0.97, 0.97)))
    assert not isinstance(late, DoesNotFit)
    for seed in range(5):
        found, _ = local_search(bench, late, WILD, seed)
        assert found.step_s <= late.step_s


def test_a_step_in_which_nothing_is_idle():
    """No candidates, and state on one device only: only starts and policies are left to change."""
    machine = load_machine({"preset": "prototype-4gpu-12.5", "gpus": {"gpu": {"count": 2}}})
    state = Tensor("weight", 8, TensorKind.WEIGHT, Lifetime.STATE)
    output = Tensor("output", 8, TensorKind.ACTIVATION)
    plain = Program("plain", (output,), (Op("forward", Phase.FORWARD, 0.1, writes=(0,)),))
    update = Op("update", Phase.OPTIMIZER, 0.1, updates=(1,), recomputable=False, step_op=True)
    stateful = Program("stateful", (output, state), (*plain.ops, update))
    workload = Workload("idle", (plain, stateful), (0, 1), 2, "synthetic")
    problem = Problem("idle", workload, machine, frozenset({Action.OFFLOAD, Action.RECOMPUTE}))
    for seed in range(5):
        result = LocalSearch(search=WILD).plan(problem, seed=seed)
        assert result.step_s == pytest.approx(0.3)
