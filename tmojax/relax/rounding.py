"""From fractions to decisions: threshold sweeps, repair by soft value, the same for all GPUs or one for each. NumPy
only.

Memory is judged by the fine slots of the `StepView`, without the copies in flight: a necessary condition. The
decode decides what fits; it does not move what never has to leave, so offloading a little too much costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import Choice, DeviceDecision, Rest

if TYPE_CHECKING:
    from tmojax.cost.model import PeriodicModel
    from tmojax.relax.optimise import RelaxedSolution

# A candidate leaves when its fraction of keep is below the first; of those that leave, it is dropped when the share of
# drop is above the second.
THRESHOLDS = ((0.5, 0.5), (0.7, 0.5), (0.3, 0.5), (0.5, 0.7), (0.5, 0.3), (0.9, 0.5), (0.85, 0.3), (0.85, 0.7))

Rounding = tuple[tuple[DeviceDecision, ...], tuple[float, ...]]


def round_solution(
    model: PeriodicModel, solution: RelaxedSolution, views: Sequence[StepView], *, most: int = 32
) -> list[Rounding]:
    """At most `most` distinct (decisions of all GPUs, start shares), best restarts first and interleaved;
    deterministic.

    `start_share` is as in `Coordination`: the compute of the first device, in micro-batches, after which a GPU
    starts.
    """
    allowed = np.asarray(model.allowed)
    capacity = np.asarray(model.capacity_gb) * 1e9
    restarts = np.argsort(solution.step_s, kind="stable").tolist()
    streams = [_variants(solution, views, allowed, capacity, restart) for restart in restarts]
    found: list[Rounding] = []
    seen: set[tuple] = set()
    while streams and len(found) < most:
        for stream in list(streams):
            item = next(stream, None)
            if item is None:
                streams.remove(stream)
                continue
            decisions, start_share = item
            key = (*((d.choice.tobytes(), d.state_out.tobytes()) for d in decisions), start_share)
            if key not in seen and len(found) < most:
                seen.add(key)
                found.append(item)
    return found


def _variants(solution: RelaxedSolution, views: Sequence[StepView], allowed: np.ndarray, capacity: np.ndarray,
              restart: int) -> Iterator[Rounding]:  # fmt: skip
    """All roundings of one restart: for each pair of thresholds a different decision per GPU, then one for all."""
    soft, state = solution.choice[restart], solution.state_out[restart]
    shares = tuple(float(share) for share in solution.start_share[restart])
    same = all(np.array_equal(view.tensor, views[0].tensor) for view in views)
    same &= all(np.array_equal(view.slot_op, views[0].slot_op) for view in views)
    uniform = same and len(views) > 1 and len(set(capacity.tolist())) == 1

    def rounded(gpu: int, fractions: np.ndarray, state_share: float, thresholds: tuple[float, float]) -> DeviceDecision:
        view = views[gpu]
        count, limit = len(view.size_bytes), float(capacity[gpu])
        return round_device(view, fractions[:count], float(state_share), allowed[gpu, :count], limit, thresholds)

    for thresholds in THRESHOLDS:
        each = tuple(rounded(g, soft[g], state[g], thresholds) for g in range(len(views)))
        yield each, shares
        if uniform:
            mean = rounded(0, soft.mean(axis=0), state.mean(), thresholds)
            yield (mean,) * len(views), shares
    if uniform:
        for gpu in range(len(views)):
            one = rounded(gpu, soft[gpu], state[gpu], THRESHOLDS[0])
            yield (one,) * len(views), shares


def round_device(view: StepView, soft: np.ndarray, state_share: float, allowed: np.ndarray, capacity_bytes: float,
                 thresholds: tuple[float, float]) -> DeviceDecision:  # fmt: skip
    """Fractions [I, 3] of one GPU as a decision that fits without copies in flight, as far as that is possible.

    Where memory is exceeded, the kept candidate with the smallest fraction of keep leaves; where it is not, dropped
    candidates with a large fraction of keep come back.
    """
    keep_below, drop_above = thresholds
    away, drop = soft[:, Choice.OFFLOAD], soft[:, Choice.RECOMPUTE]
    share_of_drop = drop / np.maximum(away + drop, 1e-9)
    leaving = np.where(share_of_drop > drop_above, Choice.RECOMPUTE, Choice.OFFLOAD)
    leaving = np.where(~allowed[:, Choice.OFFLOAD], Choice.RECOMPUTE, leaving)
    leaving = np.where(~allowed[:, Choice.RECOMPUTE], Choice.OFFLOAD, leaving)
    can_leave = allowed[:, Choice.OFFLOAD] | allowed[:, Choice.RECOMPUTE]
    choice = np.where((soft[:, Choice.KEEP] < keep_below) & can_leave, leaving, Choice.KEEP).astype(np.int8)
    choice[~allowed[:, Choice.KEEP]] = Choice.RECOMPUTE
    state_out = _resting(view, state_share)
    free = capacity_bytes + float(view.state_bytes[state_out == Rest.ON_HOST].sum())
    choice = _repair(view, choice, np.where(can_leave, leaving, Choice.KEEP).astype(np.int8), soft, free)
    return DeviceDecision(_bring_back(view, choice, soft, free), state_out)


def _resting(view: StepView, share: float) -> np.ndarray:
    """Resting state tensors, largest first, on the host until `share` of their bytes is (the last one that crosses
    it included if more than half of it is wanted).
    """
    state_out = np.zeros(len(view.state_bytes), np.int8)
    resting = np.flatnonzero(view.state_resting)
    wanted = share * float(view.state_bytes[resting].sum())
    for index in sorted(resting.tolist(), key=lambda i: (-int(view.state_bytes[i]), i)):
        size = float(view.state_bytes[index])
        if size > 0 and wanted > size / 2:
            state_out[index] = Rest.ON_HOST
            wanted -= size
    return state_out


def wanted_from(view: StepView, choice: np.ndarray) -> np.ndarray:
    """[I] first slot in backward at which a candidate must be resident under a decision, recompute chains included.

    The number of slots where nobody wants it.
    """
    never = len(view.slot_s)
    wanted = np.where(view.needed, view.idle_to, never)
    for index in np.argsort(-view.producer_slot, kind="stable").tolist():
        if choice[index] == Choice.RECOMPUTE and wanted[index] < never:
            for source in view.recompute_inputs[index]:
                wanted[source] = min(wanted[source], wanted[index])
    return wanted


def resident_bytes(view: StepView, choice: np.ndarray) -> np.ndarray:
    """[Q] bytes resident at each slot with every copy out done at once and every copy in done at the last moment."""
    count = len(view.slot_s)
    wanted = wanted_from(view, choice)
    own_use = np.where(view.needed, view.idle_to, view.idle_to + 1)
    start = np.where(choice == Choice.KEEP, view.idle_from + 1, np.maximum(wanted, view.idle_from + 1))
    end = np.maximum(own_use, start)
    change = np.zeros(count + 2)
    np.add.at(change, np.minimum(start, count), view.size_bytes.astype(float))
    np.add.at(change, np.minimum(end, count), -view.size_bytes.astype(float))
    return view.base_bytes + np.cumsum(change)[:count]


def _repair(view: StepView, choice: np.ndarray, leaving: np.ndarray, soft: np.ndarray, capacity: float) -> np.ndarray:
    choice = choice.copy()
    by_keep = np.argsort(soft[:, Choice.KEEP], kind="stable")
    while True:
        over = resident_bytes(view, choice) - capacity
        slot = int(np.argmax(over))
        missing = float(over[slot])
        idle = (view.idle_from < slot) & (slot < view.idle_to) & (choice == Choice.KEEP) & (leaving != Choice.KEEP)
        order = by_keep[idle[by_keep]]
        if missing <= 0 or not len(order):
            return choice
        covered = np.cumsum(view.size_bytes[order])
        taken = order[: int(np.searchsorted(covered, missing)) + 1]
        choice[taken] = leaving[taken]


def _bring_back(view: StepView, choice: np.ndarray, soft: np.ndarray, capacity: float) -> np.ndarray:
    """Keep dropped candidates that backward uses, largest fraction of keep first, while memory allows.

    What their inputs then need no more is not counted as free.
    """
    choice = choice.copy()
    room = capacity - resident_bytes(view, choice)
    wanted = wanted_from(view, choice)
    dropped = np.flatnonzero((choice == Choice.RECOMPUTE) & view.needed & (soft[:, Choice.KEEP] > 0.05))
    for index in dropped[np.argsort(-soft[dropped, Choice.KEEP], kind="stable")].tolist():
        gap = slice(int(view.idle_from[index]) + 1, int(wanted[index]))
        if gap.stop <= gap.start or room[gap].min() >= view.size_bytes[index]:
            choice[index] = Choice.KEEP
            room[gap] -= view.size_bytes[index]
    return choice
