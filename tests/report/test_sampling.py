"""Reduction to columns keeps areas and peaks exactly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmojax.report.sampling import highest_in_bins, mean_over_bins, rate_of_intervals

steps = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 100)), min_size=1, max_size=30)


@given(steps, st.integers(1, 17))
def test_mean_keeps_the_area(pieces, bins):
    lengths, values = np.array(pieces, float).T
    time_s = np.concatenate([[0.0], np.cumsum(lengths)[:-1]])
    edges = np.linspace(0.0, lengths.sum(), bins + 1)
    mean = mean_over_bins(time_s, values, edges)
    assert (mean * np.diff(edges)).sum() == pytest.approx((lengths * values).sum())
    assert mean.min() >= values.min() - 1e-9 and mean.max() <= values.max() + 1e-9


@given(steps, st.integers(1, 17))
def test_highest_loses_no_peak(pieces, bins):
    lengths, values = np.array(pieces, float).T
    time_s = np.concatenate([[0.0], np.cumsum(lengths)[:-1]])
    edges = np.linspace(0.0, lengths.sum(), bins + 1)
    found = highest_in_bins(time_s, values, edges)
    assert values[found].max() == values.max()
    # Every chosen entry holds for some of its bin.
    assert (time_s[found] < edges[1:]).all() and (time_s[found] + lengths[found] > edges[:-1]).all()


def test_rate_of_two_intervals_by_hand():
    start, end, amount = np.array([0.0, 2.0, 5.0]), np.array([1.0, 4.0, 5.0]), np.array([4.0, 6.0, 9.0])
    # 4 units in the first second, 3 a second from 2 to 4; the interval of no length is left out.
    assert rate_of_intervals(start, end, amount, np.arange(6.0)) == pytest.approx([4, 0, 3, 3, 0])


def test_nothing_is_zero():
    assert mean_over_bins(np.zeros(0), np.zeros(0), np.arange(4.0)).tolist() == [0, 0, 0]
