"""Coordination of given decisions: which link policy and which staggers, by exact simulation."""

from __future__ import annotations

from collections.abc import Iterable

from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import LinkPolicyKind
from tmojax.relax.decisions import DeviceDecision
from tmojax.relax.decode import NEVER, DoesNotFit

POLICIES = (LinkPolicyKind.FAIR, LinkPolicyKind.FCFS, LinkPolicyKind.PRIORITY)
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)


def even_starts(bench: Workbench, share: float) -> tuple[float, ...]:
    """Device g starts `share` * g / G micro-batches of compute after device 0."""
    return tuple(share * g / bench.device_count for g in range(bench.device_count))


def sweep(bench: Workbench, decisions: tuple[DeviceDecision, ...], *, shares: Iterable[float] = SHARES,
          policies: tuple[LinkPolicyKind, ...] = POLICIES,
          starts: Iterable[tuple[float, ...]] = ()) -> Candidate | DoesNotFit:  # fmt: skip
    """The fastest of all combinations of policy and stagger for `decisions`.

    `shares` are even staggers; `starts` are further start shares of all devices, for example the phases of a
    relaxation. With one device only the policy is tried.
    """
    lookahead = (NEVER,) * bench.device_count
    options = dict.fromkeys([*(even_starts(bench, share) for share in shares), *starts])
    if bench.device_count == 1:
        options = {(0.0,): None}
    best: Candidate | DoesNotFit | None = None
    for start_share in options:
        found = bench.with_policies(decisions, start_share, policies, lookahead)
        if isinstance(found, DoesNotFit):
            return found
        if best is None or found.step_s < best.step_s:  # type: ignore[union-attr]
            best = found
    assert best is not None
    return best
