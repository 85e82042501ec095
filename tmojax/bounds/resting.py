"""State that no op of a micro-batch touches, and what of it leaves in the first micro-batch (docs/bounds.md,
section 3, point 8).

What only the update touches stays away, or in the memory, until it crosses. What of it is away at a moment of the first
micro-batch and changes in the step has gone out before it, or goes out after its last change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.bounds.gaps import Gaps
from tmojax.bounds.highs import INFINITY, LinearModel


@dataclass(frozen=True, eq=False)
class Resting:
    """Columns of one block. absent [J]: bytes away at each moment, of tensors that no slot touches.

    away [J + 2]: bytes of late state that are yet to come in at the start of the block, at each moment and at the end;
    into [J + 1]: cumulative bytes of it that have crossed in by each moment and by the end (both empty where none
    rests).

    Of the first block: out [J + 1]: cumulative bytes of late state that have crossed out by each moment and by the end
    of the block (empty where they do not count); late_out: column of the bytes that cross out after the last change
    (-1: none); late_most: of either, on a device."""

    absent: np.ndarray
    away: np.ndarray
    into: np.ndarray
    out: np.ndarray
    late_out: int
    late_most: float


NONE = np.zeros(0, np.int64)
NOTHING_RESTS = Resting(NONE, NONE, NONE, NONE, -1, 0.0)


def add_resting(
    model: LinearModel, gaps: Gaps, shares: np.ndarray, unit_bytes: float, count: int, *, first: bool
) -> Resting:
    """Add the columns of one block with `count` moments. shares [S]: columns of the share of every resting tensor that
    is away at some time of the step."""
    size, late = gaps.resting_bytes / unit_bytes, gaps.late[gaps.resting]
    absent = model.add_columns(count, 0.0, float(size.sum()))
    for j in range(count):
        model.add_row(0.0, INFINITY, (shares, size), (absent[j], -1.0))
    away, into = _add_away(model, size[late], shares[late], count)
    for column, yet_to_come in zip(absent, away[1:-1], strict=False):
        model.add_row(0.0, INFINITY, (yet_to_come, 1.0), (shares[~late], size[~late]), (column, -1.0))
    changed = gaps.late & gaps.dirty
    if not first or not changed.any():
        return Resting(absent, away, into, NONE, -1, 0.0)
    heads = changed[gaps.tensor] & (gaps.start < 0)
    total = float(size[changed[gaps.resting]].sum() + gaps.size_bytes[heads].sum() / unit_bytes)
    out = _cumulative(model, count, total)
    late_out = int(model.add_columns(1, 0.0, total)[0])
    others = ~changed[gaps.resting]
    for j in range(count):
        model.add_row(0.0, INFINITY, (out[j], 1.0), (late_out, 1.0), (shares[others], size[others]), (absent[j], -1.0))
    return Resting(absent, away, into, out, late_out, total)


def _add_away(model: LinearModel, size: np.ndarray, shares: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`away` and `into` of `Resting`: what is yet to come in and later is not, has crossed in between."""
    most = float(size.sum())
    if not most:
        return NONE, NONE
    away = model.add_columns(count + 2, 0.0, most)
    into = _cumulative(model, count, most * (count + 1))
    for column in away:
        model.add_row(0.0, INFINITY, (shares, size), (column, -1.0))
    for j in range(count + 1):
        before = [(into[j - 1], -1.0)] if j else []
        model.add_row(0.0, INFINITY, (into[j], 1.0), *before, (away[j], -1.0), (away[j + 1], 1.0))
    return away, into


def add_seams(model: LinearModel, blocks, unit_bytes: float) -> None:
    """What of late state is yet to come in when a micro-batch ends is so when the next one begins. blocks: (how many,
    columns); what is away when the last one begins, which has the step ops, comes in again in it."""
    *others, (_, end) = blocks
    if not others or not len(others[0][1].resting.away):
        return
    at_last_begin = [(int(others[0][1].resting.away[-1]), 1.0)]
    for repeat, block in others[1:]:
        begin, until = int(block.resting.away[0]), int(block.resting.away[-1])
        if repeat == 1:
            model.add_row(0.0, 0.0, *at_last_begin, (begin, -1.0))
        at_last_begin += [(begin, -float(repeat)), (until, float(repeat))]
    _add_gaps(model, others[0][1].gaps, end, end.gaps.start < 0, unit_bytes, at_last_begin)


def add_rest(model: LinearModel, blocks, unit_bytes: float) -> None:
    """What of late state is away when a step begins after a barrier is away when it ends."""
    (_, first), (_, end) = blocks[0], blocks[-1]
    if len(first.resting.away):
        tails = end.gaps.end >= len(end.gaps.slot_op)
        _add_gaps(model, first.gaps, end, tails, unit_bytes, [(int(first.resting.away[0]), 1.0)])


def _add_gaps(
    model: LinearModel, rests: Gaps, end, where: np.ndarray, unit_bytes: float, least: list[tuple[int, float]]
) -> None:
    """Late state of `rests` that moves in the gaps `where` [I] of the last micro-batch is at least `least`. State
    without such a gap, or without a column there, may be away in full."""
    late = np.zeros(len(rests.late), bool)
    late[rests.resting] = rests.late[rests.resting]
    pick = where & late[end.gaps.tensor] & (end.moved >= 0)
    size = end.gaps.size_bytes[pick]
    others_bytes = float(rests.resting_bytes[late[rests.resting]].sum() - size.sum())
    terms = [(column, -value) for column, value in least]
    model.add_row(-others_bytes / unit_bytes, INFINITY, (end.moved[pick], size / unit_bytes), *terms)


def shared_transfer(members: int, most: float, rate: float) -> list[tuple[float, float]]:
    """(slope, offset) of lower bounds slope * b + offset of how long `members` transfers over one link delay the mean
    of their devices, where b is the mean of their bytes and none has more than `most`.

    Of transfers that begin no earlier than t(d) and all end by T, those that begin last, k of them, take b / rate each
    after the first of them began. The mean over k: T >= mean t + sum of k b(k) / (members rate), b(k) in the order of
    t. For every m the sum is at least m sum b - most m (m - 1) / 2.
    """
    return [(m / rate, -most * m * (m - 1) / (2 * members * rate)) for m in range(1, members + 1)]


def _cumulative(model: LinearModel, count: int, total: float) -> np.ndarray:
    columns = model.add_columns(count + 1, 0.0, total)
    for j in range(1, count + 1):
        model.add_row(0.0, INFINITY, (columns[j], 1.0), (columns[j - 1], -1.0))
    return columns
