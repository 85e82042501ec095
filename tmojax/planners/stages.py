"""Planners whose programme is written over stages: its schedule becomes the lists of the devices as it is.

One device's micro-batch is planned; devices that are equal in what they run, in memory and in what the programme knows
of their paths get the same plan. The lists are coordinated afterwards by a sweep of link policies and starts.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from tmojax.bounds.highs import Answer, SolverStatus
from tmojax.errors import InputError
from tmojax.ilp.checkmate_graph import StageGraph, stage_graph
from tmojax.ilp.checkmate_lists import stage_list
from tmojax.ilp.checkmate_model import StagePlan, unit_s
from tmojax.ilp.from_schedule import decision_from_schedule
from tmojax.ilp.poet_start import Decided
from tmojax.ilp.solver import solve_figures
from tmojax.planners.base import PlanResult, Status, Stopwatch, does_not_fit
from tmojax.planners.ilp import IlpPlanner
from tmojax.planners.sweep import POLICIES, SHARES, even_starts
from tmojax.planners.workbench import Workbench
from tmojax.problem import Action, LinkPolicyKind, Problem, Schedule
from tmojax.problem.step_view import StepView
from tmojax.relax.coordinate import Coordination, assemble
from tmojax.relax.decode import DeviceList, DoesNotFit
from tmojax.relax.turns import policies_of
from tmojax.simulate import prepare

MOST_STAGES = 2000
TRIED_STAGES = 160  # at least so many are tried before a programme is given up


@dataclass(frozen=True)
class StagePlanner(IlpPlanner):
    """most_stages: ops of a micro-batch are merged into so many nodes; each is one stage. There are more where a step
    op stands between or a merged node would not fit; up to 160 are tried where the programme has no solution.
    warm_start: the programme also gets what the fastest earlier plan of the run decided, among other starts."""

    gap: float = 1e-4
    most_stages: int = 40
    warm_start: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.most_stages <= MOST_STAGES:
            raise InputError(f"most_stages: {self.most_stages} must be between 1 and {MOST_STAGES}")

    # What to say when there was an answer, but no plan could be made of it.
    without_plan: ClassVar[str] = "no plan could be made of its solution"

    @abstractmethod
    def _needs(self) -> Action | None:
        """The action without which there is nothing to plan."""

    @abstractmethod
    def _path(self, problem: Problem, device: int) -> Any:
        """What the programme knows of a device's path; devices of one class with equal paths share a solve."""

    @abstractmethod
    def _solve(
        self, problem: Problem, graph: StageGraph, device: int, path: Any, decided: Decided | None
    ) -> tuple[StagePlan | None, Answer, float, float]:
        """(plan, answer, claimed seconds of a micro-batch, seconds it took to build the model)."""

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        needs = self._needs()
        if needs is not None and needs not in problem.actions:
            message = f"needs action {needs.value!r}, which the problem does not allow"
            return PlanResult(self.name, Status.NOT_FOUND, message=message, plan_s=watch.read_s())
        bench = Workbench(problem)
        details: dict[str, Any] = {"solves": []}
        known = [result for result in seeds if result.schedule is not None] if self.warm_start else []
        origin = min(known, key=lambda result: result.step_s, default=None)
        if origin is not None:
            details["warm_start_from"] = origin.planner
        solved: dict[tuple, tuple[StageGraph, StagePlan]] = {}
        lists: list[DeviceList] = []
        for device in range(bench.device_count):
            view, path = bench.view(device), self._path(problem, device)
            key = (bench.device_class[device], path)
            if key not in solved:
                found = self._plan_class(problem, view, device, path, origin, details["solves"])
                if isinstance(found, DoesNotFit):
                    return does_not_fit(self.name, problem, found, watch)
                if found is None:
                    result = self.no_solution(details, watch)
                    made_none = details["solves"][-1]["status"] == SolverStatus.FAILED
                    return replace(result, message=self.without_plan) if made_none else result
                solved[key] = found
            graph, plan = solved[key]
            made = stage_list(problem, view, graph, plan, device)
            if isinstance(made, DoesNotFit):
                return does_not_fit(self.name, problem, made, watch)
            lists.append(made)
        over = bench.over_host_limit(lists)
        if over is not None:
            return does_not_fit(self.name, problem, over, watch)
        schedule, step_s, coordination = sweep_lists(bench, lists)
        statuses = {solve["status"] for solve in details["solves"] if solve["used"]}
        status = Status.FEASIBLE
        if SolverStatus.TIME_LIMIT.value in statuses:
            status = Status.TIME_LIMIT
        elif statuses == {SolverStatus.OPTIMAL.value}:
            status = Status.OPTIMAL
        details["policy"], details["start_share"] = coordination.policy.value, list(coordination.start_share)
        return PlanResult(
            self.name, status, schedule, step_s, watch.read_s(), details=details,
            time_limited=any(solve["status"] == SolverStatus.TIME_LIMIT for solve in details["solves"]),
        )  # fmt: skip

    def _plan_class(
        self,
        problem: Problem,
        view: StepView,
        device: int,
        path: Any,
        origin: PlanResult | None,
        solves: list[dict[str, Any]],
    ) -> tuple[StageGraph, StagePlan] | DoesNotFit | None:
        most_stages = self.most_stages
        count = problem.workload.micro_batches
        decided = None if origin is None else _decided(problem, view, device, origin)
        while True:
            graph = stage_graph(problem, view, most_stages, page_inputs=self._pages_inputs())
            finest = graph.stages >= len(view.slot_op) or most_stages >= max(TRIED_STAGES, self.most_stages)
            over = too_large(problem, graph, device)
            if over is not None:
                if finest:
                    return over
                most_stages *= 2
                continue
            plan, answer, claimed_s, build_s = self._solve(problem, graph, device, path, decided)
            figures = solve_figures(answer, self.solver_settings, unit_s=unit_s(graph), build_s=build_s)
            step_ops_s = float(view.step_s.sum())
            figures["claimed_step_s"] = None if plan is None else count * claimed_s + step_ops_s
            if figures["model_bound_s"] is not None:
                figures["model_bound_s"] = count * figures["model_bound_s"] + step_ops_s
            sizes = {"stages": graph.stages, "values": len(graph.value_bytes), "used": plan is not None}
            solves.append({**figures, **sizes})
            if plan is not None:
                return graph, plan
            if answer.status not in (SolverStatus.INFEASIBLE, SolverStatus.FAILED) or finest:
                return None
            most_stages *= 2

    def _pages_inputs(self) -> bool:
        return False


