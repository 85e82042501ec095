"""The bound against plans of random steps whose state comes and goes, at the update as well."""

import pytest
from random_steps import random_problem

from tmojax.bounds import bound
from tmojax.planners.gradient import LocalSearch
from tmojax.planners.local_search import SearchSettings


def ratio(seed: int, factor: float) -> float:
    """Step time of the best plan of a short search over the bound; inf without a plan."""
    problem = random_problem(seed, factor=factor)
    plan = LocalSearch(search=SearchSettings(evaluations=60)).plan(problem, seed=seed)
    return plan.step_s / bound(problem).bound_s


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_of_a_search_beats_the_bound(seed):
    assert ratio(seed, 1.2) >= 1 - 1e-9


@pytest.mark.long
def test_no_plan_of_a_search_beats_the_bound_on_many(capsys):
    found = sorted(ratio(seed, (1.05, 1.1, 1.2, 1.3)[seed % 4]) for seed in range(3, 43))
    assert found[0] >= 1 - 1e-9
    with capsys.disabled():
        print(f"\n{len(found)} plans; plan / bound: least {found[0]:.4f}, median {found[len(found) // 2]:.4f}")
