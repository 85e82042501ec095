"""Peaks in exact bytes, each sum written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_text import Plan, lines
from small_plans import ENCODED, KEEP, LAYER, RECOMPUTE, SLICED, SWAP, TWO_BATCHES, machine, problem, with_memory
from two_gpu_plans import LOAN, READER

from tmojax.check import Rule, check
from tmojax.problem import Lifetime, Op, Phase, Program, Tensor, TensorKind, Workload

GOLDEN = {
    # w + a + b + g + workspace of back; the input stays on the host
    "keep": (KEEP, {"host": 100, "gpu0": 1000 + 400 + 300 + 70 + 20}),
    # host: x + w + a, although x has gone before the last of them comes back
    "swap": (SWAP, {"host": 100 + 1000 + 400, "gpu0": 1000 + 400 + 300 + 70 + 20}),
    # at f2: w + x + a + b; at the recomputation without a: w + x + b + a + workspace of f1
    "recompute": (RECOMPUTE, {"host": 100, "gpu0": 1000 + 100 + 400 + 300 + 5}),
    # at encode and decode: w + a + b + encoded a + scratch of the codec
    "encoded": (ENCODED, {"host": 100 + 200, "gpu0": 1000 + 400 + 300 + 200 + 200}),
    # slices of 133, 133 and 134 bytes are 400 together
    "sliced": (SLICED, {"host": 100 + 400, "gpu0": 1000 + 400 + 300 + 70 + 20}),
    # x of the second micro-batch is there while the first runs backward
    "two batches": (TWO_BATCHES, {"host": 200, "gpu0": 1000 + 100 + 400 + 300 + 70 + 20}),
    # gpu1: what it lends counts in its own list
    "loan": (LOAN, {"host": 200, "gpu0": 1790, "gpu1": 1000 + 400 + 300 + 70 + 20 + 400}),
    # host: gpu0 has w and x, gpu1 has x and half of w; each list's own maximum, whenever it is
    "reader": (READER, {"host": 1100 + 600, "gpu0": 1790, "gpu1": 1000 + 1000}),
    # x 100 -> 128, w 1000 -> 1024, a 400 -> 512
    "pinned": (with_memory(SWAP, "host", pinned_power_of_two=True), {"host": 128 + 1024 + 512, "gpu0": 1790}),
}


def checked(plan: Plan):
    report = check(plan.problem, plan.schedule())
    assert report.valid, report.text()
    return report


def with_workspace(plan: Plan, op: str, workspace_bytes: int) -> Plan:
    workload = plan.problem.workload
    program = workload.programs[0]
    ops = tuple(replace(spec, workspace_bytes=workspace_bytes) if spec.name == op else spec for spec in program.ops)
    workload = replace(workload, programs=(replace(program, ops=ops),))
    return replace(plan, problem=replace(plan.problem, workload=workload))


@pytest.mark.parametrize("name", GOLDEN)
def test_peaks_by_hand(name):
    plan, peaks = GOLDEN[name]
    assert checked(plan).peak_bytes == peaks


@pytest.mark.parametrize("name", GOLDEN)
def test_the_peak_is_enough_and_one_byte_less_is_not(name):
    plan, peaks = GOLDEN[name]
    for memory, peak in peaks.items():
        checked(with_memory(plan, memory, capacity_bytes=peak))
        checked(with_memory(plan, memory, capacity_bytes=peak + 7, reserve_bytes=7))
        short = with_memory(plan, memory, capacity_bytes=peak + 7, reserve_bytes=8)
        report = check(short.problem, short.schedule())
        assert {v.rule for v in report.violations} == {Rule.HOST_CAPACITY if memory == "host" else Rule.CAPACITY}
        assert {v.memory for v in report.violations} == {memory}
        assert max(v.bytes_over for v in report.violations) == 1


def test_what_is_there_at_the_peak():
    report = checked(KEEP)
    assert report.peak_position == (KEEP.place(0, "compute back"),)
    names = [("w", 1000), ("a (micro-batch 0)", 400), ("b (micro-batch 0)", 300), ("g (micro-batch 0)", 70)]
    assert list(report.largest_at_peak[0][:4]) == names
    assert report.largest_at_peak[0][4] == ("scratch of gpu0 #4: compute back (micro-batch 0)", 20)
    assert report.initial_bytes == {"host": 100, "gpu0": 1000}


def test_every_position_over_the_capacity_is_reported():
    plan = with_memory(KEEP, "gpu0", capacity_bytes=1500)
    found = [(v.instruction, v.bytes_over) for v in check(plan.problem, plan.schedule()).violations]
    # f1: w + x + a + workspace; f2: w + a + b; back: and g and workspace
    assert found == [(1, 5), (3, 200), (4, 290)]


def test_the_message_says_where_how_much_and_what():
    plan = with_memory(SWAP, "gpu0", capacity_bytes=1789)
    (violation,) = check(plan.problem, plan.schedule()).violations
    index = SWAP.place(0, "compute back")
    assert (violation.rule, violation.paragraph, violation.device, violation.instruction) == (
        "capacity",
        "5.2",
        0,
        index,
    )
    assert (violation.memory, violation.bytes_over) == ("gpu0", 1)
    assert violation.message == (
        f"gpu0 #{index}: compute back (micro-batch 0): 1790 bytes in gpu0, 1 over the 1789 available; largest: w 1000, "
        f"a (micro-batch 0) 400, b (micro-batch 0) 300, g (micro-batch 0) 70, "
        f"scratch of gpu0 #{index}: compute back (micro-batch 0) 20"
    )


def test_a_prefetch_before_the_retire_is_charged_with_the_workspace():
    late = with_workspace(TWO_BATCHES, "f1", 5000).replace("compute f1.0", "f: compute f1.0")
    late = late.move("prefetch x.1 host gpu0", before="compute f2.0").before("compute f2.0", "retire f")
    assert checked(late).peak_bytes["gpu0"] == 1000 + 100 + 400 + 5000 + 100
    soon = late.move("retire f", before="prefetch x.1 host gpu0")
    assert checked(soon).peak_bytes["gpu0"] == 1000 + 100 + 400 + 5000
    unwritten = late.replace("retire f")
    assert checked(unwritten).peak_bytes["gpu0"] == 1000 + 100 + 400 + 5000


def test_an_unretired_workspace_lasts_until_its_retire():
    plan = with_workspace(KEEP, "f1", 5000).replace("compute f1", "f: compute f1")
    plan = plan.before("compute step", "retire f")
    assert checked(plan).peak_bytes["gpu0"] == 1000 + 400 + 300 + 70 + 20 + 5000


def test_an_offload_over_a_resident_copy_allocates_nothing():
    plan = SWAP.after("offload a gpu0 host", "offload a gpu0 host")
    assert checked(plan).peak_bytes == checked(SWAP).peak_bytes


def test_a_clean_copy_is_released_without_an_offload():
    plan = SWAP.after("compute f2", "release w gpu0").before("compute step", "prefetch w host gpu0")
    # w + a + b at f2; later w is not there together with them
    assert checked(plan).peak_bytes["gpu0"] == 1000 + 400 + 300


def test_state_may_be_on_both_sides_of_the_seam():
    plan = replace(SWAP.replace("prefetch w host gpu0").replace("release w gpu0"), initial=({"w": ("gpu0", "host")},))
    report = checked(plan)
    assert report.initial_bytes == {"host": 1100, "gpu0": 1000}


# --- recomputation with an output that is still there -----------------------------------------------------------------

PAIR = Program(
    "pair",
    (
        Tensor("x", 100, TensorKind.INPUT),
        Tensor("p", 200, TensorKind.ACTIVATION),
        Tensor("q", 300, TensorKind.ACTIVATION),
        Tensor("r", 10, TensorKind.ACTIVATION),
    ),
    (
        Op("split", Phase.FORWARD, 1.0, reads=(0,), writes=(1, 2), workspace_bytes=7),
        Op("join", Phase.FORWARD, 1.0, reads=(1, 2), writes=(3,)),
    ),
)
AGAIN = Plan(
    problem(Workload("pair", (PAIR,), (0,), 1, "synthetic"), machine(1)),
    (
        lines("""
        prefetch x host gpu0
        compute split
        release p gpu0
        again: compute split
        compute join
        release x gpu0
        release p gpu0
        release q gpu0
        release r gpu0
        """),
    ),
    ({},),
)


def test_outputs_that_are_resident_go_to_scratch():
    # x + q + p + workspace + q once more
    report = checked(AGAIN)
    assert report.peak_bytes["gpu0"] == 100 + 300 + 200 + 7 + 300
    assert report.peak_position == (3,)


# --- tensors that share a storage -------------------------------------------------------------------------------------

ALIASED = Program(
    "aliased",
    (
        Tensor("x", 100, TensorKind.INPUT),
        Tensor("u", 400, TensorKind.ACTIVATION, alias_group="s"),
        Tensor("v", 300, TensorKind.ACTIVATION, alias_group="s"),
        Tensor("z", 50, TensorKind.ACTIVATION, alias_group="s"),
        Tensor("y", 8, TensorKind.ACTIVATION),
    ),
    (
        Op("make", Phase.FORWARD, 1.0, reads=(0,), writes=(1,)),
        Op("view", Phase.FORWARD, 1.0, reads=(1,), writes=(2,)),
        Op("use", Phase.FORWARD, 1.0, reads=(1, 2), writes=(4,)),
        Op("other", Phase.FORWARD, 1.0, reads=(0,), writes=(3,)),
    ),
)
SHARED = Plan(
    problem(Workload("aliased", (ALIASED,), (0,), 1, "synthetic"), machine(1)),
    (
        lines("""
        prefetch x host gpu0
        compute make
        compute view
        offload u gpu0 host
        release u gpu0
        prefetch u host gpu0
        compute use
        release u gpu0
        release v gpu0
        compute other
        release x gpu0
        release z gpu0
        release u host
        release y gpu0
        """),
    ),
    ({},),
)


def test_a_storage_counts_once_with_its_largest_tensor():
    # x, the storage, and y
    assert checked(SHARED).peak_bytes == {"host": 100 + 400, "gpu0": 100 + 400 + 8}


def test_a_storage_is_freed_with_its_last_tensor():
    early = SHARED.move("compute other", before="compute use")
    rules = {v.rule for v in check(early.problem, early.schedule()).violations}
    assert rules == {Rule.OP_ORDER, Rule.STALE_VERSION}


def test_a_view_keeps_its_base_and_other_content_destroys_it():
    kept = SHARED.replace("release v gpu0").before("release z gpu0", "offload v gpu0 host", "release v gpu0")
    report = check(kept.problem, kept.schedule())
    assert [v.rule for v in report.violations] == [Rule.STALE_VERSION, Rule.LEAK]
    assert "same storage" in report.violations[0].message


def test_an_update_reaches_the_views_and_outdates_their_copies():
    state = tuple(replace(t, lifetime=Lifetime.STATE) if t.name in "uv" else t for t in ALIASED.tensors)
    program = Program(
        "state",
        state,
        (
            Op("up", Phase.OPTIMIZER, 1.0, reads=(0,), updates=(1,), recomputable=False, step_op=True),
            Op("use", Phase.OPTIMIZER, 1.0, reads=(1, 2), writes=(4,), recomputable=False, step_op=True),
        ),
    )
    tensors = tuple(replace(t, lifetime=Lifetime.STEP) if t.name in "yz" else t for t in program.tensors)
    plan = Plan(
        problem(
            Workload("state", (replace(program, tensors=tensors),), (0,), 1, "synthetic"),
            machine(1),
        ),
        (
            lines("""
            prefetch x host gpu0
            compute up
            compute use
            release x gpu0
            release y gpu0
            """),
        ),
        ({"u": ("gpu0",), "v": ("gpu0",)},),
    )
    assert checked(plan).peak_bytes["gpu0"] == 100 + 400 + 8
    stale = replace(plan, initial=({"u": ("gpu0",), "v": ("gpu0", "host")},))
    assert [v.rule for v in check(stale.problem, stale.schedule()).violations] == [Rule.STATE_NOT_RESTORED]


def test_the_storage_has_its_full_size_from_its_first_tensor_on():
    ops = (Op("small", Phase.FORWARD, 1.0, reads=(0,), writes=(3,)), Op("large", Phase.FORWARD, 1.0, reads=(3,)))
    workload = Workload("small", (Program("small", ALIASED.tensors, ops),), (0,), 1, "synthetic")
    text = lines("""
    prefetch x host gpu0
    compute small
    compute large
    release x gpu0
    release z gpu0
    """)
    # u and v, which no op writes, are inputs here: their storage on the host counts once
    peaks = checked(Plan(problem(workload, machine(1)), (text,), ({},))).peak_bytes
    assert peaks == {"host": 100 + 400 + 8, "gpu0": 100 + 400}


def test_a_block_of_a_power_of_two_is_not_rounded():
    tensors = tuple(replace(t, size_bytes={"x": 128, "w": 1025, "a": 1}.get(t.name, 300)) for t in LAYER.tensors)
    workload = Workload("powers", (replace(LAYER, tensors=tensors),), (0,), 1, "synthetic")
    box = machine(1, pinned_power_of_two=True)
    assert checked(replace(SWAP, problem=problem(workload, box))).peak_bytes["host"] == 128 + 2048 + 1


def test_a_sum_beyond_64_bits_is_no_room():
    """Workspace that is held adds up to more than all tensors: here to 20 times 2^60, and 2^63 - 1 bytes are there."""
    program = Program(
        "held", (Tensor("a", 1, TensorKind.ACTIVATION),),
        (Op("f", Phase.FORWARD, 1.0, writes=(0,), workspace_bytes=2**60),),
    )  # fmt: skip
    workload = Workload("held", (program,), (0,), 1, "synthetic")
    runs = [f"r{n}: compute f" for n in range(20)]
    text = [*runs, *(f"retire r{n}" for n in range(20)), "release a gpu0"]
    plan = Plan(problem(workload, machine(1, capacity_bytes=2**63 - 1)), (lines("\n".join(text)),), ({},))
    report = check(plan.problem, plan.schedule())
    assert {violation.rule for violation in report.violations} == {Rule.CAPACITY}
    assert report.peak_bytes["gpu0"] == 20 * 2**60 + 20  # `a`, and 19 times room for it in scratch
