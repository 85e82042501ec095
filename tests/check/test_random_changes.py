"""Random changes to valid plans: the checker never raises, and agrees with a naive recount on what is valid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from naive_check import Wrong, naive_peaks
from plan_text import Plan
from small_plans import KEEP, ONE_GPU
from two_gpu_plans import VALID

from tmojax.check import CheckReport, check
from tmojax.problem import INSTRUCTION, Kind, LinkPolicy, LinkPolicyKind, Placement, Schedule

SCHEDULES = {name: plan.schedule() for name, plan in VALID.items()}


def same_verdict(plan: Plan, schedule: Schedule) -> None:
    report = check(plan.problem, schedule)
    try:
        peaks = naive_peaks(plan.problem, schedule)
    except Wrong as wrong:
        assert not report.valid, f"the naive recount says: {wrong}"
    else:
        assert report.valid, report.text()
        assert report.peak_bytes == peaks


def with_list(schedule: Schedule, rows: np.ndarray, device: int = 0) -> Schedule:
    lists = tuple(rows if d == device else old for d, old in enumerate(schedule.lists))
    return Schedule(lists, schedule.initial, schedule.link_policies, schedule.order)


@pytest.mark.parametrize("name", ONE_GPU)
def test_every_single_deletion_is_judged_right(name):
    schedule = SCHEDULES[name]
    same_verdict(ONE_GPU[name], schedule)
    for index in range(len(schedule.lists[0])):
        same_verdict(ONE_GPU[name], with_list(schedule, np.delete(schedule.lists[0], index)))


@pytest.mark.parametrize("name", ONE_GPU)
def test_every_swap_of_neighbours_is_judged_right(name):
    schedule = SCHEDULES[name]
    for index in range(len(schedule.lists[0]) - 1):
        rows = schedule.lists[0].copy()
        rows[[index, index + 1]] = rows[[index + 1, index]]
        same_verdict(ONE_GPU[name], with_list(schedule, rows))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_random_edits_are_judged_right(data):
    name = data.draw(st.sampled_from(sorted(ONE_GPU)))
    schedule = SCHEDULES[name]
    rows = list(schedule.lists[0])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(rows) - 1))
        edit = data.draw(st.sampled_from(["delete", "repeat", "move"]))
        row = rows[place] if edit == "repeat" else rows.pop(place)
        if edit != "delete":
            rows.insert(data.draw(st.integers(0, len(rows))), row)
        assume(rows)
    same_verdict(ONE_GPU[name], with_list(schedule, np.array(rows, dtype=INSTRUCTION)))


NUMBERS = st.one_of(st.integers(-3, 8), st.sampled_from([-(2**31), 2**31 - 1, 127, -128]))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_random_values_never_raise(data):
    name = data.draw(st.sampled_from(sorted(VALID)))
    schedule = SCHEDULES[name]
    for _ in range(data.draw(st.integers(1, 4))):
        device = data.draw(st.integers(0, len(schedule.lists) - 1))
        rows = schedule.lists[device].copy()
        place = data.draw(st.integers(0, len(rows) - 1))
        field = data.draw(st.sampled_from(INSTRUCTION.names))
        limit = np.iinfo(INSTRUCTION[field])
        rows[place][field] = min(max(data.draw(NUMBERS), limit.min), limit.max)
        schedule = with_list(schedule, rows, device)
    report = check(VALID[name].problem, schedule)
    assert isinstance(report, CheckReport)
    assert report.text(limit=None) and report.as_dict()


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["loan", "reader"]), st.integers(0, 2**32), st.integers(0, 12), st.integers(1, 2))
def test_random_instructions_never_raise(name, seed, length, slots):
    """Lists of instructions in which every index is in range but nothing makes sense, with orders of links."""
    rng = np.random.default_rng(seed)
    limits = {"kind": 11, "op": 3, "owner": 1, "tensor": 4, "memory": 2, "to_memory": 2, "after": 10, "event": 2,
              "stream": 5, "to_device": 1, "size_bytes": 500}  # fmt: skip
    lists, transfers = [], []
    for device in range(2):
        rows = np.zeros(length, dtype=INSTRUCTION)
        for field, limit in limits.items():
            rows[field] = rng.integers(0, limit, length, endpoint=True)
        coded = (rows["kind"] == Kind.ENCODE) | (rows["kind"] == Kind.DECODE)
        rows["form"] = np.where(coded, 0, -1)
        rows["memory"][coded] = 1 + device
        rows["parts"] = rng.integers(1, 2, length, endpoint=True)
        rows["to_device"][rows["kind"] == Kind.LEND] = 1 - device
        lists.append(rows)
        transfers += [(device, i) for i in range(-1, length) if rng.random() < 0.3]
    policies = tuple(
        LinkPolicy(LinkPolicyKind.ORDER, slots, sequence=tuple(map(tuple, rng.permutation(transfers).tolist())))
        for _ in range(3)
    )
    report = check(VALID[name].problem, Schedule(tuple(lists), SCHEDULES[name].initial, policies))
    assert not report.valid and report.text(limit=None)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(-2, 7), st.lists(st.integers(-2, 4), max_size=3)), max_size=4))
def test_random_placements_never_raise(placements):
    initial = (tuple(Placement(tensor, tuple(memories)) for tensor, memories in placements),)
    report = check(KEEP.problem, Schedule(SCHEDULES["keep"].lists, initial))
    assert report.valid == (placements == [(1, [1])])


@pytest.mark.parametrize(
    "lists",
    [(), (np.zeros(3),), (np.zeros((1, 1), dtype=INSTRUCTION),), ([1, 2],), (np.zeros(0, dtype=INSTRUCTION),) * 2],
)
def test_lists_of_another_shape_are_reported(lists):
    report = check(KEEP.problem, Schedule(lists, SCHEDULES["keep"].initial))
    assert {v.rule.value for v in report.violations} == {"malformed"}
    assert report.notes


@pytest.mark.parametrize("order", ["backwards", "", None])
def test_an_unknown_order_is_reported(order):
    schedule = SCHEDULES["keep"]
    report = check(KEEP.problem, Schedule(schedule.lists, schedule.initial, (), order))
    assert {v.rule.value for v in report.violations} == {"malformed"}


@pytest.mark.parametrize(
    "policies",
    [
        (LinkPolicy(),),
        (LinkPolicy(LinkPolicyKind.FCFS, slots=0), LinkPolicy(), LinkPolicy()),
        (LinkPolicy(LinkPolicyKind.PRIORITY, device_rank=(0, 0)), LinkPolicy(), LinkPolicy()),
        (LinkPolicy(LinkPolicyKind.PRIORITY, device_rank=(5,)), LinkPolicy(), LinkPolicy()),
        (LinkPolicy(), LinkPolicy(LinkPolicyKind.PRIORITY), LinkPolicy()),
        (LinkPolicy("fastest"), LinkPolicy(), LinkPolicy()),
    ],
)
def test_wrong_link_policies_are_reported(policies):
    schedule = SCHEDULES["keep"]
    report = check(KEEP.problem, Schedule(schedule.lists, schedule.initial, policies))
    assert {v.rule.value for v in report.violations} == {"malformed"}
