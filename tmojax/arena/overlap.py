"""A naive judge of placements. Nothing here is shared with the packing, so that no mistake of it can hide."""

from __future__ import annotations

from collections.abc import Sequence

from tmojax.arena.block import Block


def find_faults(blocks: Sequence[Block], offsets: Sequence[int], *, alignment_bytes: int = 1) -> list[str]:
    """What is wrong with a placement, in words; empty if nothing is.

    Offsets must be multiples of the alignment and not negative, and no byte may belong to two blocks that are alive at
    the same position. Walks over time and compares every block that becomes alive with all that are.
    """
    if len(blocks) != len(offsets):
        return [f"{len(offsets)} offsets for {len(blocks)} blocks"]
    faults = []
    for block, offset in zip(blocks, offsets, strict=True):
        if offset < 0 or offset % alignment_bytes:
            faults.append(f"{block.id}: offset {offset} is not a multiple of {alignment_bytes} from 0 on")
    changes: dict[int, tuple[list[int], list[int]]] = {}
    for index, block in enumerate(blocks):
        edges = [block.lower, *(edge for gap in block.gaps for edge in gap), block.upper]
        for number, edge in enumerate(edges):
            changes.setdefault(edge, ([], []))[number % 2].append(index)
    alive: set[int] = set()
    for position in sorted(changes):
        begins, ends = changes[position]
        alive.difference_update(ends)
        for index in begins:
            block, offset = blocks[index], int(offsets[index])
            for other in alive:
                start = int(offsets[other])
                if offset < start + blocks[other].size_bytes and start < offset + block.size_bytes:
                    faults.append(f"{blocks[other].id} and {block.id} overlap at position {position}")
            alive.add(index)
    return faults
