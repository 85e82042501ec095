"""State that only the update touches, in the first and in the last micro-batch of a step (docs/bounds.md, section 3).

What is away at a moment of the last micro-batch comes in after it, before the update. What is away at a moment of the
first one and changes in the step has gone out before it, or goes out after the update.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.bounds.gaps import Gaps
from tmojax.bounds.highs import INFINITY, LinearModel


@dataclass(frozen=True, eq=False)
class Resting:
    """Columns of one block. absent [J]: bytes away at each moment.

    out, into [J + 1]: cumulative bytes of this state that have crossed by each moment and by the end of the block
    (empty where they do not count); late_out, late_in: columns of the bytes that cross out after the update, and in
    between the end of the block and the update (-1: none)."""

    absent: np.ndarray
    out: np.ndarray
    into: np.ndarray
    late_out: int
    late_in: int


def add_resting(
    model: LinearModel, gaps: Gaps, shares: np.ndarray, unit_bytes: float, count: int, *, first: bool, last: bool
) -> Resting:
    """Add the columns of one block with `count` moments. shares [S]: columns of the share of every resting tensor that
    is away at some time of the step."""
    size = gaps.resting_bytes / unit_bytes
    total = float(size.sum())
    absent = model.add_columns(count, 0.0, total)
    for j in range(count):
        model.add_row(0.0, INFINITY, (shares, size), (absent[j], -1.0))
    out, into = np.zeros(0, np.int64), np.zeros(0, np.int64)
    late_out = late_in = -1
    late = gaps.resting_late
    if first and (late & gaps.resting_dirty).any():
        out = _cumulative(model, count, total)
        late_out = int(model.add_columns(1, 0.0, total)[0])
        pays = late & gaps.resting_dirty
        model.add_row(0.0, INFINITY, (shares[pays], size[pays]), (out[count], -1.0), (late_out, -1.0))
        for j in range(count):
            model.add_row(
                0.0, INFINITY, (out[j], 1.0), (late_out, 1.0), (shares[~pays], size[~pays]), (absent[j], -1.0)
            )
    if last and late.any():
        into = _cumulative(model, count, total)
        late_in = int(model.add_columns(1, 0.0, total)[0])
        model.add_row(0.0, INFINITY, (shares[late], size[late]), (into[count], -1.0), (late_in, -1.0))
        for j in range(count):
            model.add_row(
                0.0, INFINITY, (into[count], 1.0), (late_in, 1.0), (into[j], -1.0), (shares[~late], size[~late]),
                (absent[j], -1.0),
            )  # fmt: skip
    return Resting(absent, out, into, late_out, late_in)


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
