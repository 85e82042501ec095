"""Copies that one list makes and another reads."""

from __future__ import annotations

from plan_text import Plan, lines
from small_plans import layer
from two_gpu_plans import SECOND

from tmojax.check import Rule, check

# gpu1 reads the host copy of `a` that gpu0 made; gpu0 fetches it back, and frees it, only after that.
VISIT = Plan(
    layer(gpus=2),
    (
        lines("""
        prefetch x host gpu0
        compute f1
        release x gpu0
        compute f2
        out: offload a gpu0 host
        signal 1 out
        release a gpu0
        wait 2 in0
        prefetch a host gpu0
        release a host
        compute back
        release a gpu0
        release b gpu0
        compute step
        release g gpu0
        """),
        (
            *lines("""
            wait 1 in1
            prefetch a host gpu1 owner=gpu0
            read: encode a gpu1 half owner=gpu0
            signal 2 read
            release a gpu1 owner=gpu0
            release a gpu1 owner=gpu0 form=half
            """),
            *SECOND,
        ),
    ),
    ({"w": ("gpu0",)}, {"w": ("gpu1",)}),
)


def found(plan: Plan) -> list[tuple[str, int, int]]:
    report = check(plan.problem, plan.schedule())
    assert not report.notes
    return [(v.rule, v.device, v.instruction) for v in report.violations]


def test_a_visit_in_order_is_valid():
    assert found(VISIT) == []


def test_a_read_must_wait_for_the_writing():
    plan = VISIT.replace("wait 1 in1", device=1)
    assert found(plan) == [(Rule.USE_BEFORE_ARRIVAL, 1, plan.place(1, "prefetch a host gpu1 owner=gpu0"))]


def test_a_signal_of_something_earlier_is_not_enough():
    plan = VISIT.replace("out: offload a gpu0 host", "offload a gpu0 host").replace("compute f2", "out: compute f2")
    assert found(plan) == [(Rule.USE_BEFORE_ARRIVAL, 1, plan.place(1, "prefetch a host gpu1 owner=gpu0"))]


def test_a_release_must_wait_for_readers():
    plan = VISIT.replace("wait 2 in0")
    assert found(plan) == [(Rule.CROSS_LIST_RACE, 0, plan.place(0, "release a host"))]


def test_a_wait_on_a_stream_that_the_release_does_not_follow_is_not_enough():
    plan = VISIT.replace("wait 2 in0", "wait 2 out0")
    assert found(plan) == [(Rule.CROSS_LIST_RACE, 0, plan.place(0, "release a host"))]


def test_a_copy_that_was_released_is_not_there():
    plan = VISIT.replace("signal 1 out").replace("release a host", "gone: release a host", "signal 1 gone")
    plan = plan.replace("wait 2 in0").replace("signal 2 read", device=1)
    assert found(plan) == [(Rule.DATA_NOT_THERE, 1, plan.place(1, "prefetch a host gpu1 owner=gpu0"))]


def test_a_copy_that_nobody_makes_is_not_there():
    plan = VISIT.replace("prefetch a host gpu1 owner=gpu0", "prefetch b host gpu1 owner=gpu0", device=1)
    rules = found(plan)
    assert (Rule.DATA_NOT_THERE, 1, plan.place(1, "prefetch b host gpu1 owner=gpu0")) in rules


def test_two_lists_may_not_make_the_same_copy():
    plan = VISIT.after("prefetch a host gpu1 owner=gpu0", "offload a gpu1 host owner=gpu0", device=1)
    plan = plan.after("offload a gpu1 host owner=gpu0", "release a host owner=gpu0", device=1)
    assert {rule for rule, _, _ in found(plan)} == {Rule.WRITE_FOREIGN}


def test_a_copy_kept_through_an_update_is_stale():
    plan = VISIT.replace("prefetch a host gpu1 owner=gpu0", "prefetch w host gpu1 owner=gpu0", device=1)
    plan = plan.replace("read: encode a gpu1 half owner=gpu0", "read: encode w gpu1 half owner=gpu0", device=1)
    plan = plan.replace("release a gpu1 owner=gpu0", "release w gpu1 owner=gpu0", device=1)
    plan = plan.replace("release a gpu1 owner=gpu0 form=half", "release w gpu1 owner=gpu0 form=half", device=1)
    plan = Plan(plan.problem, plan.lines, ({"w": ("gpu0", "host")}, {"w": ("gpu1",)}))
    late = plan.after("compute step", "offload w gpu0 host")
    # The copy is fetched in time, but nothing says that it is encoded before the update.
    assert found(late.replace("wait 2 in0", "wait 2 compute")) == []
    soon = late.replace("read: encode w gpu1 half owner=gpu0", "encode w gpu1 half owner=gpu0", device=1)
    soon = soon.replace("prefetch w host gpu1 owner=gpu0", "read: prefetch w host gpu1 owner=gpu0", device=1)
    soon = soon.replace("wait 2 in0", "wait 2 compute")
    assert found(soon) == [(Rule.STALE_VERSION, 1, soon.place(1, "encode w gpu1 half owner=gpu0"))]
