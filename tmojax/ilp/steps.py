"""What models merge to stay small: slots into steps, tensors into groups, resting state into groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tmojax.problem import Problem
from tmojax.problem.step_view import StepView


@dataclass(frozen=True, eq=False)
class Steps:
    """Slots first[j] .. end[j] - 1 are step j; first, end [J]."""

    first: np.ndarray
    end: np.ndarray

    def whole(self, idle_from: np.ndarray, idle_to: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(begin, stop): the steps begin .. stop - 1 lie within idle_from < slot < idle_to; it is wanted in `stop`."""
        return np.searchsorted(self.first, idle_from + 1, "left"), np.searchsorted(self.end, idle_to, "right")

    def seconds(self, slot_s: np.ndarray) -> np.ndarray:
        """Duration [J] of every step."""
        return np.array([slot_s[a:b].sum() for a, b in zip(self.first, self.end, strict=True)])


def weighted_steps(view: StepView, capacity_bytes: int, most: int) -> Steps:
    """At most `most` steps: every slot on its own where there are few, else of about equal weight.

    Time and need above the capacity weigh half each: fine steps where memory is short, coarse ones where it is not.
    """
    slots = len(view.slot_s)
    if slots <= most:
        return steps_between(slots, range(slots))
    over = np.maximum(view.keep_bytes - capacity_bytes, 0).astype(float) > 0
    weight = view.slot_s / max(view.slot_s.sum(), 1e-30) + over / max(over.sum(), 1)
    position = np.concatenate([[0.0], np.cumsum(weight)])[:-1] / weight.sum()
    step = np.minimum((position * most).astype(int), most - 1)
    return steps_between(slots, np.flatnonzero(np.diff(step)) + 1)


def steps_between(slots: int, borders: Iterable[int]) -> Steps:
    """Steps that begin at slot 0 and at every border below `slots`."""
    first = np.unique([0, *(border for border in borders if 0 < border < slots)])
    return Steps(first, np.append(first[1:], slots))


def small_candidates(view: StepView, capacity_bytes: int, share: float) -> np.ndarray:
    """[I] bool: needed candidates below `share` of the capacity, the smallest first, until together they take 1 % of
    it."""
    size = view.size_bytes
    order = np.argsort(size, kind="stable")
    order = order[view.needed[order] & (size[order] <= share * capacity_bytes)]
    small = np.zeros(len(size), bool)
    small[order[np.cumsum(size[order]) <= 0.01 * capacity_bytes]] = True
    return small


def state_groups(view: StepView, most: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """(group [S], bytes per group): resting state in order, in groups of about equal bytes; -1: in none."""
    group = np.full(len(view.state_tensor), -1)
    resting = np.flatnonzero(view.state_resting)
    if not len(resting):
        return group, np.zeros(0)
    size = view.state_bytes[resting].astype(float)
    middle = np.cumsum(size) - size / 2
    number = np.minimum((middle / max(size.sum(), 1.0) * most).astype(int), most - 1)
    _, number = np.unique(number, return_inverse=True)
    group[resting] = number
    return group, np.bincount(number, weights=size)


def worst_bytes(view: StepView, steps: Steps, begin: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """[J]: most bytes at a slot of each step, with candidate i away in the steps begin[i] .. stop[i] - 1 only.

    Everything else that backward uses is present, also where it is idle in a part of a step.
    """
    partly = np.zeros(len(view.slot_s) + 1, np.int64)  # base_bytes has every needed candidate away while idle
    for i in np.flatnonzero(view.needed):
        low, high = int(view.idle_from[i]) + 1, int(view.idle_to[i])
        spans = [(low, high)]
        if stop[i] > begin[i]:
            spans = [(low, int(steps.first[begin[i]])), (int(steps.end[stop[i] - 1]), high)]
        for start, end in spans:
            if end > start:
                partly[start] += view.size_bytes[i]
                partly[end] -= view.size_bytes[i]
    profile = view.base_bytes + np.cumsum(partly)[:-1]
    return np.array([profile[a:b].max() for a, b in zip(steps.first, steps.end, strict=True)], np.int64)


@dataclass(frozen=True, eq=False)
class Groups:
    """Candidates that leave together, in the order in which the last of each is written.

    members: candidates of each group. size_bytes [N]. written [N]: slot after which the last member is there.
    idle_from, idle_to [N]: in between all members are idle. merged: whether any group has several members.
    """

    members: tuple[np.ndarray, ...]
    size_bytes: np.ndarray
    written: np.ndarray
    idle_from: np.ndarray
    idle_to: np.ndarray

    @property
    def merged(self) -> bool:
        return any(len(group) > 1 for group in self.members)


def group_candidates(problem: Problem, view: StepView, allowed: np.ndarray, most: int) -> Groups:
    """At most `most` groups of the candidates in `allowed` [I] whose common idle interval is not empty.

    Each candidate is its own group where there are few enough; else those of one layer go together, in as many parts of
    about equal bytes as there may be; else those of as many neighbouring layers as it takes.
    """
    program = problem.workload.program(view.device)
    order = np.array(sorted(np.flatnonzero(allowed), key=lambda i: (view.producer_slot[i], view.tensor[i])), np.int64)
    number = np.arange(len(order))
    if len(order) > most:
        label = [program.ops[program.producer[tensor]].layer for tensor in view.tensor[order].tolist()]
        layer = np.unique([label.index(name) for name in label], return_inverse=True)[1]
        layers = int(layer.max()) + 1
        parts = max(1, most // layers)
        number = layer * most // layers if layers > most else layer * parts
        for n in range(layers if parts > 1 else 0):
            size = view.size_bytes[order[layer == n]].astype(float)
            middle = (np.cumsum(size) - size / 2) / max(size.sum(), 1.0)
            number[layer == n] += np.minimum((middle * parts).astype(int), parts - 1)
    groups = [part for n in np.unique(number) for part in _overlapping(view, order[number == n])]
    groups.sort(key=lambda group: (int(view.producer_slot[group].max()), int(view.idle_to[group].min())))
    return Groups(
        tuple(groups),
        np.array([view.size_bytes[group].sum() for group in groups], np.int64),
        np.array([view.producer_slot[group].max() for group in groups], np.int64),
        np.array([view.idle_from[group].max() for group in groups], np.int64),
        np.array([view.idle_to[group].min() for group in groups], np.int64),
    )


def _overlapping(view: StepView, group: np.ndarray) -> list[np.ndarray]:
    """The group, or without the members that leave it no common idle slot (those with the shortest interval first)."""
    while len(group) and view.idle_to[group].min() - view.idle_from[group].max() <= 1:
        group = np.delete(group, int(np.argmin((view.idle_to - view.idle_from)[group])))
    return [group] if len(group) else []
