"""CP-SAT: the coordinated problem of all GPUs stated exactly, for small and middle instances.

Retention intervals under a cumulative memory constraint are the formulation of Bartan et al., "Moccasin: efficient
tensor rematerialization for neural networks" (ICML 2023, PMLR 202, 1826-1837); here copies, links, several GPUs and
persistent state are added, see `tmojax.ilp.cp_sat_model`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tmojax.errors import InputError
from tmojax.ilp.cp_sat import CpAnswer, CpSettings, solve_cp_sat, solver_version
from tmojax.ilp.cp_sat_decode import decode_times
from tmojax.ilp.cp_sat_start import NotInModelError, read_schedule
from tmojax.ilp.cp_sat_times import DeviceTimes, Model, model_of, step_ticks
from tmojax.planners.base import Planner, PlanResult, Status, Stopwatch, does_not_fit
from tmojax.planners.gradient import find_starts
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Problem, Schedule, largest_op_bytes
from tmojax.relax.decode import DoesNotFit
from tmojax.simulate import simulate

MOST_WORKERS = 256


@dataclass(frozen=True)
class Known:
    """A schedule to start from: who made it, its simulated time, and the decisions behind it where there are such."""

    name: str
    schedule: Schedule
    step_s: float
    candidate: Candidate | None = None


def known_schedules(bench: Workbench, seeds: tuple[PlanResult, ...], of: str = "") -> list[Known]:
    """Schedules of earlier planners of the run (only of the one named `of`, if given), or of simple strategies where
    there is none; fastest first."""
    found = [
        Known(seed.planner, seed.schedule, seed.step_s, seed.candidate)
        for seed in seeds
        if seed.status.has_plan and seed.schedule is not None and (not of or seed.planner == of)
    ]
    if not found and not of:
        own = [(start.name, start.candidate) for start in find_starts(bench, ())]
        found = [Known(name, candidate.schedule, candidate.step_s, candidate) for name, candidate in own]
    return sorted(found, key=lambda known: known.step_s)


def op_too_large(bench: Workbench) -> DoesNotFit | None:
    """The op that alone needs more memory than its device has: proof that there is no schedule."""
    for device in range(bench.device_count):
        op, needed = largest_op_bytes(bench.problem.workload, device)
        over = needed - bench.problem.capacity_bytes(device)
        if over > 0:
            return DoesNotFit(device, op, 0, over)
    return None


def best_start(
    model: Model, known: list[Known], most: int = 3
) -> tuple[tuple[DeviceTimes, ...] | None, dict[str, Any]]:
    """Of the `most` fastest known schedules the one that is fastest in the model, and what became of each."""
    best, best_ticks, figures = None, math.inf, []
    for item in known[:most]:
        entry: dict[str, Any] = {"from": item.name, "step_s": item.step_s}
        try:
            times = read_schedule(model, item.schedule)
        except NotInModelError as reason:
            entry["not_in_model"] = str(reason)
        else:
            ticks = step_ticks(model, times)
            entry["model_step_s"] = ticks * model.network.tick_s
            if ticks < best_ticks:
                best, best_ticks = times, ticks
        figures.append(entry)
    return best, {"starts": figures}


def not_modelled(problem: Problem) -> str:
    """Why the constraint model is not built for this machine ("": it is)."""
    machine = problem.machine
    users: dict[int, int] = {}
    for device in machine.devices:
        ends = (device.memory, device.host_memory), (device.host_memory, device.memory)
        engines = {engine for pair in ends for engine in machine.route(*pair).engines}
        if device.kind != "gpu" or not all(machine.route(*pair).engines for pair in ends):
            return f"its model needs GPUs with copy engines to and from the host; device {device.name!r} is none"
        for engine in engines:
            users[engine] = users.get(engine, 0) + 1
    shared = [machine.engines[engine] for engine, count in users.items() if count > 1]
    return f"its model has no copy engine for several GPUs, as {shared[0]!r} is" if shared else ""


@dataclass(frozen=True)
class CpSat(Planner):
    """Optional intervals for copies and recomputations, cumulative memory of every GPU, turns on the links, all
    micro-batches unrolled.

    time_limit_s: wall clock of the solver. deterministic_limit: a limit in CP-SAT's deterministic time besides (0:
    none), for plans that do not depend on the machine's speed. gap: relative, at which it stops. workers: of the
    solver; with few of them proofs take far longer, even on few cores. ticks: in which the time of the best known
    schedule is divided. most_items: of runs, copies and recomputations; beyond it there is no attempt.

    What the model leaves out: each micro-batch tensor may leave once (in its longest idle interval), an op runs at most
    twice, links have no fair sharing (`tmojax.ilp.cp_sat_links`), copies do not slow down compute, there are no peers
    and codecs. Its optimum and bound are those of this model, not of the problem.
    """

    name: str = "cp-sat"
    time_limit_s: float = 60.0
    gap: float = 1e-4
    deterministic_limit: float = 0.0
    workers: int = 8
    ticks: int = 1_000_000
    most_items: int = 20_000

    def __post_init__(self) -> None:
        if not 0 < self.time_limit_s < math.inf:
            raise InputError(f"time_limit_s: {self.time_limit_s} must be positive and finite")
        if not 0 <= self.gap < math.inf:
            raise InputError(f"gap: {self.gap} must be finite and not negative")
        if not 0 <= self.deterministic_limit < math.inf:
            raise InputError(f"deterministic_limit: {self.deterministic_limit} must be finite and not negative")
        if not 1 <= self.workers <= MOST_WORKERS:
            raise InputError(f"workers: {self.workers} must be between 1 and {MOST_WORKERS}")
        if not 1000 <= self.ticks <= 10**8:
            raise InputError(f"ticks: {self.ticks} must be between 1000 and {10**8}")
        if self.most_items < 1:
            raise InputError(f"most_items: {self.most_items} must be at least 1")

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        bench = Workbench(problem)
        too_large = op_too_large(bench)
        if too_large is not None:
            return does_not_fit(self.name, problem, too_large, watch)
        unsuited = not_modelled(problem)
        if unsuited:
            return PlanResult(self.name, Status.NOT_FOUND, message=unsuited, plan_s=watch.read_s())
        known = known_schedules(bench, seeds)
        # Without a known schedule: everything one after the other, twice over. Of what takes no time any tick will do.
        serial_s = 2 * sum(bench.view(device).compute_s for device in range(bench.device_count))
        tick_s = ((known[0].step_s if known else serial_s) or 1.0) / self.ticks
        model = model_of(problem, tuple(bench.view(d) for d in range(bench.device_count)), tick_s)
        details: dict[str, Any] = {"items": model.items(), "tick_s": tick_s}
        if model.items() > self.most_items:
            message = (
                f"the model would have {model.items()} ops, copies and recomputations in time, most_items allows "
                f"{self.most_items}; `improve` works on parts of such a step"
            )
            return PlanResult(self.name, Status.NOT_FOUND, message=message, plan_s=watch.read_s(), details=details)
        start, figures = best_start(model, known)
        settings = CpSettings(self.time_limit_s, self.gap, self.deterministic_limit, self.workers, seed)
        answer = solve_cp_sat(model, settings, horizon=10 * self.ticks, start=start)
        details |= figures | {"solves": [answer_figures(answer, model, settings)]}
        times, message = answer.times, ""
        if times is None and answer.status == "UNKNOWN" and start is not None:
            times, message = start, "the solver found no solution in its time; this is the one that it started from"
        result = self._result(problem, model, answer, times, settings, details, watch)
        return replace(result, message=message or result.message)

    def _result(self, problem: Problem, model: Model, answer: CpAnswer, times: tuple[DeviceTimes, ...] | None,
                settings: CpSettings, details: dict[str, Any], watch: Stopwatch) -> PlanResult:  # fmt: skip
        limited = settings.depends_on_speed(answer)
        if times is None:
            message = f"the solver ended as {answer.status.lower()} after {answer.solve_s:.1f} s, without a solution"
            if answer.status == "INFEASIBLE":
                message = "its model has no solution in this memory (it has fewer actions than the problem)"
            return PlanResult(self.name, Status.NOT_FOUND, message=message, plan_s=watch.read_s(),
                              time_limited=limited, details=details)  # fmt: skip
        schedule = decode_times(model, times)
        step_s = simulate(problem, schedule).step_s
        status = Status.TIME_LIMIT
        if answer.status == "OPTIMAL":
            status = Status.OPTIMAL if answer.objective <= answer.bound else Status.FEASIBLE  # at the gap
        return PlanResult(self.name, status, schedule, step_s, watch.read_s(), time_limited=limited, details=details)


def answer_figures(answer: CpAnswer, model: Model, settings: CpSettings) -> dict[str, Any]:
    """What is reported of a solve, as JSON values (None where there is no such number); keys as those of the MILPs
    (docs/ilp-baselines.md).

    claimed_step_s: objective of the incumbent. model_bound_s: proved for the model, which is no bound of the problem.
    rows, columns: constraints and variables before presolve; intervals: among the constraints.
    """
    tick_s = model.network.tick_s
    objective = answer.objective * tick_s if answer.times is not None else None
    bound = answer.bound * tick_s if answer.bound >= 0 else None
    return {
        "claimed_step_s": objective,
        "model_bound_s": bound,
        "model_gap": (objective / bound - 1) if objective is not None and bound else None,
        "status": answer.status.lower(),
        "build_s": answer.build_s,
        "solve_s": answer.solve_s,
        "first_incumbent_s": answer.first_incumbent_s if answer.first_incumbent_s >= 0 else None,
        "rows": answer.constraints,
        "columns": answer.variables,
        "integer_columns": answer.variables,
        "intervals": answer.intervals,
        "time_limit_s": settings.time_limit_s,
        "gap_limit": settings.gap,
        "deterministic_limit": settings.deterministic_limit,
        "threads": settings.workers,
        "seed": settings.seed,
        "solver": solver_version(),
    }
