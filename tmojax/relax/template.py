"""One micro-batch of one device under a decision: which ops run (recomputations included) and how long tensors live.

Positions are *runs*: indices into the list of op executions of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from tmojax.problem import PLAIN, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import DeviceDecision
from tmojax.relax.expansion import NOBODY, Graph, expand, graph_of

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
    life_before_gap [L]: the life ends where a gap begins. state_tensor, state_run, state_changes [P]: a STATE tensor,
    a run that touches it, and whether that changes it (1) or not (0); by tensor, then by run.
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
    state_tensor: np.ndarray
    state_run: np.ndarray
    state_changes: np.ndarray


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


def _expand(problem: Problem, view: StepView, choice: np.ndarray, form: int) -> tuple[Template, dict[int, int]]:
    """The template, and the candidates that must have another choice instead."""
    if view not in _graphs:
        _graphs[view] = graph_of(problem, view)
    graph = _graphs[view]
    runs, coding, recomputed, scratch, first_run, life, before_gap, gap, given, state, conflict = expand(
        graph, choice, form
    )
    sizes = graph.size_bytes
    if form != PLAIN:
        codec = problem.machine.codecs[form]
        coded = np.flatnonzero(coding >= 0)
        scratch[coded] = [codec.workspace_bytes(size) for size in sizes[runs[coded]].tolist()]

    def bytes_of(copies: np.ndarray) -> np.ndarray:
        plain = sizes[copies[:, 0]]
        if form == PLAIN:
            return plain
        return np.where(copies[:, 1] == PLAIN, plain, -(-plain * codec.numerator // codec.denominator))

    template = Template(
        runs, coding, recomputed, scratch, first_run,
        life[:, 0], life[:, 1], bytes_of(life), life[:, 2], life[:, 3],
        gap[:, 0], gap[:, 1], bytes_of(gap), gap[:, 2], gap[:, 3], gap[:, 4], gap[:, 5],
        given[:, 0], given[:, 1], given[:, 2], before_gap, state[:, 0], state[:, 1], state[:, 2],
    )  # fmt: skip
    instead = np.flatnonzero(conflict != NOBODY)
    return template, dict(zip(instead.tolist(), conflict[instead].tolist(), strict=True))


_graphs: WeakKeyDictionary[StepView, Graph] = WeakKeyDictionary()
