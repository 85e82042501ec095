"""Offered orders as problems of their own: the same times and the same verdicts, both ways."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_steps import random_choice, random_problem

from tmojax.check import check
from tmojax.errors import InputError
from tmojax.importers.micro_batch_orders import BreadthFirst, offer_orders
from tmojax.problem import (
    Collective,
    CollectiveKind,
    Kind,
    Lifetime,
    LinkPolicyKind,
    ListBuilder,
    Op,
    Phase,
    Placement,
    Problem,
    Program,
    Schedule,
    Segment,
    Tensor,
    TensorKind,
    Workload,
    validate_problem,
)
from tmojax.problem.in_order import in_order, offered_orders
from tmojax.problem.step_view import view_step
from tmojax.relax.coordinate import Coordination, assemble
from tmojax.relax.decisions import DeviceDecision
from tmojax.relax.decode import DoesNotFit, decode
from tmojax.simulate import simulate


def interleaved(program: Program, micro_batches: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    """Micro-batches that take turns at random; step ops as early as all of them have passed their places."""
    ops, count = program.ops, len(program.ops)
    at = [0] * micro_batches
    segments, step_op = [], 0
    while min(at) < count:
        k = int(rng.choice([k for k in range(micro_batches) if at[k] < count]))
        end = min(count, at[k] + int(rng.integers(1, 4)))
        segments.append(Segment(at[k], end, k))
        at[k] = end
        while step_op < count and (not ops[step_op].step_op or min(at) >= step_op):
            if ops[step_op].step_op:
                segments.append(Segment(step_op, step_op + 1, 0, True))
            step_op += 1
    return tuple(segments)


def with_order(problem: Problem, seed: int) -> Problem:
    """`problem` with a random order named `o`: breadth-first where that is possible, or anything."""
    rng, workload = np.random.default_rng(seed), problem.workload
    program, count = workload.programs[0], workload.micro_batches
    if seed % 2 and count > 1:
        workload = offer_orders(workload, (BreadthFirst(),))
        segments = workload.programs[0].orders["breadth-first"]
    else:
        segments = interleaved(program, count, rng)
    program = replace(program, orders={"o": segments})
    problem = replace(problem, workload=replace(workload, programs=(program,)))
    validate_problem(problem)
    return problem


def planned(problem: Problem, seed: int) -> Schedule | None:
    """A schedule of the default order with random decisions, or None where they do not fit."""
    rng, count = np.random.default_rng(seed), problem.workload.device_count
    lists = []
    for device in range(count):
        view = view_step(problem, device)
        rests = rng.choice([0, 1, 2], len(view.state_tensor)).astype(np.int8)
        found = decode(problem, view, DeviceDecision(random_choice(view, rng), rests))
        if isinstance(found, DoesNotFit):
            return None
        lists.append(found)
    policy = [LinkPolicyKind.FAIR, LinkPolicyKind.FCFS][seed % 2]
    return assemble(problem, lists, Coordination(tuple(0.2 * d for d in range(count)), policy))


def verdict(problem: Problem, schedule: Schedule) -> list[tuple]:
    return sorted((v.rule, v.device, v.instruction) for v in check(problem, schedule).violations)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), squeeze=st.sampled_from([0.9, 1.05, 1.2]))
def test_schedules_take_the_same_time_and_are_valid_both_ways(seed, squeeze):
    problem = with_order(random_problem(seed, factor=squeeze), seed)
    written = in_order(problem, "o")
    validate_problem(written.problem)
    schedule = planned(written.problem, seed)
    assume(schedule is not None)
    assert check(written.problem, schedule).valid
    back = written.back(schedule)
    assert back.order == "o" and check(problem, back).valid
    for steps in (1, 3):
        there, here = simulate(written.problem, schedule, steps=steps), simulate(problem, back, steps=steps)
        assert there.step_s == here.step_s
    assert written.there(back).same_as(schedule)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_broken_schedules_break_the_same_rules(seed):
    """Rows taken out, moved, and given other tensors and micro-batches."""
    problem = with_order(random_problem(seed, factor=1.0), seed)
    written = in_order(problem, "o")
    schedule = planned(written.problem, seed)
    assume(schedule is not None)
    back = written.back(schedule)
    rng = np.random.default_rng(seed)
    rows = back.lists[0].copy()
    for _ in range(int(rng.integers(1, 4))):
        place, other = rng.integers(len(rows), size=2)
        change = rng.integers(3)
        if change == 0:
            rows = np.delete(rows, place)
        elif change == 1:
            rows[[place, other]] = rows[[other, place]]
        elif rows["micro_batch"][place] >= 0 and rows["kind"][place] not in (Kind.COMPUTE, Kind.COLLECTIVE):
            per_micro_batch = [
                t for t, spec in enumerate(problem.workload.programs[0].tensors)
                if spec.lifetime is Lifetime.MICRO_BATCH
            ]  # fmt: skip
            rows["tensor"][place] = rng.choice(per_micro_batch)
            rows["micro_batch"][place] = rng.integers(problem.workload.micro_batches)
    broken = replace(back, lists=(rows, *back.lists[1:]))
    assert verdict(problem, broken) == verdict(written.problem, written.there(broken))
    assert written.back(written.there(broken)).same_as(broken)


def two_layers(micro_batches: int) -> Workload:
    tensors = (
        Tensor("x", 1, TensorKind.INPUT),
        Tensor("y", 2, TensorKind.ACTIVATION, alias_group="storage"),
        Tensor("z", 3, TensorKind.ACTIVATION, alias_group="storage"),
        Tensor("w", 4, TensorKind.WEIGHT, Lifetime.STATE),
        Tensor("norm", 1, TensorKind.ACTIVATION, Lifetime.STEP),
    )
    ops = (
        Op("first", Phase.FORWARD, 1.0, reads=(0,), writes=(1,), layer="a"),
        Op("gather", Phase.COLLECTIVE, 0.0, reads=(1,), recomputable=False, collective="all", layer="a"),
        Op("second", Phase.FORWARD, 1.0, reads=(1, 3), writes=(2,), layer="b"),
        Op("sum", Phase.COLLECTIVE, 0.0, reads=(2,), recomputable=False, step_op=True, collective="sum"),
        Op("measure", Phase.OPTIMIZER, 1.0, reads=(2,), writes=(4,), step_op=True),
        Op("update", Phase.OPTIMIZER, 1.0, reads=(4,), updates=(3,), recomputable=False, step_op=True),
    )
    collectives = (
        Collective("all", CollectiveKind.ALL_GATHER, 8, (0, 1)),
        Collective("sum", CollectiveKind.ALL_REDUCE, 8, (0, 1)),
    )
    return Workload("two layers", (Program("p", tensors, ops),), (0, 0), micro_batches, "synthetic", collectives)


def test_groups_are_the_micro_batches_of_the_new_problem():
    machine = random_problem(4).machine
    workload = offer_orders(two_layers(4), (BreadthFirst(group=2), BreadthFirst()))
    assert offered_orders(workload) == ("default", "breadth-first-2", "breadth-first")
    problem = Problem("two layers", workload, machine, frozenset())
    by_two = in_order(problem, "breadth-first-2")
    found = by_two.problem.workload
    assert (by_two.together, found.micro_batches) == (2, 2)
    assert [op.name for op in found.programs[0].ops] == [
        "mb0.first", "mb0.gather", "mb1.first", "mb1.gather", "mb0.second", "mb1.second", "sum", "measure", "update",
    ]  # fmt: skip
    assert [c.name for c in found.collectives] == ["mb0.all", "mb1.all", "mb0.sum"]
    tensors = found.programs[0].tensors
    assert [t.name for t in tensors] == ["mb0.x", "mb1.x", "mb0.y", "mb1.y", "mb0.z", "mb1.z", "w", "norm"]
    assert tensors[2].alias_group == tensors[4].alias_group != tensors[3].alias_group == tensors[5].alias_group
    # A step op reads what the last micro-batch wrote.
    assert found.programs[0].ops[6].reads == (5,) and found.programs[0].ops[4].reads == (2, 6)
    everything = in_order(problem, "breadth-first")
    assert (everything.together, everything.problem.workload.micro_batches) == (4, 1)


def test_rows_by_hand():
    workload = offer_orders(two_layers(4), (BreadthFirst(group=2),))
    problem = Problem("two layers", workload, random_problem(4).machine, frozenset())
    written = in_order(problem, "breadth-first-2")
    rows = ListBuilder()
    rows.compute(2, 1)  # mb1.first of the second round: micro-batch 3
    rows.collective(6, 0)
    rows.prefetch(3, 1, 2, 0)  # mb1.y
    rows.release(3, 1, 0, owner=1)
    rows.offload(6, 0, 0, 2)  # w
    rows.signal(7, 0)
    schedule = Schedule((rows.build(), ListBuilder().build()), ((Placement(6, (0,)),), (Placement(6, (1,)),)))
    back = written.back(schedule)
    assert [(int(r["op"]), int(r["tensor"]), int(r["micro_batch"])) for r in back.lists[0]] == [
        (0, -1, 3), (3, -1, 0), (-1, 1, 3), (-1, 1, 3), (-1, 3, 0), (-1, -1, -1),
    ]  # fmt: skip
    assert back.initial == ((Placement(3, (0,)),), (Placement(3, (1,)),))
    assert written.there(back).same_as(schedule)


def test_an_unknown_order():
    problem = Problem("two layers", two_layers(2), random_problem(4).machine, frozenset())
    with pytest.raises(InputError, match="no order 'depth'"):
        in_order(problem, "depth")
