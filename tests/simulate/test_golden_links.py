"""Collectives, link policies, interference, codecs, slices, repeated steps: times that follow from docs/semantics.md.

Lanes and uplinks move 10 bytes/s unless said otherwise.
"""

from __future__ import annotations

import numpy as np
import pytest
from building import HOST, box, offloading, one_op, op, problem_of, schedule_of, tensor, uplink_policy

from tmojax.problem import (
    Codec,
    Collective,
    CollectiveKind,
    Interference,
    Lifetime,
    LinkPolicy,
    LinkPolicyKind,
    ListBuilder,
    Overheads,
    Placement,
)
from tmojax.simulate import simulate

FCFS = LinkPolicy(LinkPolicyKind.FCFS)


def collective_problem(machine, size_bytes, seconds=(1.0, 2.0)):
    sync = Collective("sync", CollectiveKind.ALL_REDUCE, size_bytes, (0, 1))
    programs = [
        (
            [tensor("g", 8)],
            [op("f", s, writes=[0]), op("sync", 0.0, reads=[0], step_op=True, collective="sync"), op("h", 1.0)],
        )
        for s in seconds
    ]
    return problem_of(machine, programs, collectives=[sync])


def with_collective():
    builder = ListBuilder()
    builder.compute(0, 0)
    builder.collective(1, 0)
    builder.compute(2, 0)
    return builder


def test_collective_starts_with_the_last_and_ends_everywhere():
    machine = box(2, overheads=Overheads(launch_s=0.5))
    result = simulate(collective_problem(machine, 100), schedule_of(with_collective(), with_collective()))
    # f ends at 1.5 and 2.5; launch; an all-reduce of two sends the payload once over each lane: 10 s.
    assert result.start_s[0][1] == result.start_s[1][1] == 2.5
    assert result.transfer_start_s[0][1] == 3
    assert result.end_s[0][1] == result.end_s[1][1] == 13
    assert result.end_s[0][2] == 3  # h does not read what was reduced
    assert result.moved_bytes.tolist() == [100, 100, 100, 100, 0, 0]


def test_collective_shares_links_by_its_largest_load():
    """Ring over a route whose uplink is crossed twice: load 2 there, 1 on lanes; it counts as one on the uplink."""
    machine = box(2, peers=False)
    routes = list(machine.routes)
    route = type(routes[0])
    routes += [route(1, 2, (0, 4, 3), (0, 3)), route(2, 1, (2, 4, 1), (2, 1))]
    machine = type(machine)(**{**machine.__dict__, "routes": tuple(routes)})
    problem = collective_problem(machine, 100, (0.0, 0.0))
    builder = with_collective()
    result = simulate(problem, schedule_of(builder, builder), record=True)
    assert result.end_s[0][1] == 20  # 200 bytes on the uplink
    assert result.moved_bytes[4] == 200
    offloading_too = ListBuilder()
    offloading_too.compute(0, 0)
    offloading_too.collective(1, 0)
    offloading_too.offload(0, 0, 1, HOST)
    result = simulate(problem, schedule_of(offloading_too, with_collective()), record=True)
    assert result.end_s[0][2] == pytest.approx(8 / 5)  # half of the uplink each
    assert result.end_s[0][1] == pytest.approx(1.6 + (200 - 8) / 10)


def test_a_collective_that_not_all_enter_is_a_deadlock():
    alone = ListBuilder()
    alone.compute(0, 0)
    result = simulate(collective_problem(box(2), 100), schedule_of(with_collective(), alone))
    assert result.step_s == float("inf")
    assert result.deadlocked == ((0, 1),)


# --- policies ------------------------------------------------------------------------------------------------------


def three_offloads(seconds=(1.0, 1.0, 1.0), size_bytes=100, lane=10.0):
    machine = box(3, lane=lane)
    programs = [([tensor("x", size_bytes)], [op("f", s, writes=[0]), op("g", 2.0)]) for s in seconds]
    return problem_of(machine, programs), schedule_of(*(offloading(d) for d in range(3)))


def ends(problem, schedule, uplink):
    result = simulate(problem, schedule, link_policies=uplink_policy(problem.machine, uplink))
    return [float(end_s[1]) for end_s in result.end_s]


def test_fcfs_serves_by_request_then_device():
    problem, schedule = three_offloads()
    assert ends(problem, schedule, LinkPolicy()) == pytest.approx([31, 31, 31])
    assert ends(problem, schedule, FCFS) == [11, 21, 31]
    problem, schedule = three_offloads((3.0, 2.0, 1.0))
    assert ends(problem, schedule, FCFS) == [31, 21, 11]


