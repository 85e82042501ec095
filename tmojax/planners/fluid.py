"""Planners that select by the fluid MILP: each GPU alone (contention-oblivious), lock-step, and budget.

All three solve the same model of one GPU (`tmojax.ilp.fluid`); they differ in what it knows about the others:
nothing, an equal share of every link at every moment, or the bytes that all of them may move in the time of the step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tmojax.errors import InputError
from tmojax.ilp.fluid import PathRates, solve_fluid
from tmojax.ilp.from_schedule import decision_from_schedule
from tmojax.planners.base import PlanResult
from tmojax.planners.ilp import SelectingPlanner
from tmojax.planners.sweep import POLICIES, even_starts, sweep
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, LinkPolicyKind, Problem
from tmojax.relax.coordinate import Coordination, host_links, together
from tmojax.relax.decisions import DeviceDecision, Rest
from tmojax.relax.decode import DoesNotFit


def path_rates(problem: Problem, device: int, *, shared: bool) -> PathRates:
    """Rates of a device's host path, bytes per second: alone, or (`shared`) divided by the devices that use each
    link."""
    machine = problem.machine
    spec = machine.devices[device]
    out = set(machine.route(spec.memory, spec.host_memory).links)
    into = set(machine.route(spec.host_memory, spec.memory).links)
    users = [host_links(machine, other) for other in range(len(machine.devices))]

    def rate(links: set[int]) -> float:
        return min(
            (
                machine.links[link].bandwidth_bytes_per_s / (sum(link in used for used in users) if shared else 1)
                for link in links
            ),
            default=float("inf"),
        )

    return PathRates(rate(out), rate(into), rate(out & into))


def collective_bytes(problem: Problem, device: int) -> float:
    """Bytes that the collectives of a step put on the device's share of the fullest link of its host path."""
    machine, workload = problem.machine, problem.workload
    users = [host_links(machine, other) for other in range(len(machine.devices))]
    total: dict[int, float] = {}
    for collective in workload.collectives:
        for link, load in machine.collective_loads(collective.kind, collective.devices).items():
            total[link] = total.get(link, 0.0) + load * collective.size_bytes
    return max((total.get(link, 0.0) / sum(link in used for used in users) for link in users[device]), default=0.0)


@dataclass(frozen=True)
class _FluidPlanner(SelectingPlanner):
    """One solve per class of equal GPUs. warm_start: from the decisions of the fastest earlier plan of the run."""

    warm_start: bool = False

    without_solution = (
        "its model of one GPU has no solution in this memory (in it, persistent tensors that micro-batches use stay on "
        "the device)"
    )

    @abstractmethod
    def _limits(self, problem: Problem, device: int) -> dict[str, Any]:
        """What the model knows of the links: the arguments rates, budget, budget_taken_bytes of `solve_fluid`."""

    def _links(self, problem: Problem, device: int) -> Hashable:
        return tuple(self._limits(problem, device).items())

    def _solve(self, bench: Workbench, device: int, links: Any, seeds: tuple[PlanResult, ...]):
        actions, origin = bench.problem.actions, self._origin(seeds)
        solution = solve_fluid(
            bench.view(device),
            capacity_bytes=bench.problem.capacity_bytes(device),
            allow_offload=Action.OFFLOAD in actions,
            allow_recompute=Action.RECOMPUTE in actions,
            settings=self.solver_settings,
            start=None if origin is None else _start(bench, origin, device),
            **dict(links),
        )
        return solution.decision, solution.figures

    def _origin(self, seeds: tuple[PlanResult, ...]) -> PlanResult | None:
        known = [result for result in seeds if result.schedule is not None] if self.warm_start else []
        return min(known, key=lambda result: result.step_s, default=None)

    def _select(self, bench: Workbench, seeds: tuple[PlanResult, ...]):
        decisions, details = super()._select(bench, seeds)
        origin = self._origin(seeds)
        return decisions, details if origin is None else {**details, "warm_start_from": origin.planner}


