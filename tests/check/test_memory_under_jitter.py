"""No memory is ever exceeded, however long things take: hand-written plans, plans of every planner, some full size."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from jitter_runs import under_jitter, with_tight_limits, with_tight_pinned_limits
from plan_text import Plan
from planner_cases import cases, light
from small_plans import with_memory
from test_loans import TWO_LOANS
from two_gpu_plans import LOAN, VALID

from tmojax.check import check
from tmojax.planners.base import PlanResult, Status
from tmojax.planners.registry import PLANNERS
from tmojax.problem import MemoryKind, Problem

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "imported"))

from steps import imported

HAND_WRITTEN = VALID | {"two loans": TWO_LOANS}


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_hand_written_plans_in_the_smallest_memories(name):
    plan = HAND_WRITTEN[name]
    schedule = plan.schedule()
    problem = with_tight_limits(plan.problem, schedule)
    assert check(problem, schedule).valid
    under_jitter(problem, schedule, draws=30)


def exceeds(plan: Plan) -> bool:
    try:
        under_jitter(plan.problem, plan.schedule(), draws=30)
    except AssertionError:
        return True
    return False


def test_the_recount_sees_what_is_too_much():
    """Plans that the checker rejects for their memory or loans, with times that show it."""
    assert exceeds(with_memory(VALID["keep"], "gpu0", capacity_bytes=1789))
    assert exceeds(with_memory(VALID["encoded"], "host", capacity_bytes=299))
    assert exceeds(with_memory(VALID["encoded"], "host", pinned_limit_bytes=299))
    assert exceeds(LOAN.replace("lend 400 gpu0 7", "lend 399 gpu0 7", device=1))
    assert exceeds(LOAN.replace("wait 1 out0"))
    assert exceeds(LOAN.replace("wait 2 comm", device=1))


def assert_within_limits(problem: Problem, result: PlanResult, draws: int) -> None:
    """In the memories of the problem, with pinned limits as low as the plan allows."""
    assert result.schedule is not None
    tight = with_tight_pinned_limits(problem, result.schedule)
    assert check(tight, result.schedule).valid, result.planner
    shares = under_jitter(tight, result.schedule, draws).shares
    assert 0.3 < shares[MemoryKind.DEVICE] <= 1 and shares[MemoryKind.HOST] <= 1, (result.planner, shares)


def plans_of(problem: Problem, kinds: Iterable[str]) -> list[PlanResult]:
    """Plans, each planner starting from those before it."""
    found: list[PlanResult] = []
    for kind in kinds:
        result = light(kind).plan(problem, seed=0, seeds=tuple(found))
        if result.schedule is not None:
            found.append(result)
        else:
            assert result.status in (Status.NOT_FOUND, Status.INFEASIBLE), (kind, result.message)
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", ["half-duplex", "uneven"])
def test_plans_of_every_planner(name):
    problem = cases()[name]
    results = plans_of(problem, PLANNERS)
    assert len(results) > 5
    for result in results:
        assert_within_limits(problem, result, draws=20)


@pytest.mark.long
@pytest.mark.parametrize("step", ["GPT-2, 4 GPUs, K=8", "GPT-2, uneven risers, K=2"])
def test_plans_of_full_size(step):
    """The other planners take minutes here: `benchmarks/check/memory_under_jitter.py --planner KIND`."""
    problem = imported(step)
    results = plans_of(problem, ("offload-all", "ratio-sweep", "oblivious", "lockstep-milp", "budget-milp"))
    assert len(results) > 2
    for result in results:
        assert_within_limits(problem, result, draws=5)
