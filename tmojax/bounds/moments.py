"""The moments of a micro-batch at which the linear program looks (docs/bounds.md, section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.bounds.gaps import Gaps

FEW_SLOTS = 16  # then every one is looked at when it ends
UPDATE_SLOTS = 12  # step ops looked at because they are the worst of a stretch, and because they touch most


@dataclass(frozen=True, eq=False)
class Moments:
    """places [J]: increasing; 2 q is the start of slot q, 2 q + 1 the last moment before its end. tight [J]: memory is
    demanded there; exact [J]: with the inputs of recomputations as well. from_start_s [J]: seconds of compute from the
    start of the block; from_slot_s [J]: from the start of the slot."""

    places: np.ndarray
    tight: np.ndarray
    exact: np.ndarray
    from_start_s: np.ndarray
    from_slot_s: np.ndarray

    @property
    def slots(self) -> np.ndarray:
        return self.places // 2


def choose_moments(gaps: Gaps, capacity_bytes: int, tight: int, exact: int = 4, timing: int = 16) -> Moments:
    """At most `tight` slots at which memory overflows (the worst of each stretch), `exact` of them, step ops, and
    `timing` others. Long tight slots are looked at when they end as well, and all of them if they are few."""
    slots = len(gaps.slot_op)
    need = gaps.needed_bytes()
    over = np.flatnonzero(need > capacity_bytes)
    over = over[over >= gaps.first_allocation]
    updates = over[gaps.step_slot[over]]
    over = over[~gaps.step_slot[over]]

    def worst(count: int, over: np.ndarray = over) -> set[int]:
        parts = np.array_split(over, min(count, len(over))) if len(over) else []
        return {int(part[np.argmax(need[part])]) for part in parts}

    held = worst(tight) | worst(UPDATE_SLOTS, updates) | _largest(updates, gaps.touched_bytes, UPDATE_SLOTS)
    fixed = worst(exact) | worst(1) | worst(1, updates)
    other = {int(s) for s in np.linspace(0, slots - 1, min(timing, slots))}
    movable = gaps.may_move
    for first, last in ((gaps.made, gaps.end), (gaps.start, gaps.end)):
        inner = movable & (first >= 0) & (last < slots)
        if inner.any():
            other |= {min(int(first[inner].min()) + 1, slots - 1), int(last[inner].max())}
    held |= fixed
    long = {slot for slot in held if gaps.slot_s[slot] >= 5e-3 * gaps.slot_s.sum()}
    ends = {2 * slot + 1 for slot in long}
    if (movable & (gaps.made >= 0)).any():
        ends.add(2 * int(gaps.made[movable & (gaps.made >= 0)].min()) + 1)  # no copy out can have begun
    if slots <= FEW_SLOTS:
        ends |= set(range(1, 2 * slots, 2))
    places = np.array(sorted({2 * slot for slot in held | other} | ends), np.int64)
    slot, at_end = places // 2, places % 2 == 1
    begins = np.concatenate([[0.0], np.cumsum(gaps.slot_s)[:-1]])
    inside = np.where(at_end, gaps.slot_s[slot], 0.0)
    return Moments(
        places, np.isin(slot, list(held)), np.isin(slot, list(fixed)) & ~at_end, begins[slot] + inside, inside
    )


def _largest(slots: np.ndarray, touched_bytes: np.ndarray, count: int) -> set[int]:
    return set(slots[np.argsort(-touched_bytes[slots], kind="stable")[:count]].tolist())
