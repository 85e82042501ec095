"""The augmented Lagrangian loop: adam on a point, multipliers for the limits, one compiled scan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tmojax.jax_setup  # noqa: F401  (before JAX)

# isort: split
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from tmojax.cost.model import PeriodicModel
from tmojax.cost.timeline import Limits, Step
from tmojax.errors import InputError

LAST_RATE = 0.03  # share of the learning rate that is left at the end (cosine)
MEMORY = 0.99  # adam's second moment: penalties and the binary pressure grow, so old gradients must be forgotten

RANGE = 6.0  # variables stay within +-RANGE: a sigmoid that saturates completely has no gradient to come back by


@dataclass(frozen=True)
class Descent:
    """Settings of the optimisation.

    bins: parts of the period in which shared links are checked. learning_rate: of adam, at the start
    (cosine). penalty_start, penalty_end: of the augmented Lagrangian, growing geometrically. multiplier_steps:
    steps between two updates of the multipliers. homotopy_share: part of the steps over which shared links shrink
    from (users x bandwidth) to their bandwidth. binary_share: last part of the steps, over which fractional choices
    become expensive, up to binary_weight.
    """

    bins: int = 96
    learning_rate: float = 0.15
    penalty_start: float = 3.0
    penalty_end: float = 30.0
    multiplier_steps: int = 20
    homotopy_share: float = 0.4
    binary_share: float = 0.4
    binary_weight: float = 1.0

    def __post_init__(self) -> None:
        """Raises InputError naming the setting, its value and its range."""
        for name, low in (("bins", 2), ("multiplier_steps", 1)):
            if getattr(self, name) < low:
                raise InputError(f"{name}: {getattr(self, name)} must be at least {low}")
        for name in ("learning_rate", "penalty_start", "penalty_end", "homotopy_share", "binary_share"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{name}: {getattr(self, name)} must be positive and finite")
        if not 0 <= self.binary_weight < float("inf"):
            raise InputError(f"binary_weight: {self.binary_weight} must be finite and not negative")


class Descended(eqx.Module):
    """Where a descent ended: variables, multipliers of the limits (derivative of the objective by a relative
    limit), and the objective before each update of the multipliers. watched: what was asked for at the same moments.
    """

    variables: Any
    multipliers: Limits
    history: Float[Array, " round"]
    watched: Any


def limit_weights(bins: int) -> dict[str, float]:
    """Weight of one limit's square, by field of `Limits`. A bin's share of time is small against the step, a slot's
    memory limit is not.
    """
    return {"memory": 1.0, "order": 1.0, "link": 1 / bins, "host": 1.0}


def penalise(limits: Limits, multipliers: Limits, weights: dict[str, float], penalty) -> Float[Array, ""]:
    """Sum over limits c <= 0 of w / (2 rho) (max(0, lambda + rho c)^2 - lambda^2)."""
    total = jnp.zeros((), limits.memory.dtype)
    for name, weight in weights.items():
        value, multiplier = getattr(limits, name), getattr(multipliers, name)
        pushed = jnp.maximum(0.0, multiplier + penalty * value)
        total += weight / (2 * penalty) * jnp.sum(jnp.square(pushed) - jnp.square(multiplier))
    return total


def objective(model: PeriodicModel, step: Step) -> Float[Array, ""]:
    """Step time in units of K periods without stalls. The mean over GPUs has a small share, so that none idles for
    free.
    """
    mean = (step.period_s.mean() - step.period_s.max()) * model.micro_batches
    return (step.step_s + 0.1 * mean) / (model.micro_batches * model.unit_s)


def descend(model: PeriodicModel, variables: Any, steps: int, settings: Descent,
            evaluate: Callable[[Any, Any], tuple[Array, Limits, Array]],
            watch: Callable[[Any], Any] | None = None) -> Descended:  # fmt: skip
    """Minimise one point. `evaluate(variables, progress)` returns (objective, limits, other cost); progress runs
    from 0 to 1. `watch(variables)` is kept of every round.
    """
    weights = limit_weights(settings.bins)
    rounds = max(1, steps // settings.multiplier_steps)
    total = rounds * settings.multiplier_steps
    optimiser = optax.adam(optax.cosine_decay_schedule(settings.learning_rate, total, LAST_RATE), b2=MEMORY)

    def loss(variables, multipliers, penalty, progress):
        value, limits, other = evaluate(variables, progress)
        return value + penalise(limits, multipliers, weights, penalty) + other, (value, limits)

    def one_round(state, number):
        variables, adam, multipliers = state
        penalty = settings.penalty_start * (settings.penalty_end / settings.penalty_start) ** (number / rounds)

        def one_step(state, count):
            variables, adam, _, _ = state
            progress = (number * settings.multiplier_steps + count) / total
            gradient, (value, limits) = jax.grad(loss, has_aux=True)(variables, multipliers, penalty, progress)
            update, adam = optimiser.update(gradient, adam)
            variables = jax.tree.map(lambda leaf: jnp.clip(leaf, -RANGE, RANGE), optax.apply_updates(variables, update))
            return (variables, adam, value, limits), None

        start = (variables, adam, jnp.zeros((), model.slot_s.dtype), multipliers)
        counts = jnp.arange(settings.multiplier_steps, dtype=model.slot_s.dtype)
        (variables, adam, value, limits), _ = jax.lax.scan(one_step, start, counts)
        multipliers = jax.tree.map(lambda m, c: jnp.maximum(0.0, m + penalty * c), multipliers, limits)
        return (variables, adam, multipliers), (value, None if watch is None else watch(variables))

    shapes = jax.eval_shape(lambda point: evaluate(point, jnp.zeros((), model.slot_s.dtype))[1], variables)
    multipliers = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    numbers = jnp.arange(rounds, dtype=model.slot_s.dtype)
    state = (variables, optimiser.init(variables), multipliers)
    (variables, _, multipliers), (history, watched) = jax.lax.scan(one_round, state, numbers)
    priced = Limits(**{name: weight * getattr(multipliers, name) for name, weight in weights.items()})
    return Descended(variables, priced, history, watched)


def compile_and_run(function: Callable, *arguments: Any, emitters: bool = False) -> tuple[Any, float, float]:
    """(result, compile_s, run_s) of a function of arrays, compiled once. emitters: with XLA's fusion emitters."""
    started = time.perf_counter()
    lowered = jax.jit(function).lower(*arguments)
    try:
        # The fusion emitters double the compile time of such a program on the CPU and make it no faster.
        compiled = lowered.compile(compiler_options=None if emitters else {"xla_cpu_use_fusion_emitters": False})
    except (ValueError, RuntimeError):  # a JAX version or platform without that option
        compiled = lowered.compile()
    compiled_at = time.perf_counter()
    result = jax.block_until_ready(compiled(*arguments))
    return result, compiled_at - started, time.perf_counter() - compiled_at
