"""Coordination of given decisions: which link policy and which staggers, by exact simulation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import LinkPolicyKind
from tmojax.relax.coordinate import Coordination, shared_links
from tmojax.relax.decisions import DeviceDecision
from tmojax.relax.decode import NEVER, DoesNotFit

POLICIES = (LinkPolicyKind.FAIR, LinkPolicyKind.FCFS, LinkPolicyKind.PRIORITY, LinkPolicyKind.ORDER)
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
# Turns of a quarter and of a sixteenth of a micro-batch; 0 is a whole forward or backward.
TURNS = (4, 16)


def even_starts(bench: Workbench, share: float) -> tuple[float, ...]:
    """Device g starts `share` * g / G micro-batches of compute after device 0."""
    return tuple(share * g / bench.device_count for g in range(bench.device_count))


def sweep(bench: Workbench, decisions: tuple[DeviceDecision, ...], *, shares: Iterable[float] = SHARES,
          policies: tuple[LinkPolicyKind, ...] = POLICIES,
          starts: Iterable[tuple[float, ...]] = ()) -> Candidate | DoesNotFit:  # fmt: skip
    """The fastest of all combinations of policy and stagger for `decisions`.

    `shares` are even staggers; `starts` are further start shares of all devices, for example the phases of a
    relaxation. Where an explicit order is the fastest policy, other orders are tried with the same starts
    (`other_orders`). Where no link is shared, policies make no difference, and the first is taken.
    """
    lookahead = (NEVER,) * bench.device_count
    options = dict.fromkeys([*(even_starts(bench, share) for share in shares), *starts])
    if bench.device_count == 1:
        options = {(0.0,): None}
    if not shared_links(bench.problem.machine):
        policies = policies[:1]
    best: Candidate | DoesNotFit | None = None
    for start_share in options:
        found = bench.with_policies(decisions, start_share, policies, lookahead)
        if isinstance(found, DoesNotFit):
            return found
        if best is None or found.step_s < best.step_s:  # type: ignore[union-attr]
            best = found
    assert isinstance(best, Candidate)
    if best.coordination.policy is LinkPolicyKind.ORDER:
        found = bench.best_of(decisions, [best.coordination, *other_orders(best.coordination)], lookahead)
        assert isinstance(found, Candidate)
        best = found
    return best


def other_orders(now: Coordination) -> list[Coordination]:
    """Orders next to `now`: shorter turns, the devices the other way round, and one more transfer at a time, which
    hides the set-up of the next copy."""
    rank = now.device_rank or tuple(range(len(now.start_share)))
    return [
        *(replace(now, turns=turns) for turns in TURNS),
        replace(now, device_rank=rank[::-1]),
        replace(now, slots=now.slots + 1),
    ]
