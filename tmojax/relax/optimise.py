"""Gradient descent on the relaxed model: augmented Lagrangian, homotopy on the shared links, many restarts at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import tmojax.jax_setup  # noqa: F401  (before JAX)

# isort: split
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from tmojax.cost.model import OFFLOAD, PeriodicModel
from tmojax.cost.timeline import Limits, Step, Timing, demand, run_step
from tmojax.errors import InputError
from tmojax.relax.decisions import DeviceDecision


@dataclass(frozen=True)
class Descent:
    """Settings of the optimisation.

    bins: parts of the period in which shared links are checked. learning_rate: of adam, decaying to a tenth. penalty_start,
    penalty_end: of the augmented Lagrangian, growing geometrically. multiplier_steps: steps between two updates of the multipliers.
    homotopy_share: part of the steps over which shared links shrink from (users x bandwidth) to their bandwidth. binary_share:
    last part of the steps, over which fractional choices become expensive, up to binary_weight.
    """

    bins: int = 96
    learning_rate: float = 0.03
    penalty_start: float = 3.0
    penalty_end: float = 30.0
    multiplier_steps: int = 20
    homotopy_share: float = 0.4
    binary_share: float = 0.4
    binary_weight: float = 0.1


class Variables(eqx.Module):
    """What is optimised, unconstrained: softmax, squares, sigmoids and absolute values make it feasible."""

    choice: Float[Array, "gpu candidate 3"]
    state_out: Float[Array, " gpu"]
    stall: Float[Array, "gpu slot"]
    out_share: Float[Array, "gpu slot"]
    in_share: Float[Array, "gpu slot"]
    phase: Float[Array, " gpu"]


class Point(eqx.Module):
    """Variables in their own units: fractions [gpu, candidate, 3], state_out [gpu], and the timing."""

    choice: Float[Array, "gpu candidate 3"]
    state_out: Float[Array, " gpu"]
    timing: Timing


def read_point(model: PeriodicModel, variables: Variables) -> Point:
    choice = jax.nn.softmax(jnp.where(model.allowed, variables.choice, -1e9), axis=-1)
    stall_s = jnp.square(variables.stall) * (model.unit_s / model.slots)
    phase = jnp.abs(variables.phase.at[0].set(0.0))
    timing = Timing(stall_s, jax.nn.sigmoid(variables.out_share), jax.nn.sigmoid(variables.in_share), phase)
    return Point(choice, jax.nn.sigmoid(variables.state_out), timing)


class Multipliers(eqx.Module):
    """Of the augmented Lagrangian, one per limit, at least 0; the step time is in periods without stalls."""

    limits: Limits
    penalty: Float[Array, ""]


# Weight of one limit's square: limits are relative to their own scale, of which a slot or bin is a small part.
def _weights(model: PeriodicModel, bins: int) -> Limits:
    slots = model.slots
    return Limits(memory=1.0, order=1.0, lane_out=1.0 / slots, lane_in=1.0 / slots, link=1.0 / bins, host=1.0)


def _penalise(limits: Limits, multipliers: Limits, weights: Limits, penalty) -> Array:
    """(rho / 2) w (max(0, c + lambda / rho)^2 - (lambda / rho)^2), summed over all limits."""

    def term(value, multiplier, weight):
        shifted = jnp.maximum(0.0, value + multiplier / penalty)
        return weight * 0.5 * penalty * jnp.sum(jnp.square(shifted) - jnp.square(multiplier / penalty))

    return jax.tree.reduce(jnp.add, jax.tree.map(term, limits, multipliers, weights))


def objective(model: PeriodicModel, step: Step) -> Array:
    """Step time in units of (K x period without stalls); the mean over GPUs has a small share, so that none idles for free."""
    mean = (step.period_s.mean() - step.period_s.max()) * model.micro_batches
    return (step.step_s + 0.1 * mean) / (model.micro_batches * model.unit_s)


def with_link_rate(model: PeriodicModel, factor) -> PeriodicModel:
    return eqx.tree_at(lambda m: m.link_gb_per_s, model, model.link_gb_per_s * factor)


def _fractional(model: PeriodicModel, choice: Array) -> Array:
    """Bytes that are not decided: 0 where every choice is 0 or 1; relative to the capacities."""
    return jnp.sum(model.size_gb * (1 - jnp.sum(jnp.square(choice), -1))) / jnp.sum(model.capacity_gb)


def _descend(model: PeriodicModel, variables: Variables, settings: Descent, steps: int):
    """One restart. Returns (variables, multipliers, history of the objective)."""
    weights = _weights(model, settings.bins)
    users = jnp.maximum(model.link_use.sum((1, 2)), 1.0)

    def loss(variables: Variables, multipliers: Limits, penalty, progress):
        point = read_point(model, variables)
        relief = jnp.clip(1 - progress / settings.homotopy_share, 0.0, 1.0)
        eased = with_link_rate(model, users**relief)
        step, limits = run_step(eased, demand(eased, point.choice, point.state_out), point.timing, settings.bins)
        pressure = settings.binary_weight * jnp.clip((progress - 1 + settings.binary_share) / settings.binary_share, 0.0, 1.0)
        value = objective(model, step)
        total = value + _penalise(limits, multipliers, weights, penalty) + pressure * _fractional(model, point.choice)
        return total, (value, limits)

    schedule = optax.cosine_decay_schedule(settings.learning_rate, steps, 0.1)
    optimiser = optax.adam(schedule)
    rounds = max(1, steps // settings.multiplier_steps)

    def one_round(state, number):
        variables, adam, multipliers = state
        penalty = settings.penalty_start * (settings.penalty_end / settings.penalty_start) ** (number / rounds)

        def one_step(state, count):
            variables, adam = state
            progress = (number * settings.multiplier_steps + count) / (rounds * settings.multiplier_steps)
            gradient, (value, limits) = jax.grad(loss, has_aux=True)(variables, multipliers, penalty, progress)
            update, adam = optimiser.update(gradient, adam)
            return (optax.apply_updates(variables, update), adam), (value, limits)

        (variables, adam), (values, limits) = jax.lax.scan(one_step, (variables, adam), jnp.arange(settings.multiplier_steps))
        last = jax.tree.map(lambda x: x[-1], limits)
        multipliers = jax.tree.map(lambda m, c: jnp.maximum(0.0, m + penalty * c), multipliers, last)
        return (variables, adam, multipliers), values[-1]

    zero = jax.eval_shape(lambda v: loss(v, None, 1.0, 0.0), variables) if False else None
    shapes = jax.eval_shape(lambda v: run_step(model, demand(model, read_point(model, v).choice, read_point(model, v).state_out), read_point(model, v).timing, settings.bins)[1], variables)
    multipliers = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    state = (variables, optimiser.init(variables), multipliers)
    (variables, _, multipliers), history = jax.lax.scan(one_round, state, jnp.arange(rounds, dtype=jnp.float32))
    return variables, multipliers, history


def initial_variables(model: PeriodicModel, key: Array) -> Variables:
    """Random start: fractions near a third, evenly spread phases with jitter."""
    keys = jax.random.split(key, 6)
    gpus, slots, count = model.gpus, model.slots, model.size_gb.shape[1]
    dtype = model.slot_s.dtype
    spread = jnp.arange(gpus, dtype=dtype) / gpus
    return Variables(
        choice=0.5 * jax.random.normal(keys[0], (gpus, count, 3), dtype),
        state_out=0.5 * jax.random.normal(keys[1], (gpus,), dtype),
        stall=0.3 + 0.1 * jax.random.normal(keys[2], (gpus, slots), dtype),
        out_share=-1.0 + 0.3 * jax.random.normal(keys[3], (gpus, slots), dtype),
        in_share=-1.0 + 0.3 * jax.random.normal(keys[4], (gpus, slots), dtype),
        phase=spread + 0.1 * jax.random.normal(keys[5], (gpus,), dtype),
    )
