"""State that leaves within a step, and the synchronisation behind it, in the relaxed model: cases known by hand."""

import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "cost"))

from periodic_cases import GB, one_tensor_problem, transformer_problem, views_of

from tmojax.check import check
from tmojax.cost import Timing, demand, relax_problem, run_step
from tmojax.cost.state import LONG_GAP, find_state_gaps
from tmojax.importers.machine_build import load_machine
from tmojax.planners.gradient import made_to_fit, variants
from tmojax.planners.workbench import Workbench
from tmojax.problem import (
    Action,
    Collective,
    CollectiveKind,
    Lifetime,
    Op,
    Phase,
    Problem,
    Program,
    Tensor,
    TensorKind,
    Workload,
)
from tmojax.problem.step_view import view_step
from tmojax.relax import unroll
from tmojax.relax.coordinate import together
from tmojax.relax.decisions import Choice, DeviceDecision, Rest, keep_everything
from tmojax.relax.decode import DoesNotFit
from tmojax.relax.optimise import optimise
from tmojax.relax.rounding import round_solution, round_state


def weight_problem(capacity_gb: float, micro_batches: int = 1) -> Problem:
    """The problem of one tensor, with a weight in the place of `a`: used by f1, f2 and b1, never changed."""
    problem = one_tensor_problem(capacity_gb=capacity_gb)
    program = problem.workload.programs[0]
    weight = Tensor("w", GB, TensorKind.WEIGHT, Lifetime.STATE)
    ops = tuple(
        replace(op, reads=tuple(dict.fromkeys((*op.reads, *(() if op.name != "f1" else (0,))))), writes=tuple(
            tensor for tensor in op.writes if tensor != 0))
        for op in program.ops
    )  # fmt: skip
    program = replace(program, tensors=(weight, *program.tensors[1:]), ops=ops)
    return replace(problem, workload=replace(problem.workload, programs=(program,), micro_batches=micro_batches))


def test_the_shortest_gap_is_that_of_the_decode():
    assert LONG_GAP == unroll.LONG_GAP


def test_a_weight_leaves_within_the_step_and_comes_back():
    """Its way out is clear from the start, its way in takes 1.25 s in one second of room: 7.25 s. The model lets copies
    out begin behind the last use, but no more leaves than has to: 1.125 s each way in a second of room."""
    problem = weight_problem(1.1)
    views = views_of(problem)
    model = relax_problem(problem, views)
    assert model.state == (((0, 1, 6),),)
    solution = optimise(model, restarts=2, steps=1000)
    best = int(np.argmin(solution.step_s))
    assert solution.step_s[best] == pytest.approx(7.25, rel=0.01)
    assert solution.choice[best, 0, model.candidates[0], Choice.OFFLOAD] > 0.8
    bench = Workbench(problem)
    plans = [bench.evaluate(decisions, together(problem)) for decisions, _ in round_solution(model, solution, views)]
    found = min(plans, key=lambda plan: getattr(plan, "step_s", np.inf))
    assert found.decisions[0].state_out.tolist() == [Rest.AWAY]
    assert found.step_s == pytest.approx(7.25)
    assert check(problem, found.schedule).valid


def test_a_clean_weight_only_comes_back_in_later_micro_batches():
    problem = weight_problem(1.1, micro_batches=2)
    model = relax_problem(problem, views_of(problem))
    assert np.array(model.clean)[0, model.candidates[0] :].tolist() == [True]
    choice = jnp.zeros((1, model.size_gb.shape[1], 3)).at[..., Choice.KEEP].set(1.0)
    away = choice.at[0, model.candidates[0]].set(jnp.eye(3)[Choice.OFFLOAD])
    timing = Timing(*(jnp.full((1, model.slots), value) for value in (0.0, 0.99, 0.99)), jnp.zeros(1))
    kept, _ = run_step(model, demand(model, choice, jnp.zeros(1)), timing, 32)
    gone, limits = run_step(model, demand(model, away, jnp.zeros(1)), timing, 32)
    assert float(gone.out_gb.max()) == 0.0
    assert float(gone.in_gb[0, -1]) == pytest.approx(1.0)
    assert float(limits.order.max()) < 0.01
    # Between f2 and b1 only.
    np.testing.assert_allclose(np.array(kept.memory_gb - gone.memory_gb)[0, [0, 1, 2, 6]], [0, 0, 1, 0], atol=0.05)


