"""From a decision to the instruction list of one device.

Given which tensors leave, every tensor is released as late and prefetched as early as the static memory profile
allows, in linear time; or there is no list with that decision in this capacity, and the first place where it
fails is returned (design section 6, point 8). What never has to leave that way is not moved at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from tmojax.errors import InputError
from tmojax.problem import COMPUTE_STREAM, INSTRUCTION, Kind, Lifetime, Placement, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import DeviceDecision, Rest
from tmojax.relax.template import Template, build_template

NEVER = np.iinfo(np.int64).max // 4


@dataclass(frozen=True, eq=False)
class DeviceList:
    """The list of one device, before it is coordinated with the others.

    rows: dtype INSTRUCTION. compute_row [U]: row of every run of the step, in order. progress_s [U]: compute seconds
    (of the whole step) when that run ends, stalls not counted. moved_bytes: (out, in) over the device's host path.
    """

    rows: np.ndarray
    compute_row: np.ndarray
    progress_s: np.ndarray
    moved_bytes: tuple[int, int]
    initial: tuple[Placement, ...]


@dataclass(frozen=True)
class DoesNotFit:
    """No list exists with the decision: the memory is exceeded at an op even with everything away that may be away."""

    device: int
    op: int
    micro_batch: int
    bytes_over: int


@dataclass(frozen=True, eq=False)
class _Step:
    """The whole step unrolled. runs U; lives and gaps as in `Template` with runs counted over the step, and instances."""

    op: np.ndarray
    micro_batch: np.ndarray
    is_collective: np.ndarray
    profile_bytes: np.ndarray
    release_run: np.ndarray  # after this run ...
    release_tensor: np.ndarray  # ... this tensor's copy is freed
    release_instance: np.ndarray
    gaps: np.ndarray  # columns of _GAP


# Columns of the gap table. written: run after which the offload is issued (-1: a clean copy is on the host already);
# start: last run before the gap (-1: none); end: next run that needs it (U: none). clean: the content is that of the gap before it of the same
# tensor, so one copy out serves all of them, the first that is not pruned.
_TENSOR, _INSTANCE, _SIZE, _WRITTEN, _START, _END, _HOST_STAYS, _CLEAN = range(8)


def decode(problem: Problem, view: StepView, decision: DeviceDecision, *, capacity_bytes: int | None = None,
           lookahead_runs: int = NEVER, release_at_once: bool = False) -> DeviceList | DoesNotFit:  # fmt: skip
    """Build the list of one device.

    `capacity_bytes` defaults to the device's; `lookahead_runs` limits how many runs ahead of its use a tensor may be
    prefetched; `release_at_once` lets nothing stay longer than its last use, whether or not memory is short.
    """
    capacity = problem.capacity_bytes(view.device) if capacity_bytes is None else capacity_bytes
    template = build_template(problem, view, decision)
    step = _unroll(problem, view, decision, template)
    release, prefetch, failed = _fit(step.profile_bytes, step.gaps, capacity, lookahead_runs, release_at_once)
    if failed >= 0:
        over = int(step.profile_bytes[failed]) - capacity
        return DoesNotFit(view.device, int(step.op[failed]), int(step.micro_batch[failed]), over)
    _share_clean_copies(step.gaps, release, prefetch)
    return _emit(problem, view, decision, step, release, prefetch)


def rest_of(view: StepView, decision: DeviceDecision) -> dict[int, Rest]:
    """`Rest` of every state tensor. Raises InputError for one that is to rest on the host but is used by micro-batches."""
    for tensor in view.state_tensor[(decision.state_out == Rest.ON_HOST) & ~view.state_resting]:
        raise InputError(f"state_out: tensor {int(tensor)} is used by micro-batches and cannot rest on the host; use AWAY")
    return {
        int(tensor): Rest(int(rest))
        for tensor, rest in zip(view.state_tensor, decision.state_out, strict=True)
    }


def _state_uses(program, tensor, template: Template, spread, places, op) -> tuple[np.ndarray, np.ndarray]:
    """(runs of the step that touch a state tensor, whether each changes it), in order."""
    runs, changes = template.state_runs.get(tensor, (np.zeros(0, np.int64), np.zeros(0, bool)))
    inside = spread(runs)
    used = np.concatenate([inside.ravel(), places])
    dirty = np.concatenate([np.tile(changes, len(inside)), [tensor in program.ops[op[place]].updates for place in places]])
    order = np.argsort(used, kind="stable")
    return used[order].astype(np.int64), dirty[order].astype(bool)


def _long_gaps(used: np.ndarray, changes: np.ndarray, shortest: int):
    """(last run before, first run after, content changed since the gap before) of every gap of at least `shortest` runs.

    The first gap begins after the first run of the step where the tensor's first use is far from it.
    """
    points, changed = np.concatenate([[0], used]), np.concatenate([[True], changes])
    if points[0] == points[1]:
        points, changed = points[1:], changed[1:]
        changed[0] = True
    since = False
    for index in range(len(points) - 1):
        since = since or bool(changed[index])
        if points[index + 1] - points[index] > shortest:
            yield int(points[index]), int(points[index + 1]), since
            since = False


def _unroll(problem: Problem, view: StepView, decision: DeviceDecision, template: Template) -> _Step:
    program = problem.workload.program(view.device)
    count, body = view.micro_batches, len(template.runs)
    last = count - 1
    # Step ops stand where the op table has them: in the last micro-batch, behind the first execution of the op before.
    places = np.searchsorted(view.slot_op, [i for i, op in enumerate(program.ops) if op.step_op])
    step_ops = np.array([i for i, op in enumerate(program.ops) if op.step_op], np.int64)
    behind = np.array([0 if p == 0 else template.first_run[view.slot_op[p - 1]] + 1 for p in places], np.int64)
    shift = np.searchsorted(behind, np.arange(body), side="right")
    total = count * body + len(step_ops)
    op = np.empty(total, np.int64)
    micro_batch = np.empty(total, np.int64)
    op[: last * body] = np.tile(template.runs, last)
    micro_batch[: last * body] = np.repeat(np.arange(last), body)
    body_place = last * body + np.arange(body) + shift
    step_place = last * body + behind + np.arange(len(step_ops))
    op[body_place], micro_batch[body_place] = template.runs, last
    op[step_place], micro_batch[step_place] = step_ops, 0

    def spread(runs: np.ndarray) -> np.ndarray:
        """Template runs [n] as step runs [K, n]."""
        out = runs[None, :] + (np.arange(count) * body)[:, None]
        out[last] = body_place[runs]
        return out

    sizes = np.array([tensor.size_bytes for tensor in program.tensors], np.int64)
    touched_by_step: dict[int, list[int]] = {}
    for place, index in zip(step_place.tolist(), step_ops.tolist(), strict=True):
        for tensor in (*program.ops[index].reads, *program.ops[index].writes, *program.ops[index].updates):
            touched_by_step.setdefault(tensor, []).append(place)

    profile = np.zeros(total + 1, np.int64)
    start, end = spread(template.life_start), spread(template.life_end)
    for column, tensor in enumerate(template.life_tensor.tolist()):
        if tensor in touched_by_step and template.life_end[column] == template.life_end[template.life_tensor == tensor].max():
            end[last, column] = max(end[last, column], touched_by_step[tensor][-1])
    life_bytes = np.tile(sizes[template.life_tensor], count)
    np.add.at(profile, start.ravel(), life_bytes)
    np.add.at(profile, end.ravel() + 1, -life_bytes)
    releases = [np.stack([end.ravel(), np.tile(template.life_tensor, count), np.repeat(np.arange(count), end.shape[1])], 1)]

    gaps: list[np.ndarray] = []

    def add_gaps(tensor, instance, written, start_run, end_run, host_stays, clean=0) -> None:
        tensor = np.atleast_1d(np.asarray(tensor, np.int64)).ravel()
        columns = [tensor, instance, sizes[tensor], written, start_run, end_run, host_stays, clean]
        gaps.append(np.stack([np.broadcast_to(np.ravel(c), tensor.shape) for c in columns], 1).astype(np.int64))

    width = len(template.gap_tensor)
    instances = np.repeat(np.arange(count), width)
    gap_from, gap_to = spread(template.gap_from).ravel(), spread(template.gap_to).ravel()
    add_gaps(np.tile(template.gap_tensor, count), instances, spread(template.gap_written).ravel(), gap_from, gap_to, 0)
    # The life before a gap ends with a release that the fit places; drop it from the plain releases.
    in_gap = set(zip(np.tile(template.gap_tensor, count).tolist(), instances.tolist(), gap_from.tolist(), strict=True))
    plain = releases[0]
    if in_gap:
        plain = plain[[(t, k, r) not in in_gap for r, t, k in plain.tolist()]]
    releases = [plain]

    if len(template.input_tensor):
        first, final = spread(template.input_first), spread(template.input_last)
        for column, tensor in enumerate(template.input_tensor.tolist()):
            if tensor in touched_by_step:
                final[last, column] = touched_by_step[tensor][-1]
        input_bytes = np.tile(sizes[template.input_tensor], count)
        np.add.at(profile, first.ravel(), input_bytes)
        np.add.at(profile, final.ravel() + 1, -input_bytes)
        tensors = np.tile(template.input_tensor, count)
        owner = np.repeat(np.arange(count), first.shape[1])
        releases.append(np.stack([final.ravel(), tensors, owner], 1))
        add_gaps(tensors, owner, -1, -1, first.ravel(), 1)

    rest = rest_of(view, decision)
    for tensor, spec in enumerate(program.tensors):
        places_of = touched_by_step.get(tensor, [])
        if spec.lifetime is Lifetime.STATE:
            if rest[tensor] == Rest.ON_DEVICE:
                profile[0] += spec.size_bytes
                continue
            if rest[tensor] == Rest.AWAY:
                profile[0] += spec.size_bytes
                used, changes = _state_uses(program, tensor, template, spread, places_of, op)
                for before, after, dirty in _long_gaps(used, changes, max(2, body // 8)):
                    profile[before + 1] -= spec.size_bytes
                    profile[after] += spec.size_bytes
                    add_gaps(tensor, 0, before, before, after, 0, 0 if dirty else 1)
                continue
            profile[places_of[0]] += spec.size_bytes
            profile[places_of[-1] + 1] -= spec.size_bytes
            updated = any(tensor in program.ops[op[place]].updates for place in places_of)
            add_gaps(tensor, 0, -1, -1, places_of[0], 1)
            add_gaps(tensor, 0, places_of[-1] if updated else -1, places_of[-1], total, 1)
        elif program.producer[tensor] != -1 and program.ops[program.producer[tensor]].step_op:
            profile[places_of[0]] += spec.size_bytes
            profile[places_of[-1] + 1] -= spec.size_bytes
            releases.append(np.array([[places_of[-1], tensor, 0]], np.int64))
        elif spec.lifetime is Lifetime.STEP and places_of:
            profile[places_of[0]] += spec.size_bytes
            profile[places_of[-1] + 1] -= spec.size_bytes
            releases.append(np.array([[places_of[-1], tensor, 0]], np.int64))
            add_gaps(tensor, 0, -1, -1, places_of[0], 1)
    scratch = np.zeros(total, np.int64)
    scratch[: last * body] = np.tile(template.scratch_bytes, last)
    scratch[body_place] = template.scratch_bytes
    scratch[step_place] = [program.ops[i].workspace_bytes for i in step_ops]
    table = np.concatenate(gaps) if gaps else np.zeros((0, 8), np.int64)
    table = table[np.lexsort((table[:, _TENSOR], table[:, _END], table[:, _WRITTEN]))]
    freed = np.concatenate(releases)
    freed = freed[np.lexsort((freed[:, 1], freed[:, 0]))]
    collective = np.array([bool(program.ops[i].collective) for i in range(len(program.ops))])
    return _Step(op, micro_batch, collective[op], np.cumsum(profile)[:total] + scratch,
                 freed[:, 0], freed[:, 1], freed[:, 2], table)  # fmt: skip


def _share_clean_copies(gaps: np.ndarray, release: np.ndarray, prefetch: np.ndarray) -> None:
    """Of gaps with the same content, the first that is not pruned copies out and the last of them frees the host copy."""
    by_tensor: dict[int, list[int]] = {}
    for gap in np.flatnonzero((prefetch > release) & (gaps[:, _WRITTEN] >= 0)).tolist():
        by_tensor.setdefault(int(gaps[gap, _TENSOR]) if gaps[gap, _INSTANCE] == 0 else -1, []).append(gap)
    by_tensor.pop(-1, None)
    clean_tensors = set(gaps[gaps[:, _CLEAN] == 1, _TENSOR].tolist())
    for tensor in clean_tensors & by_tensor.keys():
        members = sorted(by_tensor[tensor], key=lambda gap: gaps[gap, _START])
        # A dirty gap that was pruned leaves its content to the next one.
        dirty_starts = np.sort(gaps[(gaps[:, _TENSOR] == tensor) & (gaps[:, _CLEAN] == 0), _START])
        for before, gap in zip([None, *members], members, strict=False):
            fresh = before is None or np.searchsorted(dirty_starts, gaps[gap, _START], "right") > np.searchsorted(
                dirty_starts, gaps[before, _START], "right"
            )
            gaps[gap, _CLEAN] = 0 if fresh else 1
            if before is not None and not fresh:
                gaps[before, _HOST_STAYS] = 1


@njit(cache=True)
def _fit(profile, gaps, capacity, lookahead, release_at_once):  # pragma: no cover - compiled
    """(release_before_run [M], resident_from_run [M], failed run or -1).

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
            return release, prefetch, run
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
    return release, prefetch, -1


