"""Offsets for blocks, compiled: greedy placement in an order, and a search over orders.

The search is an annealed local search in the space of orders that `place_in_order` decodes; a move takes a block of the
chain that holds up the top of the arena and places it earlier. The space contains an optimum: blocks in the order of
the offsets of any valid placement are decoded to offsets that are no larger. Sizes and offsets are in units of the
alignment, so every offset is a multiple of it by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

_INDEX_BITS = 20  # a sort key is offset << 20 | block
MOST_BLOCKS = 1 << _INDEX_BITS
MOST_UNITS = 1 << (62 - _INDEX_BITS)
NO_LIMIT = 1 << 62


def compiled(function: Callable[..., Any]) -> Any:
    """Compile on the first call; the machine code is kept where a cache directory can be written."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # numba finds no directory for its cache
        return njit(function)


@compiled
def conflicts(lower, upper, block, count):
    """Which blocks are alive together, as (first (count + 1,) int64, other (pairs * 2,) int32).

    Block b conflicts with `other[first[b]:first[b + 1]]`. Arguments: arrays of `Spans`. A pair of blocks that meets in
    several spans is listed several times.
    """
    spans = len(lower)
    order = np.argsort(lower, kind="mergesort")
    alive = np.empty(spans, np.int64)
    first = np.zeros(count + 1, np.int64)
    other = np.empty(0, np.int32)
    place = np.zeros(0, np.int64)
    for fill in range(2):
        if fill:
            first = np.cumsum(first)
            other = np.empty(first[count], np.int32)
            place = first[:-1].copy()
        n = 0
        for s in order:
            kept = 0
            for a in range(n):
                t = alive[a]
                if upper[t] > lower[s]:
                    alive[kept] = t
                    kept += 1
                    if fill:
                        other[place[block[s]]] = block[t]
                        other[place[block[t]]] = block[s]
                        place[block[s]] += 1
                        place[block[t]] += 1
                    else:
                        first[block[s] + 1] += 1
                        first[block[t] + 1] += 1
            alive[kept] = s
            n = kept + 1
    return first, other


@compiled
def place_in_order(order, rank, begin, first, other, sizes, offsets, limit, keys):
    """Place blocks `order[begin:]` one after the other, each at the lowest offset where it fits among those before it.

    `rank` is the inverse of `order`; `offsets` of `order[:begin]` are given, the others are written. Stops when the
    arena grows beyond `limit`. Returns (units of the arena so far, conflicts read). `keys` is scratch of the largest
    number of conflicts.
    """
    top = 0
    for p in range(begin):
        top = max(top, offsets[order[p]] + sizes[order[p]])
    work = 0
    for p in range(begin, len(order)):
        b = order[p]
        n = 0
        for e in range(first[b], first[b + 1]):
            j = other[e]
            if rank[j] < p:
                keys[n] = (offsets[j] << 20) | j
                n += 1
        work += first[b + 1] - first[b]
        if n > 40:
            keys[:n].sort()
        else:
            for i in range(1, n):
                key = keys[i]
                k = i
                while k > 0 and keys[k - 1] > key:
                    keys[k] = keys[k - 1]
                    k -= 1
                keys[k] = key
        free = 0
        for i in range(n):
            if (keys[i] >> 20) - free >= sizes[b]:
                break
            j = keys[i] & 1048575
            free = max(free, offsets[j] + sizes[j])
        offsets[b] = free
        if free + sizes[b] > top:
            top = free + sizes[b]
            if top > limit:
                break
    return top, work


@compiled
def _support(offsets, sizes, top, first, other, chain, seen, mark):
    """Blocks whose end is `top`, what they stand on, and so on down. Returns (their number, conflicts read)."""
    n = 0
    for b in range(len(sizes)):
        if offsets[b] + sizes[b] == top:
            chain[n] = b
            seen[b] = mark
            n += 1
    done = work = 0
    while done < n:
        b = chain[done]
        done += 1
        for e in range(first[b], first[b + 1]):
            j = other[e]
            if seen[j] != mark and offsets[j] + sizes[j] == offsets[b]:
                seen[j] = mark
                chain[n] = j
                n += 1
        work += first[b + 1] - first[b]
    return n, work


@compiled
def anneal(start, first, other, sizes, bound, budget, seed, heat):
    """Search over orders from `start`. Returns (units of the best arena, its offsets, conflicts read).

    `budget`: conflicts read before it stops; `bound`: units below which no arena exists, so it stops there. A move may
    make the arena worse by up to `heat` * u * u units, u uniform in [0, 1); heat falls linearly to 0.
    """
    count = len(start)
    order = start.copy()
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count)
    most = 1
    for b in range(count):
        most = max(most, first[b + 1] - first[b])
    keys = np.empty(most, np.int64)
    offsets = np.zeros(count, np.int64)
    top, work = place_in_order(order, rank, 0, first, other, sizes, offsets, np.int64(1) << 62, keys)
    best, best_offsets = top, offsets.copy()
    trial, moved = offsets.copy(), order.copy()
    chain, seen = np.empty(count, np.int64), np.zeros(count, np.int64)
    mark = n = 0
    stale = True
    while work < budget and best > bound:
        if stale:
            mark += 1
            n, read = _support(offsets, sizes, top, first, other, chain, seen, mark)
            work += read
            stale = False
        work += 1
        # Lehmer's generator with the multiplier of Park, Miller and Stockmeyer (1993): the same on every platform.
        seed = seed * 48271 % 2147483647
        b = chain[seed % n]
        late = rank[b]
        if late == 0:
            continue
        seed = seed * 48271 % 2147483647
        early = seed % late
        seed = seed * 48271 % 2147483647
        if seed & 64:
            for p in range(late, early, -1):
                moved[p] = order[p - 1]
        else:
            moved[late] = order[early]
        moved[early] = b
        for p in range(early, late + 1):
            rank[moved[p]] = p
        trial[:] = offsets
        seed = seed * 48271 % 2147483647
        u = seed / 2147483647
        limit = top + np.int64(heat * (1 - work / budget) * u * u)
        found, read = place_in_order(moved, rank, early, first, other, sizes, trial, limit, keys)
        work += read
        if found <= limit:
            order[early : late + 1] = moved[early : late + 1]
            offsets[:] = trial
            top = found
            stale = True
            if top < best:
                best = top
                best_offsets[:] = offsets
        else:
            moved[early : late + 1] = order[early : late + 1]
            for p in range(early, late + 1):
                rank[order[p]] = p
    return best, best_offsets, work
