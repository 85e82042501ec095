"""Whatever a planner returns is valid, timed exactly, no faster than the bound; and it says why there is nothing."""

import math
from functools import cache

import numpy as np
import pytest
from planner_cases import BOTH, cases, light, transformer

from tmojax.bounds import bound
from tmojax.check import check
from tmojax.planners.base import Status
from tmojax.planners.registry import PLANNERS
from tmojax.problem import Action, Kind
from tmojax.simulate import simulate

CASES = cases()
# The gradient planner compiles for every shape of problem.
EVERY = [
    pytest.param(kind, case, marks=[pytest.mark.long] if kind == "gradient" and case != "shared-path" else [])
    for kind in PLANNERS
    for case in CASES
]
bound_s = cache(lambda case: bound(CASES[case]).bound_s)
planned = cache(lambda kind, case: light(kind).plan(CASES[case], seed=5))


@pytest.mark.parametrize(("kind", "case"), EVERY)
def test_plans_are_valid_and_exactly_timed(kind, case):
    problem = CASES[case]
    result = planned(kind, case)
    assert result.planner == PLANNERS[kind]().name
    assert 0 <= result.compile_s <= result.plan_s
    if not result.status.has_plan:
        assert result.status is Status.NOT_FOUND and result.message
        assert result.schedule is None and math.isinf(result.step_s)
        return
    assert result.schedule is not None
    report = check(problem, result.schedule)
    assert report.valid, report.text()
    assert result.step_s == simulate(problem, result.schedule).step_s
    assert result.step_s >= bound_s(case) * (1 - 1e-6)
    if result.candidate is not None:
        assert result.candidate.step_s == result.step_s


def test_the_cases_have_substance():
    """Every planner has a plan somewhere; keeping everything is not enough everywhere."""
    for kind in PLANNERS:
        if kind not in ("gradient", "exhaustive"):  # the latter is for tiny problems, see tests/tiny_instances
            found = [planned(kind, case).status.has_plan for case in CASES]
            assert any(found), kind
    assert not planned("keep-all", "shared-path").status.has_plan


@pytest.mark.parametrize("kind", sorted(PLANNERS.keys() - {"gradient", "peer-offload", "compress-all"}))
def test_without_enough_memory_the_message_names_op_and_bytes(kind):
    problem = transformer("prototype-4gpu-12.5", factor=20.0)
    result = light(kind).plan(problem)
    assert result.status is Status.NOT_FOUND and result.schedule is None
    if kind == "local-search":  # its starts are strategies of its own, none of which it can blame
        assert "fits" in result.message
    elif kind in ("oblivious", "tmo-ordered", "lockstep-milp", "budget-milp", "tmo-milp", "time-indexed-milp"):
        # A model without a solution names no place.
        assert "no solution in this memory" in result.message
    else:
        assert all(word in result.message for word in ("bytes", "gpu0", "at op")), result.message


@pytest.mark.parametrize(
    ("kind", "action"), [("offload-all", "offload"), ("recompute-all", "recompute"), ("sqrt-n", "recompute")]
)
def test_what_is_not_allowed_is_not_done(kind, action):
    problem = transformer("prototype-4gpu-12.5", factor=1.1, actions=BOTH - {Action(action)})
    result = light(kind).plan(problem)
    assert result.status is Status.NOT_FOUND
    assert result.message == f"needs action {action!r}, which the problem does not allow"


@pytest.mark.parametrize("action", [Action.OFFLOAD, Action.RECOMPUTE])
@pytest.mark.parametrize("kind", ["ratio-sweep", "oblivious", "lockstep-milp", "budget-milp", "local-search"])
def test_one_action_alone(kind, action):
    """With one action, plans contain nothing of the other."""
    problem = transformer("prototype-4gpu-12.5", factor=1.15, actions=frozenset({action}))
    result = light(kind).plan(problem)
    assert result.status.has_plan and result.schedule is not None, result.message
    for device, rows in enumerate(result.schedule.lists):
        runs = sum(rows["kind"] == Kind.COMPUTE)
        first = len([run for run in problem.workload.sequence(device)
                     if not problem.workload.program(device).ops[run[0]].collective])  # fmt: skip
        copies = sum(np.isin(rows["kind"], [Kind.OFFLOAD, Kind.PREFETCH]))
        assert (runs > first, copies > 0) == ((False, True) if action is Action.OFFLOAD else (True, False))
