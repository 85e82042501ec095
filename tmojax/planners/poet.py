"""POET: optimal rematerialisation and paging by one integer programme, extended so that paging takes time.

Patil et al., "POET: Training neural networks on tiny devices with integrated rematerialization and paging", ICML 2022,
section 4; `tmojax.ilp.poet_model` has the differences. The claimed time is that of stages as barriers, with the path at
the rates of the setting; the lists let copies and compute start when they can, so that one GPU with the path to itself
(and without collectives and interference) never takes longer than claimed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tmojax.errors import InputError
from tmojax.ilp.checkmate_graph import StageGraph
from tmojax.ilp.poet_model import Paging, poet_model, read_paging_plan, stage_periods_s
from tmojax.ilp.poet_start import best_start
from tmojax.ilp.solver import solve_milp
from tmojax.planners.base import Stopwatch
from tmojax.planners.checkmate import start_values
from tmojax.planners.fluid import path_rates
from tmojax.planners.stages import StagePlanner
from tmojax.problem import Action, Lifetime, Problem
from tmojax.relax.host_memory import host_limit_bytes

RATES = ("alone", "equal-share")


def paging_of(problem: Problem, device: int, *, shared: bool) -> Paging:
    """Rates of a device's host path, alone or divided by the devices that use each link, and the time before the first
    byte."""
    machine, spec = problem.machine, problem.machine.devices[device]
    rates = path_rates(problem, device, shared=shared)

    def first_byte_s(source: int, destination: int) -> float:
        latencies = (machine.links[link].latency_s for link in machine.route(source, destination).links)
        return machine.overheads.transfer_setup_s + sum(latencies)

    return Paging(
        rates.out_bytes_per_s, rates.in_bytes_per_s, rates.joint_bytes_per_s,
        first_byte_s(spec.memory, spec.host_memory), first_byte_s(spec.host_memory, spec.memory),
    )  # fmt: skip


def host_share_bytes(problem: Problem, device: int) -> float:
    """A device's equal share of its host memory, less its inputs (half of that where blocks are rounded up)."""
    machine, workload = problem.machine, problem.workload
    host = machine.devices[device].host_memory
    users = [d for d, spec in enumerate(machine.devices) if spec.host_memory == host]
    program = workload.program(device)
    inputs = sum(
        program.tensors[t].size_bytes
        * (workload.micro_batches if program.tensors[t].lifetime is Lifetime.MICRO_BATCH else 1)
        for t in program.inputs
    )
    rounded = 2 if machine.memories[host].pinned_power_of_two else 1
    return max(1.0, (host_limit_bytes(machine, host) / len(users) - inputs * rounded) / rounded)


@dataclass(frozen=True)
class Poet(StagePlanner):
    """rates: what the programme takes the path to be: `alone`, or an `equal-share` of every link that is shared."""

    name: str = "poet"
    rates: str = "alone"

    without_solution = (
        "its model of one GPU has no solution in this memory (in it, persistent tensors stay on the device)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rates not in RATES:
            raise InputError(f"rates: {self.rates!r} is unknown; choose one of {', '.join(RATES)}")

    def actions(self, problem: Problem) -> frozenset[Action]:
        return problem.actions & {Action.RECOMPUTE, Action.OFFLOAD}

    def _needs(self) -> Action | None:
        return None

    def _pages_inputs(self) -> bool:
        return True

    def _path(self, problem: Problem, device: int) -> Any:
        return paging_of(problem, device, shared=self.rates == "equal-share")

    def _solve(self, problem, graph: StageGraph, device: int, path: Paging, decided):
        watch = Stopwatch()
        capacity, actions = problem.capacity_bytes(device), problem.actions
        model, columns = poet_model(
            graph, capacity, path, host_share_bytes(problem, device),
            rerun=Action.RECOMPUTE in actions, page=Action.OFFLOAD in actions,
        )  # fmt: skip
        plan = best_start(
            graph, capacity, path, rerun=Action.RECOMPUTE in actions, page=Action.OFFLOAD in actions,
            decided=decided,
        )  # fmt: skip
        start = start_values(model.columns, columns.remat, plan)
        if plan is not None and start is not None:
            for index, flags in ((columns.come, plan.come), (columns.go, plan.go)):
                start[index[index >= 0]] = flags[index >= 0]
        build_s = watch.read_s()
        answer = solve_milp(model, self.solver_settings, start)
        if not len(answer.values):
            return None, answer, float("inf"), build_s
        plan = read_paging_plan(graph, columns, answer.values)
        return plan, answer, float(stage_periods_s(graph, plan, path).sum()), build_s
