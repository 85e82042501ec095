"""The replay of decided plans agrees with the exact simulator, policy by policy."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "cost"))

from periodic_cases import transformer_problem, views_of

from tmojax.errors import InputError
from tmojax.problem import Kind, LinkPolicyKind, Overheads, Problem
from tmojax.relax.coordinate import Coordination, assemble
from tmojax.relax.decisions import DeviceDecision
from tmojax.relax.decode import DoesNotFit, decode
from tmojax.relax.periodic import replay_schedules
from tmojax.simulate import simulate

POLICIES = (LinkPolicyKind.FAIR, LinkPolicyKind.FCFS, LinkPolicyKind.PRIORITY)


def random_plans(problem: Problem, count: int, seed: int):
    """Schedules of random decisions that fit, under all policies, with and without stagger."""
    rng = np.random.default_rng(seed)
    view = views_of(problem)[0]
    gpus = problem.workload.device_count
    plans = []
    for number in range(20 * count):
        lists = []
        for device in range(gpus):
            leave = rng.uniform(0.3, 1.0)
            choice = np.where(rng.random(len(view.size_bytes)) < leave, rng.integers(1, 3, len(view.size_bytes)), 0)
            choice[(choice == 1) & ~view.may_offload] = 0
            choice[(choice == 2) & ~view.may_recompute] = 0
            decision = DeviceDecision(choice.astype(np.int8), np.zeros(len(view.state_bytes), np.int8))
            lists.append(decode(problem, replace(view, device=device), decision))
        if any(isinstance(one, DoesNotFit) for one in lists):
            continue
        policy = POLICIES[number % 3]
        rank = tuple(reversed(range(gpus))) if policy is LinkPolicyKind.PRIORITY else ()
        starts = tuple(rng.choice([0.0, 0.2, 0.5]) * g for g in range(gpus))
        plans.append(assemble(problem, lists, Coordination(starts, policy, rank)))
        if len(plans) == count:
            return plans
    raise AssertionError("too few plans fit")


@pytest.mark.parametrize("half_duplex", [False, True])
def test_replay_agrees_with_the_simulator(half_duplex):
    problem = transformer_problem(3, 3, 2, 1.5, ("offload", "recompute"), rate=6e9, half_duplex=half_duplex)
    plans = random_plans(problem, 12, 1)
    exact = np.array([simulate(problem, plan).step_s for plan in plans])
    estimated = replay_schedules(problem, plans)
    np.testing.assert_allclose(estimated.step_s, exact, rtol=0.01)
    assert np.median(np.abs(estimated.step_s / exact - 1)) < 1e-3
    assert exact.max() > 1.1 * exact.min()  # the plans differ
    assert (estimated.busy_s <= estimated.step_s[:, None] * (1 + 1e-5)).all()


def test_replay_knows_setup_time():
    problem = transformer_problem(2, 2, 2, 1.5, ("offload", "recompute"), rate=6e9)
    machine = replace(problem.machine, overheads=Overheads(launch_s=1e-5, transfer_setup_s=1e-3))
    problem = replace(problem, machine=machine)
    plans = random_plans(problem, 6, 2)
    exact = np.array([simulate(problem, plan).step_s for plan in plans])
    np.testing.assert_allclose(replay_schedules(problem, plans).step_s, exact, rtol=0.02)


def test_a_plan_does_not_depend_on_its_neighbours():
    problem = transformer_problem(2, 2, 2, 1.5, ("offload", "recompute"), rate=6e9)
    plans = random_plans(problem, 4, 3)
    together = replay_schedules(problem, plans).step_s
    turned = replay_schedules(problem, plans[::-1]).step_s
    np.testing.assert_allclose(together, turned[::-1], rtol=1e-6)


def test_what_is_not_covered_is_an_error():
    problem = transformer_problem(2, 2, 2, 1.5, rate=6e9)
    with pytest.raises(InputError, match="at least one"):
        replay_schedules(problem, [])
    plan = random_plans(problem, 1, 4)[0]
    rows = plan.lists[0].copy()
    rows["kind"][np.flatnonzero(rows["kind"] == Kind.RELEASE)[0]] = Kind.LEND
    with pytest.raises(InputError, match="lend"):
        replay_schedules(problem, [replace(plan, lists=(rows, *plan.lists[1:]))])
