"""Planners that select by the fluid MILP: each GPU alone (contention-oblivious), lock-step, and budget.

All three solve the same model of one GPU (`tmojax.relax.fluid_milp`); they differ in what it knows about the others:
nothing, an equal share of every link at every moment, or the bytes that all of them may move in the time of the step.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from tmojax.bounds.highs import SolverStatus
from tmojax.planners.base import Planner, PlanResult, Status, Stopwatch, does_not_fit
from tmojax.planners.repair import repair
from tmojax.planners.sweep import even_starts, sweep
from tmojax.planners.workbench import Workbench
from tmojax.problem import Action, LinkPolicyKind, Problem
from tmojax.relax.coordinate import Coordination, host_links
from tmojax.relax.decisions import DeviceDecision
from tmojax.relax.decode import DoesNotFit
from tmojax.relax.fluid_milp import FluidSolution, PathRates, solve_fluid


def path_rates(problem: Problem, device: int, *, shared: bool) -> PathRates:
    """Rates of a device's host path, bytes per second: alone, or (`shared`) divided by the devices that use each link."""
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
    return max(
        (total.get(link, 0.0) / sum(link in used for used in users) for link in users[device]), default=0.0
    )


@dataclass(frozen=True)
class _FluidPlanner(Planner):
    """time_limit_s of the solver per class of equal GPUs; gap: relative, at which it stops; threads of the solver."""

    time_limit_s: float = 12.0
    gap: float = 5e-3
    threads: int = 1

    @abstractmethod
    def _solve(self, problem: Problem, bench: Workbench, device: int) -> FluidSolution:
        """The selection for one device."""

    def _select(self, bench: Workbench) -> tuple[tuple[DeviceDecision, ...] | DoesNotFit | None, dict[str, Any]]:
        """Decisions of all devices, one solve per class; with the figures of the solves."""
        chosen: dict[int, DeviceDecision] = {}
        details: dict[str, Any] = {"solves": []}
        for device in sorted(set(bench.device_class)):
            solution = self._solve(bench.problem, bench, device)
            details["solves"].append(_figures(solution))
            if solution.decision is None:
                return None, details
            fitted = repair(bench, device, solution.decision)
            if isinstance(fitted, DoesNotFit):
                return fitted, details
            chosen[device] = fitted
        return tuple(chosen[first] for first in bench.device_class), details

    def _options(self, problem: Problem) -> dict[str, Any]:
        return {
            "allow_offload": Action.OFFLOAD in problem.actions,
            "allow_recompute": Action.RECOMPUTE in problem.actions,
            "time_limit_s": self.time_limit_s,
            "gap": self.gap,
            "threads": self.threads,
        }

    def _failed(self, problem: Problem, found: DoesNotFit | None, details: dict[str, Any], watch: Stopwatch) -> PlanResult:
        if found is not None:
            return does_not_fit(self.name, problem, found, watch)
        last = details["solves"][-1]
        message = f"the solver ended with {last['status']} and without a solution after {last['solve_s']:.1f} s"
        return PlanResult(self.name, Status.NOT_FOUND, message=message, plan_s=watch.read_s(), details=details)


def _figures(solution: FluidSolution) -> dict[str, Any]:
    return {
        "claimed_step_s": solution.objective_s,
        "model_bound_s": solution.bound_s,
        "model_gap": solution.gap,
        "status": solution.status.value,
        "solve_s": solution.solve_s,
        "build_s": solution.build_s,
        "rows": solution.rows,
        "columns": solution.columns,
        "solver": solution.solver,
        "threads": solution.threads,
        "fluid_steps": solution.steps,
    }


def _ended(details: dict[str, Any]) -> Status:
    """Time limit if any solve met it; the schedule is a decode of the model's optimum, so otherwise merely feasible."""
    limited = any(solve["status"] == SolverStatus.TIME_LIMIT.value for solve in details["solves"])
    return Status.TIME_LIMIT if limited else Status.FEASIBLE


