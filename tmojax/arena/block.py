"""Blocks of memory with known lifetimes: the input of a placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are needed at positions `lower` <= p < `upper`, except inside `gaps` (half-open as well, ascending).

    All of a block has one offset. A gap lets others use its bytes in between: state that leaves the memory in the
    middle of a step and has to be back where it was.
    """

    id: str
    size_bytes: int
    lower: int
    upper: int
    gaps: tuple[tuple[int, int], ...] = ()

    def spans(self) -> list[tuple[int, int]]:
        """The half-open intervals in which the bytes are needed, in order."""
        edges = [self.lower, *(edge for gap in self.gaps for edge in gap), self.upper]
        return list(zip(edges[::2], edges[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class Spans:
    """All spans of some blocks as int64 arrays of shape (spans,): `block` is the index of the block."""

    lower: np.ndarray
    upper: np.ndarray
    block: np.ndarray


def spans_of(blocks: Sequence[Block]) -> Spans:
    rows = [(lower, upper, index) for index, block in enumerate(blocks) for lower, upper in block.spans()]
    table = np.array(rows, np.int64).reshape(len(rows), 3)
    return Spans(*np.ascontiguousarray(table.T))


def peak_live(spans: Spans, sizes: np.ndarray) -> int:
    """The largest sum of the sizes (shape (blocks,), int64) of blocks alive at one position; no arena is smaller."""
    size = sizes[spans.block]
    position = np.concatenate([spans.upper, spans.lower])
    change = np.concatenate([-size, size])
    # A stable sort with the ends first: what ends at a position is gone before what starts there.
    live = np.cumsum(change[np.argsort(position, kind="stable")])
    return int(live.max(initial=0))
