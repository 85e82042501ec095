"""The explicit form: a chain of layers whose backward is written out, so that the plan fixes when copies run.

XLA's scheduler is free to move the copies of a checkpoint policy. Here each layer's input is copied to the host beside
the layers that the plan says, and back beside those that it says: `optimization_barrier` ties a copy to the value that
passes from layer to layer, which the scheduler cannot move across. What lies inside a layer is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.ad_checkpoint import checkpoint_name

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.execute.jitted_names import NameAction, Reach, activations_by_name, made_outside, named_plan
from tmojax.execute.jitted_scans import Loss
from tmojax.execute.jitted_step import COMPILE_FOR, JittedStep, shapes_of, step_of, verified
from tmojax.importers.jax_importer import ImportedStep
from tmojax.planners.by_name import ByName
from tmojax.problem import Problem, Schedule
from tmojax.problem.io import PlanFile
from tmojax.problem.schedule import Kind
from tmojax.problem.workload import Phase

Block = Callable[[Any, jax.Array], jax.Array]
Chain = Callable[[Sequence[Any], jax.Array], jax.Array]
_LAYER = "chain_layer"
_STAYS = -1


@dataclass(frozen=True)
class ChainTiming:
    """When the inputs of the layers of a chain are copied; one entry per layer each, -1 for an input that stays.

    `gone_after`: the copy to the host runs beside the layers from this one on, and has ended when layer `gone_after`
    has. `back_from`: the copy back begins before backward of layer `back_from` and has ended when that has.
    """

    gone_after: tuple[int, ...]
    back_from: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises InputError for lengths that differ and for copies before the input is there or after its use."""
        if len(self.gone_after) != len(self.back_from):
            raise InputError(f"back_from: {len(self.back_from)} entries for {len(self.gone_after)} layers")
        for index, (gone, back) in enumerate(zip(self.gone_after, self.back_from, strict=True)):
            stays = gone == back == _STAYS
            if not stays and not (index <= gone < len(self.gone_after) and index <= back < len(self.gone_after)):
                raise InputError(
                    f"layer {index}: gone after layer {gone} and back from layer {back}; both must be one of "
                    f"{index}..{len(self.gone_after) - 1}, or both -1"
                )


def named_chain(block: Block) -> Chain:
    """`chain(layers, x)`: `block(layer, x)` for each of `layers`, inputs named `chain.input0`, ...; import this one."""

    def chain(layers: Sequence[Any], x: jax.Array) -> jax.Array:
        for index, layer in enumerate(layers):
            with jax.named_scope(f"{_LAYER}{index}"):
                x = block(layer, checkpoint_name(x, f"chain.input{index}"))
        return x

    return chain


def explicit_chain(block: Block, timing: ChainTiming) -> Chain:
    """The same chain with copies as `timing` says; reverse-mode derivatives of first order only (`custom_vjp`)."""
    count = len(timing.gone_after)
    leaves = [index for index, gone in enumerate(timing.gone_after) if gone != _STAYS]

    def forward(layers: Sequence[Any], x: jax.Array) -> tuple[jax.Array, Any]:
        if len(layers) != count:
            raise InputError(f"chain: it has {len(layers)} layers, and the plan is for {count}")
        inputs: list[jax.Array] = []
        for index, layer in enumerate(layers):
            output = block(layer, x)
            inputs.append(jax.device_put(x, jax.memory.Space.Host) if index in leaves else x)
            for other in leaves:
                if timing.gone_after[other] == index:
                    output, inputs[other] = jax.lax.optimization_barrier((output, inputs[other]))
            x = output
        return x, (layers, inputs)

    def backward(residuals: Any, gradient: jax.Array) -> tuple[Any, jax.Array]:
        layers, inputs = residuals
        inputs = list(inputs)
        of_layers: list[Any] = [None] * count
        for index in reversed(range(count)):
            coming = [other for other in leaves if timing.back_from[other] == index]
            for other in coming:
                gradient, waiting = jax.lax.optimization_barrier((gradient, inputs[other]))
                inputs[other] = jax.device_put(waiting, jax.memory.Space.Device)
            # Ties the recomputation to backward; without it XLA would find the layer of forward and keep its inside.
            gradient, x = jax.lax.optimization_barrier((gradient, inputs[index]))
            of_layers[index], gradient = jax.vjp(block, layers[index], x)[1](gradient)
            for other in coming:
                if other != index:
                    gradient, inputs[other] = jax.lax.optimization_barrier((gradient, inputs[other]))
        return type(layers)(of_layers), gradient

    @jax.custom_vjp
    def chain(layers: Sequence[Any], x: jax.Array) -> jax.Array:
        return forward(layers, x)[0]

    chain.defvjp(forward, backward)
    return chain