@dataclass(frozen=True)
class Oblivious(_FluidPlanner):
    """Contention-oblivious large-model support: each GPU plans as if the path were its own (what TMO compares with).

    policy: of the shared links; stagger_share: GPU g starts `stagger_share` * g / G micro-batches later. The
    selection of an earlier `oblivious` planner of the run is taken over, since policy and stagger play no part in it.
    """

    name: str = "oblivious-fair"
    policy: str = "fair"
    stagger_share: float = 0.0

    def _solve(self, problem: Problem, bench: Workbench, device: int) -> FluidSolution:
        rates = path_rates(problem, device, shared=False)
        return solve_fluid(bench.view(device), capacity_bytes=problem.capacity_bytes(device), rates=rates,
                           **self._options(problem))  # fmt: skip

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        bench = Workbench(problem)
        policy = LinkPolicyKind(self.policy)
        earlier = next((s for s in seeds if "oblivious_selection" in s.details and s.candidate is not None), None)
        if earlier is not None and earlier.candidate is not None:
            selected = earlier.candidate.decisions
            details = {**earlier.details, "selection_from": earlier.planner}
        else:
            found, details = self._select(bench)
            if found is None or isinstance(found, DoesNotFit):
                return self._failed(problem, found, details, watch)
            selected, details = found, {**details, "oblivious_selection": True}
        ranks = tuple(range(bench.device_count)) if policy is LinkPolicyKind.PRIORITY else ()
        coordination = Coordination(even_starts(bench, self.stagger_share), policy, ranks, bench.slots())
        best = bench.evaluate(selected, coordination)
        assert not isinstance(best, DoesNotFit)
        status = _ended(details)
        return PlanResult(self.name, status, best.schedule, best.step_s, watch.read_s(), candidate=best,
                          time_limited=status is Status.TIME_LIMIT, details=details)  # fmt: skip


@dataclass(frozen=True)
class LockstepMilp(_FluidPlanner):
    """All GPUs at the same op at the same time: each has an equal share of every link at every moment."""

    name: str = "lockstep-milp"

    def _solve(self, problem: Problem, bench: Workbench, device: int) -> FluidSolution:
        rates = path_rates(problem, device, shared=True)
        return solve_fluid(bench.view(device), capacity_bytes=problem.capacity_bytes(device), rates=rates,
                           **self._options(problem))  # fmt: skip

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        bench = Workbench(problem)
        found, details = self._select(bench)
        if found is None or isinstance(found, DoesNotFit):
            return self._failed(problem, found, details, watch)
        best = bench.evaluate(found, Coordination(even_starts(bench, 0.0)))
        assert not isinstance(best, DoesNotFit)
        status = _ended(details)
        return PlanResult(self.name, status, best.schedule, best.step_s, watch.read_s(), candidate=best,
                          time_limited=status is Status.TIME_LIMIT, details=details)  # fmt: skip


@dataclass(frozen=True)
class BudgetMilp(_FluidPlanner):
    """One GPU at the full rate, with the bytes of all GPUs limited by link capacity times step time; then pruning (by the
    decode), and a sweep of link policies and phases: the strongest known simple rival on symmetric boxes."""

    name: str = "budget-milp"

    def _solve(self, problem: Problem, bench: Workbench, device: int) -> FluidSolution:
        return solve_fluid(
            bench.view(device), capacity_bytes=problem.capacity_bytes(device),
            rates=path_rates(problem, device, shared=False), budget=path_rates(problem, device, shared=True),
            budget_taken_bytes=collective_bytes(problem, device), **self._options(problem),
        )  # fmt: skip

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        bench = Workbench(problem)
        found, details = self._select(bench)
        if found is None or isinstance(found, DoesNotFit):
            return self._failed(problem, found, details, watch)
        best = None
        for decisions in _state_variants(bench, found):
            swept = sweep(bench, decisions)
            if not isinstance(swept, DoesNotFit) and (best is None or swept.step_s < best.step_s):
                best = swept
        assert best is not None
        status = _ended(details)
        return PlanResult(self.name, status, best.schedule, best.step_s, watch.read_s(), candidate=best,
                          time_limited=status is Status.TIME_LIMIT, details=details)  # fmt: skip


def _state_variants(bench: Workbench, decisions: tuple[DeviceDecision, ...]):
    """The decisions as they are, and with the state that leaves on the device at the seam between steps."""
    yield decisions
    if any(decision.state_out.any() for decision in decisions):
        yield tuple(
            DeviceDecision(decision.choice, decision.state_out.astype("int8") * 2) for decision in decisions
        )
