"""The TMO-type MILP as a planner: its selection, and its order of transfers on the shared links."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tmojax.bounds.highs import SolverStatus
from tmojax.errors import InputError
from tmojax.ilp.devices import DeviceTimes
from tmojax.ilp.tmo import TmoSolution, solve_tmo
from tmojax.planners.base import PlanResult, Status, Stopwatch, does_not_fit
from tmojax.planners.ilp import IlpPlanner
from tmojax.planners.repair import repair
from tmojax.planners.sweep import sweep
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, Kind, LinkPolicyKind, Problem
from tmojax.relax.coordinate import Coordination, Timetable
from tmojax.relax.decisions import DeviceDecision
from tmojax.relax.decode import DeviceList, DoesNotFit
from tmojax.relax.turns import copy_keys
from tmojax.simulate import simulate


@dataclass(frozen=True)
class TmoMilp(IlpPlanner):
    """Different tensors leave on different GPUs, in a decided order on the shared channel (Lin et al., HPCA 2023).

    The model is `tmojax.ilp.tmo`; a quarter of `time_limit_s` comes on top for the choice of what leaves. groups: of
    tensors that leave together, at most, on each GPU. disjoint: as few GPUs as memory allows move the same tensor. The
    order of the model is compared with the other link policies and staggers for its selection, and with the plan that
    the search started from; the fastest is the plan.
    """

    name: str = "tmo-milp"
    groups: int = 24
    disjoint: bool = True

    without_solution = "its model of all GPUs has no solution in this memory with what its groups of tensors can free"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.groups <= 1000:
            raise InputError(f"groups: {self.groups} must be between 1 and 1000")

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        if Action.OFFLOAD not in problem.actions:
            message = "needs action 'offload', which the problem does not allow"
            return PlanResult(self.name, Status.NOT_FOUND, message=message, plan_s=watch.read_s())
        bench = Workbench(problem)
        views = [bench.view(device) for device in range(bench.device_count)]
        plans: dict[str, Candidate] = {}

        def rehearse(decisions: tuple[DeviceDecision, ...]) -> list[DeviceTimes] | None:
            best = sweep(bench, decisions)
            if isinstance(best, DoesNotFit):
                return None
            plans["start"] = best
            return _times(bench, best)

        found = solve_tmo(
            problem, views, self.solver_settings, rehearse, most_groups=self.groups, disjoint=self.disjoint
        )
        details: dict[str, Any] = {"solves": [found.figures]}
        failure = self._decode(bench, found, plans, details)
        if not plans:
            return (
                self.no_solution(details, watch)
                if failure is None
                else does_not_fit(self.name, problem, failure, watch)
            )
        origin, best = min(plans.items(), key=lambda item: item[1].step_s)
        details["plan_from"], details["link_order"] = origin, best.coordination.policy.value
        result = self.planned(best, details, watch)
        if found.figures.get("selection_status") == SolverStatus.TIME_LIMIT:
            result = replace(result, status=Status.TIME_LIMIT, time_limited=True)
        return result

    def _decode(
        self, bench: Workbench, found: TmoSolution, plans: dict[str, Candidate], details: dict[str, Any]
    ) -> DoesNotFit | None:
        """Add the plans of the model's selection: with the best policy and stagger, and in the order of the model.
        Returns why there is none."""
        if found.decisions is None:
            return None
        fitted = []
        for device, decision in enumerate(found.decisions):
            whole = repair(bench, device, decision)
            if isinstance(whole, DoesNotFit):
                return whole
            fitted.append(whole)
        best = sweep(bench, tuple(fitted))
        if isinstance(best, DoesNotFit):
            return best
        ordered = in_model_order(bench, tuple(fitted), found)
        plans["model"], plans["model order"] = best, ordered
        details["repaired"] = not all(a.same_as(b) for a, b in zip(fitted, found.decisions, strict=True))
        details["model_order_step_s"] = ordered.step_s if ordered.step_s < float("inf") else None
        return None


def _times(bench: Workbench, best: Candidate) -> list[DeviceTimes]:
    """Times of the first micro-batch."""
    times = []
    simulation = simulate(bench.problem, best.schedule)
    for device, rows in enumerate(best.schedule.lists):
        begin_s, crossing_s, end_s = (
            values[device] for values in (simulation.start_s, simulation.transfer_start_s, simulation.end_s)
        )
        copies: dict[Kind, dict[int, tuple[float, float]]] = {Kind.OFFLOAD: {}, Kind.PREFETCH: {}}
        slots: dict[int, tuple[float, float]] = {}
        for index in np.flatnonzero(rows["micro_batch"] == 0):
            kind = Kind(int(rows["kind"][index]))
            if kind in copies:
                copies[kind][int(rows["tensor"][index])] = float(crossing_s[index]), float(end_s[index])
            elif kind is Kind.COMPUTE:
                slots.setdefault(int(rows["op"][index]), (float(begin_s[index]), float(end_s[index])))
        spans = np.array([slots[int(op)] for op in bench.view(device).slot_op])
        times.append(DeviceTimes(copies[Kind.OFFLOAD], copies[Kind.PREFETCH], spans[:, 0], spans[:, 1]))
    return times


def in_model_order(bench: Workbench, decisions: tuple[DeviceDecision, ...], found: TmoSolution) -> Candidate:
    """The schedule of `decisions` (which fit) with the transfers on every shared link in the order of the model.

    Its time is infinite where a list does not allow that order.
    """
    lists = bench.lists(decisions)
    assert not isinstance(lists, DoesNotFit)
    at_once = (0.0,) * bench.device_count
    timetable = _timetable(bench.problem, lists, found)
    ordered = bench.evaluate(
        decisions, Coordination(at_once, LinkPolicyKind.ORDER, (), bench.slots(), timetable=timetable)
    )
    assert not isinstance(ordered, DoesNotFit)
    return ordered


def _timetable(problem: Problem, lists: list[DeviceList], found: TmoSolution) -> Timetable:
    """Every copy at the model's start time; what the model does not know (inputs, the update's transfers) as soon as
    its list allows."""
    count = problem.workload.micro_batches
    copies = []
    for device, item in enumerate(lists):
        rows, ops = item.rows, problem.workload.program(device).ops
        keys, start_s = copy_keys(rows), []
        # The runs of a micro-batch that have been issued where a transfer stands: no later than they begin.
        batch = 0
        for index in np.flatnonzero(np.isin(rows["kind"], [Kind.COMPUTE, Kind.OFFLOAD, Kind.PREFETCH])):
            kind = Kind(int(rows["kind"][index]))
            if kind is Kind.COMPUTE:
                batch = count if ops[int(rows["op"][index])].step_op else int(rows["micro_batch"][index])
                continue
            tensor, instance = int(rows["tensor"][index]), int(rows["micro_batch"][index])
            known_s = (found.out_s if kind is Kind.OFFLOAD else found.into_s)[device].get(tensor)
            start_s.append(batch * found.period_s if known_s is None else instance * found.period_s + known_s)
        copies.append((keys, np.array(start_s)))
    return Timetable.of(copies)
