"""Names of activations: given to the modules of a flax model, found in an imported step, read out of a plan.

A `jax.checkpoint` policy knows activations by their `checkpoint_name`, a plan by the tensors of its workload. The
importer keeps the names, so one leads to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import tmojax.jax_setup  # noqa: F401
from tmojax.check.acceptance import checked_schedule
from tmojax.errors import InputError
from tmojax.execute.jitted_scans import input_names, names_of, scans_of
from tmojax.importers.jax_importer import ImportedStep
from tmojax.planners.by_name import ByName
from tmojax.problem import Lifetime, Problem, Program, Schedule
from tmojax.problem.io import PlanFile
from tmojax.problem.schedule import PLAIN, Kind
from tmojax.problem.workload import Phase, TensorKind


class NameAction(StrEnum):
    """What a policy does with a name. RECOMPUTE of one that backward does not need drops it."""

    SAVE = "save"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class NamedPlan:
    """A plan as decisions on names, the same on all devices.

    `actions`: by name, for the names of the step that the plan's workload has. `bytes_of`: bytes per micro-batch
    and device of all tensors of a name together. `micro_batches`: K.
    """

    actions: Mapping[str, NameAction]
    bytes_of: Mapping[str, int]
    micro_batches: int

    def names(self, action: NameAction) -> tuple[str, ...]:
        return tuple(name for name, chosen in self.actions.items() if chosen is action)

    @property
    def host_bytes(self) -> int:
        """Bytes that one device sends to the host per micro-batch."""
        return sum(self.bytes_of[name] for name in self.names(NameAction.OFFLOAD))

    def policy(self) -> Callable[..., Any]:
        """The policy for `jax.checkpoint`."""
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=self.names(NameAction.SAVE),
            names_which_can_be_offloaded=self.names(NameAction.OFFLOAD),
            offload_src="device",
            offload_dst="pinned_host",
        )


def named_modules(loss: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], jax.Array]:
    """`loss` with the output of every flax (linen) module named by the module's path, such as `h3.attn.qkv`.

    Under `nn.scan` all layers of the scan share their names. Models that are not flax modules call
    `jax.ad_checkpoint.checkpoint_name` themselves; both can be mixed.
    """

    def name_output(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        output = call(*args, **kwargs)
        if context.method_name != "__call__" or not context.module.path:
            return output
        return jax.tree.map(lambda x: checkpoint_name(x, ".".join(context.module.path)), output)

    def named_loss(params: Any, batch: Any) -> jax.Array:
        with nn.intercept_methods(name_output):
            return loss(params, batch)

    return named_loss


@dataclass(frozen=True)
class Reach:
    """What a policy decides in a step.

    `names`: the names that it decides on, with their tensors. In a model with named scans those are the names in the
    bodies, because a policy around a scan would bring all layers back at once; `kept` are then the tensors outside,
    which stay. `never_recomputed`: names of inputs of layers, which a scan keeps unless they are offloaded.
    """

    names: Mapping[str, tuple[str, ...]]
    kept: frozenset[str]
    never_recomputed: frozenset[str]

    @property
    def scanned(self) -> bool:
        return bool(self.never_recomputed)


def reach_of(loss: Callable[[Any, Any], jax.Array], params: Any, batch: Any, imported: ImportedStep) -> Reach:
    """What a policy decides in the step that was imported from `loss`.

    Raises InputError if nothing is named, or if a scan has names in its body and none for what its layers hand on.
    """
    closed = jax.make_jaxpr(loss)(params, batch)
    scans = [scan for scan in scans_of(closed.jaxpr) if names_of(scan.jaxpr)]
    if not scans:
        names = activations_by_name(imported)
        if not names:
            raise InputError(
                "step: none of its activations has a name; call jax.ad_checkpoint.checkpoint_name in the model, or "
                "wrap the loss in named_modules before it is imported"
            )
        return Reach(names, frozenset(), frozenset())
    named = _tensors_by_name(imported)
    inputs = frozenset(name for scan in scans for name in input_names(scan))
    inside = {name for scan in scans for name in names_of(scan.jaxpr)}
    kept = made_outside(imported, "scan[", {t for name in inputs for t in named.get(name, ())})
    names = {n: tuple(t for t in ts if t not in kept) for n, ts in named.items() if n in inside}
    return Reach({n: ts for n, ts in names.items() if ts}, kept, inputs)


def planner_for(
    loss: Callable[[Any, Any], jax.Array], params: Any, batch: Any, imported: ImportedStep, **settings: Any
) -> ByName:
    """The planner `by-name` for the names of a step; `settings` are its other fields. Raises as `reach_of`."""
    reach = reach_of(loss, params, batch, imported)
    return ByName(
        names=dict(reach.names), kept=tuple(sorted(reach.kept)), never_recomputed=tuple(sorted(reach.never_recomputed)),
        **settings,
    )  # fmt: skip


def _tensors_by_name(imported: ImportedStep) -> dict[str, tuple[str, ...]]:
    """Tensors of the workload by their `checkpoint_name`, in the order in which the step makes them."""
    traced = imported.traced
    found: dict[str, list[str]] = {}
    for storage, tensor in traced.tensor_of.items():
        name = traced.graph.storages[storage].given_name
        if name:
            found.setdefault(name, []).append(tensor)
    return {name: tuple(dict.fromkeys(tensors)) for name, tensors in found.items()}


def activations_by_name(imported: ImportedStep) -> dict[str, tuple[str, ...]]:
    """The names that only activations have, with their tensors."""
    kinds = {tensor.name: tensor.kind for tensor in imported.workload.programs[0].tensors}
    named = _tensors_by_name(imported)
    return {n: ts for n, ts in named.items() if all(kinds[t] is TensorKind.ACTIVATION for t in ts)}


def made_outside(imported: ImportedStep, scope: str, inputs: set[str]) -> frozenset[str]:
    """Forward activations made or read outside of scopes that begin with `scope`, but for `inputs`."""
    traced, program = imported.traced, imported.workload.programs[0]
    graph = traced.graph

    def inside(storage: int) -> bool:
        producer = graph.storages[storage].producer
        return producer >= 0 and any(part.startswith(scope) for part in graph.equations[producer].scope)

    made_inside = {tensor for storage, tensor in traced.tensor_of.items() if inside(storage)}
    read_outside = {
        program.tensors[t].name
        for op in program.ops
        if op.phase is Phase.FORWARD and not any(inside(s) for s in traced.op_writes.get(op.name, ()))
        for t in op.reads
    }  # fmt: skip
    forward = {program.tensors[t].name for op in program.ops if op.phase is Phase.FORWARD for t in op.writes}
    return frozenset(forward - (made_inside - read_outside) - inputs)


def named_plan(imported: ImportedStep, reach: Reach, problem: Problem, plan: PlanFile | Schedule) -> NamedPlan:
    """Read a plan as decisions on the names of a step; `reach` says what a policy decides in it.

    Raises InputError for a plan of another problem or step, one that the checker rejects, and everything that a policy
    cannot express: devices or micro-batches that differ, state that moves, tensors without a name that are kept or
    offloaded, one name with several decisions, copies that are sliced, encoded or sent to a peer.
    """
    schedule = checked_schedule(imported.workload, problem, plan)
    workload = problem.workload
    first: dict[str, NameAction] | None = None
    for device in range(workload.device_count):
        _require_state_at_home(problem, schedule, device)
        for micro_batch in range(workload.micro_batches):
            here = _actions_of_tensors(problem, schedule, device, micro_batch)
            first = here if first is None else first
            if here != first:
                tensor = next(t for t in here if here[t] is not first[t])
                raise InputError(
                    f"plan: {tensor!r} is {here[tensor]} on device {device}, micro-batch {micro_batch}, and "
                    f"{first[tensor]} on device 0, micro-batch 0; one jitted step does the same everywhere: ask for "
                    f"such a plan with the planner 'by-name', or run this one with PlannedStep"
                )
    assert first is not None
    return _by_name(reach, workload.program(0), first, workload.micro_batches)


def _require_state_at_home(problem: Problem, schedule: Schedule, device: int) -> None:
    home = problem.machine.devices[device].memory
    program = problem.workload.program(device)
    for placement in schedule.initial[device]:
        if placement.memories != (home,):
            raise InputError(
                f"plan: {program.tensors[placement.tensor].name!r} rests outside of device memory, and a jitted step "
                f"keeps its state there; ask the planner 'by-name', or run this plan with PlannedStep"
            )


def _actions_of_tensors(problem: Problem, schedule: Schedule, device: int, micro_batch: int) -> dict[str, NameAction]:
    """What a list does with each forward activation of one micro-batch, by tensor name."""
    program, rows = problem.workload.program(device), schedule.lists[device]
    spec = problem.machine.devices[device]
    activations = [
        t for t, tensor in enumerate(program.tensors)
        if program.producer[t] >= 0 and program.ops[program.producer[t]].phase is Phase.FORWARD
    ]  # fmt: skip
    left = {index for index, op in enumerate(program.ops) if op.phase is Phase.FORWARD}  # not run yet
    resident: set[int] = set()
    at_backward: set[int] | None = None
    offloaded: set[int] = set()
    again: set[int] = set()  # computed anew after forward
    read: set[int] = set()  # after forward, of what was there then
    for row in rows:
        kind, tensor = Kind(row["kind"]), int(row["tensor"])
        if kind in (Kind.ENCODE, Kind.DECODE, Kind.LEND):
            raise InputError(f"plan: it uses {kind.name.lower()}, which a policy cannot; run it with PlannedStep")
        if kind in (Kind.OFFLOAD, Kind.PREFETCH):
            _require_plain_copy(program, row, (spec.memory, spec.host_memory))
        if kind is Kind.OFFLOAD:
            if program.tensors[tensor].lifetime is not Lifetime.MICRO_BATCH or tensor not in activations:
                raise InputError(
                    f"plan: it offloads {program.tensors[tensor].name!r}, which is no activation of forward; a jitted "
                    f"step keeps the rest on the device, and donates its state there: ask the planner 'by-name', or "
                    f"run this plan with PlannedStep"
                )
            if program.tensors[tensor].alias_group:
                raise InputError(
                    f"plan: it offloads {program.tensors[tensor].name!r}, which shares its storage (aliased, group "
                    f"{program.tensors[tensor].alias_group!r}), so it does not leave the device alone; import the step "
                    f"without that alias"
                )
            if row["micro_batch"] == micro_batch:
                offloaded.add(tensor)
        if kind is Kind.RELEASE and row["micro_batch"] == micro_batch and row["memory"] == spec.memory:
            resident.discard(tensor)
        if kind is Kind.COMPUTE and row["micro_batch"] == micro_batch:
            op = program.ops[row["op"]]
            if not left and at_backward is None:
                at_backward = set(resident)
            left.discard(int(row["op"]))
            if at_backward is not None:
                read.update(t for t in (*op.reads, *op.updates) if t not in again)
                again.update(t for t in op.writes if t not in at_backward)
            resident.update(op.writes)
    kept = (at_backward or set()) & read
    return {
        program.tensors[t].name: NameAction.OFFLOAD if t in offloaded
        else NameAction.SAVE if t in kept
        else NameAction.RECOMPUTE
        for t in activations
    }  # fmt: skip


def _require_plain_copy(program: Program, row: np.void, memories: tuple[int, int]) -> None:
    name = program.tensors[row["tensor"]].name
    if row["form"] != PLAIN or row["parts"] != 1:
        raise InputError(f"plan: it moves {name!r} encoded or in slices; a policy cannot, PlannedStep can")
    if {int(row["memory"]), int(row["to_memory"])} != set(memories):
        raise InputError(
            f"plan: it moves {name!r} to another memory than the device's own host; run it with PlannedStep"
        )


def _by_name(reach: Reach, program: Program, actions: Mapping[str, NameAction], micro_batches: int) -> NamedPlan:
    sizes = {tensor.name: tensor.size_bytes for tensor in program.tensors}
    by_name: dict[str, NameAction] = {}
    bytes_of: dict[str, int] = {}
    for name, tensors in reach.names.items():
        here = [tensor for tensor in tensors if tensor in actions]
        different = {actions[tensor] for tensor in here}
        if len(different) > 1:
            raise InputError(
                f"name {name!r}: the plan decides {', '.join(f'{actions[t]} for {t!r}' for t in here[:4])}; one name "
                f"is one decision: ask the planner 'by-name' (planner_for), or give the layers names of their own "
                f"(scan_in_segments)"
            )
        if name in reach.never_recomputed and NameAction.RECOMPUTE in different:
            raise InputError(
                f"name {name!r}: the plan recomputes the input of the layers of a scan, which a scan keeps; ask the "
                f"planner 'by-name' (planner_for)"
            )
        if different:
            by_name[name], bytes_of[name] = different.pop(), sum(sizes[tensor] for tensor in here)
    named = {tensor for tensors in reach.names.values() for tensor in tensors}
    for tensor, action in actions.items():
        if tensor in reach.kept and action is NameAction.OFFLOAD:
            raise InputError(
                f"plan: it offloads {tensor!r}, which lies outside of the layers that are scanned, where no policy "
                f"reaches; ask the planner 'by-name' (planner_for)"
            )
        if tensor not in named and tensor not in reach.kept and action is not NameAction.RECOMPUTE:
            raise InputError(
                f"plan: it would {action} {tensor!r}, which has no checkpoint_name, so JAX would recompute it; name it "
                f"in the model, or ask the planner 'by-name' (planner_for)"
            )
    return NamedPlan(by_name, bytes_of, micro_batches)
