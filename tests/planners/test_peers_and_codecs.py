"""Strategies, starts and searches with spare memory of peers and with codecs: valid, no slower than their starts."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planner_cases import light, transformer

sys.path.append(str(Path(__file__).parents[1] / "relax"))

from further_steps import further_problem, problem_of, step
from random_steps import random_problem

from tmojax.check import check
from tmojax.importers.machine_build import load_machine
from tmojax.importers.pipeline import pipeline_workload
from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
from tmojax.planners.base import Status
from tmojax.planners.gradient import LocalSearch, find_starts
from tmojax.planners.local_search import SearchSettings, local_search
from tmojax.planners.peers_and_codecs import CompressAll, PeerOffload, find_lenders, further_starts
from tmojax.planners.registry import PLANNERS
from tmojax.planners.workbench import Workbench
from tmojax.problem import Action, Codec, Kind, Problem, keep_all_footprint_bytes
from tmojax.relax.coordinate import together
from tmojax.relax.decisions import Choice, DeviceDecision, keep_everything
from tmojax.relax.decode import DoesNotFit


def uses(schedule, kind: Kind) -> bool:
    return any((rows["kind"] == kind).any() for rows in schedule.lists)


def pipeline(factor: float) -> Problem:
    """Four stages, 1F1B, two NVLink pairs."""
    machine = load_machine("rtx3090x4-nvlink-pairs")
    source = synthetic_transformer(SyntheticTransformer(layers=8, tokens=1024, width=256, compute_s=0.002), 1, 6)
    workload = pipeline_workload(source, 4, "1f1b")
    problem = Problem("pipeline", workload, machine, frozenset({Action.OFFLOAD, Action.PEER}))
    return problem.with_device_capacity(int(keep_all_footprint_bytes(workload, 0) / factor))


def test_first_stages_borrow_from_last_ones():
    assert find_lenders(Workbench(pipeline(1.3))) == (3, -1, -1, -1)  # only the first one is short
    assert find_lenders(Workbench(pipeline(1.8))) == (3, 2, -1, -1)


def test_nobody_lends_among_equals_or_without_the_action():
    assert find_lenders(Workbench(transformer("rtx3090x4-nvlink-pairs", factor=1.3))) == (-1,) * 4
    problem = pipeline(1.3)
    assert find_lenders(Workbench(replace(problem, actions=frozenset({Action.OFFLOAD})))) == (-1,) * 4


def test_a_pipeline_is_faster_with_memory_of_its_last_stages():
    problem = pipeline(1.3)
    plan = PeerOffload().plan(problem)
    assert plan.schedule is not None and check(problem, plan.schedule).valid and uses(plan.schedule, Kind.LEND)
    host_only = find_starts(Workbench(replace(problem, actions=frozenset({Action.OFFLOAD}))), ())
    assert plan.step_s < 0.99 * min(start.candidate.step_s for start in host_only)


def test_half_the_bytes_over_a_shared_path_take_half_the_time():
    problem = transformer("prototype-4gpu-12.5", factor=2.0, actions=frozenset({Action.OFFLOAD, Action.COMPRESS}))
    fast = replace(problem.machine, codecs=(Codec("half", 1, 2, 1e15, 1e15),))
    problem = replace(problem, machine=fast)
    plan = CompressAll().plan(problem)
    assert plan.schedule is not None and check(problem, plan.schedule).valid and uses(plan.schedule, Kind.ENCODE)
    plain = find_starts(Workbench(replace(problem, actions=frozenset({Action.OFFLOAD}))), ())
    assert plan.step_s < 0.6 * min(start.candidate.step_s for start in plain)


@pytest.mark.parametrize("planner", [PeerOffload(), CompressAll()])
def test_strategies_say_which_action_they_lack(planner):
    plan = planner.plan(random_problem(1, factor=1.1))
    assert plan.schedule is None and "which the problem does not allow" in plan.message


def test_no_further_starts_without_further_actions():
    assert list(further_starts(Workbench(random_problem(4, factor=1.1)), None)) == []


@pytest.mark.parametrize("seed", range(8))
def test_searches_stay_valid_and_no_slower_than_their_starts(seed):
    bench = Workbench(further_problem(seed, 1.25))
    for start in find_starts(bench, ()):
        found, _ = local_search(bench, start.candidate, SearchSettings(evaluations=60), seed)
        report = check(bench.problem, found.schedule)
        assert report.valid, [v.message for v in report.violations[:3]]
        assert found.step_s <= start.candidate.step_s


def test_searches_go_on_from_plans_with_peers():
    problem = pipeline(1.5)
    plan = LocalSearch(search=SearchSettings(evaluations=60)).plan(problem)
    assert plan.schedule is not None and uses(plan.schedule, Kind.LEND)
    assert check(problem, plan.schedule).valid
    assert plan.step_s <= min(start.candidate.step_s for start in find_starts(Workbench(problem), ())) * (1 + 1e-12)


@pytest.mark.parametrize("kind", sorted(PLANNERS.keys() - {"gradient", "exhaustive"}))
def test_every_planner_can_follow_plans_with_peers_and_codecs(kind):
    problem = further_problem(1, 1.25)
    seeds = (PeerOffload().plan(problem), CompressAll().plan(problem))
    plan = light(kind).plan(problem, seeds=seeds)
    if plan.schedule is None:
        assert plan.status is Status.NOT_FOUND and plan.message
    else:
        assert check(problem, plan.schedule).valid
    if kind in ("local-search", "improve"):
        assert plan.step_s <= min(seed.step_s for seed in seeds)


@pytest.mark.parametrize("peer_bytes", [30, 60])
@pytest.mark.parametrize("codec_rate", [10.0, 400.0])
@pytest.mark.parametrize("path_rate", [5.0, 40.0])
def test_searches_find_the_best_of_all_decisions_of_a_tiny_step(peer_bytes, codec_rate, path_rate):
    codec = Codec("half", 1, 2, codec_rate, codec_rate)
    problem = problem_of((step(40, 50), step(10, 0)), (70, peer_bytes), path_rate, codec)
    bench = Workbench(problem)
    kept = keep_everything(bench.view(1))
    best_s = float("inf")
    for choice in Choice:
        decision = DeviceDecision(np.array([choice], np.int8), np.zeros(0, np.int8), lender=1)
        found = bench.evaluate((decision, kept), together(problem))
        best_s = min(best_s, float("inf") if isinstance(found, DoesNotFit) else found.step_s)
    plan = LocalSearch(search=SearchSettings(evaluations=60)).plan(problem)
    assert plan.step_s <= best_s < float("inf")
