"""Whether a plan may run: it is of this problem, the problem is of this step, and the checker finds it valid.

What executes plans asks here first, whatever it executes them with; nothing has run yet when one of these fails.
"""

from __future__ import annotations

from typing import Any

from tmojax.check.checker import check
from tmojax.errors import InputError
from tmojax.problem.io import PlanFile, problem_hash
from tmojax.problem.problem import Problem
from tmojax.problem.schedule import Schedule
from tmojax.problem.workload import Program, Workload

_SHOWN_VIOLATIONS = 3


def schedule_of(problem: Problem, plan: PlanFile | Schedule) -> Schedule:
    """The schedule of a plan of `problem`. Raises InputError for a plan of another problem, and for no plan at all."""
    if isinstance(plan, Schedule):
        return plan
    if not isinstance(plan, PlanFile):
        raise InputError(f"plan: {plan!r} is no schedule; a planner that finds none says why in `PlanResult.message`")
    expected = problem_hash(problem)
    if plan.problem_hash != expected:
        raise InputError(
            f"plan: it is of problem {plan.problem_hash[:12]}..., not of this one ({expected[:12]}...); plan this "
            f"problem, or load the problem file that lies beside the plan"
        )
    return plan.schedule


def require_same_step(step: Workload, planned: Workload) -> None:
    """Raises InputError unless `planned` is the workload `step`: the same tensors and ops, with at least its workspace.

    Durations may differ: those of a plan may be measured ones.
    """
    ours, theirs = ((w.device_program, w.micro_batches) for w in (step, planned))
    if ours != theirs:
        raise InputError(
            f"plan: it is for {len(theirs[0])} device(s) (programs {theirs[0]}) and {theirs[1]} micro-batch(es), and "
            f"the step was imported for {len(ours[0])} (programs {ours[0]}) and {ours[1]}; plan the workload of this "
            f"step"
        )
    for program, other in zip(step.programs, planned.programs, strict=True):
        for what, describe in (("tensor", _tensors_of), ("op", _ops_of)):
            here, there = describe(program), describe(other)
            if here != there:
                first = next((b for a, b in zip(here, there, strict=False) if a != b), (here + there)[-1])
                raise InputError(f"{what} {first[0]!r}: the plan is of another step; plan the workload of this step")
        for op, there in zip(program.ops, other.ops, strict=True):
            if there.workspace_bytes < op.workspace_bytes:
                raise InputError(
                    f"op {op.name!r}: needs {op.workspace_bytes} bytes of workspace, and the plan counts "
                    f"{there.workspace_bytes}; plan the workload of this step"
                )


def require_valid(problem: Problem, schedule: Schedule) -> None:
    """Raises InputError, with the first violations, for a schedule that the checker rejects."""
    report = check(problem, schedule)
    if not report.valid:
        shown = "; ".join(str(violation) for violation in report.violations[:_SHOWN_VIOLATIONS])
        raise InputError(f"plan: the checker rejects it ({len(report.violations)} violation(s)): {shown}")


def checked_schedule(step: Workload, problem: Problem, plan: PlanFile | Schedule) -> Schedule:
    """The schedule of a plan that is valid for `problem`, whose workload is `step`. Raises InputError otherwise."""
    schedule = schedule_of(problem, plan)
    require_same_step(step, problem.workload)
    require_valid(problem, schedule)
    return schedule


def _tensors_of(program: Program) -> list[tuple[str, Any]]:
    return [(tensor.name, (tensor.size_bytes, tensor.alias_group)) for tensor in program.tensors]


def _ops_of(program: Program) -> list[tuple[str, Any]]:
    return [(op.name, (op.reads, op.writes, op.updates)) for op in program.ops]
