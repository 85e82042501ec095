"""State that leaves within a step (`Rest.AWAY`), as further candidates of the relaxed model.

The decode lets such a tensor leave in each of its long gaps where memory is short. The model has one gap of each: the
longest, between two uses within a micro-batch, or, for what micro-batches change, from its last use to its first use in
the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tmojax.problem import Problem
from tmojax.problem.step_view import StepView

LONG_GAP = 1 / 8  # of a micro-batch's slots, as in the decode: shorter gaps are not worth a trip
SMALLEST = 1e-3  # of the largest state tensor: smaller ones are not worth a variable
LEAST_SHARE = 0.05  # of the capacity: if all of them together have less, the state stays


@dataclass(frozen=True, eq=False)
class StateGaps:
    """N state tensors. state [N]: index into `StepView.state_tensor`. last_use, next_use [N]: slots around the gap;
    it spans the end of a micro-batch where next_use <= last_use. clean [N]: micro-batches do not change it, so from the
    second gap on the host has a current copy."""

    state: np.ndarray
    last_use: np.ndarray
    next_use: np.ndarray
    clean: np.ndarray


def find_state_gaps(problem: Problem, view: StepView) -> StateGaps:
    """Gaps of the state that micro-batches use. Empty if what could leave is less than `LEAST_SHARE` of the memory."""
    ops, slots = problem.workload.program(view.device).ops, len(view.slot_op)
    number = {tensor: index for index, tensor in enumerate(view.state_tensor.tolist())}
    uses: dict[int, list[int]] = {}
    changed: set[int] = set()
    for slot, op in enumerate(view.slot_op.tolist()):
        for tensor in dict.fromkeys((*ops[op].reads, *ops[op].updates)):
            if tensor in number:
                uses.setdefault(number[tensor], []).append(slot)
        changed.update(number[tensor] for tensor in ops[op].updates if tensor in number)
    smallest = SMALLEST * view.state_bytes.max(initial=0)
    shortest = max(2, int(slots * LONG_GAP))
    found = []
    for index, own in sorted(uses.items()):
        gaps = [(after - before, before, after) for before, after in pairwise(own)]
        if view.micro_batches == 1:
            gaps.append((own[0], 0, own[0]))
        elif index in changed:
            gaps.append((slots - own[-1] + own[0], own[-1], own[0]))
        length, before, after = max(gaps, default=(0, 0, 0))
        if length > shortest and view.state_bytes[index] >= max(smallest, 1):
            found.append((index, before, after, view.micro_batches > 1 and index not in changed))
    if view.state_bytes[[row[0] for row in found]].sum() < LEAST_SHARE * problem.capacity_bytes(view.device):
        found = []
    table = np.array(found, np.int64).reshape(-1, 4)
    return StateGaps(table[:, 0], table[:, 1], table[:, 2], table[:, 3].astype(bool))
