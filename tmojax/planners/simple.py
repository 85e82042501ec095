"""Strategies that need no solver: keep all, offload all, recompute per layer, sqrt(n) checkpointing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tmojax.planners.base import Planner, PlanResult, Status, Stopwatch, does_not_fit
from tmojax.planners.workbench import Workbench
from tmojax.problem import Action, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.coordinate import together
from tmojax.relax.decisions import Choice, DeviceDecision, Rest, keep_everything
from tmojax.relax.decode import DoesNotFit


def offload_everything(view: StepView) -> DeviceDecision:
    """Every candidate that backward uses is offloaded, and all resting state lives in host memory."""
    choice = keep_everything(view).choice
    choice[view.needed & view.may_offload] = Choice.OFFLOAD
    return DeviceDecision(choice, np.where(view.state_resting, Rest.ON_HOST, Rest.ON_DEVICE).astype(np.int8))


def segments(problem: Problem, view: StepView, layers_per_segment: int) -> np.ndarray:
    """Segment of every slot's op [Q]: runs of forward ops with one layer label count as a layer, in order of
    appearance.

    Backward slots get -1.
    """
    program = problem.workload.program(view.device)
    segment = np.full(len(view.slot_op), -1)
    layer, label = -1, None
    for slot in range(view.forward_end):
        here = program.ops[view.slot_op[slot]].layer
        if here != label:
            layer, label = layer + 1, here
        segment[slot] = layer // layers_per_segment
    return segment


def layer_count(problem: Problem, view: StepView) -> int:
    return int(segments(problem, view, 1).max(initial=-1)) + 1


def checkpoints(problem: Problem, view: StepView, layers_per_segment: int) -> np.ndarray:
    """Candidates [I] that per-segment checkpointing keeps: what a later segment's forward ops read."""
    program = problem.workload.program(view.device)
    segment = segments(problem, view, layers_per_segment)
    reach: dict[int, int] = {}
    for slot in range(view.forward_end):
        for tensor in program.ops[view.slot_op[slot]].reads:
            reach[tensor] = max(reach.get(tensor, -1), int(segment[slot]))
    born = segment[view.producer_slot]
    read_until = np.array([reach.get(tensor, -1) for tensor in view.tensor.tolist()], np.int64)
    return (born >= 0) & (read_until > born)


def recompute_segments(problem: Problem, view: StepView, layers_per_segment: int) -> DeviceDecision:
    """Keep the checkpoints between segments, and everything of the last segment; recompute the rest."""
    segment = segments(problem, view, layers_per_segment)
    born = segment[view.producer_slot]
    inside = (born >= 0) & (born < segment.max(initial=0))
    kept = checkpoints(problem, view, layers_per_segment)
    choice = keep_everything(view).choice
    choice[inside & kept] = Choice.KEEP
    choice[inside & ~kept & view.may_recompute] = Choice.RECOMPUTE
    return DeviceDecision(choice, np.zeros(len(view.state_tensor), np.int8))


class SimpleStrategy(Planner):
    """Decides for every GPU by a rule that knows nothing of the others; all start at once, links are shared fairly."""

    @property
    def coordinates(self) -> bool:
        return False


@dataclass(frozen=True)
class KeepAll(SimpleStrategy):
    """Nothing leaves device memory."""

    name: str = "keep-all"

    def actions(self, problem: Problem) -> frozenset[Action]:
        return frozenset()

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        return _fixed(self.name, problem, None, lambda bench, d: keep_everything(bench.view(d)))


@dataclass(frozen=True)
class OffloadAll(SimpleStrategy):
    """Every activation that backward uses, and all optimizer state, goes to host memory as soon as it is idle and comes
    back `lookahead_layers` layers ahead of its use (as vDNN, MICRO 2016, does for all layers)."""

    name: str = "offload-all"
    lookahead_layers: int = 2

    def actions(self, problem: Problem) -> frozenset[Action]:
        return problem.actions & {Action.OFFLOAD}

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        def decide(bench: Workbench, device: int) -> DeviceDecision:
            return offload_everything(bench.view(device))

        return _fixed(self.name, problem, Action.OFFLOAD, decide, lookahead_layers=self.lookahead_layers)


@dataclass(frozen=True)
class RecomputeAll(SimpleStrategy):
    """Per-layer activation checkpointing: only what crosses from layer to layer is kept."""

    name: str = "recompute-all"

    def actions(self, problem: Problem) -> frozenset[Action]:
        return problem.actions & {Action.RECOMPUTE}

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        return _fixed(
            self.name, problem, Action.RECOMPUTE, lambda bench, d: recompute_segments(problem, bench.view(d), 1)
        )


@dataclass(frozen=True)
class SqrtCheckpointing(SimpleStrategy):
    """Checkpoints between segments of about sqrt(layers) layers (Chen et al. 2016, "Training deep nets with sublinear
    memory cost")."""

    name: str = "sqrt-n"

    def actions(self, problem: Problem) -> frozenset[Action]:
        return problem.actions & {Action.RECOMPUTE}

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        def decide(bench: Workbench, device: int) -> DeviceDecision:
            view = bench.view(device)
            return recompute_segments(problem, view, max(1, round(math.sqrt(layer_count(problem, view)))))

        return _fixed(self.name, problem, Action.RECOMPUTE, decide)


def _fixed(name: str, problem: Problem, action: Action | None, decide, lookahead_layers: int = 0) -> PlanResult:
    """Decode and simulate one decision per device, everybody starting at once on fairly shared links."""
    watch = Stopwatch()
    if action is not None and action not in problem.actions:
        message = f"needs action {action.value!r}, which the problem does not allow"
        return PlanResult(name, Status.NOT_FOUND, message=message, plan_s=watch.read_s())
    bench = Workbench(problem)
    devices = range(bench.device_count)
    decisions = tuple(decide(bench, device) for device in devices)
    lookahead: tuple[int, ...] = ()
    if lookahead_layers:
        lookahead = tuple(
            max(1, lookahead_layers * len(bench.view(d).slot_op) // (2 * max(1, layer_count(problem, bench.view(d)))))
            for d in devices
        )
    found = bench.evaluate(decisions, together(problem), lookahead, release_at_once=bool(lookahead_layers))
    if isinstance(found, DoesNotFit):
        return does_not_fit(name, problem, found, watch)
    return PlanResult(
        name, Status.FEASIBLE, found.schedule, found.step_s, watch.read_s(), candidate=found,
        message="" if found.step_s < math.inf else "deadlocks in simulation",
    )  # fmt: skip
