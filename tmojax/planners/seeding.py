"""From the schedule of any planner to a candidate that searches can go on from."""

from __future__ import annotations

from dataclasses import replace

from tmojax.ilp.from_schedule import decision_from_schedule
from tmojax.planners.sweep import sweep
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import LinkPolicyKind, Schedule
from tmojax.relax.coordinate import together
from tmojax.relax.decode import DoesNotFit
from tmojax.relax.turns import timetable_of
from tmojax.simulate import simulate


def candidate_of(bench: Workbench, schedule: Schedule) -> Candidate | DoesNotFit:
    """The decisions of a schedule that is more than decisions, coordinated in the way that is fastest: with the copies
    in the order in which that schedule makes them, or as the sweep finds.

    Lists are decoded anew, so the candidate may be slower than the schedule, and with decisions that differ between
    micro-batches it may not fit at all.
    """
    decisions = tuple(
        decision_from_schedule(bench.problem, bench.view(device), schedule, device)
        for device in range(bench.device_count)
    )
    swept = sweep(bench, decisions)
    if isinstance(swept, DoesNotFit):
        return swept
    order = replace(
        together(bench.problem, LinkPolicyKind.ORDER),
        slots=bench.slots(),
        timetable=timetable_of(schedule, simulate(bench.problem, schedule)),
    )
    timed = bench.evaluate(decisions, order)
    return timed if isinstance(timed, Candidate) and timed.step_s < swept.step_s else swept
