"""One micro-batch of one device under a decision: which ops run (recomputations included) and how long tensors live.

Positions are *runs*: indices into the list of op executions of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from tmojax.problem import PLAIN, Kind, Lifetime, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import CODED, Choice, DeviceDecision

TEMPLATES_KEPT = 16  # of each device: many decisions in a row differ in their state alone


@dataclass(frozen=True, eq=False)
class Template:
    """runs [T]: op of each run; of one that encodes or decodes, the tensor. coding [T]: Kind.ENCODE or Kind.DECODE of
    such runs (-1: others). recomputed [T]: whether it is a recomputation. scratch_bytes [T]: workspace, and outputs of
    a recomputation that are resident already. first_run [ops]: run of each micro-batch op's first execution (-1: none).

    Lives, [L] each: tensor, form, bytes, and the runs from the one that allocates it to the last that touches it,
    inclusive. Gaps, [M] each: a tensor that leaves, its form and bytes, whether a peer takes it, the run that writes
    it, the last run before and the first run after the gap.
    Inputs, [N] each: an input tensor and the first and last run that touch it.
    life_before_gap [L]: the life ends where a gap begins. state_runs: for every STATE tensor that micro-batches
    touch, the runs that do, and whether each changes it.
    """

    runs: np.ndarray
    coding: np.ndarray
    recomputed: np.ndarray
    scratch_bytes: np.ndarray
    first_run: np.ndarray
    life_tensor: np.ndarray
    life_form: np.ndarray
    life_bytes: np.ndarray
    life_start: np.ndarray
    life_end: np.ndarray
    gap_tensor: np.ndarray
    gap_form: np.ndarray
    gap_bytes: np.ndarray
    gap_to_peer: np.ndarray
    gap_written: np.ndarray
    gap_from: np.ndarray
    gap_to: np.ndarray
    input_tensor: np.ndarray
    input_first: np.ndarray
    input_last: np.ndarray
    life_before_gap: np.ndarray
    state_runs: dict[int, list[tuple[int, bool]]]


def build_template(
    problem: Problem, view: StepView, decision: DeviceDecision, *, first: bool = False, last: bool = False
) -> Template:
    """Expand a decision into runs and lives, of the micro-batches between the first and the last, or of one of these.

    An op with several outputs yields all of them again when it is recomputed; an output of it that the decision
    offloads is therefore recomputed with the others. A dropped tensor that a recomputation turns out to need, and whose
    own op may not run again, is kept. A tensor is encoded directly behind its last use before the gap and decoded
    directly before the next one.
    """
    choice = decision.in_last if last else decision.in_first if first else decision.choice
    choice = choice.astype(np.int8)
    form = decision.codec if decision.encodes else PLAIN
    known, key = _templates.setdefault(view, {}), (form, choice.tobytes())
    if key not in known:
        if len(known) >= TEMPLATES_KEPT:
            del known[next(iter(known))]
        known[key] = _without_conflicts(problem, view, choice, form)
    return known[key]


_templates: WeakKeyDictionary[StepView, dict[tuple[int, bytes], Template]] = WeakKeyDictionary()


def _without_conflicts(problem: Problem, view: StepView, choice: np.ndarray, form: int) -> Template:
    while True:
        template, conflicts = _expand(problem, view, choice, form)
        if not conflicts:
            return template
        for index, instead in conflicts.items():
            choice[index] = instead


def _expand(problem: Problem, view: StepView, choice: np.ndarray, form: int) -> tuple[Template, dict[int, Choice]]:
    program = problem.workload.program(view.device)
    codec = problem.machine.codecs[form] if form != PLAIN else None
    ops, producer = program.ops, program.producer
    index_of = {int(tensor): index for index, tensor in enumerate(view.tensor)}
    drop_after: dict[int, list[int]] = {}
    for index in np.flatnonzero(choice == Choice.RECOMPUTE):
        drop_after.setdefault(int(view.idle_from[index]), []).append(int(view.tensor[index]))
    encode_after: dict[int, list[int]] = {}
    for index in np.flatnonzero(np.isin(choice, CODED)) if codec else ():
        encode_after.setdefault(int(view.idle_from[index]), []).append(int(view.tensor[index]))

    runs: list[int] = []
    coding: list[int] = []
    recomputed: list[bool] = []
    dropped: set[int] = set()
    created: dict[int, list[int]] = {}
    changed: dict[int, set[int]] = {}
    touched: dict[int, list[int]] = {}
    encoded: dict[int, int] = {}  # tensor: run that encodes it, until it is decoded
    encoded_in: dict[int, tuple[int, int]] = {}

    def code(tensor: int, kind: Kind) -> None:
        position = len(runs)
        runs.append(tensor)
        coding.append(kind)
        recomputed.append(False)
        if kind is Kind.ENCODE:
            encoded[tensor] = position
        else:
            encoded_in[tensor] = (encoded.pop(tensor), position)

    def run(op: int, again: bool) -> None:
        for tensor in (*ops[op].reads, *ops[op].updates):
            if tensor in encoded:
                code(tensor, Kind.DECODE)
        position = len(runs)
        runs.append(op)
        coding.append(-1)
        recomputed.append(again)
        for tensor in (*ops[op].reads, *ops[op].updates):
            touched.setdefault(tensor, []).append(position)
        for tensor in ops[op].updates:
            changed.setdefault(tensor, set()).add(position)
        for tensor in ops[op].writes:
            if not again or tensor in dropped:
                created.setdefault(tensor, []).append(position)
                dropped.discard(tensor)

    conflicts: dict[int, Choice] = {}

    def restore(tensor: int) -> None:
        """Recompute a dropped tensor, its dropped inputs first."""
        pending = [tensor]
        while pending:
            if pending[-1] not in dropped:
                pending.pop()
                continue
            op = producer[pending[-1]]
            if not ops[op].recomputable:
                conflicts[index_of[pending[-1]]] = Choice.KEEP
            missing = [source for source in ops[op].reads if source in dropped]
            if missing:
                pending.extend(reversed(missing))
            else:
                run(op, True)
                pending.pop()

    first_run = np.full(len(ops), -1, np.int64)
    for slot, op in enumerate(view.slot_op.tolist()):
        for tensor in (*ops[op].reads, *ops[op].updates):
            if tensor in dropped:
                restore(tensor)
        run(op, False)
        first_run[op] = len(runs) - 1
        dropped.update(drop_after.get(slot, ()))
        for tensor in encode_after.get(slot, ()):
            code(tensor, Kind.ENCODE)
    conflicts.update((index_of[tensor], Choice.KEEP) for tensor in encoded)  # nothing asks for it any more

    lives: list[tuple[int, int, int, int]] = []  # tensor, form, first and last run
    before_gap: list[bool] = []
    gaps: list[tuple[int, int, int, int, int, int]] = []  # tensor, form, to a peer, written, from, to
    inputs: list[tuple[int, int, int]] = []
    state_runs: dict[int, list[tuple[int, bool]]] = {}
    for tensor, spec in enumerate(program.tensors):
        uses = touched.get(tensor, [])
        if spec.lifetime is not Lifetime.MICRO_BATCH:
            if uses and spec.lifetime is Lifetime.STATE:
                state_runs[tensor] = [(use, use in changed.get(tensor, ())) for use in uses]
            continue
        if producer[tensor] == -1:
            if uses:
                inputs.append((tensor, uses[0], uses[-1]))
            continue
        starts = created.get(tensor, [])
        if not starts:
            continue  # written by a step op
        index = index_of.get(tensor, -1)
        if tensor in encoded_in:
            at, back = encoded_in[tensor]
            lives += [(tensor, PLAIN, starts[0], at), (tensor, PLAIN, back, max(use for use in uses if use > back))]
            before_gap += [False, False]
            if choice[index] == Choice.OFFLOAD_COMPRESSED and back - at > 1:
                gaps.append((tensor, form, 0, at, at, back))
                lives += [(tensor, form, at, at), (tensor, form, back, back)]
                before_gap += [True, False]
            else:
                lives.append((tensor, form, at, back))
                before_gap.append(False)
            continue
        if index >= 0 and choice[index] in (Choice.OFFLOAD, Choice.PEER):
            idle_from = int(first_run[view.slot_op[view.idle_from[index]]])
            after = [use for use in uses if use > idle_from]
            if after and after[0] - idle_from > 1:
                written = max(run for run in (starts[0], *changed.get(tensor, ())) if run <= idle_from)
                gaps.append((tensor, PLAIN, choice[index] == Choice.PEER, written, idle_from, after[0]))
                lives += [(tensor, PLAIN, starts[0], idle_from), (tensor, PLAIN, after[0], after[-1])]
                before_gap += [True, False]
                continue
        for start, end in zip(starts, [*starts[1:], len(runs)], strict=True):
            inside = [use for use in uses if start < use < end]
            lives.append((tensor, PLAIN, start, inside[-1] if inside else start))
            before_gap.append(False)

    sizes = [tensor.size_bytes for tensor in program.tensors]
    scratch = np.array(
        [codec.workspace_bytes(sizes[op]) if codec and kind >= 0 else ops[op].workspace_bytes
         for op, kind in zip(runs, coding, strict=True)], np.int64,
    )  # fmt: skip
    span: dict[int, list[tuple[int, int]]] = {}
    for tensor, _, start, end in lives:
        span.setdefault(tensor, []).append((start, end))
    away = {tensor: (start, end) for tensor, _, _, _, start, end in gaps} | encoded_in
    for position in np.flatnonzero(recomputed).tolist():
        for tensor in ops[runs[position]].writes:
            if position in created[tensor]:
                continue
            if tensor in away and away[tensor][0] < position < away[tensor][1]:
                conflicts[index_of[tensor]] = Choice.RECOMPUTE
            elif any(start <= position <= end for start, end in span[tensor]):
                scratch[position] += program.tensors[tensor].size_bytes
            else:
                lives.append((tensor, PLAIN, position, position))
                before_gap.append(False)
    life = np.array(lives, np.int64).reshape(-1, 4)
    gap = np.array(gaps, np.int64).reshape(-1, 6)
    given = np.array(inputs, np.int64).reshape(-1, 3)

    def bytes_of(copies: np.ndarray) -> np.ndarray:
        plain = np.array(sizes, np.int64)[copies[:, 0]]
        if codec is None:
            return plain
        return np.where(copies[:, 1] == PLAIN, plain, -(-plain * codec.numerator // codec.denominator))

    return Template(
        np.array(runs, np.int64), np.array(coding, np.int64), np.array(recomputed, bool), scratch, first_run,
        life[:, 0], life[:, 1], bytes_of(life), life[:, 2], life[:, 3],
        gap[:, 0], gap[:, 1], bytes_of(gap), gap[:, 2], gap[:, 3], gap[:, 4], gap[:, 5],
        given[:, 0], given[:, 1], given[:, 2], np.array(before_gap, bool), state_runs,
    ), conflicts  # fmt: skip
