"""How little memory the simple strategies get by with, everything allowed put together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tmojax.planners.gradient import own_starts
from tmojax.planners.repair import repair
from tmojax.planners.workbench import Workbench
from tmojax.problem import Action, Problem
from tmojax.relax.decisions import DeviceDecision, Rest
from tmojax.relax.decode import DoesNotFit
from tmojax.relax.template import build_template
from tmojax.relax.unroll import unroll

PRECISION = 1e-3  # of the capacity: how closely the search ends
FINALISTS = 3  # strategies with the least peaks, which are pressed further


def least_capacity(problem: Problem, wanted_bytes: int) -> tuple[int, str]:
    """(bytes, strategy): `wanted_bytes`, if a strategy fits into it on every device, or else the least that one does.

    Strategies are those of `own_starts`, also with all state away between its uses; the emptiest of them are sent away
    further where memory is short (`repair`). Planners that mix actions tensor by tensor may fit into somewhat less;
    nothing fits into less than the largest op needs.
    """
    bench = Workbench(problem)
    ranked = sorted(
        ((max(_peak(bench, d, decisions[d]) for d in set(bench.device_class)), name, decisions)
         for name, decisions in _strategies(bench)),
        key=lambda found: found[0],
    )  # fmt: skip
    least, best = ranked[0][:2]
    for peak_bytes, name, decisions in ranked[:FINALISTS]:
        if least <= wanted_bytes:
            break
        needed = max(_least(bench, d, decisions[d], wanted_bytes, peak_bytes) for d in sorted(set(bench.device_class)))
        if needed < least:
            least, best = needed, name
    return max(least, wanted_bytes), best


def _strategies(bench: Workbench) -> Iterator[tuple[str, tuple[DeviceDecision, ...]]]:
    for name, decisions in own_starts(bench):
        yield name, decisions
        if Action.OFFLOAD in bench.problem.actions and any(len(decision.state_out) for decision in decisions):
            away = [np.full(len(decision.state_out), Rest.AWAY, np.int8) for decision in decisions]
            yield f"{name} and all state", tuple(
                DeviceDecision(decision.choice, rest) for decision, rest in zip(decisions, away, strict=True)
            )


def _peak(bench: Workbench, device: int, decision: DeviceDecision) -> int:
    """Bytes that the device's lists need in any case, with everything away that may be."""
    view = bench.view(device)
    template = build_template(bench.problem, view, decision)
    return int(unroll(bench.problem, view, decision, template).profile_bytes.max())


def _least(bench: Workbench, device: int, decision: DeviceDecision, low: int, high: int) -> int:
    """The least capacity between `low` and `high`, into which it fits, that the decision can be made to fit into."""

    def fits(capacity_bytes: int) -> DeviceDecision | None:
        found = repair(Workbench(bench.problem.with_device_capacity(capacity_bytes)), device, decision)
        return None if isinstance(found, DoesNotFit) else found

    if fits(low) is not None:
        return low
    while high - low > PRECISION * high:
        middle = (low + high) // 2
        found = fits(middle)
        if found is None:
            low = middle
        else:
            high = min(middle, max(_peak(bench, device, found), low + 1))
    return high
