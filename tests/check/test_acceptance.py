"""What may run: a valid plan of this problem, whose workload is that of this step."""

from dataclasses import replace

import pytest
from planner_cases import cases

from tmojax.check.acceptance import checked_schedule
from tmojax.errors import InputError
from tmojax.planners.simple import KeepAll
from tmojax.problem import keep_all_footprint_bytes
from tmojax.problem.io import PlanFile, problem_hash


@pytest.fixture(scope="module")
def planned():
    problem = next(iter(cases().values()))
    problem = problem.with_device_capacity(
        max(keep_all_footprint_bytes(problem.workload, d) for d in range(problem.workload.device_count))
    )
    schedule = KeepAll().plan(problem).schedule
    assert schedule is not None
    return problem, schedule


def changed(workload, **fields):
    return replace(workload, programs=(replace(workload.programs[0], **fields), *workload.programs[1:]))


def test_a_plan_of_the_step_is_accepted(planned):
    problem, schedule = planned
    plan = PlanFile(schedule, problem_hash(problem), "keep-all", "feasible")
    assert checked_schedule(problem.workload, problem, plan) is schedule
    assert checked_schedule(problem.workload, problem, schedule) is schedule
    # Durations and more workspace than the step needs do not make it another step.
    ops = tuple(replace(op, duration_s=2 * op.duration_s, workspace_bytes=0) for op in problem.workload.programs[0].ops)
    assert checked_schedule(changed(problem.workload, ops=ops), problem, schedule) is schedule


def test_plans_of_other_problems_and_steps_are_refused(planned):
    problem, schedule = planned
    program = problem.workload.programs[0]
    with pytest.raises(InputError, match=r"of problem 0{12}\.\.\., not of this one"):
        checked_schedule(problem.workload, problem, PlanFile(schedule, "0" * 64, "keep-all", "feasible"))
    with pytest.raises(InputError, match=r"None is no schedule"):
        checked_schedule(problem.workload, problem, None)  # type: ignore[arg-type]
    renamed = (replace(program.tensors[0], name="other"), *program.tensors[1:])
    with pytest.raises(InputError, match=f"tensor '{program.tensors[0].name}': the plan is of another step"):
        checked_schedule(changed(problem.workload, tensors=renamed), problem, schedule)
    with pytest.raises(InputError, match=f"op '{program.ops[-1].name}': the plan is of another step"):
        checked_schedule(changed(problem.workload, ops=program.ops[:-1]), problem, schedule)
    more = (replace(program.ops[0], workspace_bytes=10**6), *program.ops[1:])
    with pytest.raises(InputError, match=r"needs 1000000 bytes of workspace, and the plan counts \d"):
        checked_schedule(changed(problem.workload, ops=more), problem, schedule)
    several = replace(problem.workload, micro_batches=problem.workload.micro_batches + 1)
    with pytest.raises(InputError, match=r"micro-batch\(es\), and the step was imported for"):
        checked_schedule(several, problem, schedule)


def test_plans_that_the_checker_rejects_are_refused(planned):
    problem, schedule = planned
    with pytest.raises(InputError, match=r"the checker rejects it \(\d+ violation\(s\)\): \["):
        checked_schedule(problem.workload, problem.with_device_capacity(1), schedule)
