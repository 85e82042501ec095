"""Compiled pass of the template: which ops a micro-batch runs under a decision, and what lives how long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tmojax.problem import PLAIN, Kind, Lifetime, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import Choice

KEEP, OFFLOAD, RECOMPUTE, PEER = (int(c) for c in (Choice.KEEP, Choice.OFFLOAD, Choice.RECOMPUTE, Choice.PEER))
COMPRESS, OFFLOAD_COMPRESSED = int(Choice.COMPRESS), int(Choice.OFFLOAD_COMPRESSED)
ENCODE, DECODE, NO_FORM = int(Kind.ENCODE), int(Kind.DECODE), int(PLAIN)
MICRO_BATCH, STATE, OTHER = range(3)
NOBODY = -1  # in `conflict`: none


class Graph(NamedTuple):
    """A device's micro-batch as arrays. slot_op: op of every slot. reads, updates, writes: tensors of op o at
    `[ptr[o]:ptr[o + 1]]`. producer: per tensor, -1: none. lifetime: per tensor, of the three above. index_of: candidate
    of a tensor, -1: none. may_recompute, same_until: per candidate. idle_from: slot behind which a candidate is idle;
    those of slot q are `by_slot[slot_ptr[q]:slot_ptr[q + 1]]`."""

    slot_op: NDArray[np.int64]
    reads_ptr: NDArray[np.int64]
    reads: NDArray[np.int64]
    updates_ptr: NDArray[np.int64]
    updates: NDArray[np.int64]
    writes_ptr: NDArray[np.int64]
    writes: NDArray[np.int64]
    producer: NDArray[np.int64]
    workspace_bytes: NDArray[np.int64]
    lifetime: NDArray[np.int8]
    size_bytes: NDArray[np.int64]
    index_of: NDArray[np.int64]
    tensor: NDArray[np.int64]
    may_recompute: NDArray[np.bool_]
    same_until: NDArray[np.int64]
    idle_from: NDArray[np.int64]
    by_slot: NDArray[np.int64]
    slot_ptr: NDArray[np.int64]


def graph_of(problem: Problem, view: StepView) -> Graph:
    """The arrays of the program that a device runs."""
    program = problem.workload.program(view.device)
    reads_ptr, reads = _compressed([op.reads for op in program.ops])
    updates_ptr, updates = _compressed([op.updates for op in program.ops])
    writes_ptr, writes = _compressed([op.writes for op in program.ops])
    kinds = {Lifetime.MICRO_BATCH: MICRO_BATCH, Lifetime.STATE: STATE}
    index_of = np.full(len(program.tensors), -1, np.int64)
    index_of[view.tensor] = np.arange(len(view.tensor))
    by_slot = np.argsort(view.idle_from, kind="stable")
    slot_ptr = np.searchsorted(view.idle_from[by_slot], np.arange(len(view.slot_op) + 1))
    return Graph(
        view.slot_op.astype(np.int64), reads_ptr, reads, updates_ptr, updates, writes_ptr, writes,
        np.array(program.producer, np.int64),
        np.array([op.workspace_bytes for op in program.ops], np.int64),
        np.array([kinds.get(tensor.lifetime, OTHER) for tensor in program.tensors], np.int8),
        np.array([tensor.size_bytes for tensor in program.tensors], np.int64), index_of,
        view.tensor.astype(np.int64), view.may_recompute, view.same_until, view.idle_from.astype(np.int64), by_slot,
        slot_ptr.astype(np.int64),
    )  # fmt: skip


def _compressed(groups: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(first member of every group and the end of the last one, members)."""
    pointer = np.concatenate([[0], np.cumsum([len(group) for group in groups])]).astype(np.int64)
    return pointer, np.array([member for group in groups for member in group], np.int64)


