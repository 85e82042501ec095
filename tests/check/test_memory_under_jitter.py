"""No memory is ever exceeded, however long things take: hand-written plans, and full-size plans of every planner."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jitter_runs import under_jitter, with_tight_limits, with_tight_pinned_limits
from plan_text import Plan
from planner_cases import light
from small_plans import with_memory
from test_loans import TWO_LOANS
from two_gpu_plans import LOAN, VALID

from tmojax.check import check
from tmojax.planners.base import Status
from tmojax.planners.registry import PLANNERS
from tmojax.problem import MemoryKind

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
    assert exceeds(with_memory(VALID["swap"], "host", capacity_bytes=1499))
    assert exceeds(LOAN.replace("lend 400 gpu0 7", "lend 399 gpu0 7", device=1))
    assert exceeds(LOAN.replace("wait 1 out0"))
    assert exceeds(LOAN.replace("wait 2 comm", device=1))


@pytest.mark.long
@pytest.mark.parametrize("step", ["GPT-2, 4 GPUs, K=8", "GPT-2, half-duplex, K=2", "GPT-2, uneven risers, K=2"])
def test_full_size_plans_of_every_planner(step):
    problem = imported(step)
    seeds, found = [], 0
    for kind in PLANNERS:
        result = light(kind).plan(problem, seed=0, seeds=tuple(seeds))
        if result.schedule is None:
            assert result.status in (Status.NOT_FOUND, Status.INFEASIBLE), (kind, result.message)
            continue
        seeds.append(result)
        found += 1
        tight = with_tight_pinned_limits(problem, result.schedule)
        assert check(tight, result.schedule).valid, kind
        shares = under_jitter(tight, result.schedule, draws=5).shares
        assert 0.5 < shares[MemoryKind.DEVICE] <= 1 and shares[MemoryKind.HOST] <= 1, (kind, shares)
    assert found > 5
