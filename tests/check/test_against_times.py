"""What the checker accepts must hold in time: with whatever durations, it runs to its end and never holds more bytes.

The bytes are counted here from simulated times, including what one GPU really has in the memory of another.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from occupancy import Occupancy
from plan_text import Plan
from two_gpu_plans import VALID

from tmojax.check import Rule, check
from tmojax.problem import INSTRUCTION, Kind, Problem, Schedule
from tmojax.simulate import simulate


def with_durations(problem: Problem, seed: int) -> Problem:
    """The problem with other op durations, link rates and reaction times."""
    rng = np.random.default_rng(seed)
    programs = tuple(
        replace(program, ops=tuple(replace(op, duration_s=float(rng.choice([0, 1, 9]))) for op in program.ops))
        for program in problem.workload.programs
    )
    links = tuple(replace(link, bandwidth_bytes_per_s=float(rng.choice([20, 300]))) for link in problem.machine.links)
    overheads = replace(problem.machine.overheads, handover_s=float(rng.choice([0, 2])))
    machine = replace(problem.machine, links=links, overheads=overheads)
    return replace(problem, workload=replace(problem.workload, programs=programs), machine=machine)


def largest_bytes(problem: Problem, schedule: Schedule) -> dict[str, int]:
    """The largest total of the bytes that are really in each memory at one time."""
    simulation = simulate(problem, schedule)
    assert simulation.step_s < float("inf")
    occupancy = Occupancy(problem, schedule)
    return {m.name: occupancy.most_bytes(simulation, i) for i, m in enumerate(problem.machine.memories)}


def edited(schedule: Schedule, device: int, order: list[int]) -> Schedule:
    """The schedule with one list in another order (or without some instructions); labels follow their instructions."""
    old = schedule.lists[device]
    rows = old[order]
    for row in rows:
        if row["kind"] in (Kind.RETIRE, Kind.SIGNAL):
            row["after"] = order.index(row["after"]) if row["after"] in order else len(old)
    return replace(schedule, lists=tuple(rows if d == device else x for d, x in enumerate(schedule.lists)))


def holds_in_time(plan: Plan, schedule: Schedule, seed: int) -> None:
    problem = with_durations(plan.problem, seed)
    report = check(problem, schedule)
    if report.valid:
        found = largest_bytes(problem, schedule)
        assert all(size <= report.peak_bytes[name] for name, size in found.items()), (found, report.peak_bytes)
    elif {v.rule for v in report.violations} == {Rule.DEADLOCK}:
        assert simulate(problem, schedule).step_s == float("inf")


@pytest.mark.parametrize("name", VALID)
def test_valid_plans_hold_in_time(name):
    plan = VALID[name]
    for seed in range(5):
        holds_in_time(plan, plan.schedule(), seed)


@pytest.mark.parametrize("name", ["loan", "parked", "staged", "reduce", "swap"])
def test_moved_instructions_hold_in_time_or_are_rejected(name):
    plan = VALID[name]
    schedule = plan.schedule()
    accepted = 0
    for device in range(len(schedule.lists)):
        count = len(schedule.lists[device])
        for place in range(count):
            for target in range(max(0, place - 4), min(count, place + 5)):
                order = [i for i in range(count) if i != place]
                order.insert(target, place)
                moved = edited(schedule, device, order)
                accepted += check(plan.problem, moved).valid
                holds_in_time(plan, moved, seed=place)
    assert accepted > 5  # the test has substance


@pytest.mark.long
@settings(max_examples=3000, deadline=None)
@given(st.data())
def test_shuffled_lists_hold_in_time_or_are_rejected(data):
    name = data.draw(st.sampled_from(["loan", "parked", "staged", "reduce", "swap", "two batches", "encoded"]))
    plan = VALID[name]
    schedule = plan.schedule()
    for _ in range(data.draw(st.integers(1, 5))):
        device = data.draw(st.integers(0, len(schedule.lists) - 1))
        order = list(range(len(schedule.lists[device])))
        moved = order.pop(data.draw(st.integers(0, len(order) - 1)))
        if data.draw(st.integers(0, 4)):
            order.insert(min(len(order), max(0, moved + data.draw(st.integers(-6, 6)))), moved)
        schedule = edited(schedule, device, order)
    assert schedule.lists[0].dtype == INSTRUCTION
    holds_in_time(plan, schedule, data.draw(st.integers(0, 1000)))
