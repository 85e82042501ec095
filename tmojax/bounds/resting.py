"""State that no op of a micro-batch touches, and what of it leaves in the first micro-batch (docs/bounds.md,
section 3, point 8).

What only the update touches, is away at a moment of the first micro-batch and changes in the step has gone out before
it, or goes out after its last change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.bounds.gaps import Gaps
from tmojax.bounds.highs import INFINITY, LinearModel


@dataclass(frozen=True, eq=False)
class Resting:
    """Columns of one block. absent [J]: bytes away at each moment, of tensors that no slot touches.

    Of the first block: out [J + 1]: cumulative bytes of late state that have crossed out by each moment and by the end
    of the block (empty where they do not count); late_out: column of the bytes that cross out after the last change
    (-1: none); late_most: of either, on a device."""

    absent: np.ndarray
    out: np.ndarray
    late_out: int
    late_most: float


def add_resting(
    model: LinearModel, gaps: Gaps, shares: np.ndarray, unit_bytes: float, count: int, *, first: bool
) -> Resting:
    """Add the columns of one block with `count` moments. shares [S]: columns of the share of every resting tensor that
    is away at some time of the step."""
    size = gaps.resting_bytes / unit_bytes
    absent = model.add_columns(count, 0.0, float(size.sum()))
    for j in range(count):
        model.add_row(0.0, INFINITY, (shares, size), (absent[j], -1.0))
    late = gaps.late & gaps.dirty
    if not first or not late.any():
        return Resting(absent, np.zeros(0, np.int64), -1, 0.0)
    heads = late[gaps.tensor] & (gaps.start < 0)
    total = float(size[late[gaps.resting]].sum() + gaps.size_bytes[heads].sum() / unit_bytes)
    out = _cumulative(model, count, total)
    late_out = int(model.add_columns(1, 0.0, total)[0])
    others = ~late[gaps.resting]
    for j in range(count):
        model.add_row(0.0, INFINITY, (out[j], 1.0), (late_out, 1.0), (shares[others], size[others]), (absent[j], -1.0))
    return Resting(absent, out, late_out, total)


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
