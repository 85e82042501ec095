"""Questions that take many runs: how much a step time varies, and what a step costs when steps follow each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tmojax.errors import InputError
from tmojax.problem import Problem, Schedule
from tmojax.simulate.prepared import Prepared, prepare
from tmojax.simulate.simulation import Simulation

LONGEST_CYCLE = 4  # steps
SAME = 1e-9  # of the period: two steps whose times differ by less are the same


def jitter(
    problem: Problem | Prepared,
    schedule: Schedule | None = None,
    *,
    percent: float = 5.0,
    samples: int = 200,
    seed: int = 0,
) -> tuple[float, float]:
    """Median and 95th percentile of `step_s` when durations and rates vary (design, section 6, point 6).

    In each sample every compute, encode and decode instruction takes a factor of its own longer, and every link has a
    factor of its own for the whole step, all independent and uniform in 1 - percent/100 .. 1 + percent/100. `schedule`
    is not needed with a Prepared. Deterministic for a seed. Raises InputError.
    """
    if not 0 <= percent < 100:
        raise InputError(f"percent: {percent} must be at least 0 and below 100")
    if samples < 1:
        raise InputError(f"samples: {samples} must be at least 1")
    prepared = _prepared(problem, schedule)
    rng = np.random.default_rng(seed)
    low, high = 1 - percent / 100, 1 + percent / 100
    links = len(prepared.problem.machine.links)
    step_s = np.empty(samples)
    for sample in range(samples):  # drawn one by one: all factors of all samples need not fit in memory
        op_scale = [rng.uniform(low, high, len(rows)) for rows in prepared.schedule.lists]
        step_s[sample] = prepared.run(op_scale=op_scale, link_scale=rng.uniform(low, high, links)).step_s
    if np.isinf(step_s).any():  # the order of events may decide whether a schedule that the checker rejects gets stuck
        return float(np.sort(step_s)[(samples - 1) // 2]), float("inf")
    return float(np.median(step_s)), float(np.quantile(step_s, 0.95))


@dataclass(frozen=True)
class SteadyState:
    """Steps that follow each other (semantics 8.7).

    `detected`: from step `steps_until_periodic` on, every instruction of a step takes effect exactly one period after
    that of the step before, or, with `cycle` > 1, `cycle` periods after that of `cycle` steps before. `period_s` is
    that period per step; if it was not detected, the mean over the second half of the simulated steps, and
    `steps_until_periodic` is their number. inf if the schedule deadlocks.
    """

    period_s: float
    steps_until_periodic: int
    detected: bool
    cycle: int = 1
    first_step_s: float = float("nan")


def steady_state(problem: Problem | Prepared, schedule: Schedule | None = None, max_steps: int = 32) -> SteadyState:
    """Issue the lists again and again until the times repeat, at most `max_steps` times. Raises InputError."""
    if max_steps < 4:
        raise InputError(f"max_steps: {max_steps} must be at least 4, or no repetition can be seen")
    prepared = _prepared(problem, schedule)
    steps = min(6, max_steps)
    while True:
        simulation = prepared.run(steps=steps)
        ends_s = simulation.step_ends_s
        if np.isinf(ends_s).any():
            return SteadyState(float("inf"), steps, False, 1, float(ends_s[0]))
        # The last steps are not followed by others that get in their way: they may end earlier than they would.
        kept = steps - max(1, steps // 6)
        times, ends_s = _times(simulation, steps)[:kept], ends_s[:kept]
        for cycle in range(1, LONGEST_CYCLE + 1):
            found = _periodic_from(times, ends_s, cycle)
            if found is not None:
                period_s = float(ends_s[-1] - ends_s[-1 - cycle]) / cycle
                return SteadyState(period_s, found, True, cycle, float(ends_s[0]))
        if steps == max_steps:
            half = kept // 2
            period_s = float(ends_s[-1] - ends_s[half - 1]) / (kept - half)
            return SteadyState(period_s, steps, False, 1, float(ends_s[0]))
        steps = min(2 * steps, max_steps)


def _prepared(problem: Problem | Prepared, schedule: Schedule | None) -> Prepared:
    if isinstance(problem, Prepared):
        return problem
    if schedule is None:
        raise InputError("schedule: give one with a Problem; only a Prepared has its own")
    return prepare(problem, schedule)


def _times(simulation: Simulation, steps: int) -> NDArray[np.float64]:
    """Shape (step, instruction of all lists): every effect."""
    return np.concatenate([end_s.reshape(steps, -1) for end_s in simulation.end_s], axis=1)


def _periodic_from(times: NDArray, ends_s: NDArray, cycle: int) -> int | None:
    """The first step from which all effects repeat after `cycle` steps, seen at least twice; None if they do not."""
    steps = len(times)
    if steps < 2 * cycle + 1:
        return None
    shift = ends_s[cycle:] - ends_s[:-cycle]
    period_s = shift[-1]
    if times.size and period_s > 0:
        difference = times[cycle:] - times[:-cycle] - period_s
        same = np.abs(difference).max(axis=1, initial=0.0) <= SAME * period_s
    else:
        same = np.ones(steps - cycle, np.bool_)
    run = int(np.argmin(same[::-1])) if not same.all() else len(same)
    return steps - cycle - run if run >= cycle + 1 else None
