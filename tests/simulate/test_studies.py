"""Jitter and steady state."""

from __future__ import annotations

import numpy as np
import pytest
from building import HOST, box, op, problem_of, random_case, schedule_of, tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from tmojax.errors import InputError
from tmojax.problem import Collective, CollectiveKind, LinkPolicy, LinkPolicyKind, ListBuilder
from tmojax.simulate import jitter, prepare, simulate, steady_state


def offload_case():
    """1 s of compute, then 100 bytes at 10 bytes/s while another second is computed."""
    problem = problem_of(box(1), [([tensor("x", 100)], [op("f", 1.0, writes=[0]), op("g", 1.0)])])
    builder = ListBuilder()
    builder.compute(0, 0)
    builder.offload(0, 0, 1, HOST)
    builder.compute(1, 0)
    return problem, schedule_of(builder)


def test_without_variation_the_jitter_is_the_step():
    problem, schedule = offload_case()
    assert jitter(problem, schedule, percent=0, samples=3) == (11, 11)


def test_jitter_stays_within_what_the_factors_allow_and_depends_on_the_seed_only():
    problem, schedule = offload_case()
    prepared = prepare(problem, schedule)
    median_s, high_s = jitter(prepared, percent=5, samples=400, seed=3)
    assert 11 / 1.05 <= median_s <= high_s <= 11 / 0.95
    # f + 10 / r, f about 1, and r the smaller of uplink and lane: below 0.95 + 0.1 u with probability 1 - (1 - u)**2
    assert median_s == pytest.approx(1 + 10 / (0.95 + 0.1 * (1 - np.sqrt(0.5))), rel=0.01)
    assert high_s == pytest.approx(1 + 10 / (0.95 + 0.1 * (1 - np.sqrt(0.95))), rel=0.01)
    assert (median_s, high_s) == jitter(problem, schedule, percent=5, samples=400, seed=3)
    assert (median_s, high_s) != jitter(problem, schedule, percent=5, samples=400, seed=4)


def test_steady_state_of_a_transfer_bound_step():
    """Both outputs have to be gone before the next step may write them again."""
    tensors = [tensor("x", 100), tensor("y", 10)]
    problem = problem_of(box(1), [(tensors, [op("f", 1.0, writes=[0]), op("g", 1.0, writes=[1])])])
    builder = ListBuilder()
    builder.compute(0, 0)
    builder.offload(0, 0, 1, HOST)
    builder.compute(1, 0)
    builder.release(0, 0, 1)
    builder.offload(1, 0, 1, HOST)
    builder.release(1, 0, 1)
    state = steady_state(problem, schedule_of(builder))
    # first step: f until 1, x until 11, y until 12; the next f waits for x and y to be gone: 12..13, and so on
    assert (state.detected, state.period_s, state.cycle, state.first_step_s) == (True, 12, 1, 12)
    assert state.steps_until_periodic == 0


def test_steps_that_overlap_have_a_period_below_the_first_step():
    """Two GPUs and one fcfs uplink: the second one's offload overlaps the first one's next step."""
    problem = problem_of(box(2), [([tensor("x", 10)], [op("f", 2.0, writes=[0])])], device_program=[0, 0])
    lists = []
    for device in range(2):
        builder = ListBuilder()
        builder.compute(0, 0)
        builder.offload(0, 0, 1 + device, HOST)
        builder.release(0, 0, 1 + device)
        lists.append(builder)
    fcfs = tuple([LinkPolicy()] * 4 + [LinkPolicy(LinkPolicyKind.FCFS), LinkPolicy()])
    state = steady_state(problem, schedule_of(*lists, link_policies=fcfs))
    # device 0: compute 0..2, move 2..3, compute 3..5, ...; device 1: 0..2, 3..4, 4..6: never in each other's way again
    assert (state.detected, state.period_s, state.first_step_s) == (True, 3, 4)