@njit(cache=True)
def _rows(op, micro_batch, collective, freed, gaps, release, prefetch, by_release, by_prefetch, by_end, device_memory,
          host_memory):  # fmt: skip  # pragma: no cover - compiled
    """(rows [n, 7], compute_row [U]): kind, op, instance or micro-batch, tensor, unused, source, destination."""
    runs, count = op.shape[0], gaps.shape[0]
    rows = np.empty((runs + freed.shape[0] + 4 * count, 7), np.int64)
    compute_row = np.empty(runs, np.int64)
    n, next_release, next_prefetch, next_end, next_written, next_freed = 0, 0, 0, 0, 0, 0
    while next_written < count and gaps[next_written, 3] < 0:
        next_written += 1
    for run in range(runs + 1):
        while next_release < count and release[by_release[next_release]] <= run:
            gap = by_release[next_release]
            if gaps[gap, 4] >= 0 and (prefetch[gap] > release[gap] or gaps[gap, 5] >= runs):
                rows[n] = (3, -1, gaps[gap, 1], gaps[gap, 0], -1, device_memory, -1)
                n += 1
            next_release += 1
        if run == runs:
            break
        while next_prefetch < count and prefetch[by_prefetch[next_prefetch]] <= run:
            gap = by_prefetch[next_prefetch]
            if gaps[gap, 4] < 0 or prefetch[gap] > release[gap]:
                rows[n] = (2, -1, gaps[gap, 1], gaps[gap, 0], -1, host_memory, device_memory)
                n += 1
            next_prefetch += 1
        rows[n] = (6 if collective[run] else 0, op[run], micro_batch[run], -1, -1, -1, -1)
        compute_row[run] = n
        n += 1
        # Host copies go first: the same tensor may leave again after this very run.
        while next_end < count and gaps[by_end[next_end], 5] <= run:
            gap = by_end[next_end]
            if gaps[gap, 6] == 0 and prefetch[gap] > release[gap]:
                rows[n] = (3, -1, gaps[gap, 1], gaps[gap, 0], -1, host_memory, -1)
                n += 1
            next_end += 1
        while next_written < count and gaps[next_written, 3] == run:
            gap = next_written
            if gaps[gap, 7] == 0 and (prefetch[gap] > release[gap] or gaps[gap, 5] >= runs):
                rows[n] = (1, -1, gaps[gap, 1], gaps[gap, 0], -1, device_memory, host_memory)
                n += 1
            next_written += 1
        while next_freed < freed.shape[0] and freed[next_freed, 0] == run:
            rows[n] = (3, -1, freed[next_freed, 2], freed[next_freed, 1], -1, device_memory, -1)
            n += 1
            next_freed += 1
    return rows[:n], compute_row


