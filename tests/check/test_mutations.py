"""Valid plans with one thing changed, and the rule that the change breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_text import Plan
from small_plans import ENCODED, KEEP, RECOMPUTE, SLICED, SWAP, TWO_BATCHES, with_memory
from two_gpu_plans import LOAN, READER, REDUCE, VALID

from tmojax.check import Rule, check


@pytest.mark.parametrize("name", VALID)
def test_the_plans_are_valid_as_they_stand(name):
    plan = VALID[name]
    report = check(plan.problem, plan.schedule())
    assert report.valid and not report.notes, report.text()


def starting(plan: Plan, *initial: dict[str, tuple[str, ...]]) -> Plan:
    return replace(plan, initial=initial)


def without_peer_routes(plan: Plan) -> Plan:
    box = plan.problem.machine
    box = replace(box, routes=tuple(route for route in box.routes if 0 in (route.source, route.destination)))
    return replace(plan, problem=replace(plan.problem, machine=box))


def not_recomputable(plan: Plan, op: str) -> Plan:
    workload = plan.problem.workload
    program = workload.programs[0]
    ops = tuple(replace(spec, recomputable=spec.recomputable and spec.name != op) for spec in program.ops)
    workload = replace(workload, programs=(replace(program, ops=ops),))
    return replace(plan, problem=replace(plan.problem, workload=workload))


OP_RULES = {
    "op deleted": (KEEP.replace("compute step"), Rule.MISSING_OP),
    "op deleted before another": (KEEP.replace("compute f2"), Rule.OP_ORDER),
    "ops swapped": (KEEP.move("compute f2", before="compute f1"), Rule.OP_ORDER),
    "micro-batch too early": (TWO_BATCHES.move("compute f1.1", before="compute back.0"), Rule.OP_ORDER),
    "update runs twice": (KEEP.after("compute step", "compute step"), Rule.RECOMPUTE_IN_PLACE),
    "recomputation not allowed": (not_recomputable(RECOMPUTE, "f1"), Rule.RECOMPUTE_IN_PLACE),
    "recomputed on new weights": (
        RECOMPUTE.replace("release x gpu0").after("compute step", "compute f1", "release x gpu0", "release a gpu0"),
        Rule.RECOMPUTE_VERSION,
    ),
}

DATA_RULES = {
    "input not fetched": (KEEP.replace("prefetch x host gpu0"), Rule.DATA_NOT_THERE),
    "weight starts elsewhere": (starting(KEEP, {"w": ("host",)}), Rule.DATA_NOT_THERE),
    "offload deleted": (SWAP.replace("offload a gpu0 host"), Rule.DATA_NOT_THERE),
    "prefetch deleted": (SWAP.replace("prefetch a host gpu0"), Rule.DATA_NOT_THERE),
    "offload before the tensor exists": (SWAP.move("offload a gpu0 host", before="compute f1"), Rule.DATA_NOT_THERE),
    "prefetch before the offload": (
        SWAP.move("prefetch a host gpu0", before="offload a gpu0 host"),
        Rule.DATA_NOT_THERE,
    ),
    "recomputation deleted": (RECOMPUTE.replace("again: compute f1"), Rule.DATA_NOT_THERE),
    "input of a recomputation gone": (RECOMPUTE.move("release x gpu0", before="compute f2"), Rule.DATA_NOT_THERE),
    "wrong micro-batch": (TWO_BATCHES.replace("prefetch x.1 host gpu0", "prefetch x.0 host gpu0"), Rule.DATA_NOT_THERE),
    "last micro-batch gone before the step op": (
        TWO_BATCHES.move("release g.1 gpu0", before="compute step"),
        Rule.DATA_NOT_THERE,
    ),
    "stale prefetch": (SWAP.after("compute step", "prefetch w host gpu0"), Rule.STALE_VERSION),
    "stale offload": (
        starting(SWAP, {"w": ("host",)}).replace("offload w gpu0 host", "prefetch w host gpu0", "offload w gpu0 host"),
        Rule.STALE_VERSION,
    ),
    "decode deleted": (ENCODED.replace("decode a gpu0 half"), Rule.NOT_DECODED),
    "decode before arrival": (
        ENCODED.move("decode a gpu0 half", before="prefetch a host gpu0 form=half"),
        Rule.DATA_NOT_THERE,
    ),
    "encode deleted": (ENCODED.replace("encode a gpu0 half"), Rule.DATA_NOT_THERE),
    "a slice not fetched": (SLICED.replace("prefetch a host gpu0 part=1/3"), Rule.DATA_NOT_THERE),
    "a slice of another cut": (
        SLICED.replace("prefetch a host gpu0 part=1/3", "prefetch a host gpu0 part=1/2"),
        Rule.DATA_NOT_THERE,
    ),
}

RELEASE_RULES = {
    "released twice": (KEEP.after("release a gpu0", "release a gpu0"), Rule.DOUBLE_RELEASE),
    "released where it never was": (KEEP.replace("release a gpu0", "release a host"), Rule.RELEASE_FOREIGN),
    "released too early": (KEEP.move("release a gpu0", before="compute back"), Rule.LAST_CURRENT_COPY),
    "released without an offload": (SWAP.replace("offload a gpu0 host"), Rule.LAST_CURRENT_COPY),
    "dropped and not recomputed": (RECOMPUTE.replace("again: compute f1"), Rule.LAST_CURRENT_COPY),
    "state released": (KEEP.after("release g gpu0", "release w gpu0"), Rule.LAST_CURRENT_COPY),
    "updated state dropped": (SWAP.replace("offload w gpu0 host"), Rule.LAST_CURRENT_COPY),
    "host copy and the only one": (
        SWAP.move("release a host", before="prefetch a host gpu0"),
        Rule.LAST_CURRENT_COPY,
    ),
    "only slices are left, and not all": (SLICED.replace("offload a gpu0 host part=1/3"), Rule.LAST_CURRENT_COPY),
    "activation left": (KEEP.replace("release a gpu0"), Rule.LEAK),
    "activation left on the host": (SWAP.replace("release a host"), Rule.LEAK),
    "slice left": (SLICED.replace("release a host part=1/3"), Rule.LEAK),
    "encoded copy left": (ENCODED.replace("release a host form=half"), Rule.LEAK),
    "state left elsewhere": (SWAP.replace("release w gpu0"), Rule.LEAK),
    "input left on the device": (KEEP.replace("release x gpu0"), Rule.LEAK),
    "loan left": (LOAN.replace("reclaim 7", device=1), Rule.LEAK),
    "state not written back": (SWAP.replace("offload w gpu0 host"), Rule.STATE_NOT_RESTORED),
    "state missing in one of two places": (
        starting(SWAP, {"w": ("host", "gpu0")}).replace("prefetch w host gpu0"),
        Rule.STATE_NOT_RESTORED,
    ),
}

MEMORY_RULES = {
    "device one byte short": (with_memory(KEEP, "gpu0", capacity_bytes=1789), Rule.CAPACITY),
    "device reserve one byte too large": (
        with_memory(KEEP, "gpu0", capacity_bytes=1800, reserve_bytes=11),
        Rule.CAPACITY,
    ),
    "what is lent is missing": (with_memory(LOAN, "gpu1", capacity_bytes=2099), Rule.CAPACITY),
    "host one byte short": (with_memory(SWAP, "host", capacity_bytes=1499), Rule.HOST_CAPACITY),
    "host reserve": (with_memory(SWAP, "host", capacity_bytes=1600, reserve_bytes=101), Rule.HOST_CAPACITY),
    "pinned limit": (with_memory(SWAP, "host", pinned_limit_bytes=1499), Rule.PINNED_CAPACITY),
    "pinned blocks rounded up": (
        with_memory(SWAP, "host", pinned_limit_bytes=1663, pinned_power_of_two=True),
        Rule.PINNED_CAPACITY,
    ),
    "retired twice": (SWAP.after("retire f", "retire f"), Rule.RETIRE),
    "retired before it runs": (SWAP.move("retire f", before="compute f1"), Rule.RETIRE),
    "retire of a transfer": (SWAP.replace("prefetch x host gpu0", "p: prefetch x host gpu0", "retire p"), Rule.RETIRE),
}

LOAN_RULES = {
    "nothing lent": (
        LOAN.replace("lend 400 gpu0 7", device=1).replace("reclaim 7", device=1),
        Rule.LOAN,
    ),
    "lent one byte less": (LOAN.replace("lend 400 gpu0 7", "lend 399 gpu0 7", device=1), Rule.LOAN),
    "not waited for": (LOAN.replace("wait 1 out0"), Rule.LOAN),
    "wait on another stream": (LOAN.replace("wait 1 out0", "wait 1 compute"), Rule.LOAN),
    "signalled before memory is free": (
        LOAN.replace("free: release x gpu1", "release x gpu1", device=1).replace(
            "prefetch x host gpu1", "free: prefetch x host gpu1", device=1
        ),
        Rule.LOAN,
    ),
    "reclaimed without waiting": (LOAN.replace("wait 2 comm", device=1), Rule.LOAN),
    "reclaimed before the wait": (LOAN.move("reclaim 7", before="wait 2 comm", device=1), Rule.LOAN),
    "returned too early": (
        LOAN.replace("done: release a gpu1", "release a gpu1").replace("compute f2", "done: compute f2"),
        Rule.LOAN,
    ),
    "reclaimed twice": (LOAN.after("reclaim 7", "reclaim 7", device=1), Rule.LOAN),
    "reclaim of an unknown loan": (LOAN.replace("reclaim 7", "reclaim 8", device=1), Rule.LOAN),
    "loan number used twice": (LOAN.after("lend 400 gpu0 7", "lend 1 gpu0 7", device=1), Rule.LOAN),
    "state starts in memory of a peer": (
        starting(LOAN, {"w": ("gpu0", "gpu1")}, {"w": ("gpu1",)}),
        Rule.LOAN,
    ),
}

EVENT_RULES = {
    "event never signalled": (LOAN.replace("signal 2 done"), Rule.EVENT),
    "event signalled twice": (LOAN.after("signal 2 done", "signal 2 done"), Rule.EVENT),
    "event signalled by two lists": (LOAN.before("reclaim 7", "signal 2 free", device=1), Rule.EVENT),
    "signal before its instruction": (LOAN.move("signal 2 done", before="compute f1"), Rule.EVENT),
    "signal after a signal": (
        LOAN.replace("signal 2 done", "first: signal 2 done", "signal 3 first"),
        Rule.EVENT,
    ),
    "tensor updated while another list reads": (READER.replace("wait 1 compute"), Rule.STALE_VERSION),
    "copy overwritten while another list reads": (READER.replace("wait 1 compute"), Rule.CROSS_LIST_RACE),
    "read before another list makes it": (
        starting(READER.move("offload w gpu0 host", before="compute f1"), {"w": ("gpu0",)}, {"w": ("gpu1",)}),
        Rule.USE_BEFORE_ARRIVAL,
    ),
    "release of another list's copy": (
        READER.after("signal 1 here", "release w host owner=gpu0", device=1),
        Rule.RELEASE_FOREIGN,
    ),
    "write of another list's copy": (
        READER.replace("offload w gpu1 host owner=gpu0 part=0/2", "offload w gpu1 host owner=gpu0", device=1).replace(
            "release w host owner=gpu0 part=0/2", "release w host owner=gpu0", device=1
        ),
        Rule.WRITE_FOREIGN,
    ),
    "copy of another device's tensor left": (
        READER.replace("release w host owner=gpu0 part=0/2", device=1),
        Rule.LEAK,
    ),
    "collective left out": (REDUCE.replace("collective wsum", device=1), Rule.COLLECTIVE_MISMATCH),
    "collective entered twice": (REDUCE.after("collective sum", "collective sum"), Rule.COLLECTIVE_MISMATCH),
}

ALL = OP_RULES | DATA_RULES | RELEASE_RULES | MEMORY_RULES | LOAN_RULES | EVENT_RULES


@pytest.mark.parametrize("name", ALL)
def test_a_changed_plan_breaks_the_rule(name):
    plan, rule = ALL[name]
    report = check(plan.problem, plan.schedule())
    assert rule in {violation.rule for violation in report.violations}, report.text()
    for violation in report.violations:
        assert violation.message and violation.paragraph == violation.rule.paragraph


def test_a_missing_route_is_found():
    plan = without_peer_routes(LOAN)
    rules = [violation.rule for violation in check(plan.problem, plan.schedule()).violations]
    assert rules.count(Rule.NO_ROUTE) == 2
