"""Streams, hazards, memory, signals: times that follow from docs/semantics.md by hand.

Lanes and uplinks move 10 bytes/s unless said otherwise.
"""

from __future__ import annotations

import numpy as np
import pytest
from building import HOST, box, offloading, one_op, op, problem_of, schedule_of, tensor

from tmojax.problem import (
    ListBuilder,
    Overheads,
)
from tmojax.simulate import simulate


def test_one_op_takes_its_duration_and_launch():
    problem = one_op(box(1, overheads=Overheads(launch_s=0.5)))
    builder = ListBuilder()
    builder.compute(0, 0)
    result = simulate(problem, schedule_of(builder))
    assert result.step_s == 1.5
    assert result.events == 1
    assert result.compute_busy_s == [1.5]
    assert result.stall_s == [0.0]


def test_offload_overlaps_compute():
    result = simulate(one_op(box(1)), schedule_of(offloading(0)), record=True)
    assert result.start_s[0].tolist() == [0, 1, 1]
    assert result.end_s[0].tolist() == [1, 11, 3]
    assert result.transfer_start_s[0][1] == 1
    assert result.step_s == 11
    assert result.moved_bytes.tolist() == [100, 0, 100, 0]
    assert result.busy_s.tolist() == [10, 0, 10, 0]
    times, rates = result.segments[2]
    assert times.tolist() == [1, 11]
    assert rates.tolist() == [10, 0]


def test_shared_uplink_is_split_fairly_and_a_slow_lane_leaves_the_rest_to_others():
    result = simulate(one_op(box(2)), schedule_of(offloading(0), offloading(1)))
    assert result.step_s == 21  # two of 100 bytes at 5 bytes/s each
    machine = box(2)
    links = list(machine.links)
    links[0] = type(links[0])("out0", 2.0)
    machine = type(machine)(**{**machine.__dict__, "links": tuple(links)})
    result = simulate(one_op(machine), schedule_of(offloading(0), offloading(1)))
    assert result.end_s[1][1] == pytest.approx(1 + 100 / 8)
    assert result.end_s[0][1] == pytest.approx(1 + 100 / 2)


def test_duplex_limit_is_one_more_link():
    tensors = [tensor("in", 100), tensor("x", 100)]
    problem = problem_of(box(1, duplex=10.0), [(tensors, [op("f", 1.0, writes=[1])])])
    builder = ListBuilder()
    builder.compute(0, 0)
    builder.prefetch(0, 0, HOST, 1)
    builder.offload(1, 0, 1, HOST)
    result = simulate(problem, schedule_of(builder))
    # 0..1: the prefetch alone, 10 bytes; then both share 10 bytes/s; it ends at 1 + 90/5, the other's last 10 after it.
    assert result.end_s[0].tolist() == [1, 19, 20]


def test_setup_holds_the_engine_and_no_link_and_latency_delays_the_first_byte():
    tensors = [tensor("a", 10), tensor("b", 10)]
    machine = box(1, latency_s=0.25, overheads=Overheads(transfer_setup_s=0.5))
    problem = problem_of(machine, [(tensors, [op("f", 0.0, reads=[0, 1])])])
    builder = ListBuilder()
    builder.prefetch(0, 0, HOST, 1)
    builder.prefetch(1, 0, HOST, 1)
    builder.compute(0, 0)
    result = simulate(problem, schedule_of(builder))
    assert result.start_s[0].tolist() == [0, 1.75, 3.5]
    assert result.transfer_start_s[0][:2].tolist() == [0.75, 2.5]
    assert result.end_s[0].tolist() == [1.75, 3.5, 3.5]
    assert result.busy_s[1] == 2


def two_outputs(workspace_bytes=0):
    """f writes x, g writes y; both 100 bytes."""
    tensors = [tensor("x", 100), tensor("y", 100)]
    return problem_of(
        box(1), [(tensors, [op("f", 1.0, writes=[0]), op("g", 1.0, writes=[1], workspace_bytes=workspace_bytes)])]
    )