def _start(bench: Workbench, origin: PlanResult, device: int) -> DeviceDecision:
    """What an earlier plan decided for a device: as its planner says, or read off its schedule."""
    if origin.candidate is not None:
        return origin.candidate.decisions[device]
    assert origin.schedule is not None
    return decision_from_schedule(bench.problem, bench.view(device), origin.schedule, device)


@dataclass(frozen=True)
class Oblivious(_FluidPlanner):
    """Contention-oblivious large-model support: each GPU plans as if the path were its own (what TMO compares with).

    policy: of the shared links; stagger_share: GPU g starts `stagger_share` * g / G micro-batches later. The
    selection of an earlier `oblivious` planner of the run is taken over, since policy and stagger play no part in it.
    """

    name: str = "oblivious-fair"
    policy: str = "fair"
    stagger_share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        policies = [kind.value for kind in POLICIES]
        if self.policy not in policies:
            raise InputError(f"policy: {self.policy!r} is unknown; choose one of {', '.join(policies)}")
        if not 0 <= self.stagger_share <= 1:
            raise InputError(f"stagger_share: {self.stagger_share} must be between 0 and 1")

    @property
    def coordinates(self) -> bool:
        return self.policy != LinkPolicyKind.FAIR.value or self.stagger_share > 0

    def _limits(self, problem: Problem, device: int) -> dict[str, Any]:
        return {"rates": path_rates(problem, device, shared=False)}

    def _select(self, bench: Workbench, seeds: tuple[PlanResult, ...]):
        for earlier in seeds:
            if "oblivious_selection" in earlier.details and earlier.candidate is not None:
                return earlier.candidate.decisions, {**earlier.details, "selection_from": earlier.planner}
        decisions, details = super()._select(bench, seeds)
        return decisions, {**details, "oblivious_selection": True}

    def _coordinate(self, bench: Workbench, decisions: tuple[DeviceDecision, ...]) -> Candidate | DoesNotFit:
        policy = LinkPolicyKind(self.policy)
        rank = tuple(range(bench.device_count)) if policy is LinkPolicyKind.PRIORITY else ()
        starts = even_starts(bench, self.stagger_share)
        return bench.evaluate(decisions, Coordination(starts, policy, rank, bench.slots()))


@dataclass(frozen=True)
class LockstepMilp(_FluidPlanner):
    """All GPUs at the same op at the same time: each has an equal share of every link at every moment."""

    name: str = "lockstep-milp"

    def _limits(self, problem: Problem, device: int) -> dict[str, Any]:
        return {"rates": path_rates(problem, device, shared=True)}

    def _coordinate(self, bench: Workbench, decisions: tuple[DeviceDecision, ...]) -> Candidate | DoesNotFit:
        return bench.evaluate(decisions, together(bench.problem))


@dataclass(frozen=True)
class BudgetMilp(_FluidPlanner):
    """One GPU at the full rate, with the bytes of all GPUs limited by link capacity times step time; then pruning
    (by the decode), and a sweep of link policies and phases: the strongest known simple rival on symmetric boxes."""

    name: str = "budget-milp"

    def _limits(self, problem: Problem, device: int) -> dict[str, Any]:
        return {
            "rates": path_rates(problem, device, shared=False),
            "budget": path_rates(problem, device, shared=True),
            "budget_taken_bytes": collective_bytes(problem, device),
        }

    def _coordinate(self, bench: Workbench, decisions: tuple[DeviceDecision, ...]) -> Candidate | DoesNotFit:
        best = sweep(bench, decisions)
        if any(decision.state_out.any() for decision in decisions):
            # The model lets state rest on the host; it may as well be on the device across the seam of steps.
            away = tuple(
                DeviceDecision(decision.choice, np.where(decision.state_out, Rest.AWAY, Rest.ON_DEVICE).astype(np.int8))
                for decision in decisions
            )
            other = sweep(bench, away)
            if isinstance(best, DoesNotFit) or (not isinstance(other, DoesNotFit) and other.step_s < best.step_s):
                best = other
        return best
