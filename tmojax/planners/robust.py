"""Among plans that are nearly equally fast, the one that varying durations hurt least."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tmojax.planners.sweep import POLICIES
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Kind, LinkPolicyKind, Problem, Schedule
from tmojax.relax.coordinate import shared_links
from tmojax.relax.decode import DoesNotFit
from tmojax.simulate import Prepared, prepare

NEAR = 0.005  # so much slower than the fastest a plan may be
SPREAD = 0.05  # of all durations and rates, each way
MOST_PLANS, MOST_SAMPLES, LEAST_SAMPLES = 6, 40, 20


@dataclass(frozen=True)
class Choice:
    """The plan chosen, with figures for `PlanResult.details`: nominal times and 95th percentiles of the compared."""

    plan: Candidate
    figures: dict[str, Any]


def most_robust(bench: Workbench, plans: Sequence[Candidate], *, limit_s: float, simulations: int, seed: int) -> Choice:
    """The plan with the least 95th percentile of the step time under jitter, of those within NEAR of the fastest.

    Compared are `plans` (the first of them at most), and the decisions of the fastest under the other link policies.
    `limit_s`: plans that are not faster than that do not count, unless the fastest is not either. All are given the
    same factors: one for every run of an op and one for every link, uniform in 1 +- SPREAD. `simulations`: at most so
    many; where they are too few for two plans, the fastest is taken. Deterministic for a seed.
    """
    ranked = sorted(plans, key=lambda plan: plan.step_s)
    most = min(MOST_PLANS, simulations // LEAST_SAMPLES)
    if most < 2:
        return Choice(ranked[0], {"compared": 1})
    others = _other_policies(bench, ranked[0])
    fastest = min([ranked[0], *others], key=lambda plan: plan.step_s)
    bar_s = fastest.step_s * (1 + NEAR)
    distinct: dict[Hashable, Candidate] = {}
    for plan in (fastest, *others, *ranked):
        if plan is fastest or (plan.step_s <= bar_s and plan.step_s < limit_s):
            distinct.setdefault((plan.step_s, plan.coordination.policy, plan.coordination.start_share), plan)
    compared = list(distinct.values())[:most]
    if len(compared) < 2:
        return Choice(fastest, {"compared": 1})
    samples = min(MOST_SAMPLES, simulations // len(compared))
    p95_s = [_p95_s(bench.problem, plan.schedule, samples, seed) for plan in compared]
    bench.simulations += samples * len(compared)
    chosen = min(range(len(compared)), key=lambda index: (p95_s[index], compared[index].step_s))
    figures = {
        "compared": len(compared),
        "samples": samples,
        "spread": SPREAD,
        "fastest": {"step_s": fastest.step_s, "p95_s": p95_s[0]},
        "chosen": {"step_s": compared[chosen].step_s, "p95_s": p95_s[chosen]},
    }
    return Choice(compared[chosen], figures)


def _other_policies(bench: Workbench, plan: Candidate) -> list[Candidate]:
    """The same lists with shared links given out in other ways."""
    if not shared_links(bench.problem.machine):
        return []
    rank = tuple(range(bench.device_count))
    options = [
        replace(plan.coordination, policy=policy, device_rank=rank if policy is LinkPolicyKind.PRIORITY else (),
                turns=0, timetable=None)
        for policy in POLICIES
        if policy is not plan.coordination.policy
    ]  # fmt: skip
    found = bench.each_of(plan.decisions, options, plan.lookahead_runs)
    return [] if isinstance(found, DoesNotFit) else found


def _p95_s(problem: Problem, schedule: Schedule, samples: int, seed: int) -> float:
    """Seconds; inf if a sample gets stuck. Plans of one problem see the same factors in sample i."""
    prepared: Prepared = prepare(problem, schedule)
    runs = [_run_numbers(problem, device, rows) for device, rows in enumerate(schedule.lists)]
    count = problem.workload.micro_batches
    step_s = np.empty(samples)
    for sample in range(samples):
        rng = np.random.default_rng([seed, sample])
        link_scale = rng.uniform(1 - SPREAD, 1 + SPREAD, len(problem.machine.links))
        op_scale = []
        for device, run in enumerate(runs):
            factors = rng.uniform(1 - SPREAD, 1 + SPREAD, 2 * count * len(problem.workload.program(device).ops))
            op_scale.append(np.append(factors, 1.0)[run])
        step_s[sample] = prepared.run(op_scale=op_scale, link_scale=link_scale).step_s
    return float(np.quantile(step_s, 0.95)) if np.isfinite(step_s).all() else float("inf")


def _run_numbers(problem: Problem, device: int, rows: np.ndarray) -> NDArray[np.int64]:
    """For every instruction the number of its run: (first or later run, micro-batch, op); -1 for what is no compute."""
    ops = len(problem.workload.program(device).ops)
    computes = np.flatnonzero(rows["kind"] == Kind.COMPUTE)
    number = rows["micro_batch"][computes].astype(np.int64) * ops + rows["op"][computes]
    again = np.ones(len(computes), np.int64)
    again[np.unique(number, return_index=True)[1]] = 0
    numbers = np.full(len(rows), -1, np.int64)
    numbers[computes] = number + again * problem.workload.micro_batches * ops
    return numbers
