"""Recompute chains: which choices make an idle tensor wanted before its own backward use, and when.

When tensor `h` is recomputed, its inputs must be there at `h`'s own backward use; those of them that were dropped
are recomputed then too, and so on. A *path* leads from an input over dropped tensors to such an `h`: the input is
wanted at `h`'s slot to the extent (a product of fractions) that every tensor on the path is dropped.

Paths over dozens of tensors are cut by *anchors*: tensors that may be kept or offloaded but not dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.cost.slots import FluidSlots
from tmojax.problem.step_view import StepView

MAX_PATH_LENGTH = 16
MAX_PATHS_PER_TENSOR = 16
NEVER = -1  # stands for a tensor that is certainly not recomputed


@dataclass(frozen=True, eq=False)
class Chains:
    """All paths of one device, sorted by length. P paths.

    owner, slot [P]: the candidate that is wanted and the merged slot at which. length [P]: tensors on the path.
    first [P]: the dependent of `owner` that the path begins with. rest [P]: the path that continues from it (-1 for
    length 1). left_out: paths that the limit per tensor excludes.
    """

    owner: np.ndarray
    slot: np.ndarray
    length: np.ndarray
    first: np.ndarray
    rest: np.ndarray
    left_out: int


def can_be_dropped(view: StepView) -> np.ndarray:
    """[I] whether the model lets a candidate be dropped and produced again.

    Its op may run again, and so may those of inputs that nothing else keeps alive; and it is not an anchor. Anchors
    are tensors that everything later is made from (nothing older is read behind them), taken where a chain gets
    longer than half of `MAX_PATH_LENGTH`; a chain without such a place is cut at `MAX_PATH_LENGTH`.
    """
    possible = view.may_recompute.copy()
    order = np.argsort(view.producer_slot, kind="stable")
    last_reader = [max((int(view.producer_slot[d]) for d in readers), default=-1) for readers in view.dependents]
    read_until = -1
    depth = np.zeros(len(possible), np.int64)
    for index in order.tolist():
        sources = view.recompute_inputs[index]
        if not all(view.needed[source] or possible[source] for source in sources):
            possible[index] = False
        depth[index] = 1 + max((int(depth[source]) for source in sources), default=0)
        cuts_everything = read_until <= view.producer_slot[index]
        if view.needed[index] and (
            (cuts_everything and depth[index] > MAX_PATH_LENGTH // 2) or depth[index] > MAX_PATH_LENGTH
        ):
            possible[index] = False
        if not possible[index]:
            depth[index] = 0
        read_until = max(read_until, last_reader[index])
    return possible


def find_chains(view: StepView, slots: FluidSlots, possible: np.ndarray) -> Chains:
    """Collect, for every candidate, the paths that want it earlier than its own use.

    `possible` [I]: which candidates may be dropped. Of several ways to the same tensor the shortest is kept: it is
    the weakest condition. A candidate that backward does not use has only such wishes, so all of its paths count.
    """
    found: list[tuple[int, int, int, int, int]] = []  # owner, slot, length, first, rest
    ways: list[dict[int, int]] = [{} for _ in view.size_bytes]  # candidate -> {last tensor of the path: index in found}
    left_out = 0
    for owner in np.argsort(-view.producer_slot, kind="stable").tolist():
        best: dict[int, tuple[int, int, int]] = {}
        for first in sorted(d for d in view.dependents[owner] if possible[d]):
            options = [(end, found[way][2] + 1, way) for end, way in ways[first].items()]
            if view.needed[first]:
                options.append((first, 1, -1))
            for end, length, way in options:
                if length <= 2 * MAX_PATH_LENGTH and (end not in best or length < best[end][0]):
                    best[end] = (length, first, way)
        earlier = [
            (length, end, first, way)
            for end, (length, first, way) in best.items()
            if slots.idle_to[end] < slots.idle_to[owner] or not view.needed[owner]
        ]
        left_out += max(0, len(earlier) - MAX_PATHS_PER_TENSOR)
        for length, end, first, way in sorted(earlier)[:MAX_PATHS_PER_TENSOR]:
            ways[owner][end] = len(found)
            found.append((owner, int(slots.idle_to[end]), length, first, way))
    table = np.array(found, np.int64).reshape(-1, 5)
    order = np.lexsort((table[:, 1], table[:, 0], table[:, 2]))
    place = np.empty(len(order) + 1, np.int64)
    place[order] = np.arange(len(order))
    place[-1] = -1  # read by rest == -1
    owner, slot, length, first, rest = table[order].T
    return Chains(owner, slot, length, first, place[rest], left_out)


def shared_producers(view: StepView) -> np.ndarray:
    """[I, S] for every candidate the earlier candidates that the same op writes (padded with `NEVER`): one
    recomputation yields all of them, so only what exceeds the others' fraction costs time.
    """
    count = len(view.size_bytes)
    earlier = [
        [j for j in range(index) if view.producer_slot[j] == view.producer_slot[index]] for index in range(count)
    ]
    width = max((len(others) for others in earlier), default=0)
    table = np.full((count, width), NEVER, np.int64)
    for index, others in enumerate(earlier):
        table[index, : len(others)] = others
    return table
