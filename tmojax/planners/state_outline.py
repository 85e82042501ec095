"""A step in a few numbers: where each kind of state rests, and how much is recomputed, in the first micro-batch apart.

Where state leaves and comes within the step, what activations do and where state rests have to change together, which
no single move of a search does: gradients that are away in every forward leave room for activations, and at first,
when state has not left yet, more has to be recomputed. A coarse grid over these numbers, then coordinate descent from
its best point, on the exact simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from tmojax.planners.simple import checkpoints
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import Choice, DeviceDecision, Rest, rests_of

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of what may be recomputed cheaply
COARSE = (0.0, 0.5, 1.0)
SMALL_KIND = 0.02  # of all state: kinds below stay as they are
AS_OTHERS = -1.0


@dataclass(frozen=True)
class Outline:
    """rests: of every large kind of state. recomputed, first: share of the bytes used by backward that is recomputed,
    cheapest first, in all micro-batches, and in the first (AS_OTHERS: no other share there); the others are kept, or
    with `offloaded` offloaded."""

    rests: tuple[Rest, ...]
    recomputed: float
    offloaded: bool
    first: float


@dataclass(frozen=True, eq=False)
class _Kind:
    """State tensors of one kind that rest in micro-batches, or do not. masks [S], of every class of devices."""

    masks: dict[int, np.ndarray]
    options: tuple[Rest, ...]


def _kinds(bench: Workbench) -> list[_Kind]:
    found: dict[tuple[str, bool], dict[int, np.ndarray]] = {}
    for device in sorted(set(bench.device_class)):
        view, tensors = bench.view(device), bench.problem.workload.program(device).tensors
        names = [(str(tensors[tensor].kind), bool(resting))
                 for tensor, resting in zip(view.state_tensor.tolist(), view.state_resting, strict=True)]  # fmt: skip
        for name in dict.fromkeys(names):
            mask = np.array([name == other for other in names])
            if view.state_bytes[mask].sum() > SMALL_KIND * view.state_bytes.sum():
                found.setdefault(name, {})[device] = mask
    return [_Kind(masks, rests_of(bench.problem, resting)) for (_, resting), masks in found.items()]


def shed(problem: Problem, view: StepView, share: float, offloaded: bool) -> np.ndarray:
    """[I] choices: `share` of what backward uses and layers do not pass on recomputed, the cheapest seconds per byte
    first; the rest kept, or offloaded."""
    leaves = view.needed & view.may_offload & offloaded
    choice = np.where(view.needed, np.where(leaves, Choice.OFFLOAD, Choice.KEEP), Choice.RECOMPUTE).astype(np.int8)
    allowed = np.flatnonzero(view.may_recompute & view.needed & ~checkpoints(problem, view, 1))
    cost = view.recompute_s[allowed] / np.maximum(view.size_bytes[allowed], 1)
    order = allowed[np.argsort(cost, kind="stable")]
    freed = np.cumsum(view.size_bytes[order])
    choice[order[freed - view.size_bytes[order] < share * freed[-1:].sum()]] = Choice.RECOMPUTE
    return choice


def best_outline(bench: Workbench, start: Candidate, evaluations: int) -> Candidate | None:
    """The best of at most `evaluations` simulated plans that differ from `start` in an `Outline`, which may be slower
    than `start`; None if none fits. Deterministic. At most twice as many that do not fit are decoded as well."""
    kinds = _kinds(bench)
    before = bench.simulations
    tried: dict[Outline, Candidate | None] = {}

    def step_s(outline: Outline) -> float:
        if outline not in tried:
            decisions = tuple(
                _apply(bench, device, kinds, outline, decision) for device, decision in enumerate(start.decisions)
            )
            found = bench.evaluate(decisions, start.coordination, start.lookahead_runs)
            tried[outline] = found if isinstance(found, Candidate) else None
        known = tried[outline]
        return known.step_s if known is not None else float("inf")

    def exhausted() -> bool:
        return bench.simulations - before >= evaluations or len(tried) >= 3 * evaluations

    for outline in _grid(bench.problem, kinds):
        if exhausted():
            break
        step_s(outline)
    now, improved = min(tried, key=step_s), True
    while improved:
        improved = False
        for change in _changes(bench.problem, kinds):
            for outline in change(now):
                if outline not in tried and exhausted():
                    return tried[now]
                if step_s(outline) < step_s(now) * (1 - 1e-9):
                    now, improved = outline, True
    return tried[now]


def _grid(problem: Problem, kinds: list[_Kind]) -> Iterator[Outline]:
    recompute = Action.RECOMPUTE in problem.actions
    firsts = (AS_OTHERS, 1.0) if recompute and problem.workload.micro_batches > 1 else (AS_OTHERS,)
    for share, offloaded, first in product(COARSE if recompute else (0.0,), (False, True), firsts):
        for rests in product(*(kind.options for kind in kinds)):
            yield Outline(rests, share, offloaded, first)


def _changes(problem: Problem, kinds: list[_Kind]) -> Iterator[Callable[[Outline], list[Outline]]]:
    """For every number of an outline what gives those with another value of it."""

    def rest_of(number: int, kind: _Kind) -> Callable[[Outline], list[Outline]]:
        return lambda outline: [
            replace(outline, rests=(*outline.rests[:number], rest, *outline.rests[number + 1 :]))
            for rest in kind.options
        ]

    for number, kind in enumerate(kinds):
        yield rest_of(number, kind)
    if Action.RECOMPUTE in problem.actions:
        yield lambda outline: [replace(outline, recomputed=share, offloaded=offloaded)
                               for share in SHARES for offloaded in (False, True)]  # fmt: skip
        if problem.workload.micro_batches > 1:
            yield lambda outline: [replace(outline, first=share) for share in (AS_OTHERS, *SHARES)]


def _apply(
    bench: Workbench, device: int, kinds: list[_Kind], outline: Outline, decision: DeviceDecision
) -> DeviceDecision:
    view, state_out = bench.view(device), decision.state_out.astype(np.int8)
    for kind, rest in zip(kinds, outline.rests, strict=True):
        if bench.device_class[device] in kind.masks:
            state_out[kind.masks[bench.device_class[device]]] = rest
    choice = shed(bench.problem, view, outline.recomputed, outline.offloaded)
    first = None if outline.first == AS_OTHERS else shed(bench.problem, view, outline.first, outline.offloaded)
    return DeviceDecision(choice, state_out, first_choice=first)
