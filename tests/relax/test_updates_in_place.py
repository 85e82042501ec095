"""Tensors of a micro-batch that a later op changes in place: what leaves is the last version, nothing is run again."""

from dataclasses import replace

import numpy as np
import pytest
from random_steps import random_problem

from tmojax.check import check
from tmojax.planners.registry import PLANNERS
from tmojax.planners.simple import OffloadAll
from tmojax.planners.workbench import Workbench
from tmojax.problem import Kind, Phase, Problem


def changed_in_place(seed: int) -> Problem:
    """A random step in which forward ops change what they read of the op before them."""
    problem = random_problem(seed, factor=1.1)
    rng = np.random.default_rng(seed)
    programs = []
    for program in problem.workload.programs:
        ops, changed = [], set()
        for op in program.ops:
            mine = [t for t in op.reads if program.producer[t] >= 0 and op.phase is Phase.FORWARD and not op.collective]
            if mine and rng.random() < 0.5:
                tensor = mine[int(rng.integers(len(mine)))]
                changed.add(tensor)
                op = replace(op, reads=tuple(t for t in op.reads if t != tensor), updates=(*op.updates, tensor),
                             recomputable=False)  # fmt: skip
            ops.append(op)
        assert changed
        programs.append(replace(program, ops=tuple(ops)))
    return replace(problem, workload=replace(problem.workload, programs=tuple(programs)))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["offload-all", "recompute-all", "sqrt-n", "ratio-sweep", "oblivious", "local-search"])
def test_plans_are_valid(kind, seed):
    problem = changed_in_place(seed)
    result = PLANNERS[kind]().plan(problem)
    if result.schedule is not None:
        assert check(problem, result.schedule).valid, check(problem, result.schedule).text()


def test_the_copy_waits_for_the_change():
    """The copy out of a changed tensor stands behind the op that changes it, and what made it is not run again."""
    found = 0
    for seed in range(8):
        problem = changed_in_place(seed)
        result = OffloadAll().plan(problem)
        if result.schedule is None:
            continue
        for device, rows in enumerate(result.schedule.lists):
            program = problem.workload.program(device)
            view = Workbench(problem).view(device)
            changers = {t: index for index, op in enumerate(program.ops) for t in op.updates
                        if not op.step_op and op.phase is Phase.FORWARD}  # fmt: skip
            for place in np.flatnonzero(rows["kind"] == Kind.OFFLOAD).tolist():
                tensor, batch = int(rows["tensor"][place]), int(rows["micro_batch"][place])
                if tensor in changers and batch >= 0:
                    ran = (rows["op"] == changers[tensor]) & (rows["micro_batch"] == batch)
                    assert np.flatnonzero(ran & (rows["kind"] == Kind.COMPUTE))[0] < place
                    found += 1
            for index in np.flatnonzero(view.may_recompute).tolist():
                producer = program.ops[program.producer[view.tensor[index]]]
                assert not {*producer.reads, *producer.writes} & set(changers)
    assert found > 3
