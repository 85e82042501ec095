"""Offsets for blocks: exact decomposition first, then a search in each part."""

from __future__ import annotations

import numpy as np

from tmojax.arena.block import Spans, peak_live
from tmojax.arena.orders import NO_LIMIT, anneal, conflicts, place_in_order
from tmojax.arena.skyline import anneal_keys, skyline

_SEED = 12345
_HEATS = (0.005, 0.02, 0.05)  # of the bound, one for each key: which suits differs much between instances
_KEYS_SHARE = 0.9  # of the effort; the rest goes to the search over orders, which sees gaps


def first_fit(spans: Spans, sizes: np.ndarray) -> np.ndarray:
    """Offsets, in units, of blocks placed in the order in which they are allocated."""
    began, _ = _lives(spans, len(sizes))
    first, other = conflicts(spans.lower, spans.upper, spans.block, len(sizes))
    return _decoded(np.argsort(began, kind="stable"), first, other, sizes)[1]


def pack(spans: Spans, sizes: np.ndarray, effort: int) -> np.ndarray:
    """Offsets, in units, of the best placement found. `effort`: see `place_blocks`.

    Only the part that reaches highest decides, so it is searched first, and the search ends when that one is at its
    bound or has been searched.
    """
    offsets = np.zeros(len(sizes), np.int64)
    parts = _parts(spans, sizes, offsets)
    floor = peak_live(spans, sizes)
    searched: dict[bytes, _Part] = {}  # equal parts, as in the micro-batches of a step, are searched once
    while parts:
        part = max(parts, key=lambda part: part.base + part.top)
        if part.base + part.top <= floor or part.searched or effort <= 0:
            break
        key = part.key()
        if key in searched:
            part.top, part.offsets, part.searched = searched[key].top, searched[key].offsets, True
        else:
            # Those that may still decide share the effort by their size.
            rivals = [p for p in parts if p.base + p.top > floor and not p.searched]
            share = len(part.blocks) / sum(len(p.blocks) for p in rivals)
            effort -= part.search(floor - part.base, int(effort * share))
            searched[key] = part
    for part in parts:
        offsets[part.blocks] = part.base + part.offsets
    return offsets


def _parts(spans: Spans, sizes: np.ndarray, offsets: np.ndarray) -> list[_Part]:
    """Split blocks into parts that cannot be split further; their arenas begin at `base`. Nothing is lost by it:

    a block that is alive as long as anything is goes to the bottom (from any placement, by moving up what is below
    it), and where no block of a part is alive across a position, the two sides do not see each other.
    `offsets` of the blocks that went to a bottom are written.
    """
    count = len(sizes)
    lower, upper = _lives(spans, count)
    whole = np.bincount(spans.block, minlength=count) == 1
    parts = []
    waiting = [(np.argsort(lower, kind="stable"), 0)] if count else []
    while waiting:
        blocks, base = waiting.pop()
        throughout = whole[blocks] & (lower[blocks] == lower[blocks].min()) & (upper[blocks] == upper[blocks].max())
        for block in blocks[throughout]:
            offsets[block] = base
            base += int(sizes[block])
        rest = blocks[~throughout]
        # In the order of their beginnings: a new group begins where all before have ended.
        ended = np.maximum.accumulate(upper[rest])
        groups = [group for group in np.split(rest, np.flatnonzero(lower[rest][1:] >= ended[:-1]) + 1) if len(group)]
        if len(groups) == 1 and not throughout.any():
            parts.append(_Part(rest, base, spans, sizes))
        else:
            waiting += [(group, base) for group in groups]
    return parts