@njit(cache=True)
def expand(graph, choice, form):  # pragma: no cover - compiled
    """(runs, coding, recomputed, scratch_bytes, first_run, lives, before_gap, gaps, inputs, state, conflict).

    As in `tmojax.relax.template.Template`; lives [L, 4]: tensor, form, first and last run; gaps [M, 6]: tensor, form,
    to a peer, written, from, to; inputs [N, 3]; state [P, 3]: tensor, run, whether it changes it. scratch_bytes of runs
    that encode or decode is 0. conflict [I]: the choice that a candidate must have instead, or NOBODY.
    """
    # One function on purpose, as in the simulator: handing over a dozen arrays costs more than what is done here.
    slot_op, reads_ptr, reads, updates_ptr, updates = (
        graph.slot_op, graph.reads_ptr, graph.reads, graph.updates_ptr, graph.updates
    )  # fmt: skip
    writes_ptr, writes, producer, may_recompute = graph.writes_ptr, graph.writes, graph.producer, graph.may_recompute
    same_until = graph.same_until
    workspace, lifetime, sizes, index_of = graph.workspace_bytes, graph.lifetime, graph.size_bytes, graph.index_of
    candidate, idle_from, by_slot, slot_ptr = graph.tensor, graph.idle_from, graph.by_slot, graph.slot_ptr
    ops, tensors, candidates, slots = writes_ptr.size - 1, producer.size, candidate.size, slot_op.size
    # A candidate is dropped, encoded and decoded once at most, and what runs again brings back a dropped one.
    most = slots + 3 * candidates
    most_touched, most_made = 0, candidates
    for slot in range(slots):
        op = slot_op[slot]
        most_touched += reads_ptr[op + 1] - reads_ptr[op] + updates_ptr[op + 1] - updates_ptr[op]
        most_made += writes_ptr[op + 1] - writes_ptr[op]
    for index in range(candidates):
        op = producer[candidate[index]]
        most_touched += reads_ptr[op + 1] - reads_ptr[op] + updates_ptr[op + 1] - updates_ptr[op]
    runs, coding = np.empty(most, np.int64), np.full(most, -1, np.int64)
    recomputed = np.zeros(most, np.bool_)
    touched, touched_run = np.empty(most_touched, np.int64), np.empty(most_touched, np.int64)
    changes = np.zeros(most_touched, np.bool_)
    made, made_run = np.empty(most_made, np.int64), np.empty(most_made, np.int64)
    first_run = np.full(ops, -1, np.int64)
    dropped = np.zeros(tensors, np.bool_)
    encoded, decoded = np.full(tensors, -1, np.int64), np.full(tensors, -1, np.int64)  # run of either
    conflict = np.full(candidates, NOBODY, np.int8)
    pending = np.empty(reads.size + 2, np.int64)
    count, touches, creations = 0, 0, 0
    for slot in range(slots):
        own, place = slot_op[slot], reads_ptr[slot_op[slot]]
        asked_reads, asked_updates = reads_ptr[own + 1], updates_ptr[own + 1] - updates_ptr[own]
        while True:
            # What the op needs and what is dropped comes back first, its dropped inputs before it; then the op runs.
            height = 0
            while place < asked_reads + asked_updates:
                asked = reads[place] if place < asked_reads else updates[updates_ptr[own] + place - asked_reads]
                place += 1
                if dropped[asked]:
                    pending[0] = asked
                    height = 1
                    break
            again = height > 0
            while True:
                op = own
                if again:
                    while height > 0 and not dropped[pending[height - 1]]:
                        height -= 1
                    if height == 0:
                        break
                    op = producer[pending[height - 1]]
                    index = index_of[pending[height - 1]]
                    if not may_recompute[index] or own > same_until[index]:
                        conflict[index] = KEEP
                    missing = False
                    for at in range(reads_ptr[op + 1] - 1, reads_ptr[op] - 1, -1):
                        if dropped[reads[at]]:
                            pending[height] = reads[at]
                            height += 1
                            missing = True
                    if missing:
                        continue
                for group in range(2):
                    begin, end, members = reads_ptr[op], reads_ptr[op + 1], reads
                    if group == 1:
                        begin, end, members = updates_ptr[op], updates_ptr[op + 1], updates
                    for at in range(begin, end):
                        if encoded[members[at]] >= 0 and decoded[members[at]] < 0:
                            decoded[members[at]] = count
                            runs[count], coding[count] = members[at], DECODE
                            count += 1
                runs[count], recomputed[count] = op, again
                for at in range(reads_ptr[op], reads_ptr[op + 1]):
                    touched[touches], touched_run[touches] = reads[at], count
                    touches += 1
                for at in range(updates_ptr[op], updates_ptr[op + 1]):
                    touched[touches], touched_run[touches], changes[touches] = updates[at], count, True
                    touches += 1
                for at in range(writes_ptr[op], writes_ptr[op + 1]):
                    if not again or dropped[writes[at]]:
                        made[creations], made_run[creations] = writes[at], count
                        creations += 1
                        dropped[writes[at]] = False
                count += 1
                if not again:
                    break
                height -= 1
            if not again:
                break
        first_run[own] = count - 1
        for at in range(slot_ptr[slot], slot_ptr[slot + 1]):
            if choice[by_slot[at]] == RECOMPUTE:
                dropped[candidate[by_slot[at]]] = True
        if form != NO_FORM:
            for at in range(slot_ptr[slot], slot_ptr[slot + 1]):
                if choice[by_slot[at]] == COMPRESS or choice[by_slot[at]] == OFFLOAD_COMPRESSED:
                    encoded[candidate[by_slot[at]]] = count
                    runs[count], coding[count] = candidate[by_slot[at]], ENCODE
                    count += 1
    for index in range(candidates):
        if encoded[candidate[index]] >= 0 and decoded[candidate[index]] < 0:
            conflict[index] = KEEP  # nothing asks for it any more

    # By tensor: its uses and the runs that make it, both in order.
    use_ptr, make_ptr = np.zeros(tensors + 1, np.int64), np.zeros(tensors + 1, np.int64)
    for at in range(touches):
        use_ptr[touched[at] + 1] += 1
    for at in range(creations):
        make_ptr[made[at] + 1] += 1
    for tensor in range(tensors):
        use_ptr[tensor + 1] += use_ptr[tensor]
        make_ptr[tensor + 1] += make_ptr[tensor]
    uses, use_changes = np.empty(touches, np.int64), np.zeros(touches, np.bool_)
    makes = np.empty(creations, np.int64)
    free = use_ptr.copy()
    for at in range(touches):
        uses[free[touched[at]]], use_changes[free[touched[at]]] = touched_run[at], changes[at]
        free[touched[at]] += 1
    free = make_ptr.copy()
    for at in range(creations):
        makes[free[made[at]]] = made_run[at]
        free[made[at]] += 1

    most = creations + 3 * candidates
    for run in range(count):
        if recomputed[run]:
            most += writes_ptr[runs[run] + 1] - writes_ptr[runs[run]]
    lives, before_gap = np.empty((most, 4), np.int64), np.zeros(most, np.bool_)
    gaps = np.empty((candidates, 6), np.int64)
    inputs = np.empty((tensors, 3), np.int64)
    state = np.empty((touches, 3), np.int64)
    life_ptr = np.zeros(tensors + 1, np.int64)
    away_from, away_to = np.full(tensors, -1, np.int64), np.full(tensors, -1, np.int64)
    life_count, gap_count, input_count, state_count = 0, 0, 0, 0
    for tensor in range(tensors):
        life_ptr[tensor] = life_count
        begin, end = use_ptr[tensor], use_ptr[tensor + 1]
        if lifetime[tensor] != MICRO_BATCH:
            if lifetime[tensor] == STATE:
                for at in range(begin, end):
                    changed = use_changes[at]
                    later = at + 1  # the same run may both read and update it
                    while later < end and uses[later] == uses[at]:
                        changed = changed or use_changes[later]
                        later += 1
                    state[state_count, 0], state[state_count, 1], state[state_count, 2] = tensor, uses[at], changed
                    state_count += 1
            continue
        if producer[tensor] == -1:
            if begin < end:
                inputs[input_count, 0] = tensor
                inputs[input_count, 1], inputs[input_count, 2] = uses[begin], uses[end - 1]
                input_count += 1
            continue
        if make_ptr[tensor] == make_ptr[tensor + 1]:
            continue  # written by a step op
        start, index = makes[make_ptr[tensor]], index_of[tensor]
        if encoded[tensor] >= 0 and decoded[tensor] >= 0:
            out, back = encoded[tensor], decoded[tensor]
            away_from[tensor], away_to[tensor] = out, back
            lives[life_count, 0], lives[life_count, 1] = tensor, NO_FORM
            lives[life_count, 2], lives[life_count, 3] = start, out
            lives[life_count + 1, 0], lives[life_count + 1, 1] = tensor, NO_FORM
            lives[life_count + 1, 2], lives[life_count + 1, 3] = back, uses[end - 1]
            life_count += 2
            if choice[index] == OFFLOAD_COMPRESSED and back - out > 1:
                gaps[gap_count, 0], gaps[gap_count, 1], gaps[gap_count, 2] = tensor, form, 0
                gaps[gap_count, 3], gaps[gap_count, 4], gaps[gap_count, 5] = out, out, back
                gap_count += 1
                lives[life_count, 0], lives[life_count, 1] = tensor, form
                lives[life_count, 2], lives[life_count, 3] = out, out
                before_gap[life_count] = True
                lives[life_count + 1, 0], lives[life_count + 1, 1] = tensor, form
                lives[life_count + 1, 2], lives[life_count + 1, 3] = back, back
                life_count += 2
            else:
                lives[life_count, 0], lives[life_count, 1] = tensor, form
                lives[life_count, 2], lives[life_count, 3] = out, back
                life_count += 1
            continue
        if index >= 0 and (choice[index] == OFFLOAD or choice[index] == PEER):
            left = first_run[slot_op[idle_from[index]]]
            at = begin
            while at < end and uses[at] <= left:
                at += 1
            if at < end and uses[at] - left > 1:
                written = start
                for change in range(begin, at):
                    if use_changes[change]:
                        written = max(written, uses[change])
                gaps[gap_count, 0], gaps[gap_count, 1], gaps[gap_count, 2] = tensor, NO_FORM, choice[index] == PEER
                gaps[gap_count, 3], gaps[gap_count, 4], gaps[gap_count, 5] = written, left, uses[at]
                gap_count += 1
                away_from[tensor], away_to[tensor] = left, uses[at]
                lives[life_count, 0], lives[life_count, 1] = tensor, NO_FORM
                lives[life_count, 2], lives[life_count, 3] = start, left
                before_gap[life_count] = True
                lives[life_count + 1, 0], lives[life_count + 1, 1] = tensor, NO_FORM
                lives[life_count + 1, 2], lives[life_count + 1, 3] = uses[at], uses[end - 1]
                life_count += 2
                continue
        at = begin
        for make in range(make_ptr[tensor], make_ptr[tensor + 1]):
            start = makes[make]
            until = makes[make + 1] if make + 1 < make_ptr[tensor + 1] else count
            final = start
            while at < end and uses[at] < until:
                if uses[at] > start:
                    final = uses[at]
                at += 1
            lives[life_count, 0], lives[life_count, 1] = tensor, NO_FORM
            lives[life_count, 2], lives[life_count, 3] = start, final
            life_count += 1
    life_ptr[tensors] = life_count

    scratch = np.zeros(count, np.int64)
    for run in range(count):
        if coding[run] >= 0:
            continue
        op = runs[run]
        scratch[run] = workspace[op]
        if not recomputed[run]:
            continue
        for at in range(writes_ptr[op], writes_ptr[op + 1]):
            tensor = writes[at]
            new = False
            for make in range(make_ptr[tensor], make_ptr[tensor + 1]):
                new = new or makes[make] == run
            if new:
                continue
            if away_from[tensor] >= 0 and away_from[tensor] < run < away_to[tensor]:
                conflict[index_of[tensor]] = RECOMPUTE
                continue
            there = False
            for life in range(life_ptr[tensor], life_ptr[tensor + 1]):
                there = there or lives[life, 2] <= run <= lives[life, 3]
            if there:
                scratch[run] += sizes[tensor]
            else:
                lives[life_count, 0], lives[life_count, 1] = tensor, NO_FORM
                lives[life_count, 2], lives[life_count, 3] = run, run
                life_count += 1
    return (
        runs[:count], coding[:count], recomputed[:count], scratch, first_run, lives[:life_count],
        before_gap[:life_count], gaps[:gap_count], inputs[:input_count], state[:state_count], conflict,
    )  # fmt: skip
