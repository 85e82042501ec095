"""From fractions to decisions: threshold sweeps, repair by soft value, the same for all GPUs or one for each. NumPy
only.

Memory is judged by the fine slots of the `StepView`, without the copies in flight: a necessary condition. The
decode decides what fits; it does not move what never has to leave, so offloading a little too much costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
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
    streams = [_variants(model, solution, views, allowed, capacity, restart) for restart in restarts]
    found: list[Rounding] = []
    seen: set[tuple] = set()
    while streams and len(found) < most:
        for stream in list(streams):
            item = next(stream, None)
            if item is None:
                streams.remove(stream)
                continue
            decisions, start_share = item
            key = (*(decision.key for decision in decisions), start_share)
            if key not in seen and len(found) < most:
                seen.add(key)
                found.append(item)
    return found


def _variants(model: PeriodicModel, solution: RelaxedSolution, views: Sequence[StepView], allowed: np.ndarray,
              capacity: np.ndarray, restart: int) -> Iterator[Rounding]:  # fmt: skip
    """All roundings of one restart: for each pair of thresholds a different decision per GPU, then one for all."""
    soft = solution.choice[restart]
    resting = np.stack([solution.state_out[restart], solution.state_away[restart]], 1)
    resting = resting * (np.asarray(model.resting_gb) > 0)[:, None]  # shares of nothing where state may not leave
    shares = tuple(float(share) for share in solution.start_share[restart])
    coded_share = float(model.coded_share)
    same = all(np.array_equal(view.tensor, views[0].tensor) for view in views)
    same &= all(np.array_equal(view.slot_op, views[0].slot_op) for view in views)
    uniform = same and len(views) > 1 and len(set(capacity.tolist())) == 1

    def rounded(
        gpu: int, fractions: np.ndarray, resting: np.ndarray, thresholds: tuple[float, float]
    ) -> DeviceDecision:
        view, gaps = views[gpu], np.array(model.state[gpu], np.int64).reshape(-1, 3)
        count = len(view.size_bytes)
        leaves = fractions[count : count + len(gaps), Choice.KEEP] < thresholds[0]
        state_out, free = round_state(view, gaps[leaves], *resting.tolist())
        room, own = capacity[gpu] + free, slice(count)
        found = round_device(view, fractions[own], allowed[gpu, own], room, state_out, thresholds, coded_share)
        return replace(found, lender=model.lenders[gpu], codec=model.codec) if model.choices > 3 else found

    for thresholds in THRESHOLDS:
        each = tuple(rounded(g, soft[g], resting[g], thresholds) for g in range(len(views)))
        yield each, shares
        if uniform:
            mean = rounded(0, soft.mean(axis=0), resting.mean(axis=0), thresholds)
            yield (mean,) * len(views), shares
    if uniform:
        for gpu in range(len(views)):
            one = rounded(gpu, soft[gpu], resting[gpu], THRESHOLDS[0])
            yield (one,) * len(views), shares


def round_device(view: StepView, soft: np.ndarray, allowed: np.ndarray, capacity_bytes: np.ndarray,
                 state_out: np.ndarray, thresholds: tuple[float, float],
                 coded_share: float = 1.0) -> DeviceDecision:  # fmt: skip
    """Fractions [I, 3 or 6] of one GPU as a decision that fits without copies in flight, as far as that is possible.
    capacity_bytes [Q]: what state that leaves adds to the memory included. coded_share: encoded bytes of a plain one.
    What leaves goes where most of it goes.

    Where memory is exceeded, the kept candidate with the smallest fraction of keep leaves; where it is not, dropped
    candidates with a large fraction of keep come back.
    """
    keep_below, drop_above = thresholds
    ways = np.array([Choice.OFFLOAD, *range(Choice.RECOMPUTE + 1, soft.shape[1])])
    way = ways[np.argmax(np.where(allowed[:, ways], soft[:, ways], -1.0), axis=1)]
    elsewhere = allowed[:, ways].any(axis=1)
    away, drop = soft[:, ways].sum(axis=1), soft[:, Choice.RECOMPUTE]
    share_of_drop = drop / np.maximum(away + drop, 1e-9)
    leaving = np.where(share_of_drop > drop_above, Choice.RECOMPUTE, way)
    leaving = np.where(~elsewhere, Choice.RECOMPUTE, leaving)
    leaving = np.where(~allowed[:, Choice.RECOMPUTE], way, leaving)
    can_leave = elsewhere | allowed[:, Choice.RECOMPUTE]
    choice = np.where((soft[:, Choice.KEEP] < keep_below) & can_leave, leaving, Choice.KEEP).astype(np.int8)
    choice[~allowed[:, Choice.KEEP]] = Choice.RECOMPUTE
    leaving = np.where(can_leave, leaving, Choice.KEEP).astype(np.int8)
    choice = _repair(view, choice, leaving, soft, capacity_bytes, coded_share)
    return DeviceDecision(_bring_back(view, choice, soft, capacity_bytes, coded_share), state_out)


def round_state(view: StepView, leaves: np.ndarray, on_host: float, away: float) -> tuple[np.ndarray, np.ndarray]:
    """(state_out [S], bytes that it frees at each slot [Q]).

    leaves [N, 3]: state tensors that leave within the step, with the slots around their gaps. Of the resting ones,
    largest first, the share `on_host` of their bytes is on the host (the last one that crosses it included if more than
    half of it is wanted), and of the others the share `away` leaves.
    """
    state_out = np.zeros(len(view.state_bytes), np.int8)
    state_out[leaves[:, 0]] = Rest.AWAY
    free = np.zeros(len(view.slot_s))
    places = np.arange(len(free))
    for index, last_use, next_use in leaves.tolist():
        after, before = places > last_use, places < next_use
        free[(after | before) if next_use <= last_use else (after & before)] += view.state_bytes[index]
    for share, rest in ((on_host, Rest.ON_HOST), (away, Rest.AWAY)):
        resting = np.flatnonzero(view.state_resting & (state_out == Rest.ON_DEVICE))
        wanted = share * float(view.state_bytes[resting].sum())
        for index in sorted(resting.tolist(), key=lambda i: (-int(view.state_bytes[i]), i)):
            size = float(view.state_bytes[index])
            if size > 0 and wanted > size / 2:
                state_out[index] = rest
                wanted -= size
                free += size
    return state_out, free


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


def resident_bytes(view: StepView, choice: np.ndarray, coded_share: float = 1.0) -> np.ndarray:
    """[Q] bytes resident at each slot with every copy out done at once and every copy in done at the last moment."""
    count = len(view.slot_s)
    wanted = wanted_from(view, choice)
    own_use = np.where(view.needed, view.idle_to, view.idle_to + 1)
    start = np.where(choice == Choice.KEEP, view.idle_from + 1, np.maximum(wanted, view.idle_from + 1))
    end = np.maximum(own_use, start)
    change = np.zeros(count + 2)
    np.add.at(change, np.minimum(start, count), view.size_bytes.astype(float))
    np.add.at(change, np.minimum(end, count), -view.size_bytes.astype(float))
    coded = np.flatnonzero(choice == Choice.COMPRESS)
    np.add.at(change, view.idle_from[coded] + 1, coded_share * view.size_bytes[coded])
    np.add.at(change, np.minimum(start[coded], count), -coded_share * view.size_bytes[coded])
    return view.base_bytes + np.cumsum(change)[:count]


def _repair(
    view: StepView, choice: np.ndarray, leaving: np.ndarray, soft: np.ndarray, capacity: np.ndarray, coded_share: float
) -> np.ndarray:
    choice = choice.copy()
    by_keep = np.argsort(soft[:, Choice.KEEP], kind="stable")
    while True:
        over = resident_bytes(view, choice, coded_share) - capacity
        slot = int(np.argmax(over))
        missing = float(over[slot])
        idle = (view.idle_from < slot) & (slot < view.idle_to) & (choice == Choice.KEEP) & (leaving != Choice.KEEP)
        order = by_keep[idle[by_keep]]
        if missing <= 0 or not len(order):
            return choice
        covered = np.cumsum(view.size_bytes[order])
        taken = order[: int(np.searchsorted(covered, missing)) + 1]
        choice[taken] = leaving[taken]


def _bring_back(
    view: StepView, choice: np.ndarray, soft: np.ndarray, capacity: np.ndarray, coded_share: float
) -> np.ndarray:
    """Keep dropped candidates that backward uses, largest fraction of keep first, while memory allows.

    What their inputs then need no more is not counted as free.
    """
    choice = choice.copy()
    room = capacity - resident_bytes(view, choice, coded_share)
    wanted = wanted_from(view, choice)
    dropped = np.flatnonzero((choice == Choice.RECOMPUTE) & view.needed & (soft[:, Choice.KEEP] > 0.05))
    for index in dropped[np.argsort(-soft[dropped, Choice.KEEP], kind="stable")].tolist():
        gap = slice(int(view.idle_from[index]) + 1, int(wanted[index]))
        if gap.stop <= gap.start or room[gap].min() >= view.size_bytes[index]:
            choice[index] = Choice.KEEP
            room[gap] -= view.size_bytes[index]
    return choice
