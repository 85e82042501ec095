"""The decision read off a schedule makes the same schedule again."""

import pytest
from planner_cases import cases

from tmojax.ilp.from_schedule import decision_from_schedule
from tmojax.planners.registry import PLANNERS
from tmojax.planners.workbench import Workbench
from tmojax.relax.decisions import Choice
from tmojax.relax.decode import DoesNotFit

CASES = cases()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [
    "recompute-all", "budget-milp", *(pytest.param(k, marks=pytest.mark.long) for k in ("offload-all", "ratio-sweep")),
])  # fmt: skip
def test_round_trip(kind, case):
    problem = CASES[case]
    result = PLANNERS[kind]().plan(problem)
    if result.candidate is None:
        return
    bench = Workbench(problem)
    found = tuple(
        decision_from_schedule(problem, bench.view(device), result.schedule, device)
        for device in range(bench.device_count)
    )
    for device, (made, given) in enumerate(zip(found, result.candidate.decisions, strict=True)):
        # What memory never forced out stays at home. What nobody needs may be kept or dropped all the same.
        changed = (made.choice != given.choice) & bench.view(device).needed
        assert (given.choice[changed] == Choice.OFFLOAD).all() and (made.choice[changed] == Choice.KEEP).all(), device
    if kind == "offload-all":  # decoded in a way of its own: everything leaves at once
        return
    again = bench.evaluate(found, result.candidate.coordination, result.candidate.lookahead_runs)
    assert not isinstance(again, DoesNotFit)
    assert again.step_s == pytest.approx(result.step_s, rel=0.01)
