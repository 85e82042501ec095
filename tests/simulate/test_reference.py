"""The simulator against a second one that is exact, naive and separate (reference.py), on random schedules."""

from __future__ import annotations

import numpy as np
import pytest
from building import random_case, transfers_of_link
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Reference

from tmojax.problem import LinkPolicy, LinkPolicyKind
from tmojax.simulate import simulate


def assert_same_times(problem, schedule, policies, steps):
    result = simulate(problem, schedule, link_policies=policies, steps=steps)
    reference = Reference(problem, schedule, steps, policies)
    for device in range(len(schedule.lists)):
        expected = np.array([np.nan if time is None else float(time) for time in reference.end_s[device]])
        np.testing.assert_allclose(result.end_s[device], expected, rtol=1e-9, atol=1e-9)
    return result


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_same_times_as_the_reference(seed):
    result = assert_same_times(*random_case(seed))
    assert not result.deadlocked


@pytest.mark.long
@settings(max_examples=1500, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_same_times_as_the_reference_many(seed):
    assert_same_times(*random_case(seed))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 2))
def test_same_times_with_an_order_even_if_it_deadlocks(seed, slots):
    """Sequences: the order of a fair run, with one neighbouring pair exchanged at times."""
    problem, schedule, _, _ = random_case(seed)
    rng = np.random.default_rng(seed)
    first = simulate(problem, schedule, link_policies=())
    policies = []
    for link in range(len(problem.machine.links)):
        users = transfers_of_link(problem, schedule, link)
        users.sort(key=lambda user: (first.transfer_start_s[user[0]][user[1]], user))
        if len(users) > 1 and rng.random() < 0.3:
            place = int(rng.integers(0, len(users) - 1))
            users[place], users[place + 1] = users[place + 1], users[place]
        ordered = rng.random() < 0.5
        policies.append(LinkPolicy(LinkPolicyKind.ORDER, slots, sequence=tuple(users)) if ordered else LinkPolicy())
    assert_same_times(problem, schedule, tuple(policies), 1)
