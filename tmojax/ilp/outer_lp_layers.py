"""One micro-batch of a device by layers: what programmes over layers are written over."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tmojax.problem import Problem
from tmojax.problem.step_view import StepView


@dataclass(frozen=True, eq=False)
class Layers:
    """L layers in forward order. layer [I]: of every candidate of the view (-1: none, it is no saved activation).

    saved_bytes [L]: activations that backward needs. forward_s, backward_s [L]. forward_bytes, backward_bytes [L]: the
    most that is in memory at an op of the layer besides saved activations. slot_layer [Q]: layer of every slot.
    """

    layer: np.ndarray
    saved_bytes: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray
    forward_bytes: np.ndarray
    backward_bytes: np.ndarray
    slot_layer: np.ndarray
    forward_end: int

    @property
    def count(self) -> int:
        return len(self.saved_bytes)


def layers_of(problem: Problem, view: StepView) -> Layers:
    """Runs of forward ops with one layer label are a layer; without labels, about sqrt(ops) runs of equally many ops.

    A backward op belongs to the layer whose saved activations it was the first to need, or to that of the op before.
    """
    ops = problem.workload.program(view.device).ops
    end = view.forward_end
    labels = [ops[op].layer for op in view.slot_op[:end]]
    changes = [slot for slot in range(1, end) if labels[slot] != labels[slot - 1]]
    if not changes and end > 1:
        blocks = max(2, math.isqrt(end))
        changes = sorted({round(end * block / blocks) for block in range(1, blocks)} - {0})
    slot_layer = np.zeros(len(view.slot_op), np.int64)
    slot_layer[:end] = np.searchsorted(changes, np.arange(end), side="right")
    count = len(changes) + 1
    saved = view.needed & (view.producer_slot < end)
    layer = np.where(saved, slot_layer[np.minimum(view.producer_slot, max(end - 1, 0))], -1)
    first_needs = np.full(len(slot_layer), -1)
    for index in np.flatnonzero(saved):
        first_needs[view.idle_to[index]] = max(first_needs[view.idle_to[index]], layer[index])
    here = count - 1
    for slot in range(end, len(slot_layer)):
        here = int(first_needs[slot]) if first_needs[slot] >= 0 else here
        slot_layer[slot] = here
    forward = np.arange(len(slot_layer)) < end
    others = view.keep_bytes - _saved_profile(problem, view, saved)

    def per_layer(values: np.ndarray, of_forward: bool, combine) -> np.ndarray:
        result = np.zeros(count, values.dtype)
        chosen = forward == of_forward
        combine.at(result, slot_layer[chosen], values[chosen])
        return result

    return Layers(
        layer, np.bincount(layer[saved], weights=view.size_bytes[saved], minlength=count).astype(np.int64),
        per_layer(view.slot_s, True, np.add), per_layer(view.slot_s, False, np.add),
        per_layer(others, True, np.maximum), per_layer(others, False, np.maximum), slot_layer, end,
    )  # fmt: skip


def _saved_profile(problem: Problem, view: StepView, saved: np.ndarray) -> np.ndarray:
    """[Q] bytes of saved activations at every slot when all are kept from their production to their last use."""
    ops = problem.workload.program(view.device).ops
    last: dict[int, int] = {}
    for slot, op in enumerate(view.slot_op.tolist()):
        for tensor in (*ops[op].reads, *ops[op].writes, *ops[op].updates):
            last[tensor] = slot
    change = np.zeros(len(view.slot_op) + 1, np.int64)
    for index in np.flatnonzero(saved):
        change[view.producer_slot[index]] += view.size_bytes[index]
        change[last[int(view.tensor[index])] + 1] -= view.size_bytes[index]
    return np.cumsum(change)[:-1]
