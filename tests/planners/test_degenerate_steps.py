"""Steps at the edge of what a model covers: one op, no compute time, GPUs without state, state that may not move."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from planner_cases import light
from random_steps import random_problem, shared_path_machine

from tmojax.bounds import bound
from tmojax.check import check
from tmojax.cost import relax_problem
from tmojax.planners.cp_sat import CpSat
from tmojax.planners.gradient import Gradient
from tmojax.planners.local_search import SearchSettings
from tmojax.planners.simple import offload_everything
from tmojax.planners.state_choice import StateSettings, improve_state
from tmojax.planners.workbench import Workbench
from tmojax.problem import (
    Action,
    Lifetime,
    Op,
    Overheads,
    Phase,
    Problem,
    Program,
    Tensor,
    TensorKind,
    Workload,
    validate_problem,
)
from tmojax.relax.coordinate import together
from tmojax.relax.rounding import round_solution


def one_op() -> Problem:
    """A micro-batch of one op, and an update of two tensors of which one fits at a time."""
    tensors = [Tensor("a", 5, TensorKind.ACTIVATION)]
    tensors += [Tensor(f"m{i}", 20, TensorKind.OPTIMIZER_STATE, Lifetime.STATE) for i in range(2)]
    ops = [Op("f", Phase.FORWARD, 0.1, writes=(0,))]
    ops += [Op(f"u{i}", Phase.OPTIMIZER, 0.1, updates=(1 + i,), recomputable=False, step_op=True) for i in range(2)]
    return _problem(tensors, ops, 2, 30)


def no_compute_time(micro_batches: int = 1) -> Problem:
    """Two saved tensors of which one fits at a time, made and read in no time."""
    tensors = [Tensor(name, 40, TensorKind.ACTIVATION) for name in ("a", "b")]
    ops = [Op(f"f{i}", Phase.FORWARD, 0.0, writes=(i,)) for i in range(2)]
    ops += [Op(f"b{i}", Phase.BACKWARD, 0.0, reads=(i,)) for i in (1, 0)]
    return _problem(tensors, ops, micro_batches, 50)


def _problem(tensors: list[Tensor], ops: list[Op], micro_batches: int, capacity_bytes: int) -> Problem:
    workload = Workload("edge", (Program("edge", tuple(tensors), tuple(ops)),), (0,), micro_batches, "synthetic")
    machine = replace(shared_path_machine(1, capacity_bytes), overheads=Overheads())
    problem = Problem("edge", workload, machine, frozenset({Action.OFFLOAD, Action.RECOMPUTE}))
    validate_problem(problem)
    return problem


@pytest.mark.parametrize("make", [one_op, no_compute_time])
def test_the_gradient_planner_plans_without_a_relaxation(make):
    problem = make()
    found = Gradient(search=SearchSettings(evaluations=10)).plan(problem)
    assert found.planner == "gradient" and found.schedule is not None, found.message
    assert check(problem, found.schedule).valid
    assert found.details["relaxed_step_s"] is None
    assert found.step_s >= bound(problem).bound_s


def test_cp_sat_plans_what_takes_no_time():
    problem = no_compute_time().with_device_capacity(80)
    found = CpSat(workers=1, deterministic_limit=0.02).plan(problem)
    assert found.schedule is not None, found.message
    assert check(problem, found.schedule).valid
    assert found.step_s == 0


@pytest.mark.parametrize("kind", ["ratio-sweep", "local-search", "gradient", "improve"])
def test_planners_plan_what_takes_no_time(kind):
    """With state, of which nothing has to move."""
    problem = one_op()
    program = problem.workload.programs[0]
    timeless = replace(program, ops=tuple(replace(op, duration_s=0.0) for op in program.ops))
    problem = replace(problem, workload=replace(problem.workload, programs=(timeless,))).with_device_capacity(80)
    found = light(kind).plan(problem)
    assert found.schedule is not None, found.message
    assert found.step_s == 0 and bound(problem).bound_s == 0


def test_a_step_without_compute_time_is_not_proved_infeasible():
    """Only copies take time: 40 bytes leave and come back at 100 bytes/s each way; in units of compute time such a rate
    would be too small for the solver."""
    problem = no_compute_time()
    offload = bound(replace(problem, actions=frozenset({Action.OFFLOAD})))
    assert 0.6 * (1 - 1e-6) <= offload.bound_s <= 0.8 * (1 + 1e-6)
    assert bound(problem).bound_s < 1e-3
    with np.errstate(all="raise"):
        assert bound(no_compute_time(micro_batches=3)).bound_s < 1e-3


def test_state_is_chosen_where_one_gpu_has_none():
    with_state = one_op().workload.programs[0]
    without = Program("without", with_state.tensors[:1], with_state.ops[:1])
    workload = Workload("uneven", (with_state, without), (0, 1), 2, "synthetic")
    problem = Problem("uneven", workload, shared_path_machine(2, 30), frozenset({Action.OFFLOAD}))
    bench = Workbench(problem)
    decisions = tuple(offload_everything(bench.view(device)) for device in range(2))
    start = bench.evaluate(decisions, together(problem))
    found = improve_state(bench, start, StateSettings(evaluations=100, decodes=20))
    assert check(problem, found.schedule).valid
    assert found.step_s <= start.step_s


@pytest.mark.parametrize("seed", [12, 30])
def test_state_stays_where_offloading_is_not_allowed(seed):
    """Shares of the state that leaves mean nothing then."""
    problem = random_problem(seed, actions=(Action.RECOMPUTE, Action.COMPRESS))
    bench = Workbench(problem)
    views = [bench.view(device) for device in range(bench.device_count)]
    model = relax_problem(problem, views)
    shape = (1, *model.allowed.shape)
    some = np.full((1, len(views)), 0.6)
    solution = SimpleNamespace(choice=np.full(shape, 1 / shape[-1]), state_out=some, state_away=some,
                               start_share=0 * some, step_s=np.ones(1))  # fmt: skip
    found = round_solution(model, solution, views)  # type: ignore[arg-type]
    assert found
    assert not any(decision.state_out.any() for decisions, _ in found for decision in decisions)
