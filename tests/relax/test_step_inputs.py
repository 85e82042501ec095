"""Tensors that live once in a step and that micro-batches use, and inputs of a micro-batch that only step ops use."""

from dataclasses import replace

import numpy as np
import pytest
from random_steps import random_choice, random_problem

from tmojax.check import check
from tmojax.planners.registry import PLANNERS
from tmojax.planners.simple import KeepAll
from tmojax.problem import (
    Kind,
    Lifetime,
    Op,
    Phase,
    Problem,
    Tensor,
    TensorKind,
    keep_all_footprint_bytes,
    validate_problem,
)
from tmojax.problem.step_view import view_step
from tmojax.relax.coordinate import assemble, together
from tmojax.relax.decisions import keep_everything
from tmojax.relax.decode import DeviceList, decode


def with_step_inputs(seed: int, *, factor: float = 1.1) -> Problem:
    """A random step with a table that micro-batch and step ops read, a counter that one of them changes, a rate of the
    last micro-batch that only the update reads, and, in a step of one micro-batch, a tensor that a step op makes in
    the middle of the others."""
    problem = random_problem(seed, factor=factor)
    rng = np.random.default_rng(seed)
    programs = []
    for program in problem.workload.programs:
        first = len(program.tensors)
        given = [("table", Lifetime.STEP), ("counter", Lifetime.STEP), ("rate", Lifetime.MICRO_BATCH)]
        tensors = [*program.tensors, *(Tensor(name, 7, TensorKind.INPUT, lifetime) for name, lifetime in given)]
        ops = list(program.ops)
        able = [i for i, op in enumerate(ops) if not op.collective]
        for i in rng.choice(able, size=4, replace=False).tolist():
            ops[i] = replace(ops[i], reads=(*ops[i].reads, first))
        changer = int(rng.choice(able))
        ops[changer] = replace(ops[changer], updates=(*ops[changer].updates, first + 1), recomputable=False)
        ops[-1] = replace(ops[-1], reads=(*ops[-1].reads, first + 2))
        if problem.workload.micro_batches == 1:
            tensors.append(Tensor("made", 9, TensorKind.ACTIVATION, Lifetime.STEP))
            ops[2:2] = [Op("make", Phase.FORWARD, 0.01, (), (first + 3,), recomputable=False, step_op=True)]
            for i in (4, -3):
                ops[i] = ops[i] if ops[i].collective else replace(ops[i], reads=(*ops[i].reads, first + 3))
        programs.append(replace(program, tensors=tuple(tensors), ops=tuple(ops)))
    problem = replace(problem, workload=replace(problem.workload, programs=tuple(programs)))
    capacity = int(keep_all_footprint_bytes(problem.workload, 0) / factor)
    problem = problem.with_device_capacity(capacity)
    validate_problem(problem)
    return problem


@pytest.mark.parametrize("factor", [0.9, 1.05])
def test_decoded_lists_are_valid(factor):
    found = 0
    for seed in range(30):
        problem = with_step_inputs(seed, factor=factor)
        rng = np.random.default_rng(seed)
        views = [view_step(problem, device) for device in range(problem.workload.device_count)]
        decisions = [replace(keep_everything(view), choice=random_choice(view, rng)) for view in views]
        found_lists = map(decode, [problem] * len(views), views, decisions)
        lists = [one for one in found_lists if isinstance(one, DeviceList)]
        if len(lists) == len(views):
            found += 1
            report = check(problem, assemble(problem, lists, together(problem)))
            assert report.valid, (seed, report.text())
    assert found >= 4


@pytest.mark.parametrize("kind", ["offload-all", "ratio-sweep", "tmo-ordered", "sqrt-n"])
@pytest.mark.parametrize("seed", range(4))
def test_plans_are_valid(kind, seed):
    problem = with_step_inputs(seed)
    result = PLANNERS[kind]().plan(problem)
    assert result.schedule is None or check(problem, result.schedule).valid


@pytest.mark.parametrize("seed", range(8))
def test_keeping_everything_needs_the_footprint_and_no_byte_more(seed):
    """What lives once in the step comes before the first op that uses it and goes behind the last one."""
    problem = with_step_inputs(seed, factor=1.0)
    schedule = KeepAll().plan(problem).schedule
    assert schedule is not None and check(problem, schedule).valid
    footprint = keep_all_footprint_bytes(problem.workload, 0)
    assert KeepAll().plan(problem.with_device_capacity(footprint - 1)).schedule is None
    table = next(t for t, spec in enumerate(problem.workload.programs[0].tensors) if spec.name == "table")
    for rows in schedule.lists:
        assert ((rows["kind"] == Kind.PREFETCH) & (rows["tensor"] == table)).sum() == 1