def _lives(spans: Spans, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Begin and end of every block, gaps included."""
    lower, upper = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(lower, spans.block, spans.lower)
    np.maximum.at(upper, spans.block, spans.upper)
    return lower, upper


class _Part:
    """Blocks that hang together in time. `top`: units of its arena, which stands on `base`."""

    def __init__(self, blocks: np.ndarray, base: int, spans: Spans, sizes: np.ndarray) -> None:
        self.blocks, self.base, self.searched = blocks, base, False
        number = np.full(len(sizes), -1)
        number[blocks] = np.arange(len(blocks))
        mine = number[spans.block] >= 0
        self._spans = Spans(spans.lower[mine], spans.upper[mine], number[spans.block[mine]])
        self._sizes = sizes[blocks]
        self._first, self._other = conflicts(self._spans.lower, self._spans.upper, self._spans.block, len(blocks))
        self.top, self.offsets, self._order = NO_LIMIT, np.zeros(len(blocks), np.int64), np.arange(len(blocks))
        lower, upper = _lives(self._spans, len(blocks))
        lifetime = (upper - lower).astype(np.float64)
        self._keys = (lifetime, lifetime * self._sizes, self._sizes.astype(np.float64))
        self._skyline = _Skyline(lower, upper, self._sizes)
        self._bound = peak_live(self._spans, self._sizes)
        for order in _orders(self._spans, self._sizes, lifetime):
            if self.top > self._bound:
                self._try(order)
        for key in self._keys:
            if self.top > self._bound:
                self._try(self._by_offset(self._skyline.offsets(key)))

    def _by_offset(self, offsets: np.ndarray) -> np.ndarray:
        """The order in which decoding gives the same offsets or lower ones."""
        return np.lexsort((-self._sizes, offsets))

    def _try(self, order: np.ndarray) -> None:
        self._keep(*_decoded(order, self._first, self._other, self._sizes))

    def _keep(self, top: int, offsets: np.ndarray) -> None:
        if top < self.top:
            self.top, self.offsets, self._order = top, offsets, self._by_offset(offsets)

    def key(self) -> bytes:
        """The same for parts that differ by a shift in time only."""
        spans = self._spans
        begin = spans.lower.min()
        return b"".join(a.tobytes() for a in (spans.lower - begin, spans.upper - begin, spans.block, self._sizes))

    def search(self, enough: int, effort: int) -> int:
        """Look for an arena of at most `enough` units. Returns the effort spent."""
        bound = max(enough, self._bound)
        spent = 0
        for number, (key, heat) in enumerate(zip(self._keys, _HEATS, strict=True)):
            if self.top > bound:
                budget = int(effort * _KEYS_SHARE / len(self._keys))
                offsets, work = self._skyline.anneal(key, bound, budget, _SEED + number, heat * bound)
                spent += work
                self._try(self._by_offset(offsets))
        if self.top > bound:
            top, offsets, work = anneal(
                self._order, self._first, self._other, self._sizes, bound, effort - spent, _SEED, _HEATS[0] * bound
            )
            spent += int(work)
            self._keep(int(top), offsets)
        self.searched = True
        return spent


def _orders(spans: Spans, sizes: np.ndarray, lifetime: np.ndarray) -> list[np.ndarray]:
    """Orders in which greedy placement does well: by size, bytes x lifetime, lifetime, and by how full memory gets."""
    area = sizes.astype(np.float64) * lifetime
    fullness = _fullest(spans, sizes)
    keys = [(-lifetime, -sizes), (-sizes, -area), (-sizes, -lifetime), (-area, -fullness), (-sizes, -fullness)]
    return [np.lexsort(key) for key in keys]


class _Skyline:
    """Blocks as `skyline` wants them. It does not see gaps; whoever decodes the order of its offsets does."""

    def __init__(self, lower: np.ndarray, upper: np.ndarray, sizes: np.ndarray) -> None:
        positions = np.unique(np.concatenate([lower, upper]))
        self._order = np.argsort(lower, kind="stable")
        self._lower = np.searchsorted(positions, lower[self._order])
        self._upper = np.searchsorted(positions, upper[self._order])
        self._sizes = sizes[self._order]
        change = np.zeros(len(positions), np.int64)
        np.add.at(change, self._lower, self._sizes)
        np.add.at(change, self._upper, -self._sizes)
        self._live = np.cumsum(change)[:-1]

    def offsets(self, key: np.ndarray) -> np.ndarray:
        found = np.empty(len(key), np.int64)
        skyline(self._lower, self._upper, self._sizes, self._live, key[self._order], NO_LIMIT, found)
        return self._given_order(found)

    def anneal(self, key: np.ndarray, bound: int, budget: int, seed: int, heat: float) -> tuple[np.ndarray, int]:
        """(offsets, steps of work)."""
        _, found, work = anneal_keys(
            self._lower, self._upper, self._sizes, self._live, key[self._order], bound, budget, seed, heat
        )
        return self._given_order(found), int(work)

    def _given_order(self, found: np.ndarray) -> np.ndarray:
        offsets = np.empty_like(found)
        offsets[self._order] = found
        return offsets


def _fullest(spans: Spans, sizes: np.ndarray) -> np.ndarray:
    """For every block the largest number of units alive at any position of its life."""
    positions = np.unique(np.concatenate([spans.lower, spans.upper]))
    change = np.zeros(len(positions) + 1, np.int64)
    begin, end = np.searchsorted(positions, spans.lower), np.searchsorted(positions, spans.upper)
    np.add.at(change, begin, sizes[spans.block])
    np.add.at(change, end, -sizes[spans.block])
    live = np.cumsum(change)
    fullest = np.zeros(len(sizes), np.int64)
    pairs = np.column_stack([begin, end]).ravel()
    np.maximum.at(fullest, spans.block, np.maximum.reduceat(live, pairs)[::2])
    return fullest


def _decoded(order: np.ndarray, first: np.ndarray, other: np.ndarray, sizes: np.ndarray) -> tuple[int, np.ndarray]:
    count = len(order)
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count)
    offsets = np.zeros(count, np.int64)
    keys = np.empty(max(1, int(np.diff(first).max())), np.int64)
    top, _ = place_in_order(order, rank, 0, first, other, sizes, offsets, NO_LIMIT, keys)
    return int(top), offsets
