"""Exact reduction of long step functions to as many values as a picture has columns."""

from __future__ import annotations

import numpy as np


def mean_over_bins(time_s: np.ndarray, value: np.ndarray, edges_s: np.ndarray) -> np.ndarray:
    """Mean of a step function in every bin, [len(edges_s) - 1].

    `value` [E] holds from `time_s` [E] (increasing) to the next entry, the last one for ever; before the first it is 0.
    """
    if len(time_s) == 0:
        return np.zeros(len(edges_s) - 1)
    last = max(float(time_s[-1]), float(edges_s[-1]))
    knots = np.append(time_s, last + 1.0)
    area = np.concatenate([[0.0], np.cumsum(value * np.diff(knots))])
    return np.diff(np.interp(edges_s, knots, area)) / np.diff(edges_s)


def rate_of_intervals(start_s: np.ndarray, end_s: np.ndarray, amount: np.ndarray, edges_s: np.ndarray) -> np.ndarray:
    """Mean rate in every bin of amounts that arrive evenly between their start and end, [len(edges_s) - 1].

    With amount = end - start this is the fraction of every bin that is covered (of intervals that do not overlap).
    Intervals of no length are left out.
    """
    positive = end_s > start_s
    start_s, end_s, amount = start_s[positive], end_s[positive], amount[positive]
    rate = amount / (end_s - start_s)
    times = np.concatenate([start_s, end_s])
    order = np.argsort(times, kind="stable")
    steps = np.cumsum(np.concatenate([rate, -rate])[order])
    return np.maximum(mean_over_bins(times[order], steps, edges_s), 0.0)


def highest_in_bins(time_s: np.ndarray, value: np.ndarray, edges_s: np.ndarray) -> np.ndarray:
    """Entry of a step function that is the highest in every bin, [len(edges_s) - 1].

    As `mean_over_bins`, but an entry counts in a bin only where it holds for some of it.
    """
    first = np.maximum(np.searchsorted(time_s, edges_s[:-1], side="right") - 1, 0)
    end = np.maximum(np.searchsorted(time_s, edges_s[1:], side="left"), first + 1)
    return np.array([f + int(np.argmax(value[f:e])) for f, e in zip(first.tolist(), end.tolist(), strict=True)], int)