def reach_of_chain(imported: ImportedStep) -> Reach:
    """What the explicit form decides in a step with a `named_chain`: its inputs. Raises InputError without a chain."""
    names = {n: ts for n, ts in activations_by_name(imported).items() if n.startswith("chain.input")}
    if not names:
        raise InputError("step: it has no named_chain of layers; write the layers so before the loss is imported")
    kept = made_outside(imported, _LAYER, {tensor for tensors in names.values() for tensor in tensors})
    return Reach(names, kept, frozenset(names))


def planner_for_chain(imported: ImportedStep, **settings: Any) -> ByName:
    """The planner `by-name` for the layers of a chain, one decision each; `settings` are its other fields."""
    reach = reach_of_chain(imported)
    names = {"names": dict(reach.names), "kept": tuple(sorted(reach.kept)), "never_recomputed": tuple(reach.names)}
    return ByName(**{**names, "tie_layers": False, **settings})


def chain_timing(imported: ImportedStep, problem: Problem, schedule: Schedule, layers: int) -> ChainTiming:
    """When a plan moves the inputs of a chain of so many layers, to the layer.

    Of devices and micro-batches that differ, the first to have released counts and the last to fetch, so that memory
    is in no layer more than planned.
    """
    names = reach_of_chain(imported).names
    gone, back = [_STAYS] * layers, [_STAYS] * layers
    for device in range(problem.workload.device_count):
        program = problem.workload.program(device)
        tensor_of = {tensor.name: index for index, tensor in enumerate(program.tensors)}
        layer_of = [_layer_index(op.layer) for op in program.ops]
        input_of = {
            tensor_of[tensor]: index
            for index in range(layers)
            for tensor in names.get(f"chain.input{index}", ())
        }  # fmt: skip
        rows = schedule.lists[device]
        sent: set[tuple[int, int]] = set()
        last = _STAYS  # layer of the last op of forward
        coming: list[int] = []  # inputs that are fetched before the next op
        for row in rows:
            if row["kind"] == Kind.COMPUTE:
                here = layer_of[row["op"]]
                for index in coming:
                    back[index] = _earlier(back[index], max(index, here if here >= 0 else layers - 1))
                coming = []
                if program.ops[row["op"]].phase is Phase.FORWARD:
                    last = here if here >= 0 else layers - 1
            index, key = input_of.get(int(row["tensor"])), (int(row["tensor"]), int(row["micro_batch"]))
            if index is None:
                continue
            if row["kind"] == Kind.OFFLOAD:
                sent.add(key)
            elif (
                row["kind"] == Kind.RELEASE and key in sent and row["memory"] == problem.machine.devices[device].memory
            ):
                sent.discard(key)
                gone[index] = _earlier(gone[index], max(index, last))
            elif row["kind"] == Kind.PREFETCH:
                coming.append(index)
    return ChainTiming(tuple(gone), tuple(back))


def _layer_index(label: str) -> int:
    return int(label.removeprefix(_LAYER)) if label.startswith(_LAYER) else -1


def _earlier(known: int, found: int) -> int:
    return found if known == _STAYS else min(known, found)


def explicit_step(
    loss_of: Callable[[Chain], Loss],
    block: Block,
    params: Any,
    batch: Any,
    optimizer: optax.GradientTransformation,
    imported: ImportedStep,
    problem: Problem,
    plan: PlanFile | Schedule,
    *,
    platform: str | None = None,
    axis_name: str | None = None,
    compile_for: str | None = COMPILE_FOR,
) -> tuple[JittedStep, ChainTiming]:
    """A step function whose copies run when the plan says, and their times by layer.

    `loss_of(chain)` gives `loss(params, batch)` with that chain inside; the step was imported from
    `loss_of(named_chain(block))`. All else as in `jitted_step`.
    Raises InputError as `jitted_step` does.
    """
    decided = named_plan(imported, reach_of_chain(imported), problem, plan)
    schedule = plan if isinstance(plan, Schedule) else plan.schedule
    layers = sum(name.startswith("chain.input") for name in imported_names(imported))
    timing = chain_timing(imported, problem, schedule, layers)
    moved = {f"chain.input{index}" for index, gone in enumerate(timing.gone_after) if gone != _STAYS}
    assert moved == set(decided.names(NameAction.OFFLOAD))
    loss = loss_of(explicit_chain(block, timing))
    verification = verified(loss, decided, problem, params, batch, platform, compile_for, explicit=True)
    step = step_of(loss, optimizer, decided.micro_batches, axis_name, problem.workload.device_count)
    return JittedStep(loss, decided, verification, step, shapes_of(params, batch)), timing


def imported_names(imported: ImportedStep) -> set[str]:
    """All names in an imported step, those of its inputs too."""
    return {storage.given_name for storage in imported.traced.graph.storages if storage.given_name}
