"""The bound against plans of random steps whose state comes and goes, at the update as well."""

from dataclasses import replace

import pytest
from random_steps import random_problem
from shared_path_machine import shared_path

from tmojax.bounds import bound
from tmojax.planners.gradient import LocalSearch
from tmojax.planners.local_search import SearchSettings
from tmojax.problem import Action, Codec, Lifetime, Op, Phase, Problem, Program, Tensor, TensorKind, Workload


def ratio(seed: int, factor: float) -> float:
    """Step time of the best plan of a short search over the bound; inf without a plan."""
    problem = random_problem(seed, factor=factor)
    plan = LocalSearch(search=SearchSettings(evaluations=60)).plan(problem, seed=seed)
    return plan.step_s / bound(problem).bound_s


@pytest.mark.parametrize("capacity", [100, 130])
def test_state_without_a_place_leaves_plain_behind_its_update_by_hand(capacity):
    """Two tensors of 60 bytes, 30 encoded. With 100 bytes 20 of them have to leave behind the first update, at 2 s, on
    each of two GPUs over a link of 10 bytes/s, although they fit together with one of them encoded. Otherwise 3 s of
    compute are all."""
    tensors = tuple(Tensor(name, 60, TensorKind.OPTIMIZER_STATE, Lifetime.STATE) for name in ("v", "w"))
    forward = Op("f", Phase.FORWARD, 1.0, workspace_bytes=1)
    updates = tuple(Op(f"update {n}", Phase.OPTIMIZER, 1.0, updates=(n,), step_op=True) for n in (0, 1))
    workload = Workload("two", (Program("p", tensors, (forward, *updates)),), (0, 0), 1, "synthetic")
    machine = shared_path(2, capacity, 10.0)
    machine = replace(machine, codecs=(Codec("half", 1, 2, 1e9, 1e9),))
    found = bound(Problem("two", workload, machine, frozenset({Action.OFFLOAD, Action.COMPRESS})))
    assert found.bound_s == pytest.approx(2.0 + 2 * 20 / 10 if capacity == 100 else 3.0)


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_of_a_search_beats_the_bound(seed):
    assert ratio(seed, 1.2) >= 1 - 1e-9


@pytest.mark.long
def test_no_plan_of_a_search_beats_the_bound_on_many(capsys):
    found = sorted(ratio(seed, (1.05, 1.1, 1.2, 1.3)[seed % 4]) for seed in range(3, 43))
    assert found[0] >= 1 - 1e-9
    with capsys.disabled():
        print(f"\n{len(found)} plans; plan / bound: least {found[0]:.4f}, median {found[len(found) // 2]:.4f}")
