"""The bound against the best schedule of an exhaustive family, on tiny steps; checker and simulator judge the
schedules."""

import itertools
import random

import pytest
from enumerated_schedules import options, schedules
from tiny_steps import tiny_problem

from tmojax.bounds import bound
from tmojax.check import check
from tmojax.problem import Action
from tmojax.simulate import simulate

MOVE, BOTH = {Action.OFFLOAD}, {Action.OFFLOAD, Action.RECOMPUTE}


def cases():
    """(seed, arguments of tiny_problem): every combination of GPUs, K, actions, duplex, with and without state."""
    grid = itertools.product((1, 2), (1, 2), (MOVE, BOTH), (True, False), (False, True))
    for number, (gpus, micro_batches, actions, duplex, state) in enumerate(grid):
        for repeat in range(2):
            layers, squeeze = 3 + (number + repeat) % 2, (0.35, 0.7)[repeat]
            yield 100 * number + repeat, dict(gpus=gpus, micro_batches=micro_batches, layers=layers, actions=actions,
                                              duplex=duplex, state=state, squeeze=squeeze)  # fmt: skip


def best_of_family(problem, seed: int, limit: int, finalists: int = 40) -> tuple[float, int]:
    """(least step time, number of valid schedules) among at most `limit` choices. Of the best `finalists`
    policies and staggers are tried too, and partners with another choice."""
    rng = random.Random(seed)
    by_tensor = options(problem)
    everything = [dict(zip(by_tensor, picks, strict=True)) for picks in _some(list(by_tensor.values()), limit, rng)]
    gpus = problem.workload.device_count
    runs = len(problem.workload.programs[0].ops)
    fitting = []
    for choice in everything:
        first = next(schedules(problem, [choice] * gpus), None)
        if first is not None and check(problem, first).valid:
            fitting.append((simulate(problem, first).step_s, choice))
    fitting.sort(key=lambda item: item[0])
    best, count = float("inf"), len(fitting)
    for _, choice in fitting[:finalists]:
        pairs = [[choice] * gpus]
        if gpus > 1:
            pairs += [[choice, other] for _, other in rng.sample(fitting, min(3, len(fitting)))]
        for choices in pairs:
            staggers = (0, runs // 3, runs // 2, runs) if gpus > 1 else (0,)
            for schedule in schedules(problem, choices, staggers):
                if check(problem, schedule).valid:
                    count += 1
                    best = min(best, simulate(problem, schedule).step_s)
    return best, count


def _some(lists: list[list], limit: int, rng: random.Random):
    total = 1
    for items in lists:
        total *= len(items)
    if total <= limit:
        return list(itertools.product(*lists))
    return [tuple(rng.choice(items) for items in lists) for _ in range(limit)]


@pytest.mark.parametrize("seed, arguments", [case for n, case in enumerate(cases()) if n % 11 == 3])
def test_bound_is_below_every_schedule(seed, arguments):
    problem = tiny_problem(seed, **arguments)
    best, _ = best_of_family(problem, seed, 60, 12)
    assert bound(problem).bound_s <= best * (1 + 1e-9)


@pytest.mark.long
def test_bound_against_optimum_of_family(capsys):
    ratios = []
    for seed, arguments in cases():
        problem = tiny_problem(seed, **arguments)
        report = bound(problem)
        best, count = best_of_family(problem, seed, 400, 20)
        assert report.bound_s <= best * (1 + 1e-9), (seed, arguments, report, best)
        if count:
            ratios.append(best / report.bound_s)
    ratios.sort()
    with capsys.disabled():
        quarter = [f"{ratios[int(q * (len(ratios) - 1))]:.3f}" for q in (0, 0.25, 0.5, 0.75, 1)]
        print(f"\n{len(ratios)} cases with a schedule; best / bound: quartiles {', '.join(quarter)}")
    assert len(ratios) >= 50
