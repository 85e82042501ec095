"""Fewer, longer slots: neighbouring ops of a micro-batch merged into at most a given number of fluid slots.

Memory stays on the safe side: a merged slot is charged with its highest moment, and a tensor counts as present in the
whole merged slot of its last use before and its first use after the idle interval.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.problem.step_view import StepView


@dataclass(frozen=True, eq=False)
class FluidSlots:
    """A `StepView` on merged slots. Shapes: Q fine slots, M merged slots, I candidates.

    group [Q]: merged slot of every slot. slot_s [M]: seconds. base_bytes [M]: resident bytes when every candidate is
    away as long as it may be. idle_from, idle_to [I]: merged slots around the idle interval (exclusive); for a
    candidate that backward does not use, `idle_to` is the last slot in which a recomputation may read it.
    """

    group: np.ndarray
    slot_s: np.ndarray
    base_bytes: np.ndarray
    idle_from: np.ndarray
    idle_to: np.ndarray


def last_reads(view: StepView) -> np.ndarray:
    """[I] last fine slot at which a candidate can be wanted: its backward use, or that of the last tensor made from
    it.
    """
    last = view.idle_to.copy()
    for index in np.argsort(-view.producer_slot, kind="stable").tolist():
        if not view.needed[index]:
            last[index] = max((int(last[d]) for d in view.dependents[index]), default=int(last[index]))
    return last


def merge_slots(view: StepView, most: int) -> FluidSlots:
    """Merge neighbours, shortest first, until at most `most` slots are left; forward and backward stay apart.

    The time of a merged pair is weighed together with the bytes that merging makes look resident for longer.
    """
    count = len(view.slot_s)
    last = last_reads(view)
    left_bytes = np.zeros(count)  # idle from here: a merge with the next slot charges these there too
    right_bytes = np.zeros(count)
    np.add.at(left_bytes, view.idle_from[view.needed], view.size_bytes[view.needed])
    np.add.at(right_bytes, view.idle_to[view.needed], view.size_bytes[view.needed])
    seconds = view.slot_s.astype(float)
    total_s = max(seconds.sum(), 1e-30)
    total_bytes = max(float(view.size_bytes.sum()), 1.0)
    starts = list(range(count))
    seconds, left_bytes, right_bytes = seconds.tolist(), left_bytes.tolist(), right_bytes.tolist()

    def loss(at: int) -> float:
        if starts[at + 1] == view.forward_end:
            return np.inf
        return (seconds[at] + seconds[at + 1]) / total_s + (left_bytes[at] + right_bytes[at + 1]) / total_bytes

    losses = [loss(at) for at in range(count - 1)]
    while len(starts) > max(most, 2):
        at = int(np.argmin(losses))
        for values in (seconds, left_bytes, right_bytes):
            values[at] += values.pop(at + 1)
        del starts[at + 1], losses[at]
        for neighbour in (at - 1, at):
            if 0 <= neighbour < len(losses):
                losses[neighbour] = loss(neighbour)
    group = np.zeros(count, np.int64)
    group[starts] = 1
    group = np.cumsum(group) - 1
    ends = np.append(starts[1:], count)

    change = np.zeros(count + 1, np.int64)
    needed = np.flatnonzero(view.needed)
    wide = needed[group[view.idle_to[needed]] > group[view.idle_from[needed]]]
    narrow = needed[group[view.idle_to[needed]] == group[view.idle_from[needed]]]
    size = view.size_bytes
    np.add.at(change, view.idle_from[narrow] + 1, size[narrow])
    np.add.at(change, view.idle_to[narrow], -size[narrow])
    np.add.at(change, view.idle_from[wide] + 1, size[wide])
    np.add.at(change, ends[group[view.idle_from[wide]]], -size[wide])
    np.add.at(change, np.asarray(starts)[group[view.idle_to[wide]]], size[wide])
    np.add.at(change, view.idle_to[wide], -size[wide])
    base = view.base_bytes + np.cumsum(change[:count])
    return FluidSlots(
        group=group,
        slot_s=np.array(seconds),
        base_bytes=np.maximum.reduceat(base, starts),
        idle_from=group[view.idle_from],
        idle_to=group[last],
    )
