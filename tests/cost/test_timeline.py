"""The relaxed model at binary points equals exact accounting; its flows conserve bytes; its gradients are right."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from periodic_cases import one_tensor_problem, transformer_problem, views_of

from tmojax.cost import Timing, demand, relax_problem, run_step
from tmojax.cost.timeline import _drain
from tmojax.importers.machine_build import load_machine
from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
from tmojax.problem import Action, Problem
from tmojax.problem.step_view import view_step
from tmojax.relax.decisions import Choice, DeviceDecision
from tmojax.relax.descent import limit_weights, objective, penalise
from tmojax.relax.optimise import initial_variables, read_point
from tmojax.relax.rounding import resident_bytes
from tmojax.relax.template import build_template

PROBLEM = transformer_problem(3, 2, 2, 1.5, ("offload", "recompute"))
VIEWS = views_of(PROBLEM)
MODEL = relax_problem(PROBLEM, VIEWS, most_slots=10_000)
ask = jax.jit(demand)
lay_out = jax.jit(run_step, static_argnums=3)


def random_choices(rng: np.random.Generator, offload: bool = True) -> np.ndarray:
    """[candidate] a random choice that the model allows."""
    allowed = np.array(MODEL.allowed[0])
    allowed[:, Choice.OFFLOAD] &= offload
    return np.array([rng.choice(np.flatnonzero(row)) for row in allowed], np.int8)


def one_hot(choice: np.ndarray) -> jnp.ndarray:
    return jnp.asarray(np.stack([np.eye(3)[choice]] * 2), jnp.float32)


def even_timing(model, share: float, phase=(0.0, 0.0)) -> Timing:
    shape = (model.gpus, model.slots)
    return Timing(jnp.zeros(shape), jnp.full(shape, share), jnp.full(shape, share), jnp.asarray(phase, jnp.float32))


def test_shape_checks_are_on():
    with pytest.raises(Exception, match="type"):
        demand(MODEL, jnp.zeros((2, 3)), jnp.zeros(2))


@given(seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=25)
def test_held_bytes_and_recompute_time_of_binary_choices_are_exact(seed):
    choice = random_choices(np.random.default_rng(seed), offload=False)
    asked = ask(MODEL, one_hot(choice), jnp.zeros(2))
    np.testing.assert_allclose(np.array(asked.held_gb[0]) * 1e9, resident_bytes(VIEWS[0], choice), rtol=1e-5)
    template = build_template(PROBLEM, VIEWS[0], DeviceDecision(choice, np.zeros(0, np.int8)))
    ops = PROBLEM.workload.program(0).ops
    again = sum(ops[op].duration_s for op in template.runs[template.recomputed])
    assert float(asked.recompute_s[0].sum()) == pytest.approx(again, rel=1e-4, abs=1e-9)


@given(seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=15)
def test_offloaded_bytes_are_ready_behind_their_use_and_due_in_time(seed):
    choice = random_choices(np.random.default_rng(seed))
    asked = ask(MODEL, one_hot(choice), jnp.zeros(2))
    away = choice == Choice.OFFLOAD
    total = VIEWS[0].size_bytes[away].sum() / 1e9
    assert float(asked.total_gb[0]) == pytest.approx(total, rel=1e-5)
    ready, due = np.array(asked.ready_gb[0]), np.array(asked.due_gb[0])
    assert (np.diff(ready) >= -1e-6).all() and (np.diff(due) >= -1e-6).all()
    assert ready[-1] == pytest.approx(total, rel=1e-4) and due[-1] == pytest.approx(total, rel=1e-4)
    assert (np.array(asked.absorbed_gb) <= due + 1e-5).all()


@given(
    shares=st.lists(st.floats(0.0, 1.0), min_size=6, max_size=6),
    amounts=st.lists(st.floats(0.0, 5.0), min_size=6, max_size=6),
    urgent=st.lists(st.floats(0.0, 1.0), min_size=6, max_size=6),
)
@settings(deadline=None, max_examples=50)
def test_drain_moves_what_is_ready_and_no_more_and_what_it_has_to(shares, amounts, urgent):
    ready = np.cumsum(amounts)
    least = np.maximum.accumulate(np.array(urgent) * ready)
    drained = np.array(_drain(jnp.asarray(shares), jnp.asarray(ready), jnp.asarray(least)))
    expected, level = [], 0.0
    for share, now, at_least in zip(shares, ready, least, strict=True):
        level = max(level, at_least)
        level += share * (now - level)
        expected.append(level)
    np.testing.assert_allclose(drained, expected, rtol=1e-4, atol=1e-5)
    assert (drained <= ready + 1e-4).all() and (drained >= least - 1e-4).all()


def test_a_slot_lasts_as_long_as_its_own_copies():
    """Alone on its way, a GPU moves 12.5 GB/s: what a slot moves takes its compute time or stalls it, never less."""
    choice = random_choices(np.random.default_rng(4))
    asked = ask(MODEL, one_hot(choice), jnp.zeros(2))
    step, _ = lay_out(MODEL, asked, even_timing(MODEL, 0.9), 32)
    lasted = np.diff(np.array(step.slot_end_s), axis=1, prepend=0.0)
    out = np.diff(np.array(step.out_gb), axis=1, prepend=0.0) / np.array(MODEL.lane_gb_per_s)[:, :1]
    assert (lasted >= out - 1e-6).all()
    compute = np.array(MODEL.slot_s + asked.recompute_s)
    np.testing.assert_allclose(np.array(step.stall_s), lasted - compute, atol=1e-5)
    assert (np.array(step.stall_s) > 1e-4).any()


def test_fixed_lists_hold_copies_to_their_places():
    """What must be gone before a slot is gone at its start; what is not open yet has not come."""
    asked = ask(MODEL, one_hot(random_choices(np.random.default_rng(6))), jnp.zeros(2))
    total = np.array(asked.total_gb)[:, None]
    gone = np.maximum(np.array(asked.ready_gb) - 0.1 * total, 0.0)
    opened = np.minimum(np.array(asked.due_gb) + 0.1 * total, total)
    fixed = eqx.tree_at(lambda a: (a.gone_gb, a.open_gb), asked, (jnp.asarray(gone), jnp.asarray(opened)))
    step, _ = lay_out(MODEL, fixed, even_timing(MODEL, 0.05), 32)
    assert (np.array(step.out_gb)[:, :-1] >= gone[:, 1:] - 1e-4).all()
    assert (np.array(step.in_gb)[:, :-1] <= opened[:, :-1] + 1e-4).all()
    free, _ = lay_out(MODEL, asked, even_timing(MODEL, 0.05), 32)
    assert (np.array(free.out_gb)[:, :-1] < gone[:, 1:] - 1e-3).any()


def test_copies_arrive_before_they_are_due_by_construction():
    choice = random_choices(np.random.default_rng(3))
    asked = ask(MODEL, one_hot(choice), jnp.zeros(2))
    step, _ = lay_out(MODEL, asked, even_timing(MODEL, 0.3), 32)
    before = np.pad(np.array(step.in_gb)[:, :-1], ((0, 0), (1, 0)))
    assert (before >= np.array(asked.due_gb) - 1e-4).all()
    assert (np.array(step.out_gb) <= np.array(asked.ready_gb) + 1e-4).all()


@pytest.mark.parametrize("phase", [(0.0, 0.0), (0.0, 0.37), (0.0, 1.2)])
def test_links_carry_every_byte_once_in_a_period(phase):
    choice = random_choices(np.random.default_rng(5))
    asked = ask(MODEL, one_hot(choice), jnp.zeros(2))
    step, _ = lay_out(MODEL, asked, even_timing(MODEL, 0.4, phase), 48)
    out = float(step.out_gb[:, -1].sum())
    into = float((step.in_gb[:, -1] - step.in_gb[:, 0]).sum() + (step.in_gb[:, 0]).sum())
    np.testing.assert_allclose(np.array(step.link_gb.sum(axis=1)), [out, into], rtol=2e-3)


def test_step_time_of_keeping_everything_is_compute():
    problem = one_tensor_problem(capacity_gb=3.0)
    model = relax_problem(problem, views_of(problem))
    keep = jnp.zeros((1, model.size_gb.shape[1], 3)).at[..., Choice.KEEP].set(1.0)
    step, limits = lay_out(model, ask(model, keep, jnp.zeros(1)), even_timing(model, 0.5, (0.0,)), 16)
    assert float(step.step_s) == pytest.approx(7.0)
    assert float(limits.memory.max()) < 0


def test_gradients_match_finite_differences():
    with jax.enable_x64(True):
        model = relax_problem(PROBLEM, VIEWS, most_slots=20, dtype=jnp.float64)
        start = initial_variables(model, jax.random.key(1), spread=True)

        def loss(variables):
            point = read_point(model, variables)
            step, limits = run_step(model, demand(model, point.choice, point.state_out), point.timing, 24)
            held = jax.tree.map(lambda c: 0.3 + 0.0 * c, limits)
            return objective(model, step) + penalise(limits, held, limit_weights(24), 5.0)

        both = jax.jit(jax.value_and_grad(loss))
        gradient = both(start)[1]
        rng = np.random.default_rng(0)
        for name in ("choice", "stall", "out_share", "in_share", "phase"):
            leaf = getattr(start, name)
            direction = jnp.asarray(rng.normal(size=leaf.shape))

            def moved(scale, name=name, leaf=leaf, direction=direction):
                return both(type(start)(**{**vars(start), name: leaf + scale * direction}))[0]

            numeric = (moved(1e-6) - moved(-1e-6)) / 2e-6
            exact = float(jnp.vdot(getattr(gradient, name), direction))
            assert float(numeric) == pytest.approx(exact, rel=2e-4, abs=1e-7), name


def test_equal_gpus_on_different_sockets_use_their_own_links():
    """A workbench has one view for all equal GPUs; links and hosts are those of each GPU all the same."""
    workload = synthetic_transformer(SyntheticTransformer(layers=1), 4, 2)
    machine = load_machine("dual-socket-v100x4")
    problem = Problem("two sockets", workload, machine, frozenset({Action.OFFLOAD})).with_device_capacity(10**9)
    model = relax_problem(problem, [view_step(problem, 0)] * 4)
    uses = np.array(model.link_use).any(axis=2).tolist()
    users = dict(zip(model.link_names, uses, strict=True))
    left, right = [True, True, False, False], [False, False, True, True]
    assert users == {
        "switch0.to_host": left, "switch0.from_host": left, "switch1.to_host": right, "switch1.from_host": right,
    }  # fmt: skip
    assert np.array(model.host_use).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