def test_an_allocation_waits_for_every_release_before_it():
    for released_first, expected in ((True, 12), (False, 11)):
        builder = ListBuilder()
        builder.compute(0, 0)
        builder.offload(0, 0, 1, HOST)
        if released_first:
            builder.release(0, 0, 1)
        last = builder.compute(1, 0)
        if not released_first:
            builder.release(0, 0, 1)
        result = simulate(two_outputs(), schedule_of(builder))
        assert result.step_s == expected
        assert result.start_s[0][last] == (11 if released_first else 1)


def test_an_op_that_allocates_nothing_is_not_held_back():
    builder = offloading(0)
    rows = builder.build()
    builder = ListBuilder()
    builder.compute(0, 0)
    builder.offload(0, 0, 1, HOST)
    builder.release(0, 0, 1)
    builder.compute(1, 0)  # g of one_op: no outputs, no workspace
    result = simulate(one_op(box(1)), schedule_of(builder))
    assert result.end_s[0].tolist() == [1, 11, 11, 3]
    assert np.isnan(result.start_s[0][2])
    assert len(rows) == 3


def test_workspace_is_freed_at_retire():
    """The prefetch may overlap g only if it stands before the retire of g's workspace."""
    tensors = [tensor("in", 10), tensor("y", 1)]
    problem = problem_of(box(1), [(tensors, [op("g", 3.0, writes=[1], workspace_bytes=5)])])
    builder = ListBuilder()
    op_index = builder.compute(0, 0)
    builder.prefetch(0, 0, HOST, 1)
    builder.retire(op_index)
    assert simulate(problem, schedule_of(builder)).step_s == 3
    builder = ListBuilder()
    builder.compute(0, 0)
    builder.prefetch(0, 0, HOST, 1)
    assert simulate(problem, schedule_of(builder)).step_s == 4


def test_recomputation_writes_what_is_gone_and_leaves_what_is_there():
    tensors = [tensor("x", 100), tensor("y", 100), tensor("z", 1)]
    ops = [op("f", 1.0, writes=[0, 1]), op("g", 1.0, reads=[0], writes=[2])]
    problem = problem_of(box(1), [(tensors, ops)])
    builder = ListBuilder()
    builder.compute(0, 0)
    builder.offload(1, 0, 1, HOST)  # reads y until 11
    builder.release(0, 0, 1)  # x is free at 1
    builder.compute(0, 0)  # writes x again; y goes to scratch, so the copy of y is not waited for
    builder.compute(1, 0)
    result = simulate(problem, schedule_of(builder))
    assert result.end_s[0].tolist() == [1, 11, 1, 2, 3]


def test_scratch_of_a_recomputation_is_an_allocation_too():
    """f runs again while its output is there: nothing is written, but the scratch waits for the release before it."""
    tensors = [tensor("x", 100), tensor("y", 100)]
    problem = problem_of(box(1), [(tensors, [op("f", 1.0, writes=[0]), op("g", 1.0, writes=[1])])])
    builder = ListBuilder()
    builder.compute(0, 0)
    builder.compute(1, 0)
    builder.offload(1, 0, 1, HOST)
    builder.compute(0, 0)
    assert simulate(problem, schedule_of(builder)).end_s[0].tolist() == [1, 2, 12, 3]
    builder = ListBuilder()
    builder.compute(0, 0)
    builder.compute(1, 0)
    builder.offload(1, 0, 1, HOST)
    builder.release(1, 0, 1)
    builder.compute(0, 0)
    assert simulate(problem, schedule_of(builder)).end_s[0].tolist() == [1, 2, 12, 12, 13]


def test_a_transfer_that_waits_for_one_engine_keeps_its_place_at_the_other():
    """Device 2 fetches 40 bytes from the host until 4. Device 0 wants to send to device 2 from 1 on and queues for its
    in-engine; device 1 wants to fetch from device 0 from 2 on, needs that one's out-engine, and is behind it.
    """
    machine = box(3, uplink=100.0)
    programs = [
        ([tensor("x", 10)], [op("f", 1.0, writes=[0])]),
        ([tensor("x", 10)], [op("f", 2.0, writes=[0])]),
        ([tensor("x", 40)], [op("f", 1.0, reads=[0])]),
    ]
    sender, fetcher, busy = ListBuilder(), ListBuilder(), ListBuilder()
    sender.compute(0, 0)
    sender.offload(0, 0, 1, 3)
    fetcher.signal(0, fetcher.compute(0, 0))
    fetcher.wait(0, 2)  # engine 0, so that the fetch is ready at 2
    fetcher.prefetch(0, 0, 1, 2, owner=0)
    busy.prefetch(0, 0, HOST, 3)
    result = simulate(problem_of(machine, programs), schedule_of(sender, fetcher, busy))
    assert result.start_s[0][1] == 4
    assert result.start_s[1][3] == 5


