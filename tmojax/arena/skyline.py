"""Best fit on a skyline: a constructive placement from the bottom up.

Sekiyama, Imai, Negishi, Kawachiya, "Profile-guided memory optimization for deep neural networks" (2018), after Burke,
Kendall, Whitwell (2004): take the lowest stretch of the skyline; put there, of the blocks whose whole life falls into
it, the one that lives longest; if there is none, raise the stretch to its lower neighbour.
"""

from __future__ import annotations

import numpy as np

from tmojax.arena.orders import compiled


@compiled
def skyline(lower, upper, sizes, live, key, limit, offsets):
    """Write offsets (int64, shape (blocks,)) in the units of `sizes`. Returns (units of the arena, steps of work).

    `lower`, `upper`: lifetimes as numbers 0, 1, ... of distinct positions, blocks in ascending order of `lower`;
    `live`: units alive from each of these positions to the next. Of the blocks that fit into a stretch the one with the
    largest `key` (float64) is taken, ties in the order given. Gives up, with an arena above `limit`, as soon
    as it is clear that it will be: at some position the skyline and what is still to come are higher together.
    """
    count, width = len(lower), len(live)
    from_here = np.searchsorted(lower, np.arange(width + 1))
    height = np.zeros(width, np.int64)
    coming = live.copy()
    offsets[:] = -1
    left, top, work = count, np.int64(0), count + width
    while left:
        begin = np.argmin(height)
        level = height[begin]
        end = begin
        while end < width and height[end] == level:
            end += 1
        chosen = -1
        for b in range(from_here[begin], from_here[end]):
            if offsets[b] < 0 and upper[b] <= end and (chosen < 0 or key[b] > key[chosen]):
                chosen = b
        work += width // 8 + from_here[end] - from_here[begin] + 1
        if chosen >= 0:
            offsets[chosen] = level
            height[lower[chosen] : upper[chosen]] += sizes[chosen]
            coming[lower[chosen] : upper[chosen]] -= sizes[chosen]
            top = max(top, level + sizes[chosen])
            left -= 1
        else:
            beside = np.int64(1) << 62
            if begin > 0:
                beside = height[begin - 1]
            if end < width:
                beside = min(beside, height[end])
            for t in range(begin, end):
                height[t] = beside
                # Where nothing is to come a stretch may rise beyond the limit.
                if coming[t] and beside + coming[t] > limit:
                    return limit + 1, work
    return top, work


@compiled
def anneal_keys(lower, upper, sizes, live, start, bound, budget, seed, heat):
    """Search over the keys of `skyline` from `start`. Returns (units of the best arena, its offsets, steps of work).

    A move exchanges the keys of two blocks or puts one directly before or behind another; half of the moves take a
    block at the top of the arena. A move may make the arena worse by up to `heat` * u * u units, u uniform in [0, 1);
    heat falls linearly to 0. Stops after `budget` steps or with an arena of `bound` units, below which there is none.
    """
    count = len(sizes)
    key = start.copy()
    offsets = np.empty(count, np.int64)
    top, work = skyline(lower, upper, sizes, live, key, np.int64(1) << 61, offsets)
    best, best_offsets = top, offsets.copy()
    trial = offsets.copy()
    while work < budget and best > bound:
        # Lehmer's generator with the multiplier of Park, Miller and Stockmeyer (1993): the same on every platform.
        seed = seed * 48271 % 2147483647
        a = seed % count
        seed = seed * 48271 % 2147483647
        if seed & 64:
            for b in range(count):
                if offsets[b] + sizes[b] == top:
                    a = b
        seed = seed * 48271 % 2147483647
        b = seed % count
        key_a, key_b = key[a], key[b]
        seed = seed * 48271 % 2147483647
        if seed & 32:
            key[a], key[b] = key_b, key_a
        elif seed & 64:
            key[a] = key_b * (1 + 1e-6)
        else:
            key[a] = key_b * (1 - 1e-6)
        seed = seed * 48271 % 2147483647
        u = seed / 2147483647
        limit = top + np.int64(heat * (1 - work / budget) * u * u)
        found, steps = skyline(lower, upper, sizes, live, key, limit, trial)
        work += steps + count
        if found <= limit:
            offsets[:] = trial
            top = found
            if top < best:
                best = top
                best_offsets[:] = offsets
        else:
            key[a], key[b] = key_a, key_b
    return best, best_offsets, work
