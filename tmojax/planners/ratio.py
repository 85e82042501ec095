"""A greedy one-parameter family: recompute what is cheapest per byte, offload the rest, coordinate by sweep."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

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


@dataclass(frozen=True)
class RatioSweep(Planner):
    """The fastest of several thresholds, all GPUs alike, each with the best policy and stagger, with optimizer state at
    home and away. A threshold leaves so many bytes to be offloaded that they take `link_loads` times the compute
    time of a micro-batch
    on the device's share of its links; 0 recomputes everything that can be. The best `finalists` get the full sweep."""

    name: str = "ratio-sweep"
    link_loads: tuple[float, ...] = (0.0, 0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 4.0, 1000.0)
    finalists: int = 4

    def __post_init__(self) -> None:
        if not self.link_loads or min(self.link_loads) < 0:
            raise InputError(f"link_loads: {list(self.link_loads)} must be at least one number, none negative")
        if self.finalists < 1:
            raise InputError(f"finalists: {self.finalists} must be at least 1")

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        bench = Workbench(problem)
        offload, recompute = Action.OFFLOAD in problem.actions, Action.RECOMPUTE in problem.actions
        views = {id(bench.view(d)): bench.view(d) for d in range(bench.device_count)}
        rests = RESTS if offload and any(len(view.state_tensor) for view in views.values()) else RESTS[:1]
        loads = self.link_loads if recompute else (1000.0,)
        failure: DoesNotFit | None = None
        tried: dict[tuple, tuple[float, int, tuple[DeviceDecision, ...]]] = {}

        def attempt(across: bool, rest: tuple[Rest, Rest], load: float) -> None:
            nonlocal failure
            if (across, rest, load) in tried:
                return
            decisions = {}
            for key, view in views.items():
                order = orders[across, key]
                total = int(view.size_bytes[view.needed & np.isin(view.producer_slot, order)].sum())
                movable = load * float(view.slot_s.sum()) * fair_rate(bench, view.device)
                amount = total - int(min(movable, total))
                decisions[key] = ratio_decision(view, order, amount, offload=offload, rest=rest)
            chosen = tuple(decisions[id(bench.view(d))] for d in range(bench.device_count))
            found = sweep(bench, chosen, shares=(1.0,), policies=(LinkPolicyKind.FCFS,))
            if isinstance(found, Candidate) and math.isinf(found.step_s):  # a collective comes before the last start
                found = sweep(bench, chosen, shares=(0.0,), policies=(LinkPolicyKind.FCFS,))
            if isinstance(found, DoesNotFit):
                failure = found
            else:
                tried[across, rest, load] = (found.step_s, len(tried), chosen)

        families = (False, True) if recompute else (False,)
        orders = {
            (across, key): recompute_order(problem, view, across) if recompute else np.zeros(0, np.int64)
            for across in families
            for key, view in views.items()
        }
        # First every way for the state at a few loads, then all loads for the ways that did best.
        for across, rest, load in itertools.product(families, rests, loads[::3]):
            attempt(across, rest, load)
        promising = sorted(tried, key=lambda key: tried[key][:2])
        for across, rest in list(dict.fromkeys(key[:2] for key in promising))[:3]:
            for load in loads:
                attempt(across, rest, load)
        best: Candidate | None = None
        for _, _, chosen in sorted(tried.values(), key=lambda item: item[:2])[: self.finalists]:
            found = sweep(bench, chosen)
            if not isinstance(found, DoesNotFit) and (best is None or found.step_s < best.step_s):
                best = found
        if best is None:
            assert failure is not None
            return does_not_fit(self.name, problem, failure, watch)
        return PlanResult(self.name, Status.FEASIBLE, best.schedule, best.step_s, watch.read_s(), candidate=best)
