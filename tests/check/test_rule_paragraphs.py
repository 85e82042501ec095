"""Rules and docs/semantics.md name each other; each kind of mistake has a rule and bad schedules."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from plan_text import Plan
from small_plans import ENCODED, KEEP, with_memory
from test_deadlock import DEADLOCKS
from test_mutations import ALL
from test_shared_copies import VISIT
from two_gpu_plans import LOAN, READER, REDUCE

from tmojax.check import PARAGRAPHS, Rule, check

DOCUMENT = (Path(__file__).parents[2] / "docs" / "semantics.md").read_text()


def paragraphs() -> set[str]:
    """Numbers of all paragraphs: `5.1`; of a section without numbered ones `7`; `3` is the table of instructions."""
    found = {"3"}
    for section in re.split(r"^## ", DOCUMENT, flags=re.MULTILINE)[1:]:
        number = section.split(".")[0]
        inside = {f"{number}.{n}" for n in re.findall(r"^(\d+)\. ", section.split("\n", 1)[1], flags=re.MULTILINE)}
        found |= inside or {number}
    return found


def listed() -> dict[str, set[str]]:
    """The table of section 9: paragraph -> its rules."""
    rows = re.findall(r"^\| ([\d.]+) \|(.*?)\|.*\|$", DOCUMENT.split("## 9.")[1], flags=re.MULTILINE)
    return {paragraph: set(re.findall(r"`([\w-]+)`", rules)) for paragraph, rules in rows}


def test_every_rule_names_an_existing_paragraph():
    assert set(PARAGRAPHS) == set(Rule)
    assert set(PARAGRAPHS.values()) <= paragraphs()


def test_the_document_lists_the_rules_of_every_paragraph():
    assert {p for p in paragraphs() if p[0] in "234567"} == set(listed())
    for paragraph, rules in listed().items():
        assert rules == {rule.value for rule in Rule if PARAGRAPHS[rule] == paragraph}, paragraph


def test_other_rules_that_the_table_names_exist():
    named = set(re.findall(r"`([a-z-]+)`", DOCUMENT.split("| paragraph |")[1].split("Section 8")[0]))
    assert named == {rule.value for rule in Rule}


def test_paragraphs_cited_in_the_code_exist():
    package = Path(__file__).parents[2] / "tmojax"
    for path in [*(package / "check").glob("*.py"), *(package / "simulate").glob("*.py")]:
        for numbers in re.findall(r"\((?:semantics )?(\d\.\d(?:, \d\.\d)*)\)", path.read_text()):
            assert set(numbers.split(", ")) <= paragraphs(), (path.name, numbers)


# --- what can be wrong with a schedule: each with schedules that have it ----------------------------------------------


def with_op(plan: Plan, name: str, **changes) -> Plan:
    workload = plan.problem.workload
    programs = tuple(
        replace(p, ops=tuple(replace(op, **changes) if op.name == name else op for op in p.ops))
        for p in workload.programs
    )
    return replace(plan, problem=replace(plan.problem, workload=replace(workload, programs=programs)))


REDUCE_PEAK = check(REDUCE.problem, REDUCE.schedule()).peak_bytes["gpu0"]
ENCODED_PEAK = check(ENCODED.problem, ENCODED.schedule()).peak_bytes["gpu0"]

MORE = {
    # w + a + b + encoded a + scratch is the peak; it is reached at encode and at decode
    "workspace of encode": (with_memory(ENCODED, "gpu0", capacity_bytes=ENCODED_PEAK - 1), Rule.CAPACITY),
    "workspace of a collective": (
        with_memory(with_op(REDUCE, "sum", workspace_bytes=5000), "gpu0", capacity_bytes=1000 + 70 + 5000 - 1),
        Rule.CAPACITY,
    ),
    "written while it is copied": (
        # gpu0 offloads its new `w` over the host's copy while gpu1 may still copy that one
        READER.replace("wait 1 compute").before("offload w gpu0 host", "wait 1 compute"),
        Rule.CROSS_LIST_RACE,
    ),
    "released while it is copied": (VISIT.replace("wait 2 in0"), Rule.CROSS_LIST_RACE),
    "read before it has arrived": (VISIT.replace("wait 1 in1", device=1), Rule.USE_BEFORE_ARRIVAL),
    "host pinned limit with two lists": (with_memory(LOAN, "host", pinned_limit_bytes=199), Rule.PINNED_CAPACITY),
}
CASES = ALL | MORE | {name: (plan, Rule.DEADLOCK) for name, plan in DEADLOCKS.items()}

MISTAKES = {
    "data not there": (Rule.DATA_NOT_THERE, ["input not fetched", "offload deleted", "wrong micro-batch"]),
    "stale version": (Rule.STALE_VERSION, ["stale prefetch", "stale offload"]),
    "use before arrival": (
        Rule.USE_BEFORE_ARRIVAL,
        ["read before it has arrived", "read before another list makes it"],
    ),
    "torn copy": (
        Rule.CROSS_LIST_RACE,
        ["copy overwritten while another list reads", "written while it is copied"],
    ),
    "double release": (Rule.DOUBLE_RELEASE, ["released twice"]),
    "release in flight": (Rule.CROSS_LIST_RACE, ["released while it is copied"]),
    "release of the last current copy": (
        Rule.LAST_CURRENT_COPY,
        ["released too early", "released without an offload", "only slices are left, and not all"],
    ),
    "missing op": (Rule.MISSING_OP, ["op deleted"]),
    "wrong op order": (Rule.OP_ORDER, ["ops swapped", "micro-batch too early"]),
    "capacity of device memory": (Rule.CAPACITY, ["device one byte short", "device reserve one byte too large"]),
    "capacity of host memory": (Rule.HOST_CAPACITY, ["host one byte short", "host reserve"]),
    "capacity of pinned memory": (
        Rule.PINNED_CAPACITY,
        ["pinned limit", "pinned blocks rounded up", "host pinned limit with two lists"],
    ),
    "capacity of lent memory": (Rule.LOAN, ["lent one byte less", "nothing lent"]),
    "what is lent counts for the lender": (Rule.CAPACITY, ["what is lent is missing"]),
    "workspace of encode": (Rule.CAPACITY, ["workspace of encode"]),
    "workspace of collectives": (Rule.CAPACITY, ["workspace of a collective"]),
    "lent memory used outside": (
        Rule.LOAN,
        ["not waited for", "signalled before memory is free", "returned too early", "reclaimed without waiting"],
    ),
    "cross-list access without order": (Rule.CROSS_LIST_RACE, ["copy overwritten while another list reads"]),
    "in-place op recomputed": (Rule.RECOMPUTE_IN_PLACE, ["update runs twice", "recomputation not allowed"]),
    "collective mismatch": (Rule.COLLECTIVE_MISMATCH, ["collective left out", "collective entered twice"]),
    "circle of streams and signals": (Rule.DEADLOCK, ["wait for a signal of the same stream"]),
    "circle of two lists": (Rule.DEADLOCK, ["two lists wait for each other"]),
    "circle of engine order": (Rule.DEADLOCK, ["engine order", "an engine that another list holds"]),
    "circle of allocation, release and data": (Rule.DEADLOCK, ["allocation behind a release"]),
    "circle of collectives": (Rule.DEADLOCK, ["collectives in other orders"]),
    "circle of link order": (Rule.DEADLOCK, ["link order against list order", "link order against a signal"]),
    "encoded data read without decoding": (Rule.NOT_DECODED, ["decode deleted"]),
    "persistent state not restored": (
        Rule.STATE_NOT_RESTORED,
        ["state not written back", "state missing in one of two places"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_kind_of_mistake_has_its_rule(mistake):
    rule, names = MISTAKES[mistake]
    for name in names:
        plan, expected = CASES[name]
        assert expected is rule, name
        assert rule in {violation.rule for violation in check(plan.problem, plan.schedule()).violations}, name


@pytest.mark.parametrize("name", MORE)
def test_further_bad_schedules(name):
    plan, rule = MORE[name]
    report = check(plan.problem, plan.schedule())
    assert rule in {violation.rule for violation in report.violations}, report.text()


def test_one_byte_more_is_enough_for_the_workspace():
    for plan, peak in ((ENCODED, ENCODED_PEAK), (with_op(REDUCE, "sum", workspace_bytes=5000), 1000 + 70 + 5000)):
        roomy = with_memory(plan, "gpu0", capacity_bytes=peak)
        assert check(roomy.problem, roomy.schedule()).valid
    assert REDUCE_PEAK == 1790 and KEEP.problem.capacity_bytes(0) == 10_000


def test_every_rule_has_a_bad_schedule():
    covered = {rule for _, rule in CASES.values()}
    elsewhere = {
        Rule.MALFORMED,
        Rule.INITIAL,
        Rule.LINK_ORDER,
        Rule.NO_ROUTE,
    }  # test_random_changes, test_deadlock, ...
    assert covered | elsewhere == set(Rule)
