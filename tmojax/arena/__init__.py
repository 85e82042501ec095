"""Offsets for what a schedule allocates: offline dynamic storage allocation.

The order of allocations and releases follows from the lists alone (docs/semantics.md, section 5), so the offsets can be
fixed ahead of time. `place` is the entry; `find_faults` judges a placement and shares nothing with what makes it.
"""

from tmojax.arena.block import Block
from tmojax.arena.csv_format import read_blocks, write_blocks
from tmojax.arena.liveness import blocks_of
from tmojax.arena.overlap import find_faults
from tmojax.arena.placement import Arena, place, place_blocks, place_first_fit

__all__ = [
    "Arena",
    "Block",
    "blocks_of",
    "find_faults",
    "place",
    "place_blocks",
    "place_first_fit",
    "read_blocks",
    "write_blocks",
]
