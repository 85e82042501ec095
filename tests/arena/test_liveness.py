"""Blocks of real schedules: their peak is the checker's, their placement is sound and tight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_text import Plan, lines
from planner_cases import cases, light
from small_plans import ENCODED, KEEP, RECOMPUTE, SLICED, SWAP, TWO_BATCHES, layer, with_memory
from two_gpu_plans import LOAN, READER

from tmojax.arena import Block, blocks_of, find_faults, place
from tmojax.check import check
from tmojax.errors import InputError
from tmojax.problem import Kind

PLANS = {"keep": KEEP, "swap": SWAP, "recompute": RECOMPUTE, "encoded": ENCODED, "sliced": SLICED,
         "two batches": TWO_BATCHES, "loan": LOAN, "reader": READER}  # fmt: skip


def judged(problem, schedule, alignment=1):
    report = check(problem, schedule)
    assert report.valid, report.text()
    arenas = place(problem, schedule, alignment_bytes=alignment, effort=1_000_000)
    for name, arena in arenas.items():
        assert find_faults(arena.blocks, arena.offsets, alignment_bytes=alignment) == []
        if name in report.peak_bytes:
            assert arena.peak_live_bytes == report.peak_bytes[name]
        assert len({block.id for block in arena.blocks}) == len(arena.blocks)
    return arenas


@pytest.mark.parametrize("name", PLANS)
def test_the_peak_is_that_of_the_checker(name):
    plan: Plan = PLANS[name]
    judged(plan.problem, plan.schedule())


def test_blocks_by_hand():
    blocks = {block.id: block for block in blocks_of(KEEP.problem, KEEP.schedule())["gpu0"]}
    end = len(KEEP.schedule().lists[0])
    assert blocks["w"] == Block("w", 1000, -1, end)
    back = KEEP.place(0, "compute back")
    assert blocks[f"workspace from #{back}"] == Block(f"workspace from #{back}", 20, back, back + 1)
    a = (KEEP.place(0, "compute f1"), KEEP.place(0, "release a gpu0"))
    assert blocks[f"a of micro-batch 0 from #{a[0]}"] == Block(f"a of micro-batch 0 from #{a[0]}", 400, *a)


def test_what_is_lent_is_one_block_of_the_lender_and_an_arena_of_the_borrower():
    arenas = judged(LOAN.problem, LOAN.schedule())
    loans = [block for block in arenas["gpu1"].blocks if block.id.startswith("loan")]
    assert [block.size_bytes for block in loans] == [400]
    assert arenas["gpu1 (gpu0)"].arena_bytes <= 400


@pytest.mark.parametrize("kind", ["keep-all", "offload-all", "recompute-all", "ratio-sweep"])
def test_plans_of_planners_are_placed_within_three_percent(kind):
    for name, problem in cases().items():
        schedule = light(kind).plan(problem).schedule
        if schedule is not None and not name.startswith(("random", "peers")):  # those are a few odd blocks
            for arena in judged(problem, schedule, alignment=256 if name in ("shared-path", "uneven") else 1).values():
                assert arena.arena_bytes <= max(1.03 * arena.peak_live_bytes, arena.bound_bytes), name


def test_state_that_leaves_in_the_middle_comes_back_to_its_place():
    plan = Plan(
        layer(),
        (
            lines("""
            prefetch x host gpu0
            compute f1
            release x gpu0
            compute f2
            offload w gpu0 host
            release w gpu0
            prefetch w host gpu0
            release w host
            compute back
            release a gpu0
            release b gpu0
            compute step
            release g gpu0
            """),
        ),
        ({"w": ("gpu0",)},),
    )
    (w,) = (block for block in judged(plan.problem, plan.schedule())["gpu0"].blocks if block.id == "w")
    assert w == Block("w", 1000, -1, 13, ((5, 6),))


def test_a_list_that_does_not_pair_is_refused():
    schedule = KEEP.schedule()
    rows = schedule.lists[0]
    release = rows[np.flatnonzero((rows["kind"] == Kind.RELEASE) & (rows["memory"] == _memory(KEEP, "gpu0")))[:1]]
    twice = replace(schedule, lists=(np.concatenate([rows, release]), *schedule.lists[1:]))
    with pytest.raises(InputError, match="not resident"):
        place(KEEP.problem, twice)


def test_capacities_do_not_matter():
    tight = with_memory(KEEP, "gpu0", capacity_bytes=1)
    assert place(tight.problem, tight.schedule())["gpu0"].peak_live_bytes == 1790


def _memory(plan: Plan, name: str) -> int:
    return [memory.name for memory in plan.problem.machine.memories].index(name)
