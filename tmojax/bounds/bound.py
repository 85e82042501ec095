"""Proven lower bounds of the step time (docs/bounds.md) in one order of micro-batches."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tmojax.bounds.critical_path import critical_paths
from tmojax.bounds.device_classes import gpus
from tmojax.bounds.highs import Answer, SolverStatus, solver_version
from tmojax.bounds.inputs import last_input_s
from tmojax.bounds.step_lp import StepLp
from tmojax.bounds.whole import SEARCH_SHARE
from tmojax.problem import Action, Problem

WINDOW_ROUNDS = 10  # after which the windows that are still violated hardly raise the bound
# So many rounds, one after the other, that gain less than this share of the bound are the last ones.
IDLE_ROUNDS, LEAST_GAIN = 3, 1e-6
# Whole tensors are looked at up to this many gaps in all micro-batches of all devices, in a search of so many nodes.
WHOLE_GAPS, WHOLE_NODES = 100, 300
LEAST_BYTES_SHARE = 0.25  # of the time, at most, for what large tensors must move
# Times are sums of up to some 10^5 rounded numbers, here and in the simulator. This share is taken off, so that a
# schedule that attains the bound is not reported as faster than it.
ROUNDING_SHARE = 1e-10


class BoundStatus(StrEnum):
    """How the bound ended. The values are what people read."""

    COMPLETE = "all parts solved"
    TIME_LIMIT = "time limit: the best value proved until then"
    COMPUTE_ONLY = "compute time only"
    INFEASIBLE = "proved infeasible"


@dataclass(frozen=True)
class BoundPart:
    """One bound of the step time. `binds`: which device, link or window of time makes it; `explanation`: a sentence."""

    name: str
    step_s: float
    micro_batch_s: float
    binds: str
    explanation: str


@dataclass(frozen=True)
class BoundReport:
    """No schedule in an order that the problem offers, with the problem's actions, takes less than bound_s seconds.

    bound_s holds for one step that a barrier ends; repeated_s for the period of steps that are issued without one.
    `claimed`: the part that is largest. details: solver, rows, columns, threads, seconds; JSON values.
    """

    bound_s: float
    repeated_s: float
    micro_batches: int
    parts: tuple[BoundPart, ...]
    claimed: str
    status: BoundStatus
    message: str
    solver: str
    solve_s: float
    details: Mapping[str, float | int | str] = field(default_factory=dict)

    @property
    def micro_batch_s(self) -> float:
        """The bound per micro-batch, seconds."""
        return self.bound_s / self.micro_batches

    def gap(self, step_s: float) -> float:
        """step_s / bound - 1."""
        return step_s / self.bound_s - 1.0


def bound_in_default_order(problem: Problem, *, time_limit_s: float, threads: int) -> BoundReport:
    """`tmojax.bounds.bound` for schedules that follow the default order."""
    begin = time.perf_counter()
    micro_batches = problem.workload.micro_batches
    parts = [_compute_part(problem)]
    uncovered = _uncovered(problem)
    gpu_list = gpus(problem)
    if uncovered or not gpu_list:
        message = "the linear program does not cover " + (" and ".join(uncovered) or "a machine without GPUs")
        busy_s = _steady_compute_s(problem)
        return _report(parts, parts[0].step_s, micro_batches, BoundStatus.COMPUTE_ONLY, message, begin, {}, busy_s)
    program = StepLp(problem)
    program.add_least_bytes(begin + LEAST_BYTES_SHARE * time_limit_s, threads)
    details: dict[str, float | int | str] = {"threads": threads, **program.size()}
    status, message, repeated_s = BoundStatus.COMPLETE, "all parts solved to optimality", parts[0].step_s
    answer: Answer | None = None
    for name in ("bytes", "windows"):
        left_s = time_limit_s - (time.perf_counter() - begin)
        if left_s <= 0:
            status, message = BoundStatus.TIME_LIMIT, f"the limit of {time_limit_s} s ended before part '{name}'"
            break
        if answer is not None:
            program.add_barrier()
        answer, cut_short = _solve(program, answer, begin + time_limit_s, threads)
        details |= {
            f"{name}_solve_s": answer.solve_s, f"{name}_rows": answer.rows, f"{name}_columns": answer.columns,
            f"{name}_status": str(answer.status),
        }  # fmt: skip
        if answer.status is SolverStatus.INFEASIBLE:
            infinite, why = float("inf"), program.why_infeasible()
            return _report(parts, infinite, micro_batches, BoundStatus.INFEASIBLE, why, begin, details, infinite)
        if answer.status is not SolverStatus.OPTIMAL:
            status, message = BoundStatus.TIME_LIMIT, f"part '{name}': {answer.status}; its multipliers prove the value"
        elif cut_short:
            status, message = BoundStatus.TIME_LIMIT, f"part '{name}': more windows might raise it, time was short"
        value_s = max(answer.bound * program.unit.time_s, 0.0)
        if name == "bytes":
            repeated_s = max(value_s, _steady_compute_s(problem))
        parts.append(
            BoundPart(name, value_s, value_s / micro_batches, program.binding(answer), program.explain(answer))
        )
        if answer.status is not SolverStatus.OPTIMAL:
            break
    if status is BoundStatus.COMPLETE and micro_batches <= 2:
        parts += _whole_part(problem, program.size()["gaps"], begin + time_limit_s, threads)
    best = max(part.step_s for part in parts)
    return _report(parts, best, micro_batches, status, message, begin, details, repeated_s)


def _solve(program: StepLp, previous: Answer | None, deadline: float, threads: int) -> tuple[Answer, bool]:
    """Solve; after the first part, in rounds that add the windows of time which the last values violate.

    Returns the answer and whether the deadline ended the rounds.
    """
    answer, idle = previous, 0
    for _ in range(1 if previous is None else WINDOW_ROUNDS):
        left_s = deadline - time.perf_counter()
        if answer is not None and answer is not previous and left_s < 2 * answer.solve_s:
            return answer, True
        left_s = max(left_s, 0.01)
        if answer is not None and not program.add_windows(answer, left_s, threads) and answer is not previous:
            break
        found = program.solve(left_s, threads)
        if found.status is not SolverStatus.OPTIMAL and answer is not None and answer is not previous:
            return answer, True  # the rounds before are complete
        gained = answer is None or answer is previous or found.bound > answer.bound * (1 + LEAST_GAIN)
        answer, idle = found, 0 if gained else idle + 1
        if answer.status is not SolverStatus.OPTIMAL or idle == IDLE_ROUNDS:
            break
    assert answer is not None
    return answer, False


def _whole_part(problem: Problem, gaps: int, deadline: float, threads: int) -> list[BoundPart]:
    """What whole tensors prove beyond fractions, where there are few of them, and columns for every device. Empty
    where that is not so, or time is short."""
    if gaps * problem.workload.device_count * problem.workload.micro_batches > WHOLE_GAPS:
        return []
    program = StepLp(problem, whole=True)
    if not len(program.whole_columns()):
        return []
    program.add_barrier()
    answer, _ = _solve(program, program.solve(_left_s(deadline), threads), deadline, threads)
    if answer.status is not SolverStatus.OPTIMAL:
        return []
    found = program.solve_whole(_left_s(deadline), threads, WHOLE_NODES)
    value_s = found.bound * program.unit.time_s * (1 - SEARCH_SHARE)
    if not 0 < value_s < float("inf"):
        return []
    text = f"{found.integer_columns} choices of tensors that move or are recomputed as a whole; {found.status}"
    return [BoundPart("whole", value_s, value_s / problem.workload.micro_batches, "whole tensors", text)]


def _left_s(deadline: float) -> float:
    return max(deadline - time.perf_counter(), 0.01)


def _compute_part(problem: Problem) -> BoundPart:
    found = critical_paths(problem)
    paths = [path.total_s for path in found]
    device = max(range(len(paths)), key=paths.__getitem__)
    step_s, binds = paths[device], problem.machine.devices[device].name
    with_inputs_s = last_input_s(problem, found)
    if with_inputs_s > step_s:
        step_s, binds = with_inputs_s, "data inputs of all GPUs"
    return BoundPart(
        "compute",
        step_s,
        step_s / problem.workload.micro_batches,
        binds,
        "compute in order on all devices with unlimited memory, every collective alone on its links, inputs one by one",
    )


def _steady_compute_s(problem: Problem) -> float:
    """Busy time of the busiest compute stream: what a period of repeated steps cannot undercut."""
    launch_s = problem.machine.overheads.launch_s
    count = problem.workload.micro_batches
    return max(
        sum((op.duration_s + launch_s) * (1 if op.step_op else count) for op in problem.workload.program(d).ops
            if not op.collective)
        for d in range(problem.workload.device_count)
    )  # fmt: skip


def _uncovered(problem: Problem) -> list[str]:
    reasons = []
    if Action.SHARD in problem.actions and problem.workload.device_count > 1:
        reasons.append("sharding")
    return reasons


def _report(parts, bound_s, micro_batches, status, message, begin, details, repeated_s) -> BoundReport:
    largest = max(parts, key=lambda part: part.step_s)
    claimed = "memory" if bound_s == float("inf") else largest.name
    bound_s, repeated_s = bound_s * (1 - ROUNDING_SHARE), repeated_s * (1 - ROUNDING_SHARE)
    return BoundReport(bound_s, repeated_s, micro_batches, tuple(parts), claimed, status, message, solver_version(),
                       time.perf_counter() - begin, details)  # fmt: skip
