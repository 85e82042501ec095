"""Where state rests: what is found is valid, never slower, and on a small step what is known to be best."""

import itertools

import numpy as np
import pytest
from random_steps import random_problem, shared_path_machine

from tmojax.check import check
from tmojax.errors import InputError
from tmojax.planners.simple import offload_everything
from tmojax.planners.state_choice import StateMoves, StateSettings, few_bytes, improve_state, state_families
from tmojax.planners.state_outline import best_outline, shed
from tmojax.planners.workbench import Workbench
from tmojax.problem import Action, Lifetime, Op, Phase, Problem, Program, Tensor, TensorKind, Workload, validate_problem
from tmojax.relax.coordinate import together
from tmojax.relax.decisions import Choice, Rest
from tmojax.relax.decode import DoesNotFit

LIGHT = StateSettings(evaluations=40, decodes=60)
MOMENT = 400


def moments_only(count: int, capacity_bytes: int) -> Problem:
    """One forward op of 1 s, then `count` updates of 0.1 s, each of a moment of 400 bytes; links of 100 bytes/s."""
    tensors = [Tensor("batch", 1, TensorKind.INPUT), Tensor("loss", 1, TensorKind.ACTIVATION)]
    ops = [Op("forward", Phase.FORWARD, 1.0, (0,), (1,))]
    for number in range(count):
        tensors.append(Tensor(f"moment{number}", MOMENT, TensorKind.OPTIMIZER_STATE, Lifetime.STATE))
        ops.append(Op(f"update{number}", Phase.OPTIMIZER, 0.1, updates=(len(tensors) - 1,), recomputable=False,
                      step_op=True))  # fmt: skip
    workload = Workload("moments", (Program("moments", tuple(tensors), tuple(ops)),), (0,), 1, "by hand")
    problem = Problem("moments", workload, shared_path_machine(1, capacity_bytes), frozenset({Action.OFFLOAD}))
    validate_problem(problem)
    return problem


def start_of(bench: Workbench):
    """Everything offloaded, all GPUs at once; None where that does not fit."""
    found = bench.evaluate(
        tuple(offload_everything(bench.view(d)) for d in range(bench.device_count)), together(bench.problem)
    )
    return None if isinstance(found, DoesNotFit) else found


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 7, 9, 11])  # in which offloading everything fits
def test_valid_never_slower_and_the_same_again(seed):
    problem = random_problem(seed, factor=1.3 + 0.1 * (seed % 5))
    bench = Workbench(problem)
    start = start_of(bench)
    assert start is not None
    found = improve_state(bench, start, LIGHT, seed)
    assert found.step_s <= start.step_s
    report = check(problem, found.schedule)
    assert report.valid, report
    again = improve_state(Workbench(problem), start, LIGHT, seed)
    assert again.step_s == found.step_s
    assert all(a.same_as(b) for a, b in zip(again.decisions, found.decisions, strict=True))


def test_two_of_four_moments_move_where_one_does_not_fit():
    # While the one that is away is updated, another one has to be away for it: 2 x 400 bytes out and in, no less.
    problem = moments_only(4, 3 * MOMENT + 2)
    bench = Workbench(problem)
    start = start_of(bench)
    assert start is not None and bench.decode(0, start.decisions[0]).moved_bytes == (4 * MOMENT, 4 * MOMENT + 1)
    decisions = few_bytes(bench, StateMoves(bench), start.decisions, StateSettings(), seed=0)
    assert bench.decode(0, decisions[0]).moved_bytes == (2 * MOMENT, 2 * MOMENT + 1)
    light = bench.evaluate(decisions, together(problem))
    found = improve_state(bench, start, StateSettings(evaluations=200), seed=0)
    assert found.step_s < start.step_s and found.step_s <= light.step_s


def test_state_that_fits_is_left_where_it_is():
    problem = moments_only(3, 3 * MOMENT + 2)
    bench = Workbench(problem)
    start = bench.evaluate(few_bytes(bench, StateMoves(bench), start_of(bench).decisions, StateSettings(), 0),
                           together(problem))  # fmt: skip
    assert not start.decisions[0].state_out.any()
    assert improve_state(bench, start, LIGHT) is start


def test_without_offload_nothing_is_tried():
    problem = random_problem(3, factor=1.0, actions=(Action.RECOMPUTE,))
    bench = Workbench(problem)
    start = bench.evaluate(tuple(offload_everything(bench.view(d)) for d in range(bench.device_count)),
                           together(problem))  # fmt: skip
    before = bench.simulations
    assert improve_state(bench, start, LIGHT) is start and bench.simulations == before


