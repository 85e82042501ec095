"""Checkmate's programme against every plan of tiny graphs; its lists against the checker and the simulator."""

from dataclasses import replace

import numpy as np
import pytest
from random_steps import random_problem, shared_path_machine
from stage_graphs import every_plan, peak_bytes, random_graph

from tmojax.bounds import bound
from tmojax.bounds.highs import SolverStatus
from tmojax.check import check
from tmojax.errors import InputError
from tmojax.ilp.checkmate_graph import stage_graph
from tmojax.ilp.checkmate_model import checkmate_model, read_plan, unit_s
from tmojax.ilp.checkmate_rounding import cheap_plan, plan_of_dropped, plan_of_kept, plan_peak_bytes
from tmojax.ilp.poet_start import Decided
from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
from tmojax.planners.base import Status
from tmojax.planners.checkmate import Checkmate, CheckmateRounding
from tmojax.planners.simple import RecomputeAll
from tmojax.problem import (
    Action,
    Kind,
    Op,
    Phase,
    Problem,
    Program,
    Tensor,
    TensorKind,
    Workload,
    keep_all_footprint_bytes,
)
from tmojax.problem.step_view import view_step
from tmojax.simulate import simulate


@pytest.mark.parametrize("two_outputs", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_least_compute_of_every_plan(seed, two_outputs):
    """For every capacity between two memory peaks: the programme finds what trying everything finds."""
    graph = random_graph(seed, 4, two_outputs=two_outputs)
    best: dict[int, float] = {}
    for plan in every_plan(graph):
        peak = peak_bytes(graph, plan)
        if peak is not None:
            best[peak] = min(best.get(peak, np.inf), plan.compute_s(graph))
    least = min(best)
    for capacity in sorted({least - 1, *best}):
        expected = min((seconds for peak, seconds in best.items() if peak <= capacity), default=None)
        model, columns = checkmate_model(graph, capacity)
        answer = model.solve(time_limit_s=20, gap=0.0)
        if expected is None:
            assert answer.status is SolverStatus.INFEASIBLE
            continue
        assert answer.status is SolverStatus.OPTIMAL
        assert answer.objective * unit_s(graph) == pytest.approx(expected)
        plan = read_plan(graph, columns, answer.values)
        assert plan.compute_s(graph) == pytest.approx(expected)
        peak = peak_bytes(graph, plan)
        assert peak is not None and peak <= capacity


def transformer(micro_batches: int, factor: float, **spec) -> Problem:
    """Of four layers, without inputs, on one GPU; capacity = footprint / `factor`."""
    spec = SyntheticTransformer(layers=4, tokens=1024, width=256, compute_s=0.02, **spec)
    workload = synthetic_transformer(spec, 1, micro_batches)
    machine = shared_path_machine(1, int(keep_all_footprint_bytes(workload, 0) / factor), rate=1e9)
    return Problem("transformer", workload, machine, frozenset(Action))


BOTH = [Checkmate(most_stages=16), CheckmateRounding(most_stages=16)]


@pytest.mark.parametrize("planner", BOTH, ids=lambda planner: planner.name)
@pytest.mark.parametrize(
    ("micro_batches", "factor", "spec"),
    [(1, 1.0, {}), (1, 1.5, {}), (3, 1.3, {"gradient_scale": 1.0}), (2, 1.25, {"parameters": 10**6})],
)
def test_the_claimed_time_is_the_simulated_one(planner, micro_batches, factor, spec):
    """Compute alone: nothing is copied, so the lists take what the programme says, to the last bit of rounding."""
    problem = transformer(micro_batches, factor, **spec)
    result = planner.plan(problem)
    assert result.status.has_plan and result.schedule is not None, result.message
    assert check(problem, result.schedule).valid
    last = result.details["solves"][-1]
    assert simulate(problem, result.schedule).step_s == pytest.approx(last["claimed_step_s"], rel=1e-12)
    assert last["claimed_step_s"] >= last["model_bound_s"] * (1 - 1e-6)
    copies = np.isin(result.schedule.lists[0]["kind"], [Kind.OFFLOAD, Kind.PREFETCH])
    assert not copies.any()


def test_a_value_may_be_recomputed_more_than_once():
    """A chain of six equal nodes and its backward in memory for three values: some forward op has to run a third time,
    and the list runs each as often as the plan says."""
    count = 6
    tensors = [Tensor(f"a{i}", 1, TensorKind.ACTIVATION) for i in range(count)]
    tensors += [Tensor(f"g{i}", 1, TensorKind.GRADIENT) for i in range(count)]
    ops = [Op(f"f{i}", Phase.FORWARD, 1.0, (i - 1,) if i else (), (i,)) for i in range(count)]
    ops += [
        Op(f"b{i}", Phase.BACKWARD, 1.0, (i, *((count + i + 1,) if i + 1 < count else ())), (count + i,))
        for i in reversed(range(count))
    ]
    workload = Workload("chain", (Program("chain", tuple(tensors), tuple(ops)),), (0,), 1, "synthetic")
    problem = Problem("chain", workload, shared_path_machine(1, 3), frozenset(Action))
    result = Checkmate().plan(problem)
    assert result.status is Status.OPTIMAL and result.schedule is not None
    assert check(problem, result.schedule).valid
    rows = result.schedule.lists[0]
    runs = np.bincount(rows["op"][rows["kind"] == Kind.COMPUTE])
    assert runs.max() > 2 and result.step_s == pytest.approx(runs.sum() * (1.0 + 0.001))
    assert result.step_s == pytest.approx(result.details["solves"][-1]["claimed_step_s"])


@pytest.mark.parametrize("seed", [0, 2, 3, 5, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 26))])
def test_every_plan_of_random_problems_is_valid(seed):
    """Forks, several outputs, workspace, inputs, step ops, collectives: what it calls feasible passes the checker."""
    problem = random_problem(seed, factor=1.25)
    result = Checkmate(most_stages=10).plan(problem)
    if result.schedule is None:
        assert result.status is Status.NOT_FOUND and result.message
        return
    report = check(problem, result.schedule)
    assert report.valid, report.text()
    assert result.step_s >= bound(problem).bound_s * (1 - 1e-6)


