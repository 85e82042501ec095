"""Runs of one schedule in which nothing takes as long as planned, with the bytes recounted (occupancy.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from occupancy import Occupancy, within_limits

from tmojax.check import check
from tmojax.problem import MemoryKind, Problem, Schedule
from tmojax.simulate import prepare

LOW, HIGH = 0.2, 5.0


@dataclass(frozen=True)
class Found:
    """Over all draws: the largest share of its limit that a memory of each kind reached, and the step times."""

    draws: int
    shares: dict[MemoryKind, float]
    fastest_s: float
    slowest_s: float


def under_jitter(problem: Problem, schedule: Schedule, draws: int, seed: int = 0) -> Found:
    """Simulate with factors on every instruction that computes and on every link, log-uniform in LOW .. HIGH.

    Raises AssertionError where a memory or a loan is exceeded at any time, or where the schedule does not end.
    """
    prepared, occupancy = prepare(problem, schedule), Occupancy(problem, schedule)
    rng = np.random.default_rng(seed)

    def factors(count: int) -> np.ndarray:
        return np.exp(rng.uniform(np.log(LOW), np.log(HIGH), count))

    shares, steps_s = {kind: 0.0 for kind in MemoryKind}, []
    for _ in range(draws):
        simulation = prepared.run(
            op_scale=[factors(len(rows)) for rows in schedule.lists],
            link_scale=factors(len(problem.machine.links)),
        )
        assert not simulation.deadlocked, simulation.deadlocked
        bytes_of = within_limits(occupancy, simulation)
        for spec in problem.machine.memories:
            most, limit = bytes_of[spec.name]
            shares[spec.kind] = max(shares[spec.kind], most / limit if limit else 0.0)
        steps_s.append(simulation.step_s)
    return Found(draws, shares, min(steps_s), max(steps_s))


def with_tight_pinned_limits(problem: Problem, schedule: Schedule) -> Problem:
    """The problem with the lowest pinned limits that the schedule keeps to."""
    peaks = check(problem, schedule).peak_bytes
    memories = tuple(
        replace(memory, pinned_limit_bytes=peaks[memory.name]) if memory.kind is MemoryKind.HOST else memory
        for memory in problem.machine.memories
    )
    return replace(problem, machine=replace(problem.machine, memories=memories))


def with_tight_limits(problem: Problem, schedule: Schedule) -> Problem:
    """The problem with the smallest memories that the schedule fits into."""
    peaks = check(problem, schedule).peak_bytes
    memories = tuple(
        replace(memory, capacity_bytes=max(peaks[memory.name], 1) + memory.reserve_bytes)
        for memory in problem.machine.memories
    )
    return replace(problem, machine=replace(problem.machine, memories=memories))
