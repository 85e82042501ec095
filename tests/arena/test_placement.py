"""Placements: no overlap, never below the peak, aligned, the same every time, and close to the optimum."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tmojax.arena import Block, find_faults, place_blocks, place_first_fit, read_blocks
from tmojax.errors import InputError

INSTANCES = sorted((Path(__file__).parent / "data").glob("*.csv"))


@st.composite
def block(draw, number: int, positions: int, sizes: int) -> Block:
    edges = draw(st.lists(st.integers(-1, positions), min_size=2, max_size=4, unique=True).map(sorted))
    gap = ((edges[1], edges[2]),) if len(edges) == 4 else ()
    return Block(str(number), draw(st.integers(1, sizes)), edges[0], edges[-1], gap)


@st.composite
def instances(draw, most: int = 30, positions: int = 20, sizes: int = 1000) -> list[Block]:
    return [draw(block(number, positions, sizes)) for number in range(draw(st.integers(0, most)))]


def live_bytes(blocks: list[Block], position: int) -> int:
    return sum(b.size_bytes for b in blocks if any(lower <= position < upper for lower, upper in b.spans()))


def optimum(blocks: list[Block]) -> int:
    """Smallest arena over all orders in which blocks are put at the lowest free offset: one of them is optimal."""
    together = {
        (a.id, b.id) for a in blocks for b in blocks if a is not b
        and any(x < v and u < y for x, y in a.spans() for u, v in b.spans())
    }  # fmt: skip
    best = sum(b.size_bytes for b in blocks)
    for order in permutations(blocks):
        at: dict[str, int] = {}
        for b in order:
            taken = [(at[o.id], at[o.id] + o.size_bytes) for o in blocks if o.id in at and (o.id, b.id) in together]
            tries = [0, *(end for _, end in taken)]
            at[b.id] = min(t for t in tries if all(t + b.size_bytes <= u or v <= t for u, v in taken))
        best = min(best, max(at[b.id] + b.size_bytes for b in order))
    return best


@settings(deadline=None, max_examples=150)
@given(instances(), st.sampled_from([1, 7, 256]))
def test_every_placement_is_sound(blocks, alignment):
    arena = place_blocks(blocks, alignment_bytes=alignment, effort=20_000)
    for found in (arena, place_first_fit(blocks, alignment_bytes=alignment)):
        assert find_faults(blocks, found.offsets, alignment_bytes=alignment) == []
        ends = [int(o) + b.size_bytes for o, b in zip(found.offsets, blocks, strict=True)]
        assert found.arena_bytes == max(ends, default=0)
        assert found.peak_live_bytes == max((live_bytes(blocks, p) for p in range(-1, 21)), default=0)
        assert found.arena_bytes >= found.bound_bytes >= found.peak_live_bytes
    again = place_blocks(blocks, alignment_bytes=alignment, effort=20_000)
    assert np.array_equal(arena.offsets, again.offsets)


@settings(deadline=None, max_examples=60)
@given(instances(most=6, positions=7, sizes=9))
def test_tiny_instances_are_solved_to_the_optimum(blocks):
    assert place_blocks(blocks, effort=50_000).arena_bytes == (optimum(blocks) if blocks else 0)


@pytest.mark.parametrize("path", INSTANCES, ids=lambda path: path.name[0])
def test_public_instances(path):
    blocks, _ = read_blocks(path)
    arena = place_blocks(blocks, effort=3_000_000)
    assert find_faults(blocks, arena.offsets) == []
    assert arena.arena_bytes < place_first_fit(blocks).arena_bytes


def test_by_hand():
    # Without the gap the middle block stands on top of the others; with it, it slips below.
    blocks = [Block("state", 5, -1, 10, ((3, 7),)), Block("middle", 4, 4, 6), Block("through", 2, 0, 10)]
    arena = place_blocks(blocks)
    assert (arena.arena_bytes, arena.peak_live_bytes, arena.fragmentation) == (7, 7, 0.0)
    without = place_blocks([Block("state", 5, -1, 10), *blocks[1:]])
    assert without.arena_bytes == 11


def test_empty():
    arena = place_blocks([])
    assert (arena.arena_bytes, arena.peak_live_bytes, arena.fragmentation, len(arena.offsets)) == (0, 0, 0.0, 0)


@pytest.mark.parametrize(
    ("blocks", "alignment", "words"),
    [
        ([Block("a", 1, 0, 1)], 0, "alignment_bytes: 0"),
        ([Block("a", 0, 0, 1)], 1, "'a': size_bytes 0"),
        ([Block("a", 1, 3, 3)], 1, "must ascend"),
        ([Block("a", 1, 0, 9, ((4, 4),))], 1, "gaps"),
        ([Block("a", 1, 0, 9, ((4, 9),))], 1, "must ascend"),
        ([Block("a", 1 << 50, 0, 9)], 1, "larger alignment"),
    ],
)
def test_bad_input(blocks, alignment, words):
    with pytest.raises(InputError, match=words):
        place_blocks(blocks, alignment_bytes=alignment)


def test_the_judge_sees_every_kind_of_fault():
    blocks = [Block("a", 4, 0, 5), Block("b", 4, 4, 8), Block("c", 4, 0, 9, ((2, 6),))]
    assert find_faults(blocks, [0, 4, 8]) == []
    assert find_faults(blocks, [0, 3, 8]) == ["a and b overlap at position 4"]
    assert find_faults(blocks, [0, 4, 1]) == ["a and c overlap at position 0", "b and c overlap at position 6"]
    assert find_faults(blocks, [0, 4, 9], alignment_bytes=4) == ["c: offset 9 is not a multiple of 4 from 0 on"]
    assert find_faults(blocks, [-4, 0, 4]) == ["a: offset -4 is not a multiple of 1 from 0 on"]
    assert find_faults(blocks, [0, 4]) == ["2 offsets for 3 blocks"]
