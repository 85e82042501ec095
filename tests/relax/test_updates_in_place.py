"""Tensors that a later op changes in place: what leaves is the last version, and no op that used an earlier one is run
again."""

from dataclasses import replace

import numpy as np
import pytest
from random_steps import random_choice, random_problem

from tmojax.check import check
from tmojax.planners.registry import PLANNERS
from tmojax.planners.simple import OffloadAll
from tmojax.planners.workbench import Workbench
from tmojax.problem import (
    Action,
    Kind,
    Lifetime,
    Op,
    Phase,
    Problem,
    Program,
    Tensor,
    TensorKind,
    Workload,
    keep_all_footprint_bytes,
    validate_problem,
)
from tmojax.problem.step_view import view_step
from tmojax.relax.coordinate import assemble, together
from tmojax.relax.decisions import keep_everything
from tmojax.relax.decode import DeviceList, decode


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
    """The copy out of a changed tensor stands behind the op that changes it; what made it, or read what it was before,
    is not run again."""
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
                first_run = program.producer[view.tensor[index]]
                producer = program.ops[first_run]
                assert all(changers.get(t, -1) < first_run for t in (*producer.reads, *producer.writes))
    assert found > 3


def state_changed_on_the_way(seed: int, by_forward: bool) -> Problem:
    """A random step in which a forward op changes a weight that others read, or in which weights are updated within
    the backward pass, whose last op reads what most forward ops wrote."""
    problem = random_problem(seed, factor=1.1)
    rng = np.random.default_rng(seed)
    programs = []
    for program in problem.workload.programs:
        ops = list(program.ops)
        if by_forward:
            forward = [i for i, op in enumerate(ops) if op.phase is Phase.FORWARD]
            changer = forward[len(forward) // 2]
            weight = next(t for t in ops[changer].reads if program.tensors[t].lifetime is Lifetime.STATE)
            kept = tuple(t for t in ops[changer].reads if t != weight)
            ops[changer] = replace(ops[changer], reads=kept, updates=(weight,), recomputable=False)
            for i in forward:
                if i != changer and rng.random() < 0.5:
                    ops[i] = replace(ops[i], reads=(*ops[i].reads, weight))
        else:
            updates = [op for op in ops if op.phase is Phase.OPTIMIZER]
            for op in updates:
                ops.remove(op)
                backward = next(i for i, other in enumerate(ops) if other.name == "b" + op.name[1:])
                ops.insert(backward + 1, op)
            *others, last = (i for i, op in enumerate(ops) if op.phase is Phase.BACKWARD)
            written = tuple(t for op in ops if op.phase is Phase.FORWARD for t in op.writes)
            for i in others:
                ops[i] = replace(ops[i], reads=tuple(t for t in ops[i].reads if t not in written or rng.random() < 0.3))
            ops[last] = replace(ops[last], reads=tuple(dict.fromkeys((*ops[last].reads, *written))))
        programs.append(replace(program, ops=tuple(ops)))
    problem = replace(problem, workload=replace(problem.workload, programs=tuple(programs)))
    problem = problem.with_device_capacity(keep_all_footprint_bytes(problem.workload, 0))
    validate_problem(problem)
    return problem


@pytest.mark.parametrize("by_forward", [True, False])
def test_no_op_that_used_an_earlier_version_of_state_is_run_again(by_forward):
    found = forbidden = 0
    for seed in range(60):
        problem = state_changed_on_the_way(seed, by_forward)
        rng = np.random.default_rng(seed)
        views = [view_step(problem, device) for device in range(problem.workload.device_count)]
        ops = problem.workload.programs[0].ops
        again = np.array([ops[views[0].slot_op[slot]].recomputable for slot in views[0].producer_slot], bool)
        forbidden += int((again & ~views[0].may_recompute).sum())
        decisions = [replace(keep_everything(view), choice=random_choice(view, rng)) for view in views]
        found_lists = map(decode, [problem] * len(views), views, decisions)
        lists = [one for one in found_lists if isinstance(one, DeviceList)]
        if len(lists) == len(views):
            found += 1
            report = check(problem, assemble(problem, lists, together(problem)))
            assert report.valid, (seed, report.text())
    assert found and forbidden


def test_an_update_in_the_backward_pass_leaves_recomputation_before_it_alone():
    """Of a chain without skips, every op is wanted again before its weight changes, or none is."""
    tensors = [Tensor("batch", 4, TensorKind.INPUT)]
    tensors += [Tensor(f"w{i}", 4, TensorKind.WEIGHT, Lifetime.STATE) for i in range(3)]
    tensors += [Tensor(f"a{i}", 4, TensorKind.ACTIVATION) for i in range(3)]
    tensors += [Tensor(f"g{i}", 4, TensorKind.GRADIENT) for i in range(3)]
    ops = [Op(f"f{i}", Phase.FORWARD, 1.0, (i + 3 if i else 0, i + 1), (i + 4,)) for i in range(3)]
    for i in (2, 1, 0):
        ops.append(Op(f"b{i}", Phase.BACKWARD, 1.0, (i + 4, i + 1, *((i + 8,) if i < 2 else ())), (i + 7,)))
        ops.append(Op(f"u{i}", Phase.OPTIMIZER, 1.0, (i + 7,), (), (i + 1,), recomputable=False, step_op=True))
    base = random_problem(0).machine
    workload = Workload("chain", (Program("chain", tuple(tensors), tuple(ops)),), (0,), 1, "synthetic")
    machine = replace(base, devices=base.devices[:1])
    problem = Problem("chain", workload, machine, frozenset({Action.RECOMPUTE}))
    validate_problem(problem)
    assert view_step(problem, 0).may_recompute.all()
    late = replace(ops[-2], reads=(*ops[-2].reads, 5))  # b0 reads a1, which f1 writes from w1, after u1
    late_ops = (*ops[:-2], late, ops[-1])
    programs = (replace(workload.programs[0], ops=late_ops),)
    view = view_step(replace(problem, workload=replace(workload, programs=programs)), 0)
    assert view.may_recompute[view.tensor.tolist().index(5)]  # b1 wants a1 back before u1
