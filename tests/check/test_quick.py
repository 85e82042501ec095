"""The quick path of the checker and the detailed one give the same report wherever the quick one gives any."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_text import Plan
from random_steps import random_choice, random_problem
from small_plans import KEEP, ONE_GPU, SWAP, TWO_BATCHES, with_memory
from test_mutations import ALL
from two_gpu_plans import REDUCE, STAGED, VALID

from tmojax.check import CheckReport, checker
from tmojax.check.checker import check
from tmojax.check.quick import quick_report
from tmojax.check.rules import Findings
from tmojax.check.shape import check_shape
from tmojax.check.static import Static
from tmojax.problem import Placement, Problem, Schedule
from tmojax.problem.step_view import view_step
from tmojax.relax.coordinate import Coordination, assemble
from tmojax.relax.decisions import DeviceDecision
from tmojax.relax.decode import DoesNotFit, decode

DETAILED_ONLY = {"encoded", "sliced", "loan", "reader", "parked"}


def detailed(problem: Problem, schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> CheckReport:
    """The report without the quick path."""
    with monkeypatch.context() as patch:
        patch.setattr(checker, "quick_report", lambda static, schedule: None)
        return check(problem, schedule)


def quick(problem: Problem, schedule: Schedule) -> CheckReport | None:
    static, findings = Static(problem), Findings()
    check_shape(static, schedule, findings)
    return None if findings.violations else quick_report(static, schedule)


@pytest.mark.parametrize("name", VALID)
def test_hand_written_plans(name, monkeypatch):
    plan = VALID[name]
    found = quick(plan.problem, plan.schedule())
    assert (found is None) == (name in DETAILED_ONLY)
    if found is not None:
        assert found == detailed(plan.problem, plan.schedule(), monkeypatch)


@pytest.mark.parametrize("name", ALL)
def test_nothing_that_is_wrong_is_accepted(name):
    plan, _ = ALL[name]
    assert quick(plan.problem, plan.schedule()) is None


@pytest.mark.parametrize("name", ["keep", "swap", "recompute", "two batches", "reduce", "staged"])
def test_every_deletion_swap_and_repetition(name, monkeypatch):
    plan = VALID[name]
    schedule = plan.schedule()
    accepted = 0
    for device, rows in enumerate(schedule.lists):
        changed = [np.delete(rows, i) for i in range(len(rows))]
        changed += [np.insert(rows, i, rows[j]) for i in range(len(rows) + 1) for j in range(len(rows))]
        changed += [np.insert(np.delete(rows, i), j, rows[i]) for i in range(len(rows)) for j in range(len(rows))]
        for new in changed:
            lists = tuple(new if d == device else old for d, old in enumerate(schedule.lists))
            case = replace(schedule, lists=lists)
            found = quick(plan.problem, case)
            if found is not None:
                accepted += 1
                assert found == detailed(plan.problem, case, monkeypatch)
    assert accepted > 10  # the test has substance


@pytest.mark.parametrize("plan", [KEEP, SWAP, TWO_BATCHES, REDUCE, STAGED])
def test_the_last_byte_counts(plan: Plan):
    for name, peak in check(plan.problem, plan.schedule()).peak_bytes.items():
        exact = with_memory(plan, name, capacity_bytes=peak)
        assert quick(exact.problem, exact.schedule()) is not None
        short = with_memory(plan, name, capacity_bytes=peak - 1)
        assert quick(short.problem, short.schedule()) is None


def test_placements_that_are_not_restored():
    schedule = ONE_GPU["swap"].schedule()
    for memories in [(1,), (0, 1), (1, 0)]:
        moved = replace(schedule, initial=((Placement(1, memories),),))
        assert quick(SWAP.problem, moved) is None


def test_decoded_steps(monkeypatch):
    accepted = 0
    for seed in range(40):
        problem = random_problem(seed, factor=1.1)
        rng = np.random.default_rng(seed)
        lists = []
        for device in range(problem.workload.device_count):
            view = view_step(problem, device)
            state_out = 2 * np.asarray(rng.random(len(view.state_resting)) < 0.5, dtype=np.int8)
            found = decode(problem, view, DeviceDecision(random_choice(view, rng), state_out))
            if isinstance(found, DoesNotFit):
                break
            lists.append(found)
        else:
            shares = tuple(0.3 * g for g in range(len(lists)))
            schedule = assemble(problem, lists, Coordination(shares))
            report = quick(problem, schedule)
            assert report is not None and report == detailed(problem, schedule, monkeypatch)
            accepted += 1
    assert accepted > 3
