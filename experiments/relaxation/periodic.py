"""The periodic relaxed model, the one that the gradient planner descends, with decisions and starts fixed.

Choices become the fractions that the decode really moves; stalls and copies per slot are optimised by the same descent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tmojax.cost import PeriodicModel, Timing, demand, relax_problem, run_step
from tmojax.planners.workbench import Workbench
from tmojax.problem import Kind, LinkPolicyKind
from tmojax.relax.coordinate import Coordination
from tmojax.relax.decisions import Choice, DeviceDecision, Rest
from tmojax.relax.decode import DoesNotFit
from tmojax.relax.descent import Descent, compile_and_run, descend, objective

STEPS = 1500  # as many as the gradient planner's
AT_ONCE = 20  # plans in one compiled program: bounds its memory

Plan = tuple[tuple[DeviceDecision, ...], Coordination]


class _Variables(eqx.Module):
    stall: Float[Array, "gpu slot"]
    out_share: Float[Array, "gpu slot"]
    in_share: Float[Array, "gpu slot"]


def estimate(bench: Workbench, plans: Sequence[Plan]) -> dict[str, Any]:
    """Step times (seconds), the violations that are left, and the bytes whose choice the model does not allow."""
    views = [bench.view(device) for device in range(bench.device_count)]
    model = relax_problem(bench.problem, views)
    inputs = [_inputs(bench, model, plan) for plan in plans]
    parts, compile_s, run_s = [], 0.0, 0.0

    def run(model: PeriodicModel, *fixed: Array):
        return jax.vmap(lambda *one: _one_plan(model, *one))(*fixed)

    for begin in range(0, len(plans), AT_ONCE):
        some = inputs[begin : begin + AT_ONCE]
        fixed = [jnp.asarray(np.stack(values)) for values in zip(*(one[:-1] for one in some), strict=True)]
        found, compiling_s, running_s = compile_and_run(run, model, *fixed)
        parts.append([np.asarray(value, float) for value in found])
        compile_s, run_s = compile_s + compiling_s, run_s + running_s
    step_s, memory_over, link_over, lane_over = (np.concatenate(values) for values in zip(*parts, strict=True))
    return {
        "step_s": step_s,
        "memory_over": memory_over,
        "link_over": link_over,
        "lane_over": lane_over,
        "not_allowed_bytes": [one[-1] for one in inputs],
        "compile_s": compile_s,
        "run_s": run_s,
    }


def _inputs(bench: Workbench, model: PeriodicModel, plan: Plan) -> tuple[np.ndarray, ...]:
    """(choice [gpu, candidate, 3], state_out [gpu], phase [gpu], member [gpu], bytes not allowed)."""
    decisions, coordination = plan
    gpus, allowed = bench.device_count, np.asarray(model.allowed)
    choice = np.zeros(allowed.shape, np.float32)
    state_out = np.zeros(gpus, np.float32)
    not_allowed = 0
    for device, decision in enumerate(decisions):
        view = bench.view(device)
        wanted = np.zeros((len(decision.choice), 3), np.float32)
        wanted[np.arange(len(wanted)), decision.choice] = 1.0
        away = _moved_share(bench, device, decision) * (decision.choice == Choice.OFFLOAD)
        wanted[:, Choice.KEEP] += wanted[:, Choice.OFFLOAD] - away
        wanted[:, Choice.OFFLOAD] = away
        possible = allowed[device, : len(wanted)]
        refused = (wanted * ~possible).sum(axis=1)
        not_allowed += int((refused * view.size_bytes)[view.needed].sum())
        wanted *= possible
        fallback = np.where(possible[:, Choice.KEEP], Choice.KEEP, Choice.RECOMPUTE)
        wanted[np.arange(len(wanted)), fallback] += refused
        choice[device, : len(wanted)] = wanted
        resting = float(view.state_bytes[view.state_resting].sum())
        on_host = float(view.state_bytes[view.state_resting & (decision.state_out == Rest.ON_HOST)].sum())
        state_out[device] = on_host / resting if resting else 0.0
    phase = _phases(bench, decisions[0], coordination)
    return choice, state_out, phase, np.array(_members(bench, plan), np.int32), np.int64(not_allowed)


def _moved_share(bench: Workbench, device: int, decision: DeviceDecision) -> np.ndarray:
    """[candidate] share of the micro-batches in which the decode brings it back; it leaves what need not leave."""
    found = bench.decode(device, decision)
    assert not isinstance(found, DoesNotFit)
    view = bench.view(device)
    tensors = len(bench.problem.workload.program(device).tensors)
    back = np.bincount(found.rows["tensor"][found.rows["kind"] == Kind.PREFETCH], minlength=tensors)
    return np.minimum(back[view.tensor] / view.micro_batches, 1.0).astype(np.float32)


def _phases(bench: Workbench, first: DeviceDecision, coordination: Coordination) -> np.ndarray:
    """[gpu] starts in periods: the first GPU's compute until then as a share of its compute in a micro-batch."""
    found = bench.decode(0, first)
    assert not isinstance(found, DoesNotFit)
    view = bench.view(0)
    once_s = float(view.slot_s.sum())
    busy_s = (float(found.progress_s[-1]) - float(view.step_s.sum())) / view.micro_batches
    return np.array(coordination.start_share, np.float32) * np.float32(once_s / busy_s)


