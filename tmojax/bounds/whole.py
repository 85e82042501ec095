"""Tensors that are away as a whole, on one device in one micro-batch (docs/bounds.md, section 3, point 12)."""

from __future__ import annotations

import numpy as np

from tmojax.bounds.gaps import Gaps, Host
from tmojax.bounds.highs import INFINITY, LinearModel

SEARCH_SHARE = 1e-6  # taken off what a search proves, for its tolerances


def moves_whole(gaps: Gaps) -> np.ndarray:
    """[I] gaps that end in the micro-batch, in which a tensor comes in as a whole if any of it was away."""
    return gaps.whole & (gaps.end < len(gaps.slot_op))


def add_gone(
    model: LinearModel, gaps: Gaps, around: np.ndarray, size: np.ndarray, moved: np.ndarray, again: np.ndarray,
    overflow: float, at_rest: tuple, out: np.ndarray, available: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Columns, to be made integer, for what has left and comes back by copies only, at one moment. around [I]: the gaps
    there; out: columns of the bytes that have crossed out by each moment up to this one; available [I]: the first
    moment after the version was made."""
    living = np.flatnonzero(around & gaps.lives)
    written = moves_whole(gaps) & (gaps.host == Host.COPY_OUT)
    whole = living[written[living] & (moved[living] >= 0)]
    gone = model.add_columns(len(whole))
    for i, column in zip(whole, gone, strict=True):
        model.add_row(0.0, INFINITY, (moved[i], 1.0), (column, -1.0))
    others = np.setdiff1d(living[moved[living] >= 0], whole)
    runs = living[again[living] >= 0]
    model.add_row(
        overflow, INFINITY, (gone, size[whole]), (again[runs], size[runs]), (moved[others], size[others]), at_rest
    )
    for since in np.unique(available[whole]):
        later = available[whole] >= since
        before = [(out[since - 1], -1.0)] if since else []
        model.add_row(0.0, INFINITY, (out[-1], 1.0), *before, (gone[later], -size[whole][later]))
    return gone
