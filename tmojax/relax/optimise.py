"""Gradient descent on the relaxed model: choices, phases and timing of all GPUs together, many restarts at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tmojax.jax_setup  # noqa: F401  (before JAX)

# isort: split
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tmojax.cost.model import GB, PeriodicModel
from tmojax.cost.timeline import Demand, Limits, Step, Timing, demand, run_step
from tmojax.errors import InputError
from tmojax.relax.decisions import DeviceDecision, Rest
from tmojax.relax.descent import Descended, Descent, compile_and_run, descend, objective

PHASE_SCALE = 0.25  # starts move more slowly than the rest: each of them shifts all copies of a GPU at once
WARM_LOGIT = 2.0  # of a choice that a warm start takes: a fraction of about 0.8, which gradients can still turn


class Variables(eqx.Module):
    """What is optimised, unconstrained; softmax, squares, sigmoids and absolute values make a `Point` of it."""

    choice: Float[Array, "gpu candidate choice"]
    state_out: Float[Array, " gpu"]
    state_away: Float[Array, " gpu"]
    stall: Float[Array, "gpu slot"]
    out_share: Float[Array, "gpu slot"]
    in_share: Float[Array, "gpu slot"]
    phase: Float[Array, " gpu"]
    peer_out_share: Float[Array, "gpu slot"] | None = None  # where somebody lends
    peer_in_share: Float[Array, "gpu slot"] | None = None


class Point(eqx.Module):
    """Fractions of keep, offload, drop (and, with peers or codecs, the further choices); fraction of the resting
    state that is on the host, and of the rest of it that leaves within the step; timing."""

    choice: Float[Array, "gpu candidate choice"]
    state_out: Float[Array, " gpu"]
    state_away: Float[Array, " gpu"]
    timing: Timing


# A plan to start from: one decision per GPU, and when each GPU starts, in periods after the first.
WarmStart = tuple[Sequence[DeviceDecision], Sequence[float]]


@dataclass(frozen=True, eq=False)
class RelaxedSolution:
    """The end of every restart; R restarts, G GPUs, I candidates (padded), Q merged slots, L shared links, B bins.

    choice [R, G, I, 3 or 6]: fractions of every choice, those of state that may leave within the step behind the
    candidates (`PeriodicModel.state`). state_out [R, G]: share of the resting state on the host; state_away [R, G]: of
    the rest of it, the share that leaves within the step.
    phase [R, G]: starts in periods; start_share [R, G]: the same as compute of the first GPU, in micro-batches (see
    `Coordination`). step_s [R], period_s [R, G]: the relaxed model's times. memory_over_bytes [R], link_over [R]:
    the largest violations that are left (links relative to capacity; 0: none).
    fractional_bytes [R]: bytes whose choice is not 0 or 1. memory_price_s_per_byte [R, G, Q], link_price_s [R, L,
    B]: what the step time would gain from one more byte at a slot, or from a link faster by 100 % in a bin. history
    [R, rounds]: objective in units of K periods without stalls; early ones are for faster links. watched: what `watch`
    gave, axes R, rounds. variables: to go on from, one leading restart axis. compile_s, run_s: seconds, apart.
    slot_end_s, out_gb, in_gb [R, G, Q]: when slots end, and what has crossed by then. settings.
    """

    choice: np.ndarray
    state_out: np.ndarray
    state_away: np.ndarray
    phase: np.ndarray
    start_share: np.ndarray
    step_s: np.ndarray
    period_s: np.ndarray
    memory_over_bytes: np.ndarray
    link_over: np.ndarray
    fractional_bytes: np.ndarray
    memory_price_s_per_byte: np.ndarray
    link_price_s: np.ndarray
    slot_end_s: np.ndarray
    out_gb: np.ndarray
    in_gb: np.ndarray
    history: np.ndarray
    watched: Any
    variables: Variables
    multipliers: Limits
    compile_s: float
    run_s: float
    settings: Descent


def read_point(model: PeriodicModel, variables: Variables) -> Point:
    """Variables as fractions, seconds and phases; the first GPU starts at 0."""
    choice = jax.nn.softmax(jnp.where(model.allowed, variables.choice, -1e9), axis=-1)
    stall_s = jnp.square(variables.stall) * (model.unit_s / model.slots)
    phase = PHASE_SCALE * jnp.abs(variables.phase.at[0].set(0.0))
    peer = (variables.peer_out_share, variables.peer_in_share)
    to_peer, back = (None if share is None else jax.nn.sigmoid(share) for share in peer)
    timing = Timing(
        stall_s, jax.nn.sigmoid(variables.out_share), jax.nn.sigmoid(variables.in_share), phase, to_peer, back
    )
    return Point(choice, jax.nn.sigmoid(variables.state_out), jax.nn.sigmoid(variables.state_away), timing)


def asked_at(model: PeriodicModel, point: Point) -> Demand:
    """What a point asks of the timing."""
    return demand(model, point.choice, point.state_out, point.state_away)


def with_links_eased(model: PeriodicModel, relief) -> PeriodicModel:
    """The model with shared links widened: by the number of their users at relief 1, not at all at 0."""
    users = jnp.maximum(model.link_use.sum((1, 2)), 1.0)
    return eqx.tree_at(lambda m: m.link_gb_per_s, model, model.link_gb_per_s * users**relief)


def optimise(model: PeriodicModel, *, restarts: int = 4, steps: int = 2000, seed: int = 0,
             warm_starts: Sequence[WarmStart] = (), settings: Descent | None = None,
             watch: Callable[[Variables], Any] | None = None) -> RelaxedSolution:  # fmt: skip
    """Minimise the relaxed step time from `restarts` starts; warm starts come first and take the place of random
    ones.

    Warm starts skip the homotopy on the links. `watch`: a function of JAX arrays whose values after each round are
    returned. Same arguments, same versions: same result. Raises InputError for
    bad counts or warm starts of another shape.
    """
    settings = Descent() if settings is None else settings
    if restarts < 1 or steps < settings.multiplier_steps:
        raise InputError(f"restarts {restarts}, steps {steps}: give at least 1 and {settings.multiplier_steps}")
    if len(warm_starts) > restarts:
        raise InputError(f"warm_starts: {len(warm_starts)} given; raise restarts ({restarts}) to at least that")
    # In every other start all GPUs begin at once: a stagger costs time at the ends, which few micro-batches repay.
    starts = [
        initial_variables(model, jax.random.fold_in(jax.random.key(seed), number), spread=number % 2 == 0)
        for number in range(restarts)
    ]
    for number, warm in enumerate(warm_starts):
        starts[number] = warm_variables(model, warm, starts[number])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    eased = jnp.array([number >= len(warm_starts) for number in range(restarts)], model.slot_s.dtype)
    spread = jnp.array([number >= len(warm_starts) and number % 2 == 0 for number in range(restarts)])

    def run(model: PeriodicModel, variables: Variables, eased: Array, spread: Array):
        def one(variables, eased, spread):
            ended = _one_restart(model, variables, eased, spread, steps, settings, watch)
            point = read_point(model, ended.variables)
            step, limits = run_step(model, asked_at(model, point), point.timing, settings.bins)
            return ended, point, step, limits, _fractional_gb(model, point.choice)

        return jax.vmap(one)(variables, eased, spread)

    arguments = (model, stacked, eased, spread)
    (ended, point, step, limits, fractional_gb), compile_s, run_s = compile_and_run(run, *arguments)
    if not np.isfinite(step.step_s).all():
        # WORKAROUND(jax 0.10.1): without fusion emitters XLA's CPU compiler makes some programs yield NaN.
        found, again_s, rerun_s = compile_and_run(run, *arguments, emitters=True)
        ended, point, step, limits, fractional_gb = found
        compile_s, run_s = compile_s + again_s, run_s + rerun_s
    return _solution(model, ended, point, step, limits, fractional_gb, compile_s, run_s, settings)


def _one_restart(model: PeriodicModel, variables: Variables, eased: Array, spread: Array, steps: int,
                 settings: Descent, watch: Callable[[Variables], Any] | None) -> Descended:  # fmt: skip
    capacity_gb = jnp.sum(model.capacity_gb)

    def evaluate(variables: Variables, progress: Array) -> tuple[Array, Limits, Array]:
        point = read_point(model, variables)
        relief = eased * jnp.clip(1 - progress / settings.homotopy_share, 0.0, 1.0)
        pressure = jnp.clip((progress - 1 + settings.binary_share) / settings.binary_share, 0.0, 1.0)
        relaxed = with_links_eased(model, relief)
        # While shared links are wide nothing is gained by a stagger, so a spread start is held until it can be judged.
        phase = jnp.where(spread & (relief > 0), jax.lax.stop_gradient(point.timing.phase), point.timing.phase)
        timing = eqx.tree_at(lambda t: t.phase, point.timing, phase)
        step, limits = run_step(relaxed, asked_at(relaxed, point), timing, settings.bins)
        undecided = settings.binary_weight * pressure * _fractional_gb(model, point.choice) / capacity_gb
        return objective(relaxed, step), limits, undecided

    return descend(model, variables, steps, settings, evaluate, watch)


def _fractional_gb(model: PeriodicModel, choice: Float[Array, "gpu candidate choice"]) -> Float[Array, ""]:
    """GB that are not decided: size x (1 - sum of squared fractions), 0 where every fraction is 0 or 1."""
    return jnp.sum(model.size_gb * (1 - jnp.sum(jnp.square(choice), axis=-1)))


def initial_variables(model: PeriodicModel, key: Array, *, spread: bool) -> Variables:
    """A random start: fractions nearly equal; GPUs begin evenly spread over a period in random order, or at
    once.
    """
    keys = jax.random.split(key, 6)
    gpus, slots, count, dtype = model.gpus, model.slots, model.size_gb.shape[1], model.slot_s.dtype
    phase = jax.random.permutation(keys[5], jnp.arange(1, gpus)) / gpus if spread else jnp.full(gpus - 1, 0.01)
    peer = [
        -1.0 + 0.3 * jax.random.normal(jax.random.fold_in(keys[3], number), (gpus, slots), dtype)
        if model.has_lenders
        else None
        for number in (0, 1)
    ]
    return Variables(
        choice=0.5 * jax.random.normal(keys[0], (gpus, count, model.choices), dtype),
        state_out=0.5 * jax.random.normal(keys[1], (gpus,), dtype),
        state_away=jnp.full(gpus, -1.0, dtype),
        stall=0.3 + 0.1 * jax.random.normal(keys[2], (gpus, slots), dtype),
        out_share=-1.0 + 0.3 * jax.random.normal(keys[3], (gpus, slots), dtype),
        in_share=-1.0 + 0.3 * jax.random.normal(keys[4], (gpus, slots), dtype),
        phase=(jnp.concatenate([jnp.zeros(1), phase]) / PHASE_SCALE).astype(dtype),
        peer_out_share=peer[0],
        peer_in_share=peer[1],
    )


def warm_variables(model: PeriodicModel, warm: WarmStart, start: Variables) -> Variables:
    """`start` with the choices and phases of a plan."""
    decisions, phase = warm
    if len(decisions) != model.gpus or len(phase) != model.gpus:
        raise InputError(f"warm start: {len(decisions)} decisions, {len(phase)} phases; give {model.gpus} of each")
    logits = np.array(start.choice)
    state, away = np.array(start.state_out), np.array(start.state_away)
    one_hot = np.eye(model.choices)
    for g, decision in enumerate(decisions):
        if len(decision.choice) != model.candidates[g]:
            raise InputError(f"warm start, GPU {g}: {len(decision.choice)} choices; give {model.candidates[g]}")
        logits[g, : model.candidates[g]] = WARM_LOGIT * one_hot[np.asarray(decision.choice, np.int64)]
        rest = np.asarray(decision.state_out, np.int64)
        leaves = [int(rest[index] == Rest.AWAY) for index, _, _ in model.state[g]]
        behind = slice(model.candidates[g], model.candidates[g] + len(leaves))
        logits[g, behind] = WARM_LOGIT * one_hot[np.array(leaves, np.int64)]
        state[g] = WARM_LOGIT if (rest == Rest.ON_HOST).any() else -WARM_LOGIT
        away[g] = (
            WARM_LOGIT
            if (np.delete(rest, [index for index, _, _ in model.state[g]]) == Rest.AWAY).any()
            else -WARM_LOGIT
        )
    dtype = model.slot_s.dtype
    return eqx.tree_at(
        lambda v: (v.choice, v.state_out, v.state_away, v.phase),
        start,
        (
            jnp.asarray(logits, dtype),
            jnp.asarray(state, dtype),
            jnp.asarray(away, dtype),
            jnp.asarray(phase, dtype) / PHASE_SCALE,
        ),
    )


def _solution(model: PeriodicModel, ended: Descended, point: Point, step: Step, limits: Limits, fractional_gb: Array,
              compile_s: float, run_s: float, settings: Descent) -> RelaxedSolution:  # fmt: skip
    def largest(values: Array) -> np.ndarray:
        return np.maximum(np.asarray(values).reshape(values.shape[0], -1).max(axis=1, initial=0.0), 0.0)

    capacity_gb = np.asarray(model.capacity_gb)
    step_unit_s = model.micro_batches * float(model.unit_s)  # objectives and multipliers are relative to it
    over = np.maximum(np.asarray(limits.memory), 0.0) * capacity_gb[:, None] * GB
    return RelaxedSolution(
        choice=np.asarray(point.choice),
        state_out=np.asarray(point.state_out),
        state_away=np.asarray(point.state_away),
        phase=np.asarray(point.timing.phase),
        start_share=_start_shares(model, np.asarray(point.timing.phase), step),
        step_s=np.asarray(step.step_s),
        period_s=np.asarray(step.period_s),
        memory_over_bytes=over.max(axis=(1, 2)),
        link_over=largest(limits.link),
        fractional_bytes=np.asarray(fractional_gb) * GB,
        memory_price_s_per_byte=np.asarray(ended.multipliers.memory) * step_unit_s / (capacity_gb[:, None] * GB),
        link_price_s=np.asarray(ended.multipliers.link) * step_unit_s,
        slot_end_s=np.asarray(step.slot_end_s),
        out_gb=np.asarray(step.out_gb),
        in_gb=np.asarray(step.in_gb),
        history=np.asarray(ended.history),
        watched=jax.tree.map(np.asarray, ended.watched),
        variables=ended.variables,
        multipliers=ended.multipliers,
        compile_s=compile_s,
        run_s=run_s,
        settings=settings,
    )


def _start_shares(model: PeriodicModel, phase: np.ndarray, step: Step) -> np.ndarray:
    """[restart, gpu] how much the first GPU has computed, in micro-batches without stalls, when a GPU starts."""
    end_s, period_s = np.asarray(step.slot_end_s), np.asarray(step.period_s).max(axis=1)
    stall_s = np.asarray(step.stall_s)
    unit_s = float(np.asarray(model.slot_s)[0].sum())
    shares = np.zeros_like(phase)
    for restart, row in enumerate(phase):
        busy_s = np.cumsum(np.diff(end_s[restart, 0], prepend=0.0) - stall_s[restart, 0])
        for gpu, begun in enumerate(row.tolist()):
            turns, inside = divmod(begun, 1.0)
            done_s = np.interp(inside * period_s[restart], np.append(0.0, end_s[restart, 0]), np.append(0.0, busy_s))
            shares[restart, gpu] = (turns * busy_s[-1] + done_s) / unit_s
    return shares


@dataclass(frozen=True)
class Sensitivity:
    """How the relaxed step time of one restart changes: seconds per extra byte of device memory [gpu], and seconds
    per extra byte/s of a shared link [link] or of a GPU's own way out and in [gpu, 2]. Negative: more helps. unit
    in the names.
    """

    step_s: float
    capacity_s_per_byte: np.ndarray
    link_s_per_byte_per_s: np.ndarray
    lane_s_per_byte_per_s: np.ndarray
    link_names: tuple[str, ...]


def machine_sensitivity(model: PeriodicModel, solution: RelaxedSolution, restart: int | None = None) -> Sensitivity:
    """Derivatives of the optimised step time by machine parameters: those of the Lagrangian at the solution, its
    variables and multipliers held fixed (envelope theorem). `restart`: the fastest one by default.
    """
    best = int(np.argmin(solution.step_s)) if restart is None else restart
    variables, multipliers = jax.tree.map(lambda leaf: leaf[best], (solution.variables, solution.multipliers))
    point = read_point(model, variables)

    def lagrangian(capacity_gb, link_gb_per_s, lane_gb_per_s):
        changed = eqx.tree_at(
            lambda m: (m.capacity_gb, m.link_gb_per_s, m.lane_gb_per_s),
            model,
            (capacity_gb, link_gb_per_s, lane_gb_per_s),
        )
        step, limits = run_step(changed, asked_at(changed, point), point.timing, solution.settings.bins)
        held = jax.tree.map(lambda m, c: jnp.sum(m * c), multipliers, limits)
        return objective(changed, step) + jax.tree.reduce(jnp.add, held)

    gradients = jax.grad(lagrangian, argnums=(0, 1, 2))(model.capacity_gb, model.link_gb_per_s, model.lane_gb_per_s)
    scale = model.micro_batches * float(model.unit_s) / GB
    capacity, link, lane = (np.asarray(gradient) * scale for gradient in gradients)
    return Sensitivity(float(solution.step_s[best]), capacity, link, lane, model.link_names)
