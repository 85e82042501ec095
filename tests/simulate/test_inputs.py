"""What cannot be read is refused with the place, the value and the remedy."""

from __future__ import annotations

import numpy as np
import pytest
from building import HOST, box, op, problem_of, schedule_of, tensor

from tmojax.errors import InputError
from tmojax.problem import Collective, CollectiveKind, LinkPolicy, LinkPolicyKind, ListBuilder, Placement
from tmojax.simulate import prepare, simulate


def small_problem():
    sync = Collective("sync", CollectiveKind.ALL_REDUCE, 10, (0, 1))
    ops = [op("f", 1.0, writes=[0]), op("s", 0.0, step_op=True, collective="sync")]
    return problem_of(box(2, peers=True), [([tensor("x", 100)], ops)], 2, [sync], [0, 0])


def valid_list():
    builder = ListBuilder()
    builder.compute(0, 0)
    builder.offload(0, 0, 1, HOST)
    builder.release(0, 0, 1)
    builder.compute(0, 1)
    builder.retire(3)
    builder.signal(0, 1)
    builder.wait(0, 0)
    builder.collective(1, 0)
    return builder


def schedule_with(index=None, **fields):
    other = ListBuilder()
    other.collective(1, 0)
    schedule = schedule_of(valid_list(), other)
    for field, value in fields.items():
        schedule.lists[0][field][index] = value
    return schedule


def test_the_valid_one_runs():
    assert simulate(small_problem(), schedule_with()).step_s == 12


@pytest.mark.parametrize(
    ("index", "fields", "message"),
    [
        (0, {"kind": 12}, r"list 0, instruction 0 \(kind 12\): kind 12; kinds are 0..11"),
        (0, {"op": 2}, r"instruction 0 \(compute\): op 2; ops are 0..1"),
        (0, {"op": 1}, r"op 1; an op with a collective is run by `collective`"),
        (7, {"op": 0}, r"instruction 7 \(collective\): op 0"),
        (0, {"micro_batch": 2}, r"micro_batch 2; micro-batches are 0..1"),
        (1, {"micro_batch": -1}, r"instruction 1 \(offload\): micro_batch -1"),
        (1, {"tensor": 1}, r"tensor 1; tensors of device 0 are 0..0"),
        (1, {"owner": 2}, r"owner 2; devices are -1..1"),
        (1, {"memory": 3}, r"memory 3; memories are 0..2"),
        (1, {"to_memory": -1}, r"to_memory -1"),
        (1, {"to_memory": 1}, r"has no route from 'gpu0' to 'gpu0'"),
        (1, {"form": 0}, r"form 0; codecs"),
        (1, {"parts": 0}, r"parts 0"),
        (1, {"part": 1}, r"part 1; parts are 0..0"),
        (4, {"after": 4}, r"instruction 4 \(retire\): after 4; it must be an earlier instruction"),
        (5, {"after": -1}, r"instruction 5 \(signal\): after -1"),
        (6, {"stream": 6}, r"stream 6; streams are 0..5"),
    ],
)
def test_fields_out_of_range(index, fields, message):
    with pytest.raises(InputError, match=message):
        prepare(small_problem(), schedule_with(index, **fields))


def test_shapes_of_the_schedule():
    problem, schedule = small_problem(), schedule_with()
    with pytest.raises(InputError, match="1 lists; give one per device"):
        prepare(problem, type(schedule)(schedule.lists[:1], schedule.initial))
    with pytest.raises(InputError, match=r"schedule\.initial"):
        prepare(problem, type(schedule)(schedule.lists, ()))
    with pytest.raises(InputError, match="a placement names"):
        prepare(problem, type(schedule)(schedule.lists, ((Placement(5, (0,)),), ())))
    with pytest.raises(InputError, match="ListBuilder"):
        prepare(problem, type(schedule)((np.zeros(3), schedule.lists[1]), schedule.initial))
    with pytest.raises(InputError, match="steps: 0"):
        simulate(problem, schedule, steps=0)


def test_an_event_has_one_signal():
    twice = valid_list()
    twice.signal(0, 2)
    other = ListBuilder()
    other.collective(1, 0)
    with pytest.raises(InputError, match="event 0 is also signalled by instruction 5 of list 0"):
        prepare(small_problem(), schedule_of(twice, other))


def test_a_wait_for_nothing_is_a_deadlock():
    builder = ListBuilder()
    builder.wait(3, 0)
    builder.compute(0, 0)
    result = simulate(small_problem(), schedule_of(builder, ListBuilder()))
    assert result.deadlocked == ((0, 0),)
    assert np.isnan(result.end_s[0]).all()
    assert "deadlocked" in repr(result)


def test_a_device_outside_the_collective():
    sync = Collective("sync", CollectiveKind.ALL_REDUCE, 10, (0, 1))
    program = ([tensor("x", 1)], [op("s", 0.0, step_op=True, collective="sync")])
    problem = problem_of(box(3), [program], collectives=[sync], device_program=[0, 0, 0])
    builder = ListBuilder()
    builder.collective(0, 0)
    with pytest.raises(InputError, match="device 2 is not in collective 'sync'"):
        prepare(problem, schedule_of(builder, builder, builder))


def order(*sequence):
    policies = [LinkPolicy()] * 6
    policies[4] = LinkPolicy(LinkPolicyKind.ORDER, sequence=sequence)
    return policies


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ([LinkPolicy()], "link_policies: 1 given for 6 links"),
        ([LinkPolicy(LinkPolicyKind.FCFS, slots=0)] * 6, r"link_policies\[0\] \(out0\): slots 0"),
        ([LinkPolicy(LinkPolicyKind.PRIORITY, device_rank=(2,))] * 6, "device_rank names device 2 of 2"),
        (order(), r"link_policies\[4\] \(up\): transfer \(0, 1\) is missing"),
        (order((0, 1), (0, 0)), r"transfer \(0, 0\) does not use the link"),
        (order((0, 1), (0, 1)), "names a transfer twice"),
        (order((0, 1), (0, 99)), r"sequence names \(0, 99\), which is no instruction"),
        (order((0, 1), (3, 0)), r"sequence names \(3, 0\)"),
    ],
)
def test_policies(policies, message):
    with pytest.raises(InputError, match=message):
        simulate(small_problem(), schedule_with(), link_policies=policies)


def test_scales():
    prepared = prepare(small_problem(), schedule_with())
    for arguments, message in (
        ({"link_scale": [1.0]}, "link_scale: shape"),
        ({"link_scale": [0.0] * 6}, "positive and finite"),
        ({"op_scale": [None]}, "op_scale: 1 entries"),
        ({"op_scale": [[1.0], None]}, r"op_scale\[0\]: shape"),
        ({"op_scale": [[-1.0] * 8, None]}, "not negative"),
    ):
        with pytest.raises(InputError, match=message):
            prepared.run(**arguments)
    with pytest.raises(InputError, match="at least one argument"):
        prepared.run_batch()
    with pytest.raises(InputError, match="the same size"):
        prepared.run_batch(link_scale=np.ones((2, 6)), op_scale=[np.ones((3, 8)), None])