def test_slots_let_several_run_at_once():
    problem, schedule = three_offloads(lane=5.0)
    assert ends(problem, schedule, FCFS) == [21, 41, 61]  # a lane fills half of the uplink
    assert ends(problem, schedule, LinkPolicy(LinkPolicyKind.FCFS, slots=2)) == [21, 21, 41]


def test_priority_serves_by_rank_and_does_not_preempt():
    problem, schedule = three_offloads((1.0, 2.0, 2.0))
    assert ends(problem, schedule, LinkPolicy(LinkPolicyKind.PRIORITY, device_rank=(2, 1, 0))) == [11, 31, 21]
    problem, schedule = three_offloads()
    assert ends(problem, schedule, LinkPolicy(LinkPolicyKind.PRIORITY, device_rank=(2,))) == [21, 31, 11]


def test_order_keeps_the_link_idle_for_the_next_in_the_sequence():
    problem, schedule = three_offloads((1.0, 3.0, 2.0))
    order = LinkPolicy(LinkPolicyKind.ORDER, sequence=((1, 1), (0, 1), (2, 1)))
    assert ends(problem, schedule, order) == [23, 13, 33]
    # two slots: the second starts with the first, at half speed; both end at 23, and the third has the link to itself
    assert ends(problem, schedule, LinkPolicy(LinkPolicyKind.ORDER, 2, sequence=order.sequence)) == [23, 23, 33]


def test_an_order_against_the_lists_is_a_deadlock():
    tensors = [tensor("a", 10), tensor("b", 10)]
    problem = problem_of(box(1), [(tensors, [op("f", 0.0, reads=[0, 1])])])
    builder = ListBuilder()
    builder.prefetch(0, 0, HOST, 1)
    builder.prefetch(1, 0, HOST, 1)
    builder.compute(0, 0)
    order = LinkPolicy(LinkPolicyKind.ORDER, sequence=((0, 1), (0, 0)))
    result = simulate(problem, schedule_of(builder), link_policies=(LinkPolicy(), LinkPolicy(), LinkPolicy(), order))
    assert result.deadlocked == ((0, 0),)


def test_policies_of_the_schedule_are_the_default():
    problem, schedule = three_offloads()
    schedule = schedule_of(*(offloading(d) for d in range(3)), link_policies=uplink_policy(problem.machine, FCFS))
    assert [float(e[1]) for e in simulate(problem, schedule).end_s] == [11, 21, 31]
    assert [float(e[1]) for e in simulate(problem, schedule, link_policies=()).end_s] == pytest.approx([31] * 3)


# --- interference, codecs, slices, steps ---------------------------------------------------------------------------


def test_copies_slow_compute_and_compute_slows_copies():
    """x leaves at 1, at 10/2 bytes/s while g computes. g (2 s of work) runs at 1/4 speed while it leaves: until 9."""
    machine = box(1, interference=Interference(compute_during_copy_out=4.0, copy_during_compute=2.0))
    result = simulate(one_op(machine, size_bytes=100), schedule_of(offloading(0)))
    assert result.end_s[0][2] == 9
    assert result.end_s[0][1] == 9 + 60 / 10  # 40 bytes in 8 s, the rest at full speed
    result = simulate(one_op(machine, size_bytes=20), schedule_of(offloading(0)))
    assert result.end_s[0][1] == 5  # 20 bytes at 5 bytes/s
    assert result.end_s[0][2] == 6  # 1 s of work done by then, the other at full speed


def test_setup_slows_compute_too_but_waiting_for_a_link_does_not():
    machine = box(2, overheads=Overheads(transfer_setup_s=2.0), interference=Interference(compute_during_copy_out=2.0))
    problem = one_op(machine)
    chosen = uplink_policy(machine, FCFS)
    result = simulate(problem, schedule_of(offloading(0), offloading(1)), link_policies=chosen)
    # set-up from 1 to 3: 1 s of g's work; device 0 then moves bytes until 13; device 1 waits.
    assert result.end_s[0][2] == 5
    assert result.end_s[1][2] == 4


def test_a_collective_and_compute_slow_each_other():
    machine = box(2, interference=Interference(compute_during_collective=2.0, collective_during_compute=2.0))
    result = simulate(collective_problem(machine, 100, (0.0, 0.0)), schedule_of(with_collective(), with_collective()))
    assert result.end_s[0][2] == 2  # h takes 1 s alone
    assert result.end_s[0][1] == 2 + (100 - 10) / 10