@pytest.mark.parametrize("seed", range(4))
def test_families_hold_every_large_tensor_once_and_moves_stay_allowed(seed):
    problem = random_problem(seed)
    bench = Workbench(problem)
    view, rng = bench.view(0), np.random.default_rng(seed)
    families = state_families(problem, view)
    members = np.concatenate([unit for family in families for unit in family.units])
    assert sorted(members) == list(range(len(view.state_tensor)))
    for family in families:
        for unit, size in zip(family.units, family.unit_bytes, strict=True):
            assert size == view.state_bytes[unit].sum()
            assert (view.state_resting[unit] == family.resting).all()
    moves, decision = StateMoves(bench), offload_everything(view)
    for _ in range(50):
        decision = moves.propose(rng, 0, moves.exchange(rng, 0, decision))
        assert not (decision.state_out == Rest.ON_HOST)[~view.state_resting].any()


@pytest.mark.parametrize("setting", [{"evaluations": 0}, {"starts": 0}, {"threshold": -0.1}])
def test_settings_that_make_no_sense(setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        StateSettings(**setting)


@pytest.mark.parametrize("seed", range(5))
def test_outlines_are_valid_and_stay_within_their_number(seed):
    problem = random_problem(seed, factor=1.3)
    bench = Workbench(problem)
    start = start_of(bench)
    assert start is not None
    before = bench.simulations
    found = best_outline(bench, start, 60)
    assert bench.simulations - before <= 60
    assert found is None or check(problem, found.schedule).valid


@pytest.mark.parametrize("seed", range(4))
def test_shedding_recomputes_more_and_more(seed):
    problem = random_problem(seed)
    view = Workbench(problem).view(0)
    levels = [shed(problem, view, share, seed % 2 == 0) == Choice.RECOMPUTE for share in (0.0, 0.4, 0.8, 1.0)]
    assert not (levels[0] & view.needed).any()
    for less, more in itertools.pairwise(levels):
        assert not (less & ~more).any()
    assert not (levels[-1] & view.needed & ~view.may_recompute).any()


def test_more_is_recomputed_in_the_first_micro_batch_only():
    """Room for either the moment or both activations: the moment leaves during the first micro-batch and comes back in
    the last backward, and only the first micro-batch has to make do with less."""
    tensors = [
        Tensor("batch", 1, TensorKind.INPUT),
        Tensor("a", 100, TensorKind.ACTIVATION), Tensor("b", 1, TensorKind.ACTIVATION),
        Tensor("c", 100, TensorKind.ACTIVATION), Tensor("d", 1, TensorKind.ACTIVATION),
        Tensor("moment", 200, TensorKind.OPTIMIZER_STATE, Lifetime.STATE),
        Tensor("gc", 1, TensorKind.GRADIENT), Tensor("ga", 1, TensorKind.GRADIENT),
    ]  # fmt: skip
    ops = [
        Op("fa", Phase.FORWARD, 1.0, (0,), (1,), layer="0"), Op("fb", Phase.FORWARD, 1.0, (1,), (2,), layer="0"),
        Op("fc", Phase.FORWARD, 1.0, (2,), (3,), layer="1"), Op("fd", Phase.FORWARD, 1.0, (3,), (4,), layer="1"),
        Op("bc", Phase.BACKWARD, 2.0, (3, 4), (6,), layer="1"),
        Op("ba", Phase.BACKWARD, 5.5, (1, 2, 6), (7,), layer="0"),
        Op("update", Phase.OPTIMIZER, 1.0, updates=(5,), recomputable=False, step_op=True),
    ]  # fmt: skip
    workload = Workload("moment", (Program("moment", tuple(tensors), tuple(ops)),), (0,), 4, "by hand")
    machine = shared_path_machine(1, 310, rate=40.0)
    problem = Problem("moment", workload, machine, frozenset({Action.OFFLOAD, Action.RECOMPUTE}))
    validate_problem(problem)
    bench = Workbench(problem)
    start = start_of(bench)
    assert start is not None
    found = improve_state(bench, start, StateSettings(evaluations=400), 0)
    # 4 x 11.5 s + 1 s of compute, and 1 s for `fa` again in the first micro-batch. Otherwise it is 4 s for `fa` in all
    # of them, or 3 s until the moment, which takes 5 s, has left before `fc`.
    assert 4 * 11.5 + 1 + 1 <= found.step_s < 4 * 11.5 + 1 + 1.2
    assert check(problem, found.schedule).valid


def test_of_a_large_step_only_few_plans_are_simulated():
    problem = random_problem(0, factor=1.3)
    bench = Workbench(problem)
    start = start_of(bench)
    assert start is not None
    before = bench.simulations
    found = improve_state(bench, start, StateSettings(instructions=1))
    assert bench.simulations - before <= 25 + 8 and found.step_s <= start.step_s
