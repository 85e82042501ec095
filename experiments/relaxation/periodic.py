"""The periodic relaxed model, the one that the gradient planner descends, with the lists of plans fixed.

Fixed is what the decode has decided: which ops run, what is copied, in which order, and between which runs. Starts,
stalls and copies per slot are optimised by the planner's own descent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from fixed_lists import FixedLists, Plan, read_plans
from jaxtyping import Array, Float

from tmojax.cost import PeriodicModel, Timing, relax_problem, run_step
from tmojax.planners.workbench import Workbench
from tmojax.relax.decode import DoesNotFit
from tmojax.relax.descent import Descent, compile_and_run, descend, objective

STEPS = 1500  # as many as the gradient planner's
AT_ONCE = 20  # plans in one compiled program: bounds its memory
PHASE_SCALE = 0.05  # a start shifts all copies of a GPU at once, so it has to move slowly
NUDGE = 0.02  # periods by which GPUs that start together are pulled apart in one of the starts
LINK_TOLERANCE = 0.03  # of the capacity of a link in a bin; ends of a descent that exceed it count only if all do


class _Variables(eqx.Module):
    stall: Float[Array, "gpu slot"]
    out_share: Float[Array, "gpu slot"]
    in_share: Float[Array, "gpu slot"]
    phase: Float[Array, " gpu"]


def estimate(bench: Workbench, plans: Sequence[Plan]) -> dict[str, Any]:
    """Step times (seconds): the best of four descents per plan; and by how much its links are still exceeded."""
    model = relax_problem(bench.problem, [bench.view(device) for device in range(bench.device_count)])
    lists = read_plans(bench, plans)
    phases = np.stack([_starts(bench, plan) for plan in plans])
    parts, compile_s, run_s = [], 0.0, 0.0

    def run(model: PeriodicModel, lists: FixedLists, phases: Array):
        def all_starts(one: FixedLists, starts: Array):
            return jax.vmap(lambda phase: _descend_one(model, one, phase))(starts)

        return jax.vmap(all_starts)(lists, phases)

    for begin in range(0, len(plans), AT_ONCE):
        some = jax.tree.map(lambda values, b=begin: jnp.asarray(values[b : b + AT_ONCE]), (lists, phases))
        found, compiling_s, running_s = compile_and_run(run, model, *some)
        parts.append([np.asarray(value, float) for value in found])
        compile_s, run_s = compile_s + compiling_s, run_s + running_s
    step_s, link_over = (np.concatenate(values) for values in zip(*parts, strict=True))  # [plan, start]
    ranked = np.where(link_over <= LINK_TOLERANCE, step_s, step_s.max() + link_over)
    best = np.argmin(ranked, axis=1)[:, None]
    return {
        "step_s": np.take_along_axis(step_s, best, 1)[:, 0],
        "link_over": np.take_along_axis(link_over, best, 1)[:, 0],
        "start": best[:, 0],
        "compile_s": compile_s,
        "run_s": run_s,
    }


def _starts(bench: Workbench, plan: Plan) -> np.ndarray:
    """[start, gpu] phases in periods: the plan's own, these pulled apart a little, GPUs evenly over a period and over
    half of one."""
    decisions, coordination = plan
    found = bench.decode(0, decisions[0])
    assert not isinstance(found, DoesNotFit)
    view = bench.view(0)
    once_s = float(view.slot_s.sum())
    busy_s = (float(found.progress_s[-1]) - float(view.step_s.sum())) / view.micro_batches
    own = np.array(coordination.start_share) * (once_s / busy_s)
    even = np.arange(len(own)) / len(own)
    return np.stack([own, own + NUDGE * np.arange(len(own)), even, even / 2]).astype(np.float32)


def _descend_one(model: PeriodicModel, lists: FixedLists, phase: Array) -> tuple[Array, Array]:
    """(step time, largest excess over the capacity of a link in a bin)."""
    settings = Descent()
    model = eqx.tree_at(
        lambda m: (m.slot_s, m.lane_gb_per_s, m.sync_slot, m.turn_slot), model,
        (lists.slot_s, lists.lane_gb_per_s, lists.sync_slot, jnp.zeros_like(model.turn_slot)),
    )  # fmt: skip

    def lay_out(variables: _Variables):
        stall_s = jnp.square(variables.stall) * (model.unit_s / model.slots)
        starts = PHASE_SCALE * (variables.phase - variables.phase.min())
        shares = jax.nn.sigmoid(variables.out_share), jax.nn.sigmoid(variables.in_share)
        step, limits = run_step(model, lists.demand, Timing(stall_s, *shares, starts), settings.bins)
        # Lists that passed the decode fit in memory, and no copy in of theirs can overtake its copy out.
        return step, eqx.tree_at(lambda found: (found.memory, found.order), limits, replace_fn=jnp.zeros_like)

    def evaluate(variables: _Variables, _progress: Array):
        step, limits = lay_out(variables)
        return objective(model, step), limits, jnp.zeros((), model.slot_s.dtype)

    # Small differences between GPUs, or descent could never tell them apart where only a link's order does.
    keys, shape = jax.random.split(jax.random.key(0), 3), (model.gpus, model.slots)
    noise = [0.1 * jax.random.normal(key, shape, model.slot_s.dtype) for key in keys]
    start = _Variables(0.3 + noise[0], -0.5 + noise[1], -0.5 + noise[2], phase / PHASE_SCALE)
    step, limits = lay_out(descend(model, start, STEPS, settings, evaluate).variables)
    return step.step_s, jnp.maximum(limits.link, 0.0).max(initial=0.0)
