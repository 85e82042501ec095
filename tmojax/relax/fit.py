"""Compiled passes of the decode: when offloaded tensors are released and prefetched, and the rows of the list."""

from __future__ import annotations

import numpy as np
from numba import njit

# Columns of the gap table. written: run after which the offload is issued (-1: a clean copy is on the host already);
# start: last run before the gap (-1: none); end: next run that needs it (U: none). host_stays: the host copy is not
# freed after the gap. clean: the content is that of the gap before it of the same tensor, so one copy out serves both.
# form: of the copy that leaves. to_peer: it goes to the lender's memory (1), not to the host's (0).
TENSOR, INSTANCE, SIZE, WRITTEN, START, END, HOST_STAYS, CLEAN, FORM, TO_PEER = range(10)


def share_clean_copies(gaps: np.ndarray, release: np.ndarray, prefetch: np.ndarray) -> None:
    """Of gaps with the same content, the first that is not pruned copies out and the last of them frees the host
    copy."""
    by_tensor: dict[int, list[int]] = {}
    for gap in np.flatnonzero((prefetch > release) & (gaps[:, WRITTEN] >= 0)).tolist():
        by_tensor.setdefault(int(gaps[gap, TENSOR]) if gaps[gap, INSTANCE] == 0 else -1, []).append(gap)
    by_tensor.pop(-1, None)
    clean_tensors = set(gaps[gaps[:, CLEAN] == 1, TENSOR].tolist())
    for tensor in clean_tensors & by_tensor.keys():
        members = sorted(by_tensor[tensor], key=lambda gap: gaps[gap, START])
        # A dirty gap that was pruned leaves its content to the next one.
        dirty_starts = np.sort(gaps[(gaps[:, TENSOR] == tensor) & (gaps[:, CLEAN] == 0), START])
        for before, gap in zip([None, *members], members, strict=False):
            fresh = before is None or np.searchsorted(dirty_starts, gaps[gap, START], "right") > np.searchsorted(
                dirty_starts, gaps[before, START], "right"
            )
            gaps[gap, CLEAN] = 0 if fresh else 1
            if before is not None and not fresh:
                gaps[before, HOST_STAYS] = 1


@njit(cache=True)
def state_gaps(tensors, sizes, on_host, shortest, use_ptr, run, changes, total, profile):  # pragma: no cover - compiled
    """Rows of the gap table for state tensors [S] that leave, whose absence is taken out of `profile` [U + 1] (as
    changes from run to run).

    run, changes: those of tensor s at `[use_ptr[s]:use_ptr[s + 1]]`, in order. on_host [S]: it comes before its first
    use, leaves in gaps of more than `shortest` [S] runs between two uses, and for good behind the last one; the host
    copy stays all the time, so what has not changed leaves without a copy. The others are on the device at both ends of
    the step and leave in every gap of more than `shortest` runs; where the first use is far from the start of the step,
    the first gap begins behind the first run.
    """
    rows = np.empty((run.size + 2 * tensors.size, 10), np.int64)
    n = 0
    for s in range(tensors.size):
        begin, end, size = use_ptr[s], use_ptr[s + 1], sizes[s]
        if on_host[s]:
            if begin == end:
                continue
            before, changed = run[begin], changes[begin]  # changed since the gap before
            ever = changed
            profile[before] += size
            profile[run[end - 1] + 1] -= size
            rows[n] = (tensors[s], 0, size, -1, -1, before, 1, 0, -1, 0)
            n += 1
            for use in range(begin + 1, end):
                if run[use] - before > shortest[s]:
                    profile[before + 1] -= size
                    profile[run[use]] += size
                    written = before if ever == 1 else -1
                    clean = 1 if ever == 1 and changed == 0 else 0
                    rows[n] = (tensors[s], 0, size, written, before, run[use], 1, clean, -1, 0)
                    n += 1
                    changed = 0
                before, changed, ever = run[use], max(changed, changes[use]), max(ever, changes[use])
            rows[n] = (tensors[s], 0, size, before if ever == 1 else -1, before, total, 1, 0, -1, 0)
            n += 1
            continue
        before, changed = 0, 1  # nothing is on the host yet
        for use in range(begin, end):
            if run[use] - before > shortest[s]:
                profile[before + 1] -= size
                profile[run[use]] += size
                rows[n] = (tensors[s], 0, size, before, before, run[use], 0, 1 - changed, -1, 0)
                n += 1
                changed = 0
            before, changed = run[use], max(changed, changes[use])
    return rows[:n]


