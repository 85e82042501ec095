"""The CP-SAT planner against optima worked out by hand, its hints, and what it says of itself."""

import dataclasses
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from planner_cases import BOTH, cases, transformer
from random_steps import random_problem, shared_path_machine

from tmojax.check import check
from tmojax.errors import InputError
from tmojax.ilp.cp_sat import CpSettings, solve_cp_sat
from tmojax.ilp.cp_sat_decode import decode_times
from tmojax.ilp.cp_sat_start import NotInModelError, read_schedule
from tmojax.ilp.cp_sat_times import model_of, step_ticks
from tmojax.planners.base import Status
from tmojax.planners.cp_sat import CpSat
from tmojax.planners.gradient import own_starts
from tmojax.planners.simple import OffloadAll, RecomputeAll
from tmojax.planners.sweep import sweep
from tmojax.planners.workbench import Workbench
from tmojax.problem import (
    Action,
    Kind,
    LinkPolicyKind,
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
from tmojax.relax.decode import DoesNotFit
from tmojax.simulate import simulate

SURE = {"workers": 1, "time_limit_s": 120.0, "gap": 0.0}


def ladder(gpus: int, *, capacity: int, size: int = 100, wait_s: float = 2.0, actions=(Action.OFFLOAD,)) -> Problem:
    """f writes `a` (size) in 1 s; m needs `scratch` of 100 bytes for `wait_s`; b reads a again, 1 s. Path: 100 B/s."""
    tensors = (Tensor("a", size, TensorKind.ACTIVATION), Tensor("c", 1, TensorKind.ACTIVATION))
    ops = (
        Op("f", Phase.FORWARD, 1.0, (), (0,)),
        Op("m", Phase.FORWARD, wait_s, (), (1,), workspace_bytes=100),
        Op("b", Phase.BACKWARD, 1.0, (0, 1), ()),
    )
    workload = Workload("ladder", (Program("ladder", tensors, ops),), (0,) * gpus, 1, "synthetic: by hand")
    machine = dataclasses.replace(shared_path_machine(gpus, capacity), overheads=Overheads())
    problem = Problem("ladder", workload, machine, frozenset(actions))
    validate_problem(problem)
    return problem


@pytest.mark.parametrize(
    ("problem", "optimum_s"),
    [
        (ladder(1, capacity=201), 4.0),  # all of it fits: 1 + 2 + 1
        (ladder(1, capacity=200), 6.0),  # a leaves (1 s) before m and comes back (1 s) after it: 1 + 1 + 2 + 1 + 1
        (ladder(1, capacity=200, actions=(Action.RECOMPUTE,)), 5.0),  # f again: 1 + 2 + 1 + 1
        (ladder(1, capacity=200, actions=(Action.OFFLOAD, Action.RECOMPUTE)), 5.0),
        # Two GPUs: one's way out waits for the other's; the ways back then are at different times.
        (ladder(2, capacity=200), 7.0),
        (ladder(3, capacity=200), 8.0),
    ],
)
def test_optima_by_hand(problem, optimum_s):
    result = CpSat(**SURE).plan(problem)
    assert result.status is Status.OPTIMAL and not result.time_limited
    assert check(problem, result.schedule).valid
    assert result.step_s == pytest.approx(optimum_s, rel=1e-4)
    (solve,) = result.details["solves"]
    assert solve["claimed_step_s"] == pytest.approx(result.step_s, rel=1e-4)
    assert solve["model_bound_s"] == solve["claimed_step_s"] and solve["status"] == "optimal"


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[pytest.mark.long] if s > 23 else []) for s in range(20, 32)])
def test_claims_are_what_the_simulator_measures(seed):
    """Every solution decodes to a valid schedule that is no slower than it claims, and a proved optimum is as fast as
    it claims but for the rounding of durations to ticks."""
    problem = random_problem(seed, factor=1.1)
    result = CpSat(workers=1, deterministic_limit=0.05).plan(problem)
    if not result.status.has_plan:
        assert result.status is Status.NOT_FOUND and result.message
        return
    report = check(problem, result.schedule)
    assert report.valid, report.text()
    (solve,) = result.details["solves"]
    claimed_s, rounding_s = solve["claimed_step_s"], result.details["items"] * result.details["tick_s"]
    assert result.step_s <= claimed_s * (1 + 1e-9)
    if result.status is Status.OPTIMAL:
        assert result.step_s >= claimed_s - rounding_s
    assert solve["model_bound_s"] <= claimed_s * (1 + 1e-9)


def starts(problem: Problem, policy: LinkPolicyKind):
    bench = Workbench(problem)
    for _, decisions in own_starts(bench):
        found = sweep(bench, decisions, shares=(0.0, 0.5), policies=(policy,))
        if not isinstance(found, DoesNotFit):
            yield bench, found


def model_for(bench: Workbench, tick_s: float):
    return model_of(bench.problem, tuple(bench.view(d) for d in range(bench.device_count)), tick_s)


