"""State that rests: the least of it is elsewhere, in host memory only what the update has no room for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_steps import random_problem, shared_path_machine

from tmojax.check import check
from tmojax.planners.simple import offload_everything
from tmojax.planners.state_choice import StateMoves
from tmojax.planners.state_levels import StateLevels, least_true
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, Lifetime, Op, Phase, Problem, Program, Tensor, TensorKind, Workload, validate_problem
from tmojax.relax.coordinate import together
from tmojax.relax.decisions import Choice, Rest

SIZE = 100


def step(moments: int, capacity_bytes: int, actions: frozenset[Action]) -> Problem:
    """`a` (100 B) is used again after `wide`, which has 100 B of workspace, in each of four micro-batches; then moments
    of 100 B are updated, one after the other."""
    tensors = [Tensor("batch", 1, TensorKind.INPUT), Tensor("a", SIZE, TensorKind.ACTIVATION),
               Tensor("b", 1, TensorKind.ACTIVATION), Tensor("g", 1, TensorKind.GRADIENT)]  # fmt: skip
    ops = [
        Op("a", Phase.FORWARD, 1.0, (0,), (1,), layer="0"),
        Op("wide", Phase.FORWARD, 1.0, (1,), (2,), workspace_bytes=SIZE, layer="0"),
        Op("back", Phase.BACKWARD, 2.0, (1, 2), (3,), layer="0"),
    ]
    for number in range(moments):
        tensors.append(Tensor(f"moment{number}", SIZE, TensorKind.OPTIMIZER_STATE, Lifetime.STATE))
        ops.append(Op(f"update{number}", Phase.OPTIMIZER, 0.1, updates=(len(tensors) - 1,), recomputable=False,
                      step_op=True))  # fmt: skip
    workload = Workload("levels", (Program("levels", tuple(tensors), tuple(ops)),), (0,), 4, "by hand")
    problem = Problem("levels", workload, shared_path_machine(1, capacity_bytes, rate=100.0), actions)
    validate_problem(problem)
    return problem


def levels_of(problem: Problem) -> tuple[StateLevels, Candidate]:
    bench = Workbench(problem)
    decisions = tuple(offload_everything(bench.view(d)) for d in range(bench.device_count))
    start = bench.evaluate(decisions, together(problem))
    assert isinstance(start, Candidate)
    return StateLevels(bench, StateMoves(bench).resting, start), start


@given(st.integers(0, 40), st.integers(0, 41))
def test_the_least_number_that_is_enough(most, enough):
    found = least_true(most, lambda number: number >= enough)
    assert found == (enough if enough <= most else None)


@pytest.mark.parametrize("room, away", [(8, 0), (7, 1)])
def test_what_only_activations_need_room_for_stays_home_between_steps_by_hand(room, away):
    # Six moments and `a` have room, and the workspace of `wide` too, or not.
    problem = step(6, room * SIZE + 10, frozenset({Action.OFFLOAD}))
    levels, start = levels_of(problem)
    found = levels.search()
    assert found is not None and found.step_s <= start.step_s
    assert check(problem, found.schedule).valid
    rests = found.decisions[0].state_out
    assert ((rests == Rest.ON_HOST).sum(), (rests == Rest.AWAY).sum()) == (0, away)


def test_what_has_no_room_at_the_update_rests_in_host_memory_by_hand():
    # Six moments, and room for five: while one is updated that was away, another one is.
    problem = step(6, 5 * SIZE + 10, frozenset({Action.OFFLOAD}))
    found = levels_of(problem)[0].search()
    assert found is not None and check(problem, found.schedule).valid
    assert 2 <= (found.decisions[0].state_out == Rest.ON_HOST).sum() <= 3


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 7, 9, 11])  # in which offloading everything fits
def test_plans_are_valid_and_few_are_simulated(seed):
    problem = random_problem(seed, factor=1.3)
    levels, _ = levels_of(problem)
    before = levels.bench.simulations
    found = levels.search()
    assert levels.bench.simulations - before <= 25
    assert found is None or check(problem, found.schedule).valid


def test_relief_is_for_the_micro_batches_between_the_first_and_the_last():
    problem = step(4, 5 * SIZE + 10, frozenset({Action.OFFLOAD, Action.RECOMPUTE}))
    found = levels_of(problem)[0].search()
    assert found is not None and check(problem, found.schedule).valid
    decision = found.decisions[0]
    for choice in (decision.in_first, decision.in_last):
        assert (choice == Choice.OFFLOAD).sum() <= (decision.choice == Choice.OFFLOAD).sum()


def test_where_no_state_rests_there_is_nothing_to_find():
    problem = step(0, 5 * SIZE, frozenset({Action.OFFLOAD}))
    assert levels_of(problem)[0].search() is None