def gradient_problem(micro_batches: int) -> Problem:
    """The weight problem with a gradient of 1 GB that b3 adds to in every micro-batch."""
    problem = weight_problem(3.0, micro_batches)
    program = problem.workload.programs[0]
    gradient = Tensor("g", GB, TensorKind.GRADIENT, Lifetime.STATE)
    ops = tuple(replace(op, updates=(4,), recomputable=False) if op.name == "b3" else op for op in program.ops)
    program = replace(program, tensors=(*program.tensors, gradient), ops=ops)
    return replace(problem, workload=replace(problem.workload, programs=(program,)))


def test_a_gradient_is_away_across_the_end_of_a_micro_batch():
    problem = gradient_problem(3)
    view = views_of(problem)[0]
    gaps = find_state_gaps(problem, view)
    assert list(zip(gaps.state, gaps.last_use, gaps.next_use, gaps.clean, strict=True)) == [
        (0, 1, 6, True), (1, 5, 5, False),
    ]  # fmt: skip
    model = relax_problem(problem, [view])
    place = model.candidates[0] + 1
    keep = jnp.zeros((1, model.size_gb.shape[1], 3)).at[..., Choice.KEEP].set(1.0)
    away = keep.at[0, place].set(jnp.eye(3)[Choice.OFFLOAD])
    timing = Timing(*(jnp.full((1, model.slots), value) for value in (0.0, 0.99, 0.99)), jnp.zeros(1))
    kept, _ = run_step(model, demand(model, keep, jnp.zeros(1)), timing, 32)
    gone, limits = run_step(model, demand(model, away, jnp.zeros(1)), timing, 32)
    assert float(gone.out_gb[0, -1]) == pytest.approx(1.0, abs=0.02) == float(gone.in_gb[0, -1])
    assert float(limits.order.max()) <= 0.0
    np.testing.assert_allclose(np.array(kept.memory_gb - gone.memory_gb)[0], [1, 1, 1, 1, 0, 0, 0], atol=0.05)
    state_out, free = round_state(view, np.array(model.state[0])[1:], 0.0, 0.0)
    assert state_out.tolist() == [Rest.ON_DEVICE, Rest.AWAY]
    assert (free / GB).tolist() == [1, 1, 1, 1, 1, 0, 1]


def test_little_state_stays():
    problem = weight_problem(30.0)
    assert len(find_state_gaps(problem, views_of(problem)[0]).state) == 0


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_resting_state_follows_its_shares(share):
    view = replace(views_of(weight_problem(1.0))[0], state_tensor=np.arange(4), state_bytes=np.array([10, 20, 30, 40]),
                   state_resting=np.array([True, True, True, False]))  # fmt: skip
    nothing = np.zeros((0, 3), np.int64)
    for on_host, away, rest in ((share, 0.0, Rest.ON_HOST), (0.0, share, Rest.AWAY)):
        state_out, free = round_state(view, nothing, on_host, away)
        assert state_out[3] == Rest.ON_DEVICE
        assert abs(int(view.state_bytes[state_out == rest].sum()) - share * 60) <= 15
        assert (free == view.state_bytes[state_out != Rest.ON_DEVICE].sum()).all()
    state_out, _ = round_state(view, nothing, 0.5, 1.0)
    assert set(state_out[:3].tolist()) == {Rest.ON_HOST, Rest.AWAY}


