"""Shorter chains of recomputation: tensors that leave by a copy instead, so that fewer are made again ahead of time.

A tensor that is made again wants its inputs, and those that were dropped are made again with it and stay until their
own use. Where memory is short, a chain through many layers fills it: somewhere on the way a tensor has to be brought
back from the host instead.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import Choice

KEEP, OFFLOAD, RECOMPUTE = int(Choice.KEEP), int(Choice.OFFLOAD), int(Choice.RECOMPUTE)


def break_chains(view: StepView, choice: np.ndarray, capacity_bytes: np.ndarray) -> np.ndarray:
    """`choice` [I] of keep, offload and recompute, with as much offloaded instead as it takes for the bytes that are
    resident at each slot (`tmojax.relax.rounding.resident_bytes`) not to exceed `capacity_bytes` [Q], or until nothing
    helps.

    Each time the tensor goes that takes most away from what is too much, over all slots and for each of its bytes,
    among those that are resident where most is too much or before.
    """
    sources = [np.array(inputs, np.int64) for inputs in view.recompute_inputs]
    first = np.concatenate([[0], np.cumsum([len(inputs) for inputs in sources])]).astype(np.int64)
    flat = np.concatenate([*sources, np.zeros(0, np.int64)])
    order = np.argsort(-view.producer_slot, kind="stable")
    return _break(
        choice.astype(np.int8), order, first, flat, view.needed, view.may_offload, view.idle_from, view.idle_to,
        view.size_bytes.astype(np.float64), view.base_bytes.astype(np.float64), capacity_bytes.astype(np.float64),
    )  # fmt: skip


@njit(cache=True)
def _spans(choice, order, first, sources, needed, idle_from, idle_to, slots):  # pragma: no cover - compiled
    """(from, until) [I]: the slots at which a tensor is resident beside those that its base counts."""
    begin, end = np.empty(len(choice), np.int64), np.empty(len(choice), np.int64)
    for index in range(len(choice)):
        begin[index] = idle_to[index] if needed[index] else slots
    for index in order:
        if choice[index] == RECOMPUTE and begin[index] < slots:
            for place in range(first[index], first[index + 1]):
                begin[sources[place]] = min(begin[sources[place]], begin[index])
    for index in range(len(choice)):
        begin[index] = idle_from[index] + 1 if choice[index] == KEEP else max(begin[index], idle_from[index] + 1)
        end[index] = max(begin[index], idle_to[index] if needed[index] else idle_to[index] + 1)
    return begin, end


@njit(cache=True)
def _over(begin, end, size, base, capacity):  # pragma: no cover - compiled
    """[Q] bytes above the capacity at each slot; negative where there is room."""
    slots = len(base)
    change = np.zeros(slots + 1)
    for index in range(len(begin)):
        change[min(begin[index], slots)] += size[index]
        change[min(end[index], slots)] -= size[index]
    held = 0.0
    over = np.empty(slots)
    for slot in range(slots):
        held += change[slot]
        over[slot] = base[slot] + held - capacity[slot]
    return over


@njit(cache=True)
def _break(choice, order, first, sources, needed, may_offload, idle_from, idle_to, size, base,
           capacity):  # fmt: skip  # pragma: no cover - compiled
    slots = len(base)
    while True:
        begin, end = _spans(choice, order, first, sources, needed, idle_from, idle_to, slots)
        over = _over(begin, end, size, base, capacity)
        worst = int(np.argmax(over))
        if over[worst] <= 0:
            return choice
        before = np.maximum(over, 0.0).sum()
        best, best_gain = -1, 0.0
        for index in range(len(choice)):
            # One that is gone by then still counts: what it is made again from may stay for longer.
            if choice[index] == OFFLOAD or not may_offload[index] or begin[index] > worst:
                continue
            now = choice[index]
            choice[index] = OFFLOAD
            other_begin, other_end = _spans(choice, order, first, sources, needed, idle_from, idle_to, slots)
            after = np.maximum(_over(other_begin, other_end, size, base, capacity), 0.0).sum()
            choice[index] = now
            gain = (before - after) / max(size[index], 1.0)
            if gain > best_gain:
                best, best_gain = index, gain
        if best < 0:
            return choice
        choice[best] = OFFLOAD
