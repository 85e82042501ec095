"""What one device moves at least in a step because large tensors move as a whole (docs/bounds.md, section 3, point 13).

Only memory and bytes count here, neither times nor links.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.bounds.block import copies_out
from tmojax.bounds.gaps import Gaps, Host
from tmojax.bounds.highs import INFINITY, LinearModel
from tmojax.bounds.moments import choose_moments
from tmojax.bounds.resting import NOTHING_RESTS, Resting
from tmojax.bounds.step_bytes import step_bytes
from tmojax.bounds.whole import SEARCH_SHARE

LARGE_SHARE = 0.02  # of the memory: tensors of fewer bytes may move in parts
MOMENTS = 16
# So many choices at most are all or nothing, in a search of so many nodes.
MOST_CHOICES, MOST_NODES = 150, 2_000


def least_bytes(
    read: list[Gaps], capacity_bytes: int, micro_batches: int, unit_bytes: float, ways: tuple[bool, bool],
    time_limit_s: float, threads: int,
) -> float:  # fmt: skip
    """Bytes, in units, that a device moves out of its memory, into it, or both together in a step; 0 where nothing
    large can move. read: its gaps in any micro-batch but the last one (if there are several) and in the last one."""
    if read[-1].may_compress or time_limit_s <= 0:
        return 0.0
    model = LinearModel()
    resting = sorted({int(tensor) for gaps in read for tensor in gaps.resting})
    shares = dict(zip(resting, map(int, model.add_columns(len(resting))), strict=True))
    repeats = [1] if micro_batches == 1 else [1, 1] if micro_batches == 2 else [1, micro_batches - 2, 1]
    large = LARGE_SHARE * capacity_bytes
    blocks, choices = [], [np.zeros(0, np.int64)]
    for place, repeat in enumerate(repeats):
        gaps = read[-1] if place == len(repeats) - 1 else read[0]
        rests = np.array([shares[int(tensor)] for tensor in gaps.resting], np.int64)
        block = _add_block(model, gaps, capacity_bytes, rests, unit_bytes)
        blocks.append((repeat, block))
        choices.append(rests[gaps.resting_bytes >= large])
        if repeat == 1:
            # All state begins the step as a whole copy.
            whole = (gaps.size_bytes >= large) & (gaps.whole | ((gaps.start < 0) & (place == 0)))
            choices += [columns[where & (columns >= 0)] for columns, where in (
                (block.moved, whole), (block.again, gaps.size_bytes >= large)
            )]  # fmt: skip
    out_terms, in_terms, _, _ = step_bytes(model, unit_bytes, read, blocks, shares, micro_batches)
    integer = np.unique(np.concatenate(choices))
    if not 0 < len(integer) <= MOST_CHOICES:
        return 0.0
    terms = [term for wanted, terms in zip(ways, (out_terms, in_terms), strict=True) for term in terms if wanted]
    most = 10.0 * micro_batches * sum(float(g.size_bytes.sum() + g.resting_bytes.sum()) for g in read) / unit_bytes
    total = int(model.add_columns(1, 0.0, most, cost=1.0)[0])
    model.add_row(0.0, INFINITY, (total, 1.0), *((column, -value) for column, value in terms))
    model.make_integer(integer)
    answer = model.solve(time_limit_s=time_limit_s, threads=threads, gap=0.0, most_nodes=MOST_NODES)
    return max(answer.bound, 0.0) * (1 - SEARCH_SHARE) if answer.bound < most else 0.0


@dataclass(frozen=True, eq=False)
class _Bytes:
    """As `block.Block`, with the bytes at the end of the micro-batch only."""

    gaps: Gaps
    out: np.ndarray
    into: np.ndarray
    moved: np.ndarray
    again: np.ndarray
    left: dict[tuple[int, int], int]
    resting: Resting


def _add_block(model: LinearModel, gaps: Gaps, capacity_bytes: int, rests: np.ndarray, unit_bytes: float) -> _Bytes:
    moments = choose_moments(gaps, capacity_bytes, MOMENTS)
    at = moments.places[moments.tight]
    size, slots = gaps.size_bytes / unit_bytes, len(gaps.slot_op)
    around = (2 * gaps.start + 1 < at[:, None]) & (at[:, None] < 2 * gaps.end) & gaps.lives
    overflow = (gaps.needed_bytes() - capacity_bytes)[at // 2] / unit_bytes
    around &= (overflow > 0)[:, None]
    runs = around & (at[:, None] < 2 * gaps.run_end) & (gaps.producer >= 0) & (gaps.end < slots)
    moved, again = np.full(len(size), -1), np.full(len(size), -1)
    pick, rerun = around.any(axis=0) & gaps.may_move & (size > 0), runs.any(axis=0) & (size > 0)
    moved[pick] = model.add_columns(int(pick.sum()))
    again[rerun] = model.add_columns(int(rerun.sum()))
    for j in np.flatnonzero(overflow > 0):
        away, run = around[j] & pick, runs[j] & rerun
        model.add_row(overflow[j], INFINITY, (moved[away], size[away]), (again[run], size[run]),
                      (rests, gaps.resting_bytes / unit_bytes))  # fmt: skip
    outgoing, _, left = copies_out(model, gaps, pick & (gaps.host == Host.COPY_OUT), moved)
    total = float(size.sum())
    out, into = model.add_columns(1, 0.0, total), model.add_columns(1, 0.0, total)
    goes, comes = outgoing >= 0, pick & (gaps.end < slots)
    model.add_row(0.0, 0.0, (out, -1.0), (outgoing[goes], size[goes]))
    model.add_row(0.0, 0.0, (into, -1.0), (moved[comes], size[comes]))
    return _Bytes(gaps, out, into, moved, again, left, NOTHING_RESTS)
