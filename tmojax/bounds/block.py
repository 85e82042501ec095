"""The columns and rows of one micro-batch of one class of devices. Bytes and time are in `Units` (docs/bounds.md,
section 3).

Everything is read at *moments*: the starts, and of some the ends, of selected slots. At slots that are not selected
nothing is demanded, which only lowers the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.bounds.device_classes import DeviceClass
from tmojax.bounds.encoded import add_encoded
from tmojax.bounds.gaps import Gaps, Host
from tmojax.bounds.highs import INFINITY, LinearModel
from tmojax.bounds.moments import Moments
from tmojax.bounds.resting import Resting, add_resting
from tmojax.bounds.whole import add_gone


@dataclass(frozen=True)
class Units:
    """What one unit of a column means: bytes and seconds. Chosen so that columns are neither huge nor below
    tolerances."""

    size_bytes: float
    time_s: float

    def rate(self, bytes_per_s: float) -> float:
        """A rate in units of bytes per unit of time."""
        return bytes_per_s * self.time_s / self.size_bytes


@dataclass(frozen=True, eq=False)
class Block:
    """Columns of one block of what `gaps` says at `moments`: out, into [J + 1] cumulative bytes that have crossed by
    each moment and by the end of the block; time [J + 1]: of the moments, and of the end, from the start of the block.
    moved, again [I]: columns of the moved and of the recomputed share of each gap (-1: none); of what comes in behind
    the block only state that rests is part of `into`. left: (tensor, slot that made it) -> column of the share of this
    version that is in `out`. most_in [J + 1]: bytes, which come in after each moment and by the end at most. gone:
    columns of whole tensors at moments, where asked for. coding: column of the time in which resting state is encoded
    (-1: none).
    """

    gaps: Gaps
    moments: Moments
    out: np.ndarray
    into: np.ndarray
    time: np.ndarray
    moved: np.ndarray
    again: np.ndarray
    left: dict[tuple[int, int], int]
    most_in: np.ndarray
    gone: np.ndarray
    resting: Resting
    coding: int

    @property
    def end_time(self) -> int:
        return int(self.time[-1])


def add_block(
    model: LinearModel,
    gaps: Gaps,
    device: DeviceClass,
    moments: Moments,
    resting: np.ndarray,
    coded: np.ndarray,
    unit: Units,
    longest: float,
    *,
    first_block: bool,
    whole: bool = False,
) -> Block:
    """Add one micro-batch; `resting`, `coded` [S]: columns of the share of every resting tensor that leaves at some
    time of the step, or is encoded in it. first_block: of the step. whole: with columns for whole tensors.

    `longest`: more than the block can take when the objective is at its minimum.
    """
    at, count, slots = moments.places, len(moments.places), len(gaps.slot_op)
    size = gaps.size_bytes / unit.size_bytes
    first = np.searchsorted(at, 2 * gaps.start + 1, side="right")  # moments first .. last - 1 lie inside the gap
    last = np.where(gaps.end >= slots, count + 1, np.searchsorted(at, 2 * gaps.end, side="left"))
    run_last = np.minimum(last, np.searchsorted(at, 2 * gaps.run_end, side="left"))
    available = np.searchsorted(at, 2 * gaps.made + 1, side="right")
    checked = np.concatenate([[0], np.cumsum(moments.tight)])
    exact_sum = np.concatenate([[0], np.cumsum(moments.exact)])

    def matters(until: np.ndarray) -> np.ndarray:
        seen = np.where(gaps.lives, checked[until] - checked[first], exact_sum[until] - exact_sum[first])
        return (seen > 0) & (size > 0)

    tail = gaps.end >= slots
    moved = np.full(len(size), -1)
    again = np.full(len(size), -1)
    pick = matters(np.minimum(last, count)) & gaps.may_move
    moved[pick] = model.add_columns(int(pick.sum()))
    rerun = matters(np.minimum(run_last, count)) & (gaps.producer >= 0) & ~tail
    again[rerun] = model.add_columns(int(rerun.sum()))

    total = float(size[pick].sum())
    out = model.add_columns(count + 1, 0.0, total)
    into = model.add_columns(count + 1, 0.0, total)
    free = model.add_columns(count + 1, 0.0, total)  # copies that need no crossing out in this block
    could_out = model.add_columns(count + 1, 0.0, total)
    must_in = model.add_columns(count + 1, 0.0, total)
    away_moved = model.add_columns(count, 0.0, total)
    away_again = model.add_columns(count, 0.0, float(size[rerun].sum()))
    pays = pick & (gaps.host == Host.COPY_OUT)

    def running(
        columns: np.ndarray, index: np.ndarray, where: np.ndarray, choice: np.ndarray, ending: np.ndarray | None = None,
        plus: tuple[tuple[int, int, float], ...] = (), size: np.ndarray = size,
    ) -> None:  # fmt: skip
        """columns[j] = sum of size * choice over gaps with index <= j (and, with `ending`, j < ending), and of size *
        factor * column over the entries (gap, column, factor) of `plus`."""
        rows = np.flatnonzero(where)
        for j in range(len(columns)):
            new = rows[index[rows] == j]
            terms = [(columns[j], -1.0), (choice[new], size[new])]
            terms += [(column, factor * size[gap]) for gap, column, factor in plus if index[gap] == j]
            if j:
                terms.append((columns[j - 1], 1.0))
            if ending is not None:
                over = rows[(ending[rows] == j) & (index[rows] < j)]
                terms.append((choice[over], -size[over]))
            model.add_row(0.0, 0.0, *terms)

    inside = last > first
    outgoing, extra_free, left = copies_out(model, gaps, pays, moved)
    running(could_out, available, outgoing >= 0, outgoing)
    running(free, first, pick & ~pays, moved, plus=extra_free)
    running(must_in, np.minimum(last, count), pick & ~tail, moved)
    running(away_moved, first, pick & gaps.lives & inside, moved, ending=last)
    running(away_again, first, rerun & gaps.lives & (run_last > first), again, ending=run_last)
    for j in range(count + 1):
        if j:
            model.add_row(0.0, INFINITY, (out[j], 1.0), (out[j - 1], -1.0))
            model.add_row(0.0, INFINITY, (into[j], 1.0), (into[j - 1], -1.0))
        model.add_row(-INFINITY, 0.0, (out[j], 1.0), (could_out[j], -1.0))
        model.add_row(0.0, INFINITY, (into[j], 1.0), (must_in[j], -1.0))
        model.add_row(0.0, INFINITY, (out[j], 1.0), (free[j], 1.0), (into[j], -1.0))
    for total_columns, by in ((out, could_out), (into, must_in)):
        model.add_row(0.0, 0.0, (total_columns[count], 1.0), (by[count], -1.0))

    # What is recomputed, or decoded, was away, or encoded, at a moment at which memory is demanded: the run comes after
    # the first of these.
    demanded = [np.append(np.flatnonzero(where), count) for where in (moments.tight, moments.exact)]
    living, dead = (after[np.searchsorted(after, first)] + 1 for after in demanded)
    begin = np.minimum(np.where(gaps.lives, living, dead), count)
    encoded = add_encoded(model, gaps, unit, matters(np.minimum(last, count)) & gaps.lives & inside, (moved, again),
                          (resting, coded), (available, begin, np.minimum(last, count)), count)  # fmt: skip
    not_plain = model.add_columns(count, 0.0, float(gaps.spare_bytes.sum()) / unit.size_bytes)
    running(not_plain, first, encoded.hidden >= 0, encoded.hidden, ending=last, size=gaps.spare_bytes / unit.size_bytes)

    overflow_bytes = gaps.needed_bytes() - device.capacity_bytes
    overflow = overflow_bytes[moments.slots] / unit.size_bytes
    rest = add_resting(model, gaps, resting, unit.size_bytes, count, first=first_block)
    late = pick & (gaps.start < 0) & (gaps.late & gaps.dirty)[gaps.tensor]
    rounded = np.zeros(count)
    gone = [np.zeros(0, np.int64)]
    for j in np.flatnonzero(moments.tight & (overflow > 0)):
        at_rest = ((rest.absent[j], 1.0), (not_plain[j], 1.0), *encoded.at_rest)
        else_away = ((away_again[j], 1.0), *at_rest)
        model.add_row(overflow[j], INFINITY, (away_moved[j], 1.0), *else_away)
        model.add_row(overflow[j], INFINITY, (out[j], 1.0), (free[j], 1.0), (into[j], -1.0), *else_away)
        around = (first <= j) & (j < last)
        if first_block and (around & late).any():
            went = ((moved[around & late], -size[around & late]), (rest.out[j], 1.0), (rest.late_out, 1.0))
            model.add_row(overflow[j], INFINITY, (away_moved[j], 1.0), *else_away, *went)
        reruns = np.where(j < run_last, again, -1)
        rounded[j] = _whole_tensors(gaps, around & gaps.lives, int(overflow_bytes[moments.slots[j]])) / unit.size_bytes
        if whole and not gaps.may_compress:
            since = (out[: j + 1], available)
            gone.append(add_gone(model, gaps, around, size, moved, reruns, overflow[j], at_rest[0], *since))
        if moments.exact[j]:
            crossed = (out[j], free[j], into[j])
            _add_exact(model, gaps, int(moments.slots[j]), around, size, moved, reruns, overflow[j], at_rest, crossed)

    comes = pick & ~tail
    most_in = np.array([size[comes & (last > j)].sum() for j in range(count + 1)])
    more = np.where(rounded > overflow, rounded, 0.0)
    if more.any():
        most_in[:] = INFINITY
    out, into = _add_whole(model, more, out, into, total)

    extra = _recompute_time(model, gaps, unit, begin, np.minimum(run_last, count), again, count, encoded.runs)
    into = _with_late_state(model, into, rest.into)
    time = _add_time(model, gaps, device, unit, moments, (out, rest.out), (into,), extra, longest)
    return Block(gaps, moments, out, into, time, moved, again, left, most_in, np.concatenate(gone), rest,
                 encoded.coding)  # fmt: skip


def _whole_tensors(gaps: Gaps, around: np.ndarray, overflow_bytes: int) -> int:
    """Bytes of the whole tensors that have crossed out where `overflow_bytes` must be away, `around` [I] being the gaps
    that there are; 0 where a part of a tensor may be away although not all of it has crossed out in this
    micro-batch."""
    whole = (gaps.host == Host.COPY_OUT) & (gaps.producer < 0)
    if gaps.may_compress or len(gaps.resting_bytes) or not around.any() or not whole[around].all():
        return 0
    common = int(np.gcd.reduce(gaps.size_bytes[around]))
    return -(-overflow_bytes // common) * common if common else 0


def _add_whole(model, whole: np.ndarray, out: np.ndarray, into: np.ndarray, total: float):
    """Columns like `out` and `into` that include the bytes which cross because their tensor moves as a whole, although
    they are themselves never away; whole [J]: what has crossed out by each moment at least."""
    if not whole.any():
        return out, into
    count = len(out) - 1
    more_out, more_in, all_out, all_in = (model.add_columns(count + 1, 0.0, 2 * total) for _ in range(4))
    for j in range(count + 1):
        for all_bytes, more, part in ((all_out, more_out, out), (all_in, more_in, into)):
            model.add_row(0.0, 0.0, (all_bytes[j], 1.0), (more[j], -1.0), (part[j], -1.0))
            if j:
                model.add_row(0.0, INFINITY, (more[j], 1.0), (more[j - 1], -1.0))
        model.add_row(0.0, INFINITY, (more_out[j], 1.0), (more_in[j], -1.0))
    model.add_row(0.0, 0.0, (more_out[count], 1.0), (more_in[count], -1.0))
    for j in np.flatnonzero(whole):
        model.add_row(whole[j], INFINITY, (all_out[j], 1.0))
    return all_out, all_in


def _with_late_state(model, into: np.ndarray, of_late_state: np.ndarray) -> np.ndarray:
    """Columns of what both say together."""
    if not len(of_late_state):
        return into
    most = model.most(int(into[-1])) + model.most(int(of_late_state[-1]))
    together = model.add_columns(len(into), 0.0, most)
    for j, column in enumerate(together):
        model.add_row(0.0, 0.0, (column, 1.0), (into[j], -1.0), (of_late_state[j], -1.0))
    return together


def copies_out(model, gaps, pays, moved):
    """(outgoing [I], again, left): one copy out serves all gaps of one version of a tensor.

    outgoing[i]: column of the share of the version that crosses out, at the first gap of each version (else -1).
    again: entries (gap, column, factor) of what comes in again, from the start of the gap on, without another copy out.
    left: (tensor, slot that made the version) -> column of its share that crosses out.
    """
    outgoing = np.full(len(moved), -1)
    again: list[tuple[int, int, float]] = []
    versions: dict[tuple[int, int], list[int]] = {}
    for i in np.flatnonzero(pays):
        versions.setdefault((int(gaps.tensor[i]), int(gaps.made[i])), []).append(int(i))

    for members in versions.values():
        members.sort(key=lambda i: gaps.start[i])
        left = int(moved[members[0]])  # share that has left in some gap up to this one
        for i in members[1:]:
            more = int(model.add_columns(1)[0])
            model.add_row(0.0, INFINITY, (more, 1.0), (left, -1.0))
            model.add_row(0.0, INFINITY, (more, 1.0), (moved[i], -1.0))
            again += [(i, int(moved[i]), 1.0), (i, more, -1.0), (i, left, 1.0)]
            left = more
        outgoing[members[0]] = left
    return outgoing, tuple(again), {key: int(outgoing[members[0]]) for key, members in versions.items()}


def _add_exact(model, gaps, slot, around, size, moved, again, overflow, at_rest, crossed) -> None:
    """One moment with a share per tensor: what is recomputed later needs its inputs kept, moved or recomputed later
    too."""
    out, free, into = crossed
    living = np.flatnonzero(around & gaps.lives)
    dead = {
        int(gaps.tensor[i]): int(i)
        for i in np.flatnonzero(around & ~gaps.lives)
        if gaps.last_use[gaps.tensor[i]] < slot
    }
    off: dict[int, int] = {}
    rec: dict[int, int] = {}
    kept: dict[int, int] = {}
    for i in (*living, *dead.values()):
        i = int(i)
        if moved[i] >= 0:
            off[i] = int(model.add_columns(1)[0])
            model.add_row(0.0, INFINITY, (moved[i], 1.0), (off[i], -1.0))
        if again[i] >= 0:
            rec[i] = int(model.add_columns(1)[0])
            model.add_row(0.0, INFINITY, (again[i], 1.0), (rec[i], -1.0))
        if i in off and i in rec:
            model.add_row(-INFINITY, 1.0, (off[i], 1.0), (rec[i], 1.0))
    for i in dead.values():
        kept[i] = int(model.add_columns(1)[0])
    for i in rec:
        for source in gaps.inputs.get(int(gaps.producer[i]), ()):
            if source in dead:
                j = dead[source]
                ways = [(column, 1.0) for column in (kept.get(j), off.get(j), rec.get(j)) if column is not None]
                model.add_row(0.0, INFINITY, *ways, (rec[i], -1.0))
    alive = {int(i) for i in living}
    away = [(column, size[i]) for way in (off, rec) for i, column in way.items() if i in alive]
    held = [(column, -size[i]) for i, column in kept.items()]
    model.add_row(overflow, INFINITY, *away, *held, *at_rest)
    model.add_row(
        0.0, INFINITY, (out, 1.0), (free, 1.0), (into, -1.0), *((column, -size[i]) for i, column in off.items())
    )


def _recompute_time(model, gaps, unit, first, last, again, count, coding) -> np.ndarray:
    """Columns [count + 1]: time of recomputation done by each moment; runs lie between the gap's first and last
    moment. coding: (column, first moment, last one, time) of runs of codecs."""
    slots = sorted({int(s) for s in gaps.producer[again >= 0]})
    limit = float(sum(gaps.slot_s[gaps.producer[i]] for i in np.flatnonzero(again >= 0))) / unit.time_s
    limit += sum(model.most(column) * cost for column, _, _, cost in coding)
    done = model.add_columns(count + 1, 0.0, limit)
    least: list[list[tuple[int, float]]] = [[] for _ in range(count + 1)]
    most: list[list[tuple[int, float]]] = [[] for _ in range(count + 1)]
    for column, begin, end, cost in coding:
        most[begin].append((column, cost))
        least[end].append((column, cost))
    for slot in slots:
        members = np.flatnonzero((gaps.producer == slot) & (again >= 0))
        cost = float(gaps.slot_s[slot]) / unit.time_s
        tensors = sorted(set(gaps.tensor[members].tolist()))
        if len(tensors) == 1:
            runs = [(int(again[i]), int(first[i]), int(last[i])) for i in members]
        else:
            # One run may serve all tensors that the op writes, but every gap of one tensor takes a run of its own.
            column = int(model.add_columns(1, 0.0, float(max((gaps.tensor[members] == t).sum() for t in tensors)))[0])
            for tensor in tensors:
                model.add_row(0.0, INFINITY, (column, 1.0), (again[members[gaps.tensor[members] == tensor]], -1.0))
            runs = [(column, int(first[members].min()), int(last[members].max()))]
        for column, begin, end in runs:
            most[begin].append((column, cost))
            least[end].append((column, cost))
    could = model.add_columns(count + 1, 0.0, limit)
    must = model.add_columns(count + 1, 0.0, limit)
    for columns, parts, sense in ((could, most, 1), (must, least, -1)):
        for j in range(count + 1):
            before = [(columns[j - 1], 1.0)] if j else []
            model.add_row(0.0, 0.0, (columns[j], -1.0), *before, *parts[j])
            if sense > 0:
                model.add_row(-INFINITY, 0.0, (done[j], 1.0), (columns[j], -1.0))
            else:
                model.add_row(0.0, INFINITY, (done[j], 1.0), (columns[j], -1.0))
    return done


def _add_time(model, gaps, device, unit, moments, out, into, done, longest) -> np.ndarray:
    """Columns [count + 1]: start of each moment and the end of the block, from the block's start."""
    count = len(moments.places)
    instant = np.append(moments.from_start_s, gaps.slot_s.sum()) / unit.time_s
    time = model.add_columns(count + 1, 0.0, longest)
    rates = (
        (device.out_bytes_per_s, out),
        (device.in_bytes_per_s, into),
        (device.joint_bytes_per_s, (*out, *into)),
    )
    for j in range(count + 1):
        before = [(time[j - 1], -1.0), (done[j - 1], 1.0)] if j else []
        model.add_row(
            float(instant[j] - (instant[j - 1] if j else 0.0)), INFINITY, (time[j], 1.0), (done[j], -1.0), *before
        )
        for rate, flows in rates:
            if rate == float("inf"):
                continue
            rate_in_units = unit.rate(rate)
            terms: list[tuple] = [(time[j], rate_in_units)]
            if j:
                terms.append((time[j - 1], -rate_in_units))
            for flow in flows:
                if not len(flow):
                    continue
                terms.append((flow[j], -1.0))
                if j:
                    terms.append((flow[j - 1], 1.0))
            model.add_row(0.0, INFINITY, *terms)
    return time