@njit(cache=True)
def fit(profile, gaps, capacity, lookahead, release_at_once):  # pragma: no cover - compiled
    """(release_before_run [M], resident_from_run [M], bytes [R] at each run, failed run or -1).

    Two passes of first-in-first-out eviction: forwards, what was written first is released first, when memory must
    be found; backwards, what is needed last is prefetched last.
    """
    runs, count = profile.shape[0], gaps.shape[0]
    release = np.empty(count, np.int64)
    prefetch = np.empty(count, np.int64)
    load = profile.copy()
    by_start = np.argsort(gaps[:, 4], kind="mergesort")
    held = np.zeros(count, np.bool_)
    next_in, oldest, held_bytes = 0, 0, 0
    by_end = np.argsort(gaps[:, 5], kind="mergesort")
    next_out = 0
    for run in range(runs):
        while next_in < count and gaps[by_start[next_in], 4] < run:
            gap = by_start[next_in]
            release[gap] = max(gaps[gap, 4] + 1, 0)
            if gaps[gap, 4] >= 0 and gaps[gap, 5] > run and not release_at_once:
                held[gap] = True
                held_bytes += gaps[gap, 2]
                if gap < oldest:
                    oldest = gap
            next_in += 1
        while next_out < count and gaps[by_end[next_out], 5] <= run:
            gap = by_end[next_out]
            if held[gap]:
                held[gap] = False
                held_bytes -= gaps[gap, 2]
                release[gap] = gaps[gap, 5]
            next_out += 1
        if profile[run] + held_bytes > capacity:
            gap = oldest
            while gap < count and profile[run] + held_bytes > capacity:
                if held[gap]:
                    held[gap] = False
                    held_bytes -= gaps[gap, 2]
                    release[gap] = run
                gap += 1
            oldest = gap
        if profile[run] + held_bytes > capacity:
            return release, prefetch, load, run
        load[run] += held_bytes
    for gap in range(count):
        if held[gap]:
            release[gap] = runs
        elif gaps[gap, 4] >= runs - 1:
            release[gap] = runs
    # Backwards: gaps enter as their deadline is passed; those with the latest deadline leave first.
    held[:] = False
    held_bytes = 0
    entered, latest = count - 1, count - 1
    while entered >= 0 and gaps[by_end[entered], 5] >= runs:
        prefetch[by_end[entered]] = runs
        entered -= 1
    latest = entered
    by_release = np.argsort(release, kind="mergesort")
    closing = count - 1
    for run in range(runs - 1, -1, -1):
        while entered >= 0 and gaps[by_end[entered], 5] > run:
            gap = by_end[entered]
            prefetch[gap] = gaps[gap, 5]
            if release[gap] <= run:
                held[gap] = True
                held_bytes += gaps[gap, 2]
            entered -= 1
        while closing >= 0 and release[by_release[closing]] > run:
            gap = by_release[closing]
            if held[gap]:
                held[gap] = False
                held_bytes -= gaps[gap, 2]
                prefetch[gap] = release[gap]
            closing -= 1
        scan = latest
        while scan > entered:
            gap = by_end[scan]
            if held[gap]:
                too_early = gaps[gap, 5] - run > lookahead
                if load[run] + held_bytes > capacity or too_early:
                    held[gap] = False
                    held_bytes -= gaps[gap, 2]
                    prefetch[gap] = run + 1
                else:
                    break
            scan -= 1
            latest = scan
        load[run] += held_bytes
    for gap in range(count):
        if held[gap]:
            prefetch[gap] = release[gap]
    while entered >= 0:  # wanted by the very first run
        prefetch[by_end[entered]] = gaps[by_end[entered], 5]
        entered -= 1
    return release, prefetch, load, -1


