"""Orders between lists, streams and links that can or cannot be followed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_text import Plan
from small_plans import SWAP
from two_gpu_plans import PARKED, REDUCE, STAGED

from tmojax.check import Rule, check
from tmojax.problem import LinkPolicy, LinkPolicyKind

FAIR = LinkPolicy()


def sequenced(plan: Plan, link: int, *transfers: tuple[int, str], slots: int = 1) -> Plan:
    """The plan with an explicit order of the transfers on one of the links up, down, peer."""
    sequence = tuple((device, plan.place(device, line)) for device, line in transfers)
    policy = LinkPolicy(LinkPolicyKind.ORDER, slots=slots, sequence=sequence)
    return replace(plan, link_policies=tuple(policy if i == link else FAIR for i in range(3)))


UP, DOWN, PEER = range(3)
SWAP_UP = ((0, "offload a gpu0 host"), (0, "offload w gpu0 host"))
STAGED_DOWN = ((0, "prefetch x host gpu0"), (0, "prefetch a host gpu0"), (1, "prefetch x host gpu1"))

PARKED_ORDER = (
    (0, "offload a gpu0 gpu1"),
    (1, "offload a gpu1 gpu0"),
    (0, "prefetch a gpu1 gpu0"),
    (1, "prefetch a gpu0 gpu1"),
)

VALID_ORDERS = {
    "in list order": sequenced(SWAP, UP, *SWAP_UP),
    "two at a time": sequenced(SWAP, UP, *SWAP_UP, slots=2),
    "across lists": sequenced(STAGED, DOWN, *STAGED_DOWN),
    "other list first": sequenced(STAGED, DOWN, STAGED_DOWN[2], *STAGED_DOWN[:2]),
    "staged": STAGED,
    "parked": PARKED,
}

DEADLOCKS = {
    "wait for a signal of the same stream": STAGED.replace("wait 2 comm", "go: wait 1 comm", device=1),
    "two lists wait for each other": STAGED.move("wait 1 out0", before="compute f1").replace(
        "wait 1 out0", "wait 1 compute"
    ),
    "engine order": STAGED.move("signal 2 early", before="compute back").replace(
        "signal 2 early", "late: offload b gpu0 host", "signal 2 late", "release b host"
    ),
    # `back` allocates behind the release of `a`, which waits for the offload, which waits for the signal after `back`.
    "allocation behind a release": STAGED.replace("signal 2 early")
    .after("compute back", "signal 2 last")
    .replace("compute back", "last: compute back"),
    "collectives in other orders": replace(
        REDUCE,
        lines=(
            REDUCE.lines[0],
            tuple(
                {"collective sum": "collective wsum", "collective wsum": "collective sum"}.get(x, x)
                for x in REDUCE.lines[1]
            ),
        ),
    ),
    "link order against list order": sequenced(SWAP, UP, *SWAP_UP[::-1]),
    "link order against list order, two at a time": sequenced(SWAP, UP, *SWAP_UP[::-1], slots=2),
    "link order against a signal": sequenced(
        STAGED.replace("prefetch x host gpu1", "wait 3 in1", "prefetch x host gpu1", device=1).replace(
            "release x gpu0", "later: release x gpu0", "signal 3 later"
        ),
        DOWN,
        STAGED_DOWN[2],
        *STAGED_DOWN[:2],
    ),
    "an engine that another list holds": sequenced(PARKED, PEER, *PARKED_ORDER),
}

SWAP_PREFETCH = (0, "prefetch a host gpu0")
LINK_RULES = {
    "order lacks a transfer": sequenced(SWAP, UP, SWAP_UP[0]),
    "order names a transfer twice": sequenced(SWAP, UP, *SWAP_UP, SWAP_UP[1]),
    "order names a transfer of another link": sequenced(SWAP, UP, *SWAP_UP, SWAP_PREFETCH),
    "order names no transfer": sequenced(SWAP, UP, *SWAP_UP, (0, "compute back")),
}


@pytest.mark.parametrize("name", VALID_ORDERS)
def test_orders_that_can_be_followed_are_valid(name):
    plan = VALID_ORDERS[name]
    report = check(plan.problem, plan.schedule())
    assert report.valid, report.text()


@pytest.mark.parametrize("name", DEADLOCKS)
def test_circles_are_found(name):
    plan = DEADLOCKS[name]
    report = check(plan.problem, plan.schedule())
    found = [violation for violation in report.violations if violation.rule is Rule.DEADLOCK]
    assert found, report.text()
    assert all("#" in violation.message for violation in found)


@pytest.mark.parametrize("name", LINK_RULES)
def test_incomplete_link_orders_are_found(name):
    plan = LINK_RULES[name]
    report = check(plan.problem, plan.schedule())
    assert {violation.rule for violation in report.violations} == {Rule.LINK_ORDER}, report.text()
