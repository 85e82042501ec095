"""The columns and rows of one micro-batch of one class of devices. Bytes and time are in `Units` (docs/bounds.md,
section 3).

Everything is read at *moments*: the starts, and of some the ends, of selected slots. At slots that are not selected
nothing is demanded, which only lowers the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.bounds.device_classes import DeviceClass
from tmojax.bounds.gaps import Gaps, Host
from tmojax.bounds.highs import INFINITY, LinearModel


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
    """At most `tight` slots at which memory overflows (the worst of each stretch), `exact` of them, and `timing`
    others. Long tight slots are looked at when they end as well."""
    slots = len(gaps.slot_op)
    need = gaps.touched_bytes + gaps.idle_bytes() + int(gaps.resting_bytes.sum()) + gaps.fixed_resting_bytes
    over = np.flatnonzero(need > capacity_bytes)
    over = over[over >= gaps.first_allocation]

    def worst(count: int) -> set[int]:
        parts = np.array_split(over, min(count, len(over))) if len(over) else []
        return {int(part[np.argmax(need[part])]) for part in parts}

    held, fixed = worst(tight), worst(exact) | worst(1)
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
    places = np.array(sorted({2 * slot for slot in held | other} | ends), np.int64)
    slot, at_end = places // 2, places % 2 == 1
    begins = np.concatenate([[0.0], np.cumsum(gaps.slot_s)[:-1]])
    inside = np.where(at_end, gaps.slot_s[slot], 0.0)
    return Moments(
        places, np.isin(slot, list(held)), np.isin(slot, list(fixed)) & ~at_end, begins[slot] + inside, inside
    )


@dataclass(frozen=True, eq=False)
class Block:
    """Columns of one block: out, into [J + 1] cumulative bytes that have crossed by each moment and by the end of the
    block; end_time: its length. moved [I]: column of the moved share of each gap (-1: none); tails count as moved
    without bytes here.
    """

    out: np.ndarray
    into: np.ndarray
    end_time: int
    moved: np.ndarray


def add_block(
    model: LinearModel,
    gaps: Gaps,
    device: DeviceClass,
    moments: Moments,
    resting: np.ndarray,
    unit: Units,
    longest: float,
) -> Block:
    """Add one micro-batch; `resting` [S]: columns of the share of every resting tensor that leaves at some time of
    the step.

    `longest`: more than the block can take when the objective is at its minimum.
    """
    at, count, slots = moments.places, len(moments.places), len(gaps.slot_op)
    size = gaps.size_bytes / unit.size_bytes
    first = np.searchsorted(at, 2 * gaps.start + 1, side="right")  # moments first .. last - 1 lie inside the gap
    last = np.where(gaps.end >= slots, count + 1, np.searchsorted(at, 2 * gaps.end, side="left"))
    available = np.searchsorted(at, 2 * gaps.made + 1, side="right")
    checked = np.concatenate([[0], np.cumsum(moments.tight)])
    exact_sum = np.concatenate([[0], np.cumsum(moments.exact)])
    until = np.minimum(last, count)
    matters = np.where(gaps.lives, checked[until] > checked[first], exact_sum[until] > exact_sum[first]) & (size > 0)
    tail = gaps.end >= slots
    moved = np.full(len(size), -1)
    again = np.full(len(size), -1)
    pick = matters & gaps.may_move
    moved[pick] = model.add_columns(int(pick.sum()))
    rerun = matters & (gaps.producer >= 0) & ~tail
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
        columns: np.ndarray, index: np.ndarray, where: np.ndarray, choice: np.ndarray, ending: np.ndarray | None = None
    ) -> None:  # fmt: skip
        """columns[j] = sum of size * choice over gaps with index <= j (and, with `ending`, j < ending)."""
        rows = np.flatnonzero(where)
        for j in range(len(columns)):
            plus = rows[index[rows] == j]
            terms = [(columns[j], -1.0), (choice[plus], size[plus])]
            if j:
                terms.append((columns[j - 1], 1.0))
            if ending is not None:
                minus = rows[(ending[rows] == j) & (index[rows] < j)]
                terms.append((choice[minus], -size[minus]))
            model.add_row(0.0, 0.0, *terms)

    inside = last > first
    running(could_out, available, pays, moved)
    running(free, first, pick & ~pays, moved)
    running(must_in, np.minimum(last, count), pick & ~tail, moved)
    running(away_moved, first, pick & gaps.lives & inside, moved, ending=last)
    running(away_again, first, rerun & gaps.lives & inside, again, ending=last)
    for j in range(count + 1):
        model.add_row(-INFINITY, 0.0, (out[j], 1.0), (could_out[j], -1.0))
        model.add_row(0.0, INFINITY, (into[j], 1.0), (must_in[j], -1.0))
        model.add_row(0.0, INFINITY, (out[j], 1.0), (free[j], 1.0), (into[j], -1.0))
    for total_columns, by in ((out, could_out), (into, must_in)):
        model.add_row(0.0, 0.0, (total_columns[count], 1.0), (by[count], -1.0))

    overflow = (gaps.touched_bytes + gaps.idle_bytes() + int(gaps.resting_bytes.sum()) + gaps.fixed_resting_bytes
                - device.capacity_bytes)[moments.slots] / unit.size_bytes  # fmt: skip
    at_rest = (resting, gaps.resting_bytes / unit.size_bytes)
    for j in np.flatnonzero(moments.tight & (overflow > 0)):
        left = ((away_again[j], 1.0), at_rest)
        model.add_row(overflow[j], INFINITY, (away_moved[j], 1.0), *left)
        model.add_row(overflow[j], INFINITY, (out[j], 1.0), (free[j], 1.0), (into[j], -1.0), *left)
        if moments.exact[j]:
            around, crossed = (first <= j) & (j < last), (out[j], free[j], into[j])
            _add_exact(model, gaps, int(moments.slots[j]), around, size, moved, again, overflow[j], at_rest, crossed)

    # What is recomputed was away at a moment at which memory is demanded: the run comes after the first of these.
    demanded = [np.append(np.flatnonzero(where), count) for where in (moments.tight, moments.exact)]
    living, dead = (after[np.searchsorted(after, first)] + 1 for after in demanded)
    begin = np.minimum(np.where(gaps.lives, living, dead), count)
    extra = _recompute_time(model, gaps, unit, begin, np.minimum(last, count), again, count)
    end_time = _add_time(model, gaps, device, unit, moments, out, into, extra, longest)
    return Block(out, into, end_time, moved)


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
    model.add_row(overflow, INFINITY, *away, *held, at_rest)
    model.add_row(
        0.0, INFINITY, (out, 1.0), (free, 1.0), (into, -1.0), *((column, -size[i]) for i, column in off.items())
    )


def _recompute_time(model, gaps, unit, first, last, again, count) -> np.ndarray:
    """Columns [count + 1]: time of recomputation done by each moment; runs lie between the gap's first and last
    moment."""
    slots = sorted({int(s) for s in gaps.producer[again >= 0]})
    limit = float(sum(gaps.slot_s[gaps.producer[i]] for i in np.flatnonzero(again >= 0))) / unit.time_s
    done = model.add_columns(count + 1, 0.0, limit)
    least: list[list[tuple[int, float]]] = [[] for _ in range(count + 1)]
    most: list[list[tuple[int, float]]] = [[] for _ in range(count + 1)]
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


def _add_time(model, gaps, device, unit, moments, out, into, done, longest) -> int:
    """Start of each moment and the end of the block, from the block's start; returns the column of the end."""
    count = len(moments.places)
    instant = np.append(moments.from_start_s, gaps.slot_s.sum()) / unit.time_s
    time = model.add_columns(count + 1, 0.0, longest)
    rates = (
        (device.out_bytes_per_s, (out,)),
        (device.in_bytes_per_s, (into,)),
        (device.joint_bytes_per_s, (out, into)),
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
                terms.append((flow[j], -1.0))
                if j:
                    terms.append((flow[j - 1], 1.0))
            model.add_row(0.0, INFINITY, *terms)
    return int(time[count])
