"""Several loans at once, and partly returned ones."""

from __future__ import annotations

import pytest
from plan_text import Plan, lines
from small_plans import layer

from tmojax.check import Rule, check

# gpu1 lends 400 bytes for `a` and 300 for `b`, and takes them back one after the other.
TWO_LOANS = Plan(
    layer(gpus=2),
    (
        lines("""
        prefetch x host gpu0
        compute f1
        release x gpu0
        compute f2
        wait 1 out0
        offload a gpu0 gpu1
        release a gpu0
        wait 2 out0
        offload b gpu0 gpu1
        release b gpu0
        prefetch a gpu1 gpu0
        first: release a gpu1
        signal 3 first
        prefetch b gpu1 gpu0
        second: release b gpu1
        signal 4 second
        compute back
        release a gpu0
        release b gpu0
        compute step
        release g gpu0
        """),
        lines("""
        prefetch x host gpu1
        one: compute f1
        lend 400 gpu0 1
        signal 1 one
        offload x gpu1 host
        two: release x gpu1
        lend 300 gpu0 2
        signal 2 two
        compute f2
        wait 3 comm
        reclaim 1
        compute back
        release a gpu1
        release b gpu1
        wait 4 comm
        reclaim 2
        compute step
        release g gpu1
        """),
    ),
    ({"w": ("gpu0",)}, {"w": ("gpu1",)}),
)


def loan_violations(plan: Plan) -> list[tuple[int, int]]:
    report = check(plan.problem, plan.schedule())
    assert {v.rule for v in report.violations} <= {Rule.LOAN}, report.text()
    return [(v.instruction, v.bytes_over) for v in report.violations]


def test_both_loans_cover_what_they_were_made_for():
    assert loan_violations(TWO_LOANS) == []
    report = check(TWO_LOANS.problem, TWO_LOANS.schedule())
    # gpu1 at f2: w + a + b and both loans (x has gone); at back: one loan, g and workspace
    assert report.peak_bytes["gpu1"] == 1000 + 400 + 300 + 400 + 300


def test_the_second_is_needed():
    plan = TWO_LOANS.replace("lend 300 gpu0 2", "lend 299 gpu0 2", device=1)
    # when both copies are there, and again when only the second is and the first loan has gone
    assert loan_violations(plan) == [
        (plan.place(0, "offload b gpu0 gpu1"), 1),
        (plan.place(0, "release a gpu1"), 1),
    ]


def test_one_loan_may_serve_both_copies():
    plan = TWO_LOANS.replace("lend 400 gpu0 1", "lend 500 gpu0 1", device=1)
    plan = plan.replace("lend 300 gpu0 2", "lend 200 gpu0 2", device=1)
    # 700 together, but once the first is taken back 300 bytes are in use and only 200 still lent
    assert loan_violations(plan) == [(plan.place(0, "release a gpu1"), 100)]
    later = plan.replace("wait 3 comm", device=1).move("reclaim 1", before="compute step", device=1)
    assert loan_violations(later) == []


@pytest.mark.parametrize(("event", "copy", "size_bytes"), [(1, "a", 400), (2, "b", 300)])
def test_without_its_wait_a_copy_is_not_covered(event, copy, size_bytes):
    plan = TWO_LOANS.replace(f"wait {event} out0")
    assert (plan.place(0, f"offload {copy} gpu0 gpu1"), size_bytes) in loan_violations(plan)


def test_a_reclaim_must_wait_for_its_own_return():
    plan = TWO_LOANS.move("wait 4 comm", before="compute step", device=1)
    # reclaim 2 now waits for the first return only, while `b` is still there
    assert loan_violations(plan) == [(plan.place(0, "release a gpu1"), 300)]


def test_what_is_not_lent_is_reported():
    plan = TWO_LOANS.replace("lend 300 gpu0 2", device=1).replace("reclaim 2", device=1)
    assert (plan.place(0, "offload b gpu0 gpu1"), 300) in loan_violations(plan)


def test_a_retired_workspace_may_be_lent():
    plan = TWO_LOANS.replace("one: compute f1", "fetched: wait 9 compute", "f: compute f1", "one: retire f", device=1)
    plan = plan.replace("prefetch x host gpu1", "p: prefetch x host gpu1", "signal 9 p", device=1)
    assert loan_violations(plan) == []
    early = plan.replace("signal 1 one", "signal 1 p", device=1)
    assert (early.place(0, "offload a gpu0 gpu1"), 400) in loan_violations(early)