def _emit(problem, view, decision, step: _Step, release, prefetch) -> DeviceList:
    program = problem.workload.program(view.device)
    device = problem.machine.devices[view.device]
    gaps = step.gaps
    freed = np.stack([step.release_run, step.release_tensor, step.release_instance], 1)
    by_release = np.lexsort((gaps[:, _WRITTEN], release))
    by_prefetch = np.lexsort((gaps[:, _END], prefetch))
    by_end = np.argsort(gaps[:, _END], kind="stable")
    table, compute_row = _rows(step.op, step.micro_batch, step.is_collective, freed, gaps, release, prefetch, by_release,
                               by_prefetch, by_end, device.memory, device.host_memory)  # fmt: skip
    rows = blank_rows(len(table))
    for name, column in (("kind", 0), ("op", 1), ("micro_batch", 2), ("tensor", 3), ("memory", 5), ("to_memory", 6)):
        rows[name] = table[:, column]
    launch_s = problem.machine.overheads.launch_s
    seconds = np.array([0.0 if op.collective else op.duration_s + launch_s for op in program.ops])
    sizes = np.array([tensor.size_bytes for tensor in program.tensors], np.int64)
    moved = tuple(int(sizes[rows["tensor"][rows["kind"] == kind]].sum()) for kind in (Kind.OFFLOAD, Kind.PREFETCH))
    initial = tuple(
        Placement(tensor, (device.host_memory if rest == Rest.ON_HOST else device.memory,))
        for tensor, rest in rest_of(view, decision).items()
    )
    return DeviceList(rows, compute_row, np.cumsum(seconds[step.op]), moved, initial)  # type: ignore[arg-type]


def blank_rows(count: int) -> np.ndarray:
    """`count` instructions with every field at its unused value."""
    rows = np.full(count, -1, dtype=INSTRUCTION)
    rows["part"], rows["parts"], rows["size_bytes"] = 0, 1, 0
    return rows


def wait_row(event: int) -> np.ndarray:
    """One instruction that holds back the compute stream until `event`."""
    row = blank_rows(1)
    row["kind"], row["event"], row["stream"] = Kind.WAIT, event, COMPUTE_STREAM
    return row