@njit(cache=True)
def rows_of(kind, op, micro_batch, codec, freed, gaps, release, prefetch, spare_bytes, by_release, by_prefetch, by_end,
          device_memory, away_memory):  # fmt: skip  # pragma: no cover - compiled
    """(rows [n, 7], compute_row [U]): kind, op, instance or micro-batch, tensor, form, source, destination.

    spare_bytes [U]: of the device's memory at each run. away_memory [2]: where gaps that do not go to a peer, and those
    that do, have their copies.
    """
    runs, count = op.shape[0], gaps.shape[0]
    rows = np.empty((runs + freed.shape[0] + 4 * count, 7), np.int64)
    compute_row = np.empty(runs, np.int64)
    n, next_release, next_prefetch, next_end, next_written, next_freed = 0, 0, 0, 0, 0, 0
    while next_written < count and gaps[next_written, 3] < 0:
        next_written += 1
    for run in range(runs + 1):
        # What leaves between two runs may still be there when something comes in as soon as that has room: behind all
        # of both, `spare_bytes` are free at least.
        yet_to_leave, yet_to_come = 0, 0
        at = next_release
        while at < count and release[by_release[at]] <= run:
            gap = by_release[at]
            if gaps[gap, 4] >= 0 and (prefetch[gap] > release[gap] or gaps[gap, 5] >= runs):
                yet_to_leave += gaps[gap, 2]
            at += 1
        at = next_prefetch
        while run < runs and at < count and prefetch[by_prefetch[at]] <= run:
            gap = by_prefetch[at]
            if gaps[gap, 4] < 0 or prefetch[gap] > release[gap]:
                yet_to_come += gaps[gap, 2]
            at += 1
        while True:
            may_leave = next_release < count and release[by_release[next_release]] <= run
            may_come = run < runs and next_prefetch < count and prefetch[by_prefetch[next_prefetch]] <= run
            if not may_leave and not may_come:
                break
            size = gaps[by_prefetch[next_prefetch], 2] if may_come else 0
            if may_leave and (not may_come or yet_to_leave > yet_to_come - size + spare_bytes[run]):
                gap = by_release[next_release]
                if gaps[gap, 4] >= 0 and (prefetch[gap] > release[gap] or gaps[gap, 5] >= runs):
                    rows[n] = (3, -1, gaps[gap, 1], gaps[gap, 0], gaps[gap, 8], device_memory, -1)
                    n += 1
                    yet_to_leave -= gaps[gap, 2]
                next_release += 1
                continue
            gap = by_prefetch[next_prefetch]
            if gaps[gap, 4] < 0 or prefetch[gap] > release[gap]:
                yet_to_come -= size
                rows[n] = (2, -1, gaps[gap, 1], gaps[gap, 0], gaps[gap, 8], away_memory[gaps[gap, 9]], device_memory)
                n += 1
                if gaps[gap, 9] == 1:  # a peer's memory is given back as soon as it can be
                    rows[n] = (3, -1, gaps[gap, 1], gaps[gap, 0], gaps[gap, 8], away_memory[1], -1)
                    n += 1
            next_prefetch += 1
        if run == runs:
            break
        if kind[run] == 4 or kind[run] == 5:
            rows[n] = (kind[run], -1, micro_batch[run], op[run], codec, device_memory, -1)
        else:
            rows[n] = (kind[run], op[run], micro_batch[run], -1, -1, -1, -1)
        compute_row[run] = n
        n += 1
        # Host copies go first: the same tensor may leave again after this very run.
        while next_end < count and gaps[by_end[next_end], 5] <= run:
            gap = by_end[next_end]
            if gaps[gap, 6] == 0 and gaps[gap, 9] == 0 and prefetch[gap] > release[gap]:
                rows[n] = (3, -1, gaps[gap, 1], gaps[gap, 0], gaps[gap, 8], away_memory[gaps[gap, 9]], -1)
                n += 1
            next_end += 1
        while next_written < count and gaps[next_written, 3] == run:
            gap = next_written
            if gaps[gap, 7] == 0 and (prefetch[gap] > release[gap] or gaps[gap, 5] >= runs):
                rows[n] = (1, -1, gaps[gap, 1], gaps[gap, 0], gaps[gap, 8], device_memory, away_memory[gaps[gap, 9]])
                n += 1
            next_written += 1
        while next_freed < freed.shape[0] and freed[next_freed, 0] == run:
            rows[n] = (3, -1, freed[next_freed, 2], freed[next_freed, 1], freed[next_freed, 3], device_memory, -1)
            n += 1
            next_freed += 1
    return rows[:n], compute_row