@pytest.mark.parametrize("case", sorted(cases()))
def test_hints_are_complete_and_feasible(case):
    """With every variable at its hint the model is feasible and has the hint's objective; decoded, it is valid."""
    problem = cases()[case]
    for bench, seed in list(starts(problem, LinkPolicyKind.FCFS))[-2:]:
        model = model_for(bench, seed.step_s / 1e6)
        times = read_schedule(model, seed.schedule)
        answer = solve_cp_sat(model, CpSettings(workers=1, hint_only=True), start=times)
        assert answer.status == "OPTIMAL" and answer.objective == step_ticks(model, times)
        schedule = decode_times(model, times)
        report = check(problem, schedule)
        assert report.valid, report.text()
        assert simulate(problem, schedule).step_s <= answer.objective * model.network.tick_s * (1 + 1e-9)


@pytest.mark.parametrize("policy", [LinkPolicyKind.FCFS, LinkPolicyKind.PRIORITY])
@pytest.mark.parametrize("duplex", ["", "-half-duplex"])
def test_a_hint_is_as_fast_as_its_seed(policy, duplex):
    """Where links serve one copy after the other and collectives do not meet copies."""
    problem = transformer(f"prototype-4gpu-12.5{duplex}", factor=1.4, micro_batches=2, actions=BOTH)
    workload = dataclasses.replace(problem.workload, collectives=())
    (program,) = workload.programs
    ops = tuple(op for op in program.ops if not op.collective)
    workload = dataclasses.replace(workload, programs=(dataclasses.replace(program, ops=ops, orders={}),))
    problem = dataclasses.replace(problem, workload=workload)
    seen = 0
    for bench, seed in starts(problem, policy):
        model = model_for(bench, seed.step_s / 1e6)
        ticks = step_ticks(model, read_schedule(model, seed.schedule))
        assert ticks * model.network.tick_s <= seed.step_s + model.items() * model.network.tick_s
        seen += 1
    assert seen >= 2


def test_a_plan_read_back_is_the_same_plan():
    problem = cases()["random-4"]
    bench = Workbench(problem)
    result = CpSat(workers=1, deterministic_limit=0.03).plan(problem)
    model = model_for(bench, result.details["tick_s"])
    again = decode_times(model, read_schedule(model, result.schedule))
    assert simulate(problem, again).step_s <= result.step_s * (1 + 1e-9)
    for rows, other in zip(result.schedule.lists, again.lists, strict=True):
        for kind in (Kind.COMPUTE, Kind.OFFLOAD, Kind.PREFETCH):
            assert (rows["kind"] == kind).sum() == (other["kind"] == kind).sum()


def test_what_the_model_does_not_have_is_named():
    problem = cases()["shared-path"]
    seed = OffloadAll().plan(problem)
    model = model_for(Workbench(problem), 1e-6)
    lists = [rows.copy() for rows in seed.schedule.lists]
    first = int(np.flatnonzero(lists[0]["kind"] == Kind.OFFLOAD)[0])
    lists[0]["parts"][first] = 2
    with pytest.raises(NotInModelError, match="whole plain tensor"):
        read_schedule(model, dataclasses.replace(seed.schedule, lists=tuple(lists)))


def test_it_is_no_slower_than_its_start_and_says_where_it_came_from():
    problem = cases()["half-duplex"]
    seed = RecomputeAll().plan(problem)
    result = CpSat(workers=1, deterministic_limit=0.05).plan(problem, seeds=(seed,))
    (entry,) = result.details["starts"]
    assert entry["from"] == "recompute-all" and entry["step_s"] == seed.step_s
    assert result.step_s <= entry["model_step_s"] <= seed.step_s * (1 + 1e-3)


def test_a_time_limit_is_told():
    problem = transformer("prototype-4gpu-12.5", factor=1.4, micro_batches=3)
    result = CpSat(time_limit_s=0.01).plan(problem)
    assert result.time_limited
    assert result.status in (Status.TIME_LIMIT, Status.NOT_FOUND)


def test_too_large_a_step_is_refused_with_its_size():
    result = CpSat(most_items=100).plan(cases()["shared-path"])
    assert result.status is Status.NOT_FOUND and "most_items" in result.message and "1736" in result.message


@pytest.mark.parametrize(
    ("setting", "value"),
    [("time_limit_s", 0.0), ("gap", -1.0), ("deterministic_limit", -1.0), ("workers", 0), ("ticks", 10),
     ("most_items", 0)],
)  # fmt: skip
def test_settings_out_of_range(setting, value):
    with pytest.raises(InputError, match=setting):
        CpSat(**{setting: value})


@pytest.mark.usefixtures("interrupts")
def test_interrupts_still_reach_python_after_a_solve():
    """The solver would put the system's own handler of Ctrl-C in place of Python's."""
    CpSat(time_limit_s=1.0, workers=1).plan(random_problem(1, factor=1.15))
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_a_solve():
    from tmojax.ilp import cp_sat

    class Solver:
        stopped = threading.Event()

        def solve(self, model, callback):
            signal.raise_signal(signal.SIGINT)
            assert self.stopped.wait(60)

        def stop_search(self):
            self.stopped.set()

    with pytest.raises(KeyboardInterrupt):
        cp_sat._solve(Solver(), SimpleNamespace(cp=None), None)
    assert Solver.stopped.is_set()