def _members(bench: Workbench, plan: Plan) -> list[int]:
    """[gpu] whose timing a GPU has: under fair sharing nothing tells apart GPUs that do the same at the same time."""
    decisions, coordination = plan
    if coordination.policy is not LinkPolicyKind.FAIR:
        return list(range(len(decisions)))
    keys = [
        (bench.device_class[d], decision.choice.tobytes(), decision.state_out.tobytes(), start)
        for d, (decision, start) in enumerate(zip(decisions, coordination.start_share, strict=True))
    ]
    return [keys.index(key) for key in keys]


def _one_plan(model: PeriodicModel, choice: Array, state_out: Array, phase: Array, member: Array) -> tuple[Array, ...]:
    settings = Descent(homotopy_share=0.3)
    users = jnp.maximum(model.link_use.sum((1, 2)), 1.0)
    asked = demand(model, choice, state_out)

    def timing(variables: _Variables) -> Timing:
        own = jax.tree.map(lambda leaf: leaf[member], variables)
        stall_s = jnp.square(own.stall) * (model.unit_s / model.slots)
        return Timing(stall_s, jax.nn.sigmoid(own.out_share), jax.nn.sigmoid(own.in_share), phase)

    def evaluate(variables: _Variables, progress: Array):
        relief = jnp.clip(1 - progress / settings.homotopy_share, 0.0, 1.0)
        eased = eqx.tree_at(lambda m: m.link_gb_per_s, model, model.link_gb_per_s * users**relief)
        step, limits = run_step(eased, asked, timing(variables), settings.bins)
        return objective(eased, step), limits, jnp.zeros((), model.slot_s.dtype)

    # Small differences between GPUs, or descent could never tell them apart where only a link's order does.
    keys, shape = jax.random.split(jax.random.key(0), 3), (model.gpus, model.slots)
    start = _Variables(
        *(mean + 0.1 * jax.random.normal(key, shape, model.slot_s.dtype)
          for key, mean in zip(keys, (0.3, -0.5, -0.5), strict=True))
    )  # fmt: skip
    ended = descend(model, start, STEPS, settings, evaluate)
    step, limits = run_step(model, asked, timing(ended.variables), settings.bins)
    lanes = jnp.maximum(limits.lane_out, limits.lane_in) / model.slots
    over = [jnp.maximum(value, 0.0).max(initial=0.0) for value in (limits.memory, limits.link, lanes)]
    return step.step_s, *over
