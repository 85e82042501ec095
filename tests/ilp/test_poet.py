"""POET's programme against every plan of tiny graphs; its lists against the checker and the simulator."""

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
from tmojax.ilp.checkmate_lists import stage_list
from tmojax.ilp.checkmate_model import unit_s
from tmojax.ilp.checkmate_rounding import plan_of_dropped, plan_peak_bytes
from tmojax.ilp.poet_model import Energy, Paging, poet_model, read_paging_plan, stage_periods_s
from tmojax.ilp.poet_start import best_start
from tmojax.planners.base import Status
from tmojax.planners.checkmate import Checkmate
from tmojax.planners.poet import Poet, paging_of
from tmojax.problem import Action, Kind, Op, Overheads, Phase, Problem, Program, Tensor, TensorKind, Workload
from tmojax.problem.step_view import view_step
from tmojax.relax.coordinate import assemble, together
from tmojax.relax.decode import DeviceList
from tmojax.simulate import simulate

PAGING = (Paging(2.0, 3.0, out_copy_s=0.5), Paging(1.0, 1.0, joint_bytes_per_s=1.5), Paging(0.25, 0.25))


@pytest.mark.parametrize("paging", PAGING, ids=["full duplex", "half duplex", "slow"])
@pytest.mark.parametrize(("seed", "stages", "rerun"), [(0, 4, False), (5, 4, False), (2, 3, True), (3, 3, True)])
def test_least_time_of_every_plan(seed, stages, rerun, paging):
    """For every capacity between two memory peaks: the programme finds what trying everything finds."""
    graph = random_graph(seed, stages)
    graph = replace(graph, may_rerun=graph.may_rerun & rerun)
    best: dict[int, float] = {}
    for plan in every_plan(graph, paging=True):
        peak = peak_bytes(graph, plan)
        if peak is not None:
            best[peak] = min(best.get(peak, np.inf), float(stage_periods_s(graph, plan, paging).sum()))
    least = min(best)
    for capacity in sorted({least - 1, *best}):
        expected = min((seconds for peak, seconds in best.items() if peak <= capacity), default=None)
        model, columns = poet_model(graph, capacity, paging)
        answer = model.solve(time_limit_s=20, gap=0.0)
        if expected is None:
            assert answer.status is SolverStatus.INFEASIBLE
            continue
        assert answer.status is SolverStatus.OPTIMAL
        assert answer.objective * unit_s(graph) == pytest.approx(expected)
        plan = read_paging_plan(graph, columns, answer.values)
        assert stage_periods_s(graph, plan, paging).sum() == pytest.approx(expected)
        peak = peak_bytes(graph, plan)
        assert peak is not None and peak <= capacity


def lists_of(problem: Problem, *, most_stages: int, barriers: bool):
    """The lists of the plan that the planner's own model gives, with or without stages as barriers."""
    view = view_step(problem, 0)
    graph = stage_graph(problem, view, most_stages, page_inputs=True)
    paging = paging_of(problem, 0, shared=False)
    actions = problem.actions
    model, columns = poet_model(graph, problem.capacity_bytes(0), paging, rerun=Action.RECOMPUTE in actions,
                                page=Action.OFFLOAD in actions)  # fmt: skip
    answer = model.solve(time_limit_s=60, gap=0.05)
    if not len(answer.values):
        return None
    plan = read_paging_plan(graph, columns, answer.values)
    made = stage_list(problem, view, graph, plan, 0, barriers=barriers)
    assert isinstance(made, DeviceList)
    schedule = assemble(problem, [made], together(problem))
    report = check(problem, schedule)
    assert report.valid, report.text()
    claimed_s = problem.workload.micro_batches * stage_periods_s(graph, plan, paging).sum() + view.step_s.sum()
    return simulate(problem, schedule).step_s, claimed_s, plan


ALONE = [seed for seed in range(40) if random_problem(seed).workload.device_count == 1]


@pytest.mark.parametrize("seed", [*ALONE[:3], *(pytest.param(seed, marks=pytest.mark.long) for seed in ALONE[3:12])])
@pytest.mark.parametrize("actions", [(Action.OFFLOAD, Action.RECOMPUTE), (Action.OFFLOAD,)], ids=["both", "offload"])
def test_the_claimed_time_is_the_simulated_one(seed, actions):
    """With stages as barriers, as the programme has them, the lists take what it claims; without, never longer."""
    problem = random_problem(seed, factor=1.3, actions=actions)
    found = lists_of(problem, most_stages=7, barriers=True)
    if found is None:
        return
    simulated_s, claimed_s, _ = found
    assert simulated_s == pytest.approx(claimed_s, rel=1e-9)
    free_s = lists_of(problem, most_stages=7, barriers=False)
    assert free_s is not None and free_s[0] <= claimed_s * (1 + 1e-9)


