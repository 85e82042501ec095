"""Where nothing fits: the nearest capacity in which something does, and what is too much now."""

from __future__ import annotations

from collections.abc import Sequence

from tmojax.check import check
from tmojax.planners.base import Planner, PlanResult
from tmojax.problem import Problem, largest_op_bytes
from tmojax.report.outcome import Shortfall, device_capacities

# The nearest capacity that fits is sought to this fraction of the footprint.
CAPACITY_STEP = 1 / 64


def find_shortfall(problem: Problem, footprint_bytes: Sequence[int], planners: Sequence[Planner]) -> Shortfall | None:
    """The least device memory in which one of the planners has a plan (by bisection), and where that plan exceeds what
    there is. None if not even the footprint is enough for them."""
    largest = max(largest_op_bytes(problem.workload, d)[1] for d in range(problem.workload.device_count))
    low, high = max(max(device_capacities(problem)), largest), 2 * max(footprint_bytes)
    step = max(int(max(footprint_bytes) * CAPACITY_STEP), 1)
    best: tuple[int, PlanResult] | None = None
    while high - low > step or best is None:
        middle = high if best is None else (low + high) // 2
        roomy = problem.with_device_capacity(middle)
        plans = [result for planner in planners if (result := planner.plan(roomy)).status.has_plan]
        fitting = [r for r in plans if r.schedule is not None and check(roomy, r.schedule).valid]
        if fitting:
            best, high = (middle, min(fitting, key=lambda r: r.step_s)), middle
        elif best is None:
            return None
        else:
            low = middle
    capacity, result = best
    assert result.schedule is not None
    checked = check(problem, result.schedule)
    over = max((v for v in checked.violations if v.bytes_over > 0), key=lambda v: v.bytes_over, default=None)
    if over is None:
        return None
    where, tensors = over.memory, ()
    if over.device >= 0:
        where, tensors = over.message.split(": ")[1], checked.largest_at_peak[over.device]
    return Shortfall(over.memory, over.bytes_over, where, tensors, result.planner, capacity, result.step_s)
