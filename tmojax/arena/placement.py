"""`place`: an arena for every device memory of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tmojax.arena.block import Block, Spans, peak_live, spans_of
from tmojax.arena.liveness import blocks_of
from tmojax.arena.orders import MOST_BLOCKS, MOST_UNITS
from tmojax.arena.packing import first_fit, pack
from tmojax.errors import InputError
from tmojax.problem.problem import Problem
from tmojax.problem.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Arena:
    """A placement: block i occupies bytes `offsets[i]` <= x < `offsets[i] + blocks[i].size_bytes` while it is alive.

    `offsets`: int64, shape (blocks,), multiples of `alignment_bytes`. `arena_bytes`: the end of the highest block.
    `peak_live_bytes`: the largest sum of sizes alive at one position, what the checker charges; no arena is smaller.
    `bound_bytes`: no placement with this alignment is smaller than that (sizes rounded up to the alignment, except for
    one block at the top).
    """

    blocks: tuple[Block, ...]
    offsets: np.ndarray
    alignment_bytes: int
    arena_bytes: int
    peak_live_bytes: int
    bound_bytes: int

    @property
    def fragmentation(self) -> float:
        """Share by which the arena exceeds the peak of live bytes; 0 is perfect."""
        return self.arena_bytes / self.peak_live_bytes - 1 if self.peak_live_bytes else 0.0


def place(
    problem: Problem, schedule: Schedule, *, alignment_bytes: int = 256, effort: int = 300_000_000
) -> dict[str, Arena]:
    """Offsets for everything that a schedule allocates in device memories, by memory (keys: see `blocks_of`).

    Deterministic; `effort` as in `place_blocks`. Raises InputError for a bad alignment or a schedule in which
    allocations and releases do not pair.
    """
    arenas: dict[str, Arena] = {}
    done: dict[tuple[Block, ...], Arena] = {}  # devices with equal lists, as in data parallel steps, are placed once
    for name, found in blocks_of(problem, schedule).items():
        blocks = tuple(found)
        if blocks not in done:
            done[blocks] = place_blocks(blocks, alignment_bytes=alignment_bytes, effort=effort)
        arenas[name] = done[blocks]
    return arenas


def place_blocks(blocks: Sequence[Block], *, alignment_bytes: int = 1, effort: int = 300_000_000) -> Arena:
    """Offsets for blocks, with the arena as small as the search finds.

    `effort`: steps of the search, counted in entries that it reads (100 to 300 million take a second); 0 leaves the
    best of the greedy placements. The search ends as soon as the arena meets its lower bound. Raises InputError for
    blocks or an alignment that make no sense.
    """
    return _arena(blocks, alignment_bytes, lambda spans, units: pack(spans, units, effort))


def place_first_fit(blocks: Sequence[Block], *, alignment_bytes: int = 1) -> Arena:
    """What an allocator without foresight does: each block, when it is allocated, at the lowest offset that is free."""
    return _arena(blocks, alignment_bytes, first_fit)


def _arena(blocks: Sequence[Block], alignment_bytes: int, method: Callable[[Spans, np.ndarray], np.ndarray]) -> Arena:
    _validate(blocks, alignment_bytes)
    spans = spans_of(blocks)
    sizes = np.array([block.size_bytes for block in blocks], np.int64)
    units = -(-sizes // alignment_bytes)
    bound_units = peak_live(spans, units)
    if len(blocks) >= MOST_BLOCKS or units.sum() >= MOST_UNITS:
        raise InputError(
            f"{len(blocks)} blocks with {units.sum()} units of {alignment_bytes} bytes are too many for the packing "
            f"(at most {MOST_BLOCKS - 1} and {MOST_UNITS - 1}); give a larger alignment"
        )
    offsets = method(spans, units) * alignment_bytes if blocks else np.zeros(0, np.int64)
    peak_bytes = peak_live(spans, sizes)
    # The padding of the block at the very top is not used, and it is less than one unit.
    bound_bytes = max(peak_bytes, (bound_units - 1) * alignment_bytes + 1) if blocks else 0
    arena_bytes = int((offsets + sizes).max(initial=0))
    return Arena(tuple(blocks), offsets, alignment_bytes, arena_bytes, peak_bytes, bound_bytes)


def _validate(blocks: Sequence[Block], alignment_bytes: int) -> None:
    if alignment_bytes < 1:
        raise InputError(f"alignment_bytes: {alignment_bytes} must be at least 1; 256 suits GPUs")
    for block in blocks:
        if block.size_bytes < 1:
            raise InputError(f"block {block.id!r}: size_bytes {block.size_bytes} must be positive; drop empty ones")
        if not all(lower < upper for lower, upper in block.spans()):
            raise InputError(
                f"block {block.id!r}: lower {block.lower}, gaps {block.gaps}, upper {block.upper} must ascend; "
                f"intervals are half-open and not empty"
            )
        if any(start >= end for start, end in block.gaps):
            raise InputError(f"block {block.id!r}: gaps {block.gaps} must not be empty; leave empty ones out")
