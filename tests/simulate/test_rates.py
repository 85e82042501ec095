"""The fair shares of the event loop against the reference allocator in fractions, and against what max-min means."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import max_min

from tmojax.simulate.kernel import fair_rates

LOADS = [Fraction(1), Fraction(1), Fraction(1, 2), Fraction(1, 3), Fraction(3, 4)]


@st.composite
def networks(draw):
    links = draw(st.integers(1, 7))
    capacity = [draw(st.integers(1, 60)) for _ in range(links)]
    flows = []
    for _ in range(draw(st.integers(1, 9))):
        route = draw(st.lists(st.integers(0, links - 1), min_size=1, max_size=links, unique=True))
        loads = {link: draw(st.sampled_from(LOADS)) for link in route}
        loads[route[0]] = Fraction(1)  # the most loaded link counts as one
        flows.append(loads)
    return capacity, flows


def rates_of(capacity, flows):
    link_ptr = np.concatenate(([0], np.cumsum([len(loads) for loads in flows]))).astype(np.int64)
    link = np.array([link for loads in flows for link in loads], np.int64)
    coefficient = np.array([float(load) for loads in flows for load in loads.values()])
    links, count = len(capacity), len(flows)
    share = np.empty(count)
    fair_rates(
        count, np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32), link_ptr, link, coefficient,
        np.array(capacity, np.float64), share, np.empty(links), np.empty(links), np.zeros(links, np.int32),
    )  # fmt: skip
    return share


@settings(max_examples=300, deadline=None)
@given(networks())
def test_same_shares_as_in_fractions(network):
    capacity, flows = network
    expected = max_min(flows, {link: Fraction(total) for link, total in enumerate(capacity)})
    np.testing.assert_allclose(rates_of(capacity, flows), [float(level) for level in expected], rtol=1e-12)


@pytest.mark.long
@settings(max_examples=5000, deadline=None)
@given(networks())
def test_same_shares_as_in_fractions_many(network):
    capacity, flows = network
    expected = max_min(flows, {link: Fraction(total) for link, total in enumerate(capacity)})
    np.testing.assert_allclose(rates_of(capacity, flows), [float(level) for level in expected], rtol=1e-12)


@settings(max_examples=200, deadline=None)
@given(networks())
def test_no_link_is_overfull_and_every_flow_has_a_bottleneck(network):
    """Max-min: each flow crosses a full link on which no other flow has a larger share."""
    capacity, flows = network
    share = rates_of(capacity, flows)
    used = [sum(share[i] * float(loads.get(link, 0)) for i, loads in enumerate(flows)) for link in range(len(capacity))]
    assert all(u <= c * (1 + 1e-12) for u, c in zip(used, capacity, strict=True))
    for i, loads in enumerate(flows):
        assert any(
            used[link] >= capacity[link] * (1 - 1e-9)
            and all(share[j] <= share[i] * (1 + 1e-9) for j, other in enumerate(flows) if link in other)
            for link in loads
        )


@settings(max_examples=100, deadline=None)
@given(networks(), networks())
def test_flows_that_share_nothing_keep_their_rate_bit_for_bit(first, second):
    capacity, flows = first
    shifted = [{link + len(capacity): load for link, load in loads.items()} for loads in second[1]]
    together = rates_of(capacity + second[0], flows + shifted)
    assert together[: len(flows)].tolist() == rates_of(capacity, flows).tolist()
