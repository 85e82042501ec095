"""How little memory the simple strategies get by with, everything allowed put together."""

from __future__ import annotations

from tmojax.planners.gradient import own_starts
from tmojax.planners.repair import repair
from tmojax.planners.workbench import Workbench
from tmojax.problem import Problem
from tmojax.relax.decisions import DeviceDecision
from tmojax.relax.decode import DoesNotFit
from tmojax.relax.template import build_template
from tmojax.relax.unroll import unroll

PRECISION = 1e-3  # of the capacity: how closely the search ends


def least_capacity(problem: Problem, wanted_bytes: int) -> tuple[int, str]:
    """(bytes, strategy): `wanted_bytes`, if a strategy fits into it on every device, or else the least that one does.

    Strategies are those of `own_starts`, sent away further where memory is short (`repair`). Planners that mix actions
    tensor by tensor may fit into somewhat less; nothing fits into less than the largest op needs.
    """
    bench = Workbench(problem)
    best: tuple[int, str] | None = None
    for name, decisions in own_starts(bench):
        needed, good = wanted_bytes, True
        for device in sorted(set(bench.device_class)):
            fitting = _least(problem, bench, device, decisions[device], wanted_bytes)
            needed, good = max(needed, fitting), good and fitting <= wanted_bytes
        if good:
            return wanted_bytes, name
        if best is None or needed < best[0]:
            best = (needed, name)
    assert best is not None
    return best


def _least(problem: Problem, bench: Workbench, device: int, decision: DeviceDecision, wanted_bytes: int) -> int:
    """The least capacity, at least `wanted_bytes`, that the decision can be made to fit into."""

    def peak(found: DeviceDecision) -> int:
        view = bench.view(device)
        return int(unroll(problem, view, found, build_template(problem, view, found)).profile_bytes.max())

    def fits(capacity_bytes: int) -> DeviceDecision | None:
        found = repair(Workbench(problem.with_device_capacity(capacity_bytes)), device, decision)
        return None if isinstance(found, DoesNotFit) else found

    high = peak(decision)
    if high <= wanted_bytes:
        return wanted_bytes
    if fits(wanted_bytes) is not None:
        return wanted_bytes
    low = wanted_bytes
    while high - low > PRECISION * high:
        middle = (low + high) // 2
        found = fits(middle)
        if found is None:
            low = middle
        else:
            high = min(middle, peak(found))
    return high
