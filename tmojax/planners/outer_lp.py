"""torchtitan's outer linear programme of per-layer fractions, rounded to tensors (`tmojax.ilp.outer_lp`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tmojax.errors import InputError
from tmojax.ilp.fluid import PathRates
from tmojax.ilp.outer_lp import round_fractions, solve_outer
from tmojax.ilp.outer_lp_layers import layers_of
from tmojax.planners.base import PlanResult, Stopwatch
from tmojax.planners.fluid import path_rates
from tmojax.planners.ilp import SelectingPlanner
from tmojax.planners.poet import host_share_bytes
from tmojax.planners.sweep import sweep
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import DeviceDecision
from tmojax.relax.decode import DoesNotFit

RATES = ("log2", "alone", "equal-share")


def layer_rates(problem: Problem, device: int, rates: str) -> PathRates:
    """The host path of a device alone, at an equal share of every link, or (`log2`) alone divided by the logarithm of
    the number of GPUs, as torchtitan takes it."""
    alone = path_rates(problem, device, shared=rates == "equal-share")
    ranks = sum(spec.kind == "gpu" for spec in problem.machine.devices)
    share = max(1.0, math.log2(ranks)) if rates == "log2" else 1.0
    return PathRates(alone.out_bytes_per_s / share, alone.in_bytes_per_s / share, alone.joint_bytes_per_s / share)


def least_memory(problem: Problem, view: StepView, device: int, *, state_stays: bool) -> DoesNotFit | None:
    """Where a micro-batch exceeds the memory of a device with every activation away; `state_stays`: and all persistent
    state there, otherwise without what no micro-batch touches."""
    resting = 0 if state_stays else int(view.state_bytes[view.state_resting].sum())
    slot = int(view.base_bytes.argmax())
    over = int(view.base_bytes[slot]) - resting - problem.capacity_bytes(device)
    return DoesNotFit(device, int(view.slot_op[slot]), 0, over) if over > 0 else None


@dataclass(frozen=True)
class OuterLp(SelectingPlanner):
    """rates: what the programme takes the path to be: `log2` (alone, divided by log2 of the number of GPUs), `alone`,
    or an `equal-share`. offload_price: seconds of the objective per second of copying out; torchtitan takes 0.

    Rounded fractions that do not fit are repaired by sending more away; policies and starts are swept.
    """

    name: str = "outer-lp"
    rates: str = "log2"
    offload_price: float = 0.0

    without_solution = (
        "its model of one GPU has no solution in this memory (in it, persistent tensors stay on the device, and copies "
        "have to hide in the time of their own layer)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver != "highs":
            raise InputError(f"solver: {self.solver!r} is not offered for this linear programme; take 'highs'")
        if self.rates not in RATES:
            raise InputError(f"rates: {self.rates!r} is unknown; choose one of {', '.join(RATES)}")
        if not 0 <= self.offload_price < math.inf:
            raise InputError(f"offload_price: {self.offload_price} must be finite and not negative")

    def actions(self, problem: Problem) -> frozenset[Action]:
        return problem.actions & {Action.OFFLOAD, Action.RECOMPUTE}

    def _links(self, problem: Problem, device: int) -> PathRates:
        return layer_rates(problem, device, self.rates)

    def _solve(self, bench: Workbench, device: int, links: PathRates, seeds: tuple[PlanResult, ...]):
        problem, view = bench.problem, bench.view(device)
        over = least_memory(problem, view, device, state_stays=True)
        if over is not None:
            return over, None
        watch = Stopwatch()
        layers = layers_of(problem, view)
        found = solve_outer(
            view, layers, problem.capacity_bytes(device), links, host_share_bytes(problem, device),
            offload_price=self.offload_price, allow_offload=Action.OFFLOAD in problem.actions,
            allow_recompute=Action.RECOMPUTE in problem.actions, time_limit_s=self.time_limit_s, threads=self.threads,
        )  # fmt: skip
        count, has = view.micro_batches, len(found.keep) > 0
        return round_fractions(view, layers, found) if has else None, {
            "claimed_step_s": view.compute_s + count * found.added_s if has else None,
            "model_bound_s": view.compute_s + count * found.bound_s if has else None,
            "model_gap": 0.0 if has else None,
            "status": found.status.value, "rows": found.rows, "columns": found.columns, "integer_columns": 0,
            "build_s": max(0.0, watch.read_s() - found.solve_s), "solve_s": found.solve_s,
            "first_incumbent_s": None, "time_limit_s": self.time_limit_s, "gap_limit": self.gap,
            "threads": self.threads, "solver": self.solver_settings.version(), "layers": layers.count,
            "keep": found.keep.tolist(), "recompute": found.recompute.tolist(), "offload": found.offload.tolist(),
        }  # fmt: skip

    def _coordinate(self, bench: Workbench, decisions: tuple[DeviceDecision, ...]) -> Candidate | DoesNotFit:
        return sweep(bench, decisions)
