"""A greedy one-parameter family: recompute what is cheapest per byte, offload the rest, coordinate by sweep."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tmojax.errors import InputError
from tmojax.planners.base import Planner, PlanResult, Status, Stopwatch, does_not_fit
from tmojax.planners.simple import checkpoints, offload_everything
from tmojax.planners.sweep import sweep
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, LinkPolicyKind, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.coordinate import host_links
from tmojax.relax.decisions import Choice, DeviceDecision, Rest, keep_everything
from tmojax.relax.decode import DoesNotFit

# Where state rests: what rests in the micro-batches anyway, and what they use.
RESTS = ((Rest.ON_DEVICE, Rest.ON_DEVICE), (Rest.ON_HOST, Rest.ON_DEVICE), (Rest.AWAY, Rest.ON_DEVICE),
         (Rest.ON_DEVICE, Rest.AWAY), (Rest.AWAY, Rest.AWAY), (Rest.ON_HOST, Rest.AWAY))  # fmt: skip
# Where it rests if all of it together has no room on the device between two steps.
NO_ROOM = (Rest.ON_HOST, Rest.ON_HOST)


def recompute_order(problem: Problem, view: StepView, across_layers: bool) -> np.ndarray:
    """Producer slots whose outputs may be recomputed, cheapest first by seconds per byte that backward would keep.

    Unless `across_layers`, what passes from layer to layer is left out: without it, recomputing one layer means
    recomputing all before it.
    """
    allowed = view.may_recompute if across_layers else view.may_recompute & ~checkpoints(problem, view, 1)
    freed = np.zeros(len(view.slot_op), np.int64)
    np.add.at(freed, view.producer_slot[allowed & view.needed], view.size_bytes[allowed & view.needed])
    cost = np.zeros(len(view.slot_op))
    cost[view.producer_slot] = view.recompute_s
    slots = np.flatnonzero(freed)
    return slots[np.argsort(cost[slots] / freed[slots], kind="stable")]


def ratio_decision(view: StepView, order: np.ndarray, recomputed_bytes: int, *, offload: bool,
                   rest: tuple[Rest, Rest]) -> DeviceDecision:  # fmt: skip
    """Recompute in `order` until `recomputed_bytes` are freed; offload (or keep) what else backward uses.

    rest: of the state that rests in the micro-batches, and of the state that they use.
    """
    choice = offload_everything(view).choice if offload else keep_everything(view).choice
    freed = 0
    for slot in order.tolist():
        if freed >= recomputed_bytes:
            break
        outputs = np.flatnonzero((view.producer_slot == slot) & view.may_recompute)
        choice[outputs] = Choice.RECOMPUTE
        freed += int(view.size_bytes[outputs[view.needed[outputs]]].sum())
    return DeviceDecision(choice, np.where(view.state_resting, *rest).astype(np.int8))


def fair_rate(bench: Workbench, device: int) -> float:
    """Bytes per second of a device's host path, each way, when all devices that share its links use them equally."""
    machine = bench.problem.machine
    users = [host_links(machine, other) for other in range(bench.device_count)]
    return min(
        machine.links[link].bandwidth_bytes_per_s / sum(link in used for used in users)
        for link in host_links(machine, device)
    )


class Point(NamedTuple):
    """One decision of the family. across: recompute over the borders of layers too; rest: see `ratio_decision`;
    load: see `RatioSweep`."""

    across: bool
    rest: tuple[Rest, Rest]
    load: float


class _Family:
    """Decisions of all devices for a point."""

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.offload = Action.OFFLOAD in bench.problem.actions
        self.recompute = Action.RECOMPUTE in bench.problem.actions
        self.views = {id(bench.view(d)): bench.view(d) for d in range(bench.device_count)}
        self.orders = {
            (across, key): recompute_order(bench.problem, view, across) if self.recompute else np.zeros(0, np.int64)
            for across in self.borders
            for key, view in self.views.items()
        }

    @property
    def borders(self) -> tuple[bool, ...]:
        return (False, True) if self.recompute else (False,)

    @property
    def rests(self) -> tuple[tuple[Rest, Rest], ...]:
        has_state = any(len(view.state_tensor) for view in self.views.values())
        return RESTS if self.offload and has_state else RESTS[:1]

    def decisions(self, point: Point) -> tuple[DeviceDecision, ...]:
        found = {}
        for key, view in self.views.items():
            order = self.orders[point.across, key]
            total = int(view.size_bytes[view.needed & np.isin(view.producer_slot, order)].sum())
            movable = point.load * float(view.slot_s.sum()) * fair_rate(self.bench, view.device)
            amount = total - int(min(movable, total))
            found[key] = ratio_decision(view, order, amount, offload=self.offload, rest=point.rest)
        return tuple(found[id(self.bench.view(d))] for d in range(self.bench.device_count))


