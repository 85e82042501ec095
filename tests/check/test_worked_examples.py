"""The worked examples of the documentation: every time, byte and violation that the page states."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from draw_worked_examples import picture
from occupancy import Occupancy
from worked_examples import END, PAGE, Example, examples

from tmojax.check import check
from tmojax.simulate import Simulation, hazards, kernel, lower, prepare, prepared, steady_state

sys.path.insert(0, str(Path(__file__).parents[1] / "simulate"))

from reference import Reference

EXAMPLES = examples()
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)


def plain_python(monkeypatch) -> None:
    """Replace every compiled function of the simulator by its Python original."""
    for module in (kernel, hazards, lower):
        for name, value in vars(module).copy().items():
            if hasattr(value, "py_func"):
                monkeypatch.setattr(module, name, value.py_func)
    monkeypatch.setattr(prepared, "run_events", kernel.run_events)


def assert_times(example: Example, simulation: Simulation) -> None:
    for device, expected in enumerate(example.times_s):
        for index, times in enumerate(expected):
            start_s, end_s = simulation.start_s[device][index], simulation.end_s[device][index]
            found = (end_s,) if np.isnan(start_s) else (start_s, end_s)
            if times is None:
                assert example.stuck and np.isnan(end_s), (device, index, found)
            else:
                assert found == times, (device, index)


def assert_simulates(example: Example) -> None:
    run = prepare(example.plan.problem, example.plan.schedule())
    simulation = run.run(steps=example.steps)
    assert_times(example, simulation)
    assert bool(simulation.deadlocked) == example.stuck
    if example.step_s is not None:
        assert simulation.step_s == example.step_s
    names = [device.name for device in example.plan.problem.machine.devices]
    stalls = dict(zip(names, run.run().stall_s.tolist(), strict=True))
    assert {name: stalls[name] for name in example.stall_s} == example.stall_s
    if example.period_s is not None:
        state = steady_state(run)
        assert state.detected and state.period_s == example.period_s


@each_example
def test_compiled_simulator(example):
    assert_simulates(example)


@each_example
def test_plain_simulator(example, monkeypatch):
    plain_python(monkeypatch)
    assert not hasattr(prepared.run_events, "py_func")
    assert_simulates(example)


@each_example
def test_rational_simulator(example):
    reference = Reference(example.plan.problem, example.plan.schedule())
    for device, expected in enumerate(example.times_s):
        for index, times in enumerate(expected):
            end_s = reference.end_s[device][index]
            assert end_s is None if times is None else end_s == times[-1], (device, index)


@each_example
def test_checker(example):
    schedule = example.plan.schedule()
    report = check(example.plan.problem, schedule)
    names = [device.name for device in example.plan.problem.machine.devices]
    found = []
    for violation in report.violations:
        device = names[violation.device] if violation.device >= 0 else "all"
        length = len(schedule.lists[violation.device]) if violation.device >= 0 else END
        found.append((violation.rule.value, device, violation.instruction, length, violation.bytes_over))
    expected = [(rule, device, place, over) for rule, device, place, over in example.violations]
    shown = [(rule, device, END if place == length else place, over) for rule, device, place, length, over in found]
    assert sorted(shown) == sorted(expected)
    assert {name: report.peak_bytes[name] for name in example.peak_bytes} == example.peak_bytes
    assert report.valid == (not example.violations)


@each_example
def test_bytes_over_time(example):
    """What is really there is at most what the checker charges."""
    schedule = example.plan.schedule()
    report = check(example.plan.problem, schedule)
    simulation = prepare(example.plan.problem, schedule).run()
    occupancy = Occupancy(example.plan.problem, schedule)
    for memory, spec in enumerate(example.plan.problem.machine.memories):
        if report.valid:
            assert occupancy.most_charged_bytes(simulation, memory) <= report.peak_bytes[spec.name]


@each_example
def test_picture_is_the_one_that_the_page_shows(example):
    assert f"(images/{example.picture.name})" in PAGE.read_text()
    assert example.picture.read_text() == picture(example), "run tests/check/draw_worked_examples.py"


def test_there_are_no_other_pictures():
    assert {example.picture for example in EXAMPLES} == set(EXAMPLES[0].picture.parent.glob("semantics-*.svg"))
    assert len(EXAMPLES) > 20