@pytest.mark.parametrize(
    "seed", [0, 4, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 7, *range(14, 26)))]
)
def test_every_plan_of_random_problems_is_valid(seed):
    """One to three GPUs, forks, several outputs, workspace, inputs, collectives, half-duplex paths."""
    problem = random_problem(seed, factor=1.3)
    for rates in ("alone", "equal-share"):
        result = Poet(most_stages=6, gap=0.2, rates=rates).plan(problem)
        if result.schedule is None:
            assert result.status is Status.NOT_FOUND and result.message
            continue
        report = check(problem, result.schedule)
        assert report.valid, report.text()
        assert result.step_s >= bound(problem).bound_s * (1 - 1e-6)


def chain(capacity_bytes: int, rate: float) -> Problem:
    """Forward of six ops of one second and of one value each, and backward; one GPU without launch overhead."""
    count = 6
    tensors = [Tensor(f"a{i}", 4, TensorKind.ACTIVATION) for i in range(count)]
    tensors += [Tensor(f"g{i}", 0, TensorKind.GRADIENT) for i in range(count)]
    ops = [Op(f"f{i}", Phase.FORWARD, 1.0, (i - 1,) if i else (), (i,)) for i in range(count)]
    ops += [
        Op(f"b{i}", Phase.BACKWARD, 1.0, (i, *((count + i + 1,) if i + 1 < count else ())), (count + i,))
        for i in reversed(range(count))
    ]
    workload = Workload("chain", (Program("chain", tuple(tensors), tuple(ops)),), (0,), 1, "synthetic")
    machine = replace(shared_path_machine(1, capacity_bytes, rate=rate), overheads=Overheads())
    return Problem("chain", workload, machine, frozenset(Action))


def test_a_path_that_is_fast_enough_hides_every_copy():
    """Each value crosses in one stage: four fit, two go and come behind compute, and twelve seconds are enough."""
    result = Poet().plan(chain(16, 4.0))
    assert result.status is Status.OPTIMAL and result.schedule is not None
    assert result.step_s == pytest.approx(12.0)
    assert result.details["solves"][-1]["claimed_step_s"] == pytest.approx(12.0)
    assert (result.schedule.lists[0]["kind"] == Kind.OFFLOAD).any()


def test_a_slow_path_is_not_used():
    """A copy takes a hundred times as long as a run: recomputation it is, as in Checkmate's programme."""
    problem = chain(16, 0.04)
    result, checkmate = Poet().plan(problem), Checkmate().plan(problem)
    assert result.step_s == pytest.approx(checkmate.step_s)
    assert not (result.schedule.lists[0]["kind"] == Kind.OFFLOAD).any()


def test_copies_that_do_not_hide_lengthen_their_stage():
    """At half the rate, without recomputation, every copy takes two seconds: what is claimed is what barriers take."""
    problem = replace(chain(16, 2.0), actions=frozenset({Action.OFFLOAD}))
    found = lists_of(problem, most_stages=12, barriers=True)
    assert found is not None
    simulated_s, claimed_s, plan = found
    assert plan.go.any() and claimed_s > 12.0
    assert simulated_s == pytest.approx(claimed_s)
    result = Poet(gap=0.05, most_stages=12).plan(problem)
    assert 12.0 - 1e-9 <= result.step_s <= claimed_s + 1e-9


def test_energy_is_the_published_objective():
    """With energy nothing but the joules counts: a copy dearer than every rerun is not made, a free one is."""
    problem = chain(16, 4.0)
    graph = stage_graph(problem, view_step(problem, 0), 12, page_inputs=True)
    run, values = np.ones(graph.stages), len(graph.value_bytes)
    for joule, pages in ((100.0, False), (0.0, True)):
        energy = Energy(run, np.full(values, joule), np.full(values, joule))
        model, columns = poet_model(graph, 16, Paging(1.0, 1.0), energy=energy)
        answer = model.solve(time_limit_s=60, gap=0.0)
        plan = read_paging_plan(graph, columns, answer.values)
        assert plan.go.any() == pages
        assert answer.objective == pytest.approx(plan.run.sum() + joule * (plan.go.sum() + plan.come.sum()))
        assert (plan.run.sum() == graph.stages) == pages


@pytest.mark.parametrize("seed", range(6))
def test_starts_without_a_search_fit(seed):
    """A start holds no more than the capacity, as the tests' own walk counts, and the programme takes it."""
    graph = random_graph(seed, 9)
    widest = plan_peak_bytes(graph, plan_of_dropped(graph, np.zeros(len(graph.value_bytes), bool)))
    for capacity in range(widest - 8, widest + 1, 2):
        plan = best_start(graph, capacity, PAGING[0])
        if plan is not None:
            peak = peak_bytes(graph, plan)
            assert peak is not None and peak <= capacity


@pytest.mark.parametrize(("setting", "value"), [("rates", "half"), ("most_stages", 0), ("threads", 0)])
def test_settings_out_of_range(setting, value):
    with pytest.raises(InputError, match=setting):
        Poet(**{setting: value})