def test_engines_are_first_in_first_out_in_list_order():
    tensors = [tensor("x", 100), tensor("y", 10)]
    problem = problem_of(box(1), [(tensors, [op("f", 4.0, writes=[0]), op("g", 0.0, reads=[1])])])
    builder = ListBuilder()
    builder.prefetch(1, 0, HOST, 1)
    builder.compute(0, 0)
    builder.offload(0, 0, 1, HOST)
    builder.offload(1, 0, 1, HOST)  # its data is ready at 1, but it stands behind the other
    builder.compute(1, 0)
    result = simulate(problem, schedule_of(builder))
    assert result.start_s[0][2:4].tolist() == [4, 14]


def test_an_engine_of_several_lists_serves_who_was_ready_first():
    """Both devices send to device 2; its in-engine takes the one that was ready first, then the other."""
    programs = [([tensor("x", 10)], [op("f", d, writes=[0])]) for d in (2.0, 1.0, 9.0)]
    builders = []
    for device in range(2):
        builder = ListBuilder()
        builder.compute(0, 0)
        builder.offload(0, 0, 1 + device, 3)
        builders.append(builder)
    builders.append(ListBuilder())
    result = simulate(problem_of(box(3), programs), schedule_of(*builders))
    assert result.end_s[1].tolist() == [1, 2]
    assert result.end_s[0].tolist() == [2, 3]
    same = [([tensor("x", 10)], [op("f", 1.0, writes=[0])])] * 3
    result = simulate(problem_of(box(3), same), schedule_of(*builders))
    assert result.end_s[0][1] == 2  # a tie goes to the lower device
    assert result.end_s[1][1] == 3


def test_wait_holds_back_its_stream_until_the_signal_has_been_handed_over():
    machine = box(2, overheads=Overheads(handover_s=0.25))
    problem = one_op(machine)
    first = ListBuilder()
    first.signal(7, first.compute(0, 0))
    second = ListBuilder()
    second.compute(1, 0)
    second.wait(7, 0)
    second.compute(0, 0)
    second.offload(0, 0, 2, HOST)
    result = simulate(problem, schedule_of(first, second))
    assert result.end_s[0].tolist() == [1, 1]
    assert result.end_s[1].tolist() == [2, 2, 3, 13]  # the signal was there at 1.25
    second = ListBuilder()
    second.wait(7, 0)
    second.compute(0, 0)
    result = simulate(problem, schedule_of(first, second))
    assert result.end_s[1].tolist() == [1.25, 2.25]
    assert result.stall_s.tolist() == [0, 1.25]


def test_a_signal_inside_one_list_takes_no_time():
    problem = one_op(box(1, overheads=Overheads(handover_s=0.25)))
    builder = ListBuilder()
    builder.compute(0, 0)
    builder.signal(0, builder.offload(0, 0, 1, HOST))
    builder.wait(0, 0)
    builder.compute(1, 0)
    assert simulate(problem, schedule_of(builder)).end_s[0].tolist() == [1, 11, 11, 11, 13]


def test_reclaim_waits_for_the_waits_behind_its_lend():
    programs = [([tensor("x", 100), tensor("y", 1)], [op("f", 1.0, writes=[0]), op("g", 1.0, writes=[1])])] * 2
    lender = ListBuilder()
    lender.lend(100, 1, 0)
    lender.wait(5, 1)
    lender.reclaim(0)
    lender.compute(1, 0)
    borrower = ListBuilder()
    borrower.compute(0, 0)
    borrower.offload(0, 0, 2, 1)
    borrower.signal(5, borrower.release(0, 0, 1))
    result = simulate(problem_of(box(2), programs), schedule_of(lender, borrower))
    assert result.end_s[0].tolist() == [0, 11, 11, 12]