def test_encoding_takes_compute_time_and_shrinks_the_copy():
    codec = Codec("half", 1, 2, 50.0, 100.0)
    problem = one_op(box(1, codecs=(codec,), overheads=Overheads(launch_s=0.5)))
    builder = ListBuilder()
    builder.compute(0, 0)
    builder.encode(0, 0, 1, 0)
    builder.offload(0, 0, 1, HOST, form=0)
    builder.release(0, 0, 1)
    builder.prefetch(0, 0, HOST, 1, form=0)
    builder.decode(0, 0, 1, 0)
    result = simulate(problem, schedule_of(builder))
    # f 1.5; encode 100/50 + 0.5; 50 bytes out; the same encoded copy is overwritten; decode 100/100 + 0.5
    assert result.end_s[0].tolist() == [1.5, 4, 9, 4, 14, 15.5]


def test_slices_are_read_from_the_whole_and_the_whole_from_its_slices():
    problem = one_op(box(1), size_bytes=101)
    builder = ListBuilder()
    builder.compute(0, 0)
    for part in range(2):
        builder.offload(0, 0, 1, HOST, part=part, parts=2)
    builder.release(0, 0, 1)
    builder.prefetch(0, 0, HOST, 1)
    result = simulate(problem, schedule_of(builder))
    assert result.end_s[0] == pytest.approx([1, 6, 11.1, 11.1, 21.2])


def test_steps_continue_across_the_seam_without_a_barrier():
    """f (1 s) updates a weight and its activation leaves (10 s): the next step computes, but its offload queues."""
    tensors = [tensor("x", 100), tensor("w", 8, Lifetime.STATE)]
    problem = problem_of(box(1), [(tensors, [op("f", 1.0, writes=[0]), op("u", 1.0, updates=[1])])])
    builder = ListBuilder()
    builder.compute(0, 0)
    builder.offload(0, 0, 1, HOST)
    builder.compute(1, 0)
    schedule = schedule_of(builder, initial=((Placement(1, (1,)),),))
    result = simulate(problem, schedule, steps=3)
    assert result.end_s[0].tolist() == [1, 11, 2, 3, 21, 4, 5, 31, 6]
    assert result.step_ends_s.tolist() == [11, 21, 31]
    assert result.step_s == 10
    builder.release(0, 0, 1)  # now the next step's activation has to wait for the memory
    result = simulate(problem, schedule_of(builder, initial=((Placement(1, (1,)),),)), steps=2)
    assert result.start_s[0][4] == 11


def test_state_carries_its_hazards_across_the_seam():
    """A weight that leaves at the end of a step is updated in the next only after it has left."""
    tensors = [tensor("w", 100, Lifetime.STATE)]
    problem = problem_of(box(1), [(tensors, [op("u", 1.0, updates=[0])])])
    builder = ListBuilder()
    builder.compute(0, 0)
    builder.offload(0, 0, 1, HOST)
    result = simulate(problem, schedule_of(builder, initial=((Placement(0, (1, HOST)),),)), steps=2)
    assert result.end_s[0].tolist() == [1, 11, 12, 22]


def test_aliases_share_their_hazards():
    tensors = [tensor("x", 100, alias_group="s"), tensor("view", 100, alias_group="s"), tensor("y", 1)]
    ops = [op("f", 1.0, writes=[0]), op("v", 1.0, reads=[0], writes=[1])]
    builder = ListBuilder()
    builder.compute(0, 0)
    builder.offload(0, 0, 1, HOST)
    builder.compute(1, 0)  # writes the storage that the offload reads
    assert simulate(problem_of(box(1), [(tensors, ops)]), schedule_of(builder)).end_s[0].tolist() == [1, 11, 12]


def test_an_empty_schedule_takes_no_time():
    result = simulate(one_op(box(2)), schedule_of(ListBuilder(), ListBuilder()))
    assert result.step_s == 0
    assert result.deadlocked == ()
    assert result.moved_bytes.dtype == np.int64


def test_closed_form_of_lock_step_on_a_shared_uplink():
    """n equal GPUs, c bytes each, uplink B: fair and fcfs end at the same time, t + n c / B."""
    for count in (2, 3, 5, 8):
        problem = one_op(box(count), size_bytes=90)
        schedule = schedule_of(*(offloading(d) for d in range(count)))
        fair = simulate(problem, schedule).step_s
        fcfs = simulate(problem, schedule, link_policies=uplink_policy(problem.machine, FCFS)).step_s
        assert fair == pytest.approx(1 + count * 9)
        assert fcfs == pytest.approx(1 + count * 9)