def bucket_problem(micro_batches: int) -> Problem:
    """Four GPUs, ops of one second: f1 makes `a`, f2 makes `c`; b2 reads `c`, b1 reads `a`. The gradient of b2 is
    synchronised behind b2 of the last micro-batch, which takes several seconds."""
    tensors = (
        Tensor("a", GB, TensorKind.ACTIVATION),
        Tensor("c", GB, TensorKind.ACTIVATION),
        Tensor("g", 20 * GB, TensorKind.GRADIENT, Lifetime.STATE),
    )
    ops = (
        Op("f1", Phase.FORWARD, 1.0, (), (0,)),
        Op("f2", Phase.FORWARD, 1.0, (), (1,)),
        Op("b2", Phase.BACKWARD, 1.0, (1,), (), (2,), recomputable=False),
        Op("sync", Phase.COLLECTIVE, 0.0, updates=(2,), recomputable=False, step_op=True, collective="g"),
        Op("b1", Phase.BACKWARD, 1.0, (0,)),
    )
    collective = Collective("g", CollectiveKind.ALL_REDUCE, 20 * GB, (0, 1, 2, 3))
    workload = Workload("bucket", (Program("only", tensors, ops),), (0,) * 4, micro_batches, "by hand", (collective,))
    problem = Problem("bucket", workload, load_machine("prototype-4gpu-12.5"), frozenset({Action.RECOMPUTE}))
    return problem.with_device_capacity(30 * GB)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_recomputing_behind_the_first_gradient_is_free_while_it_is_synchronised(micro_batches):
    """Exact simulation and model agree: recomputing `a` costs a second in each micro-batch, and nothing in the last."""
    problem = bucket_problem(micro_batches)
    bench = Workbench(problem)
    view = bench.view(0)
    model = relax_problem(problem, [view] * 4)
    keep = keep_everything(view).choice
    choices = (keep, np.where(view.tensor == 0, Choice.RECOMPUTE, keep).astype(np.int8))
    found = []
    for own in choices:
        choice = jnp.asarray(np.stack([np.eye(3)[own]] * 4), jnp.float32)
        timing = Timing(*(jnp.full((4, model.slots), value) for value in (0.0, 0.5, 0.5)), jnp.zeros(4))
        step, _ = run_step(model, demand(model, choice, jnp.zeros(4)), timing, 32)
        exact = bench.evaluate((DeviceDecision(own, np.zeros(1, np.int8)),) * 4, together(problem))
        assert float(step.step_s) == pytest.approx(exact.step_s, rel=1e-4)
        found.append(exact.step_s)
    assert found[1] - found[0] == pytest.approx(micro_batches - 1, abs=1e-3)
    # Only in the last micro-batch it costs nothing at all.
    last = DeviceDecision(choices[0], np.zeros(1, np.int8), last_choice=choices[1])
    assert bench.evaluate((last,) * 4, together(problem)).step_s == pytest.approx(found[0])


def test_a_last_micro_batch_of_its_own_beats_every_uniform_choice():
    """`a` and `c` do not fit together. Offloading `a` is cheapest, but in the last micro-batch its way back meets the
    synchronisation, while recomputing it is free there."""
    problem = bucket_problem(3)
    problem = replace(problem, actions=frozenset({Action.OFFLOAD, Action.RECOMPUTE})).with_device_capacity(
        int(21.5 * GB)
    )
    bench = Workbench(problem)
    view = bench.view(0)
    home = np.zeros(1, np.int8)
    offload, again = (
        DeviceDecision(np.where(view.tensor == 0, choice, Choice.KEEP).astype(np.int8), home)
        for choice in (Choice.OFFLOAD, Choice.RECOMPUTE)
    )
    plans = [bench.evaluate((one,) * 4, together(problem)) for one in (offload, again)]
    for mixed in variants(bench, (offload,) * 4, None):
        plans.append(bench.evaluate(mixed, together(problem)))
    kept_in_last, mixed = plans[2:]
    assert not hasattr(kept_in_last, "step_s")  # that does not fit
    assert mixed.step_s < min(plans[0].step_s, plans[1].step_s) * 0.99
    assert check(problem, mixed.schedule).valid


def test_what_does_not_fit_is_made_to_fit():
    problem = transformer_problem(3, 2, 2, 1.5, ("offload", "recompute"))
    bench = Workbench(problem)
    wished = (keep_everything(bench.view(0)),) * 2
    assert isinstance(bench.lists(wished), DoesNotFit)
    fitted = made_to_fit(bench, wished, None)
    assert not isinstance(bench.lists(fitted), DoesNotFit)
    assert fitted[0].same_as(fitted[1])
    assert made_to_fit(bench, fitted, None) == fitted


def test_equal_plans_have_equal_keys():
    view = view_step(weight_problem(1.0), 0)
    one = keep_everything(view)
    same = replace(one, last_choice=one.choice.copy())
    other = replace(one, last_choice=np.full_like(one.choice, Choice.OFFLOAD))
    assert one.key == same.key != other.key
    assert one.same_as(same) and not one.same_as(other)
    assert other.alike().same_as(one)