@dataclass(frozen=True)
class RatioSweep(Planner):
    """The fastest of several thresholds, all GPUs alike, each with the best policy and stagger, with optimizer state at
    home and away. A threshold leaves so many bytes to be offloaded that they take `link_loads` times the compute
    time of a micro-batch on the device's share of its links; 0 recomputes everything that can be. The best `finalists`
    get the full sweep, and thresholds between them and their neighbours are tried `refinements` times, closer every
    time."""

    name: str = "ratio-sweep"
    link_loads: tuple[float, ...] = (
        0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 3.0, 4.0, 1000.0
    )  # fmt: skip
    finalists: int = 4
    refinements: int = 3

    def __post_init__(self) -> None:
        if not self.link_loads or min(self.link_loads) < 0:
            raise InputError(f"link_loads: {list(self.link_loads)} must be at least one number, none negative")
        if self.finalists < 1:
            raise InputError(f"finalists: {self.finalists} must be at least 1")
        if self.refinements < 0:
            raise InputError(f"refinements: {self.refinements} must not be negative")

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        bench = Workbench(problem)
        family = _Family(bench)
        loads = tuple(sorted(self.link_loads)) if family.recompute else (1000.0,)
        tried: dict[Point, Candidate | DoesNotFit] = {}

        def attempt(point: Point) -> None:
            if point not in tried:
                tried[point] = _quick(bench, family.decisions(point))

        # First every way for the state at a few loads, then all loads for the ways that did best.
        for across, rest, load in itertools.product(family.borders, family.rests, loads[::3]):
            attempt(Point(across, rest, load))
        if len(family.rests) > 1 and not _fastest_first(tried):
            for across, load in itertools.product(family.borders, loads[::3]):
                attempt(Point(across, NO_ROOM, load))
        for across, rest in list(dict.fromkeys(point[:2] for point in _fastest_first(tried)))[:3]:
            for load in loads:
                attempt(Point(across, rest, load))
        finals: dict[Point, Candidate | DoesNotFit] = {
            point: sweep(bench, family.decisions(point)) for point in _fastest_first(tried)[: self.finalists]
        }
        if not finals:
            failure = next(found for found in reversed(tried.values()) if isinstance(found, DoesNotFit))
            return does_not_fit(self.name, problem, failure, watch)
        best = min(
            (
                self._refined(bench, family, point, found, loads)
                for point in _fastest_first(finals)[:2]
                if isinstance(found := finals[point], Candidate)
            ),
            key=lambda candidate: candidate.step_s,
        )
        return PlanResult(self.name, Status.FEASIBLE, best.schedule, best.step_s, watch.read_s(), candidate=best)

    def _refined(self, bench: Workbench, family: _Family, start: Point, found: Candidate,
                 loads: tuple[float, ...]) -> Candidate:  # fmt: skip
        """The fastest of thresholds around `start`, tried with the coordination of `found`; then swept."""
        at = loads.index(start.load)
        below, above = loads[max(0, at - 1)], loads[min(len(loads) - 1, at + 1)]
        above = min(above, 2 * max(start.load, loads[min(1, len(loads) - 1)]))  # not half way to 1000
        point, best = start, found
        for _ in range(self.refinements):
            around = (np.linspace(below, point.load, 5)[1:-1], np.linspace(point.load, above, 5)[1:-1])
            known = {point.load: best}
            for load in np.concatenate(around).tolist():
                other = bench.evaluate(family.decisions(point._replace(load=load)), found.coordination)
                if isinstance(other, Candidate):
                    known[load] = other
            points = sorted({below, above, *known})
            load = min(known, key=lambda load: known[load].step_s)
            at = points.index(load)
            below, above = points[max(0, at - 1)], points[min(len(points) - 1, at + 1)]
            point, best = point._replace(load=load), known[load]
        if best is found:
            return found
        swept = sweep(bench, best.decisions)
        return swept if isinstance(swept, Candidate) and swept.step_s < best.step_s else best


def _quick(bench: Workbench, decisions: tuple[DeviceDecision, ...]) -> Candidate | DoesNotFit:
    """With one policy and one stagger, or without stagger where a collective comes before the last start."""
    found = sweep(bench, decisions, shares=(1.0,), policies=(LinkPolicyKind.FCFS,))
    if isinstance(found, Candidate) and math.isinf(found.step_s):
        found = sweep(bench, decisions, shares=(0.0,), policies=(LinkPolicyKind.FCFS,))
    return found


def _fastest_first(tried: dict[Point, Candidate | DoesNotFit]) -> list[Point]:
    return sorted(
        (point for point, found in tried.items() if isinstance(found, Candidate)),
        key=lambda point: tried[point].step_s,  # type: ignore[union-attr]
    )
