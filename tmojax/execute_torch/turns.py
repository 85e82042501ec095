"""Turns on links between ranks: which copies must have ended elsewhere before one may start (policy `order`).

A rank goes through its list in order and blocks at whatever it waits for, which is stricter than the streams of the
plan. So the lists are gone through once beforehand: what would block for ever is found before anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from tmojax.errors import InputError
from tmojax.problem import Kind, LinkPolicyKind, Problem, Schedule

Place = tuple[int, int]  # device, instruction
_TRANSFERS = (Kind.OFFLOAD, Kind.PREFETCH)


@dataclass(frozen=True)
class Turns:
    """`before` {transfer: transfers of other ranks that must have ended}. `told`: links whose turns are not kept, with
    the reason."""

    before: dict[Place, tuple[Place, ...]]
    told: tuple[str, ...]

    def of(self, device: int) -> tuple[dict[int, tuple[Place, ...]], frozenset[int]]:
        """(what the transfers of a rank wait for, its transfers that others wait for)."""
        own = {index: places for (d, index), places in self.before.items() if d == device}
        wanted = {index for places in self.before.values() for d, index in places if d == device}
        return own, frozenset(wanted)


def find_turns(problem: Problem, schedule: Schedule) -> Turns:
    """The turns that ranks can keep. Raises InputError for lists that block each other even without turns."""
    if not _ends(schedule, {}):
        raise InputError(
            "plan: its lists wait for each other in a way that only separate streams resolve, and hooks go through a "
            "list in order; plan without waits between GPUs (with a planner that does not stagger them)"
        )
    links = list(zip(problem.machine.links, schedule.link_policies, strict=False))
    told = [
        f"{link.name}: {policy.kind} (there is nobody to ask who is first)"
        for link, policy in links if policy.kind in (LinkPolicyKind.FCFS, LinkPolicyKind.PRIORITY)
    ]  # fmt: skip
    before: dict[Place, set[Place]] = {}
    for link, policy in links:
        if policy.kind is not LinkPolicyKind.ORDER:
            continue
        added = {place: set(earlier) for place, earlier in before.items()}
        for earlier, later in zip(policy.sequence, policy.sequence[policy.slots :], strict=False):
            if earlier != later:
                added.setdefault(later, set()).add(earlier)
        if _ends(schedule, added):
            before = added
        else:
            told.append(f"{link.name}: order (its turns and the order of a list contradict each other)")
    between = {
        place: tuple(sorted(other for other in places if other[0] != place[0])) for place, places in before.items()
    }  # fmt: skip
    return Turns({place: others for place, others in between.items() if others}, tuple(told))


def _ends(schedule: Schedule, before: dict[Place, set[Place]]) -> bool:
    """Do all lists come to their ends when each blocks, in list order, at waits, collectives and turns?"""
    kinds = [rows["kind"].tolist() for rows in schedule.lists]
    events = [rows["event"].tolist() for rows in schedule.lists]
    signalled: set[int] = set()
    done = [0] * len(kinds)

    def meets(device: int) -> bool:
        here = schedule.lists[device][done[device]]
        others = [schedule.lists[d][done[d]] for d in range(len(done)) if d != device and done[d] < len(kinds[d])]
        return len(others) == len(done) - 1 and all(
            row["kind"] == Kind.COLLECTIVE and row["op"] == here["op"] for row in others
        )

    moved = True
    while moved:
        moved = False
        for device, own in enumerate(kinds):
            while done[device] < len(own):
                index = done[device]
                if own[index] == Kind.WAIT and events[device][index] not in signalled:
                    break
                if own[index] == Kind.COLLECTIVE:
                    if not meets(device):
                        break
                    done = [count + 1 for count in done]
                    moved = True
                    continue
                if own[index] in _TRANSFERS and any(at >= done[d] for d, at in before.get((device, index), ())):
                    break
                if own[index] == Kind.SIGNAL:
                    signalled.add(events[device][index])
                done[device] += 1
                moved = True
    return all(count == len(own) for count, own in zip(done, kinds, strict=True))