def test_rounding_is_bounded_by_the_programme():
    """Relaxation below programme below rounding, on problems of several sizes of memory."""
    for factor in (1.05, 1.3):
        problem = transformer(1, factor)
        graph = stage_graph(problem, view_step(problem, 0), 30, page_inputs=False)
        model, _ = checkmate_model(graph, problem.capacity_bytes(0))
        exact, relaxed = model.solve(time_limit_s=60, gap=0.0), model.solve(time_limit_s=60, relax=True)
        assert exact.status is SolverStatus.OPTIMAL
        assert relaxed.bound <= exact.objective * (1 + 1e-6)
        plan = cheap_plan(graph, problem.capacity_bytes(0))
        if plan is not None:
            assert plan_peak_bytes(graph, plan) <= problem.capacity_bytes(0)
            assert plan.compute_s(graph) / unit_s(graph) >= exact.objective * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_plans_without_a_search_are_counted_right(seed):
    """Peaks as the walk of the tests counts them."""
    graph = random_graph(seed, 7, two_outputs=seed % 2 == 1)
    rng = np.random.default_rng(seed)
    for _ in range(10):
        dropped = rng.random(len(graph.value_bytes)) < 0.6
        again = plan_of_dropped(graph, dropped, stays=bool(rng.random() < 0.5))
        for plan in (again, plan_of_kept(graph, rng.random((7, len(dropped))) < 0.4)):
            cleaned = replace(plan, kept=plan.kept & (graph.producer[None, :] < np.arange(7)[:, None]))
            assert peak_bytes(graph, cleaned) == plan_peak_bytes(graph, cleaned)


@pytest.mark.parametrize(("setting", "value"), [("most_stages", 0), ("most_stages", 10**6), ("time_limit_s", 0.0)])
def test_settings_out_of_range(setting, value):
    with pytest.raises(InputError, match=setting):
        Checkmate(**{setting: value})


@pytest.mark.parametrize(
    ("setting", "value"), [("allowances", ()), ("thresholds", (1.0,)), ("solver", "gurobi"), ("warm_start", True)]
)
def test_settings_of_the_rounding_out_of_range(setting, value):
    with pytest.raises(InputError, match=setting):
        CheckmateRounding(**{setting: value})


def test_merged_nodes_are_split_where_they_do_not_fit():
    """One node for all forward ops needs all of their outputs at once; finer stages do not."""
    problem = transformer(1, 1.6)
    result = Checkmate(most_stages=2).plan(problem)
    assert result.status.has_plan
    assert result.details["solves"][-1]["stages"] > 2


def test_a_start_from_an_earlier_plan():
    """What another planner recomputes becomes a plan of stages that fits; the programme says whom it started from."""
    problem = transformer(1, 1.4)
    earlier = RecomputeAll().plan(problem)
    view, capacity = view_step(problem, 0), problem.capacity_bytes(0)
    graph = stage_graph(problem, view, 40, page_inputs=False)
    assert earlier.candidate is not None
    decided = Decided(view, earlier.candidate.decisions[0])
    assert decided.dropped(graph).any() and not decided.paged(graph).any()
    plan = plan_of_dropped(graph, decided.dropped(graph), stays=True)
    assert plan_peak_bytes(graph, plan) <= capacity
    assert plan.compute_s(graph) == pytest.approx(earlier.step_s, rel=0.02)  # merged nodes run again as a whole
    result = Checkmate(most_stages=20, warm_start=True, gap=0.05).plan(problem, seeds=(earlier,))
    assert result.status.has_plan and result.details["warm_start_from"] == "recompute-all"
    assert "warm_start_from" not in Checkmate(most_stages=20, gap=0.05).plan(problem, seeds=(earlier,)).details