def _decided(problem: Problem, view: StepView, device: int, origin: PlanResult) -> Decided:
    """What an earlier plan decided for a device: as its planner says, or read off its schedule."""
    if origin.candidate is not None:
        return Decided(view, origin.candidate.decisions[device])
    assert origin.schedule is not None
    return Decided(view, decision_from_schedule(problem, view, origin.schedule, device))


def too_large(problem: Problem, graph: StageGraph, device: int) -> DoesNotFit | None:
    """The first node that does not fit with nothing but what it touches and what is held in its stage."""
    capacity = problem.capacity_bytes(device)
    for t in range(graph.stages):
        touched = graph.value_bytes[list({*graph.reads[t], *graph.writes[t]})]
        over = int(graph.fixed_bytes[t] + graph.transient_bytes[t] + touched.sum()) - capacity
        over = max(over, int(graph.fixed_bytes[t] + graph.after_bytes[t]) - capacity)
        if over > 0:
            return DoesNotFit(device, graph.ops[t][0], 0, over)
    return None


def sweep_lists(bench: Workbench, lists: list[DeviceList]) -> tuple[Schedule, float, Coordination]:
    """The fastest of all combinations of link policy and even stagger, by exact simulation."""
    problem, count = bench.problem, bench.device_count
    starts = dict.fromkeys(even_starts(bench, share) for share in SHARES) if count > 1 else {(0.0,): None}
    copies = any(np.any(item.moved_bytes) for item in lists)
    best: tuple[Schedule, float, Coordination] | None = None
    for start in starts if copies else [next(iter(starts))]:
        rank = tuple(range(count))
        options = [
            Coordination(start, kind, rank if kind is LinkPolicyKind.PRIORITY else (), bench.slots())
            for kind in (POLICIES if copies else POLICIES[:1])
        ]
        schedule = assemble(problem, lists, options[0])
        ready = prepare(problem, schedule)
        for option in options:
            chosen = policies_of(problem, schedule, option)
            bench.simulations += 1
            step_s = ready.run(link_policies=chosen).step_s
            if best is None or step_s < best[1]:
                best = (Schedule(schedule.lists, schedule.initial, chosen, schedule.order), step_s, option)
    assert best is not None
    return best