def test_steady_state_of_a_compute_bound_step():
    problem = problem_of(box(2), [([tensor("x", 1)], [op("f", 2.0, writes=[0])])], device_program=[0, 0])
    builder = ListBuilder()
    builder.compute(0, 0)
    schedule = schedule_of(builder, builder)
    state = steady_state(prepare(problem, schedule))
    assert (state.detected, state.period_s, state.steps_until_periodic) == (True, 2, 0)
    assert simulate(problem, schedule, steps=4).step_ends_s.tolist() == [2, 4, 6, 8]


def test_the_last_step_does_not_hide_the_period():
    """Every step ends with a transfer that shares the link with the next step's first one, except for the last step."""
    tensors = [tensor("x", 100), tensor("y", 100)]
    problem = problem_of(box(1, duplex=10.0), [(tensors, [op("f", 1.0, reads=[0], writes=[1])])])
    builder = ListBuilder()
    builder.prefetch(0, 0, HOST, 1)
    builder.compute(0, 0)
    builder.release(0, 0, 1)
    builder.offload(1, 0, 1, HOST)
    schedule = schedule_of(builder)
    # x 0..10, f until 11, then y and the next x at 5 bytes/s each until 31; after the last f, y alone
    assert simulate(problem, schedule, steps=3).step_ends_s.tolist() == [31, 52, 63]
    state = steady_state(problem, schedule)
    assert (state.detected, state.period_s, state.steps_until_periodic) == (True, 21, 0)


def test_devices_that_run_apart_are_not_called_periodic():
    programs = [([tensor("x", 1)], [op("f", duration_s, writes=[0])]) for duration_s in (1.0, 2.0)]
    builder = ListBuilder()
    builder.compute(0, 0)
    state = steady_state(problem_of(box(2), programs), schedule_of(builder, builder), max_steps=8)
    assert not state.detected
    assert state.period_s == 2
    assert state.steps_until_periodic == 8


def test_deadlock_has_no_period():
    sync = Collective("sync", CollectiveKind.ALL_REDUCE, 1, (0, 1))
    program = ([tensor("x", 1)], [op("s", 0.0, step_op=True, collective="sync")])
    builder = ListBuilder()
    builder.collective(0, 0)
    problem = problem_of(box(2), [program], collectives=[sync], device_program=[0, 0])
    state = steady_state(problem, schedule_of(builder, ListBuilder()))
    assert (state.period_s, state.detected) == (float("inf"), False)
    assert jitter(problem, schedule_of(builder, ListBuilder()), samples=4) == (float("inf"), float("inf"))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_detected_period_goes_on(seed):
    problem, schedule, _, _ = random_case(seed)
    prepared = prepare(problem, schedule)
    state = steady_state(prepared, max_steps=24)
    if not state.detected:
        return
    ends_s = prepared.run(steps=36).step_ends_s
    for step in range(state.steps_until_periodic, 30 - state.cycle):
        assert ends_s[step + state.cycle] - ends_s[step] == pytest.approx(state.cycle * state.period_s, rel=1e-6)


def test_bad_arguments_are_named():
    problem, schedule = offload_case()
    with pytest.raises(InputError, match="percent: 100"):
        jitter(problem, schedule, percent=100)
    with pytest.raises(InputError, match="samples: 0"):
        jitter(problem, schedule, samples=0)
    with pytest.raises(InputError, match="schedule"):
        jitter(problem)
    with pytest.raises(InputError, match="max_steps: 3"):
        steady_state(problem, schedule, max_steps=3)


def test_jitter_uses_the_policies_of_the_schedule():
    problem = problem_of(box(2), [([tensor("x", 100)], [op("f", 1.0, writes=[0])])], device_program=[0, 0])
    lists = []
    for device in range(2):
        builder = ListBuilder()
        builder.compute(0, 0)
        builder.offload(0, 0, 1 + device, HOST)
        lists.append(builder)
    fcfs = LinkPolicy(LinkPolicyKind.FCFS)
    schedule = schedule_of(*lists, link_policies=tuple([LinkPolicy()] * 4 + [fcfs, LinkPolicy()]))
    assert jitter(problem, schedule, percent=0, samples=1) == (21, 21)
