"""Peers and codecs in the relaxed model: exact at binary points, with right gradients, and absent where not allowed."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from periodic_cases import GB, one_tensor_problem, transformer_problem, views_of

from tmojax.cost import Timing, demand, relax_problem, run_step
from tmojax.errors import InputError
from tmojax.problem import Action, Codec, Link, Machine, Problem, Route
from tmojax.relax.decisions import Choice, DeviceDecision
from tmojax.relax.descent import limit_weights, objective, penalise
from tmojax.relax.optimise import Descent, initial_variables, optimise, read_point, warm_variables
from tmojax.relax.rounding import round_solution
from tmojax.relax.template import build_template

CODEC = Codec("third", 1, 3, 8e9, 4e9)
ALL = ("offload", "recompute", "compress")
BASE = transformer_problem(3, 2, 2, 1.5, ALL)
PROBLEM = replace(BASE, machine=replace(BASE.machine, codecs=(CODEC,)))
VIEWS = views_of(PROBLEM)
MODEL = relax_problem(PROBLEM, VIEWS, most_slots=10_000)
ask = jax.jit(demand)
lay_out = jax.jit(run_step, static_argnums=3)


def joined(machine: Machine, rate: float) -> Machine:
    """The machine with a link of its own from the first GPU to the second, and one back."""
    count = len(machine.links)
    return replace(
        machine,
        links=(*machine.links, Link("to peer", rate), Link("from peer", rate)),
        routes=(*machine.routes, Route(0, 1, (count,), (0,)), Route(1, 0, (count + 1,), (1,))),
    )


def lending_problem(rate: float, host_gb_per_s: float = 0.8) -> Problem:
    """Two GPUs that run the one tensor step; the second has room for both tensors and one more."""
    problem = one_tensor_problem(2, rate_gb_per_s=host_gb_per_s)
    memories = list(problem.machine.memories)
    memories[1] = replace(memories[1], capacity_bytes=3 * GB)
    machine = joined(replace(problem.machine, memories=tuple(memories)), rate)
    return replace(problem, machine=machine, actions=frozenset({Action.OFFLOAD, Action.PEER}))


def even_timing(model, share: float) -> Timing:
    shares = [jnp.full((model.gpus, model.slots), value) for value in (0.0, share, share)]
    peer = shares[1] if model.has_lenders else None
    return Timing(*shares, jnp.zeros(model.gpus), peer, peer)


def one_hot(choice: np.ndarray) -> jnp.ndarray:
    return jnp.asarray(np.stack([np.eye(6)[choice]] * 2), jnp.float32)


def test_three_choices_without_peers_and_codecs():
    plain = relax_problem(BASE, VIEWS)
    assert plain.choices == 3 and not plain.has_lenders
    assert relax_problem(replace(PROBLEM, actions=frozenset({Action.OFFLOAD})), VIEWS).choices == 3
    variables = initial_variables(plain, jax.random.key(0), spread=True)
    assert variables.peer_out_share is None


@given(seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=20)
def test_memory_and_seconds_of_encoded_tensors(seed):
    rng = np.random.default_rng(seed)
    allowed = np.array(MODEL.allowed[0])
    allowed[:, [Choice.OFFLOAD, Choice.OFFLOAD_COMPRESSED]] = False
    choice = np.array([rng.choice(np.flatnonzero(row)) for row in allowed], np.int8)
    asked = ask(MODEL, one_hot(choice), jnp.zeros(2))
    template = build_template(PROBLEM, VIEWS[0], DeviceDecision(choice, np.zeros(0, np.int8)))
    change = np.zeros(len(template.runs) + 1)
    np.add.at(change, template.life_start, template.life_bytes)
    np.add.at(change, template.life_end + 1, -template.life_bytes)
    exact = np.cumsum(change)[:-1]
    first = template.first_run[VIEWS[0].slot_op]
    held = np.array(asked.held_gb[0]) * 1e9
    # On the safe side everywhere, and exact where nothing is encoded or decoded.
    slack = 1e-5 * exact.max()
    assert (held >= exact[first] - slack).all()
    coded = np.flatnonzero(np.isin(choice, (Choice.COMPRESS,)))
    busy = {*VIEWS[0].idle_from[coded].tolist(), *VIEWS[0].idle_to[coded].tolist()}
    quiet = np.array([slot not in busy for slot in range(len(first))])
    np.testing.assert_allclose(held[quiet], exact[first][quiet], atol=slack)
    sizes = VIEWS[0].size_bytes[coded]
    ops = PROBLEM.workload.program(0).ops
    again = sum(ops[op].duration_s for op in template.runs[template.recomputed])
    seconds = again + float((sizes / CODEC.encode_bytes_per_s + sizes / CODEC.decode_bytes_per_s).sum())
    assert float(asked.recompute_s[0].sum()) == pytest.approx(seconds, rel=1e-4)


def test_an_encoded_tensor_on_the_host_moves_its_encoded_bytes():
    away = np.where(np.array(MODEL.allowed[0])[:, Choice.OFFLOAD_COMPRESSED], Choice.OFFLOAD_COMPRESSED, Choice.KEEP)
    asked = ask(MODEL, one_hot(away), jnp.zeros(2))
    sizes = VIEWS[0].size_bytes[away == Choice.OFFLOAD_COMPRESSED].sum()
    assert float(asked.total_gb[0]) * 1e9 == pytest.approx(sizes / 3, rel=1e-5)


def test_a_lender_has_less_memory_and_the_host_path_no_load():
    problem = lending_problem(2e9)
    model = relax_problem(problem, views_of(problem), lenders=(1, -1))
    keep = jnp.zeros((2, model.size_gb.shape[1], 6)).at[..., Choice.KEEP].set(1.0)
    place = int(np.argmax(np.array(model.allowed[0, :, Choice.PEER])))
    lent = keep.at[0, place].set(jnp.eye(6)[Choice.PEER])
    timing = even_timing(model, 0.999)
    before, over = lay_out(model, ask(model, keep, jnp.zeros(2)), timing, 16)
    after, limits = lay_out(model, ask(model, lent, jnp.zeros(2)), timing, 16)
    # 1 GB at 2 GB/s each way hides behind ops of 1 s.
    assert float(after.step_s) == pytest.approx(7.0) == float(before.step_s)
    assert float(over.memory[0].max()) == pytest.approx(1.0, abs=0.01)  # a and c, with room for one
    assert float(limits.memory[0].max()) <= 0.01
    np.testing.assert_allclose(np.array(after.memory_gb[1] - before.memory_gb[1]), 1.0, atol=0.01)
    assert float(after.out_gb[0].max()) == 0.0
    assert np.array(model.allowed)[1, :, Choice.PEER].sum() == 0  # who lends does not borrow
    slow = relax_problem(lending_problem(0.8e9), views_of(problem), lenders=(1, -1))
    late, _ = lay_out(slow, ask(slow, lent, jnp.zeros(2)), timing, 16)
    assert float(late.step_s) == pytest.approx(7.5, abs=0.01)  # as over the host's path of that rate


@pytest.mark.parametrize("lenders", [(1,), (1, 0)])
def test_bad_lenders(lenders):
    problem = lending_problem(2e9)
    with pytest.raises(InputError, match="lenders"):
        relax_problem(problem, views_of(problem), lenders=lenders)


def test_gradients_match_finite_differences():
    actions = (*ALL, "peer")
    with jax.enable_x64(True):
        problem = replace(PROBLEM, machine=joined(PROBLEM.machine, 5e9), actions=frozenset(map(Action, actions)))
        model = relax_problem(problem, VIEWS, most_slots=20, dtype=jnp.float64, lenders=(1, -1))
        start = initial_variables(model, jax.random.key(1), spread=True)

        def loss(variables):
            point = read_point(model, variables)
            step, limits = run_step(model, demand(model, point.choice, point.state_out), point.timing, 24)
            held = jax.tree.map(lambda c: 0.3 + 0.0 * c, limits)
            return objective(model, step) + penalise(limits, held, limit_weights(24), 5.0)

        both = jax.jit(jax.value_and_grad(loss))
        gradient = both(start)[1]
        rng = np.random.default_rng(0)
        for name in ("choice", "stall", "out_share", "in_share", "phase", "peer_out_share", "peer_in_share"):
            leaf = getattr(start, name)
            direction = jnp.asarray(rng.normal(size=leaf.shape))

            def moved(scale, name=name, leaf=leaf, direction=direction):
                return both(type(start)(**{**vars(start), name: leaf + scale * direction}))[0]

            numeric = (moved(1e-6) - moved(-1e-6)) / 2e-6
            exact = float(jnp.vdot(getattr(gradient, name), direction))
            assert float(numeric) == pytest.approx(exact, rel=2e-4, abs=1e-7), name
            assert name == "phase" or exact != 0.0


@pytest.mark.long
def test_the_optimum_lends_where_the_peer_is_faster_than_the_host():
    problem = lending_problem(2e9, 0.05)
    model = relax_problem(problem, views_of(problem), lenders=(1, -1))
    solution = optimise(model, restarts=2, steps=400, settings=Descent(bins=24))
    rounded = round_solution(model, solution, views_of(problem), most=4)
    decisions = rounded[0][0]
    assert decisions[0].borrows and decisions[0].lender == 1 and not decisions[1].borrows
    assert solution.step_s.min() == pytest.approx(7.0, abs=0.1)


def test_warm_starts_know_all_choices():
    choice = np.array([np.flatnonzero(row)[-1] for row in np.array(MODEL.allowed[0])], np.int8)
    assert (choice == Choice.OFFLOAD_COMPRESSED).any()
    decision = DeviceDecision(choice, np.zeros(0, np.int8))
    start = initial_variables(MODEL, jax.random.key(0), spread=False)
    warm = warm_variables(MODEL, ((decision, decision), (0.0, 0.0)), start)
    point = read_point(MODEL, warm)
    assert (np.array(point.choice[0]).argmax(axis=1) == choice).all()
