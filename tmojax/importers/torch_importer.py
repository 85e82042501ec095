"""From a PyTorch module, its loss and example inputs to a workload that every planner can plan.

Ops are the kernels of forward and the autograd nodes of backward, in the order in which they run. Tensors are storages,
so views cost nothing and what shares memory is one tensor. Parameters, gradients, buffers and the batch stay on the
device: the hooks that run a plan (`tmojax.execute_torch`) can move what autograd saves, and optimizer state.
"""

# PyTorch is optional, and static checks pass without it.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tmojax.errors import InputError
from tmojax.importers.jax_roofline import COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY, GpuSpec, find_gpu
from tmojax.importers.torch_calls import Loss, storages_of
from tmojax.importers.torch_tracing import MADE, Storage, TracedOp, TracedPass, trace_pass
from tmojax.problem.workload import (
    Collective,
    CollectiveKind,
    Lifetime,
    Op,
    Phase,
    Program,
    Tensor,
    TensorKind,
    Workload,
    validate_workload,
)

STATE_NAMES = {
    TensorKind.WEIGHT: "parameters and buffers",
    TensorKind.GRADIENT: "gradients",
    TensorKind.INPUT: "batch and constants",
}


@dataclass(frozen=True, eq=False)
class ImportedTorchStep:
    """A workload, and how it came from the traced pass.

    `op_of` [op of the pass]: op of the workload. Tensors that a forward op writes: first what it allocates, in order,
    then what it changes in place. `held_to` [tensor]: forward op before whose end Python does not let go of it.
    `optimizer_state` {tensor: names of the parameters whose state it is}.
    """

    workload: Workload
    traced: TracedPass
    op_of: tuple[int, ...]
    held_to: dict[int, int]
    optimizer_state: dict[int, tuple[str, ...]]

    def with_durations(self, duration_s: dict[int, float]) -> ImportedTorchStep:
        """The same step with measured seconds for ops of the workload (`StepOutcome.op_s`)."""
        program = self.workload.programs[0]
        ops = tuple(replace(op, duration_s=duration_s.get(i, op.duration_s)) for i, op in enumerate(program.ops))
        workload = replace(
            self.workload, programs=(replace(program, ops=ops),), duration_source="measured: kernels of a PyTorch step"
        )
        return replace(self, workload=workload)


def import_torch_step(
    module: torch.nn.Module,
    loss: Loss,
    batch: Any,
    *,
    gpu: str,
    gpus: int = 1,
    micro_batches: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    name: str = "torch",
    fake: bool = True,
) -> ImportedTorchStep:
    """Import the step of one rank: `loss(module, batch)`, backward, the sum of gradients over `gpus` ranks.

    Nothing is computed, unless `fake` is off (`trace_pass`). Op durations are a roofline of `gpu` (a name of the GPU
    table): FLOP by PyTorch's own formulas, bytes of all operands and results. With `optimizer`, whose state must exist
    (one `optimizer.step()`), the update is an op and the state counts, as one tensor per block of the module. Gradients
    count from the start of the step: they are accumulated in place.
    Raises InputError as `trace_pass`, and for unknown GPUs and dtypes that the GPU does not multiply.
    """
    if gpus < 1 or micro_batches < 1:
        raise InputError(f"gpus, micro_batches: {gpus}, {micro_batches} must be at least 1")
    traced = trace_pass(module, loss, batch, fake)
    blocks = {} if optimizer is None else optimizer_blocks(module, optimizer)
    builder = _Builder(traced, find_gpu(gpu), blocks)
    program = builder.program(name, gpus)
    collectives = ()
    if gpus > 1:
        size = builder.state_bytes[TensorKind.GRADIENT]
        collectives = (Collective("gradients", CollectiveKind.ALL_REDUCE, size, tuple(range(gpus))),)
    workload = Workload(name, (program,), (0,) * gpus, micro_batches, f"roofline: {gpu}", collectives)
    validate_workload(workload)
    return ImportedTorchStep(workload, traced, tuple(builder.op_of), builder.held_to, builder.optimizer_state)


class _Builder:
    def __init__(self, traced: TracedPass, gpu: GpuSpec, blocks: dict[str, tuple[tuple[str, ...], int]]) -> None:
        self.traced, self.gpu = traced, gpu
        self.state_bytes = dict.fromkeys(STATE_NAMES, 0)
        for storage in traced.storages:
            if storage.role != MADE:
                self.state_bytes[TensorKind(storage.role)] += storage.size_bytes
        self.tensors = [
            Tensor(STATE_NAMES[kind], size, kind, Lifetime.STATE) for kind, size in self.state_bytes.items() if size
        ]
        self.state = tuple(range(len(self.tensors)))
        self.optimizer_state = {len(self.tensors) + i: names for i, (names, _) in enumerate(blocks.values())}
        self.tensors += [
            Tensor(f"optimizer state of {label or 'the rest'}", size, TensorKind.OPTIMIZER_STATE, Lifetime.STATE)
            for label, (_, size) in blocks.items()
        ]
        self.ops: list[Op] = []
        self.op_of: list[int] = []
        self.tensor_of: dict[int, int] = {}
        self.held_to: dict[int, int] = {}
        self.names: dict[str, int] = {}

    def program(self, name: str, gpus: int) -> Program:
        fixed = self._never_again()
        for place, op in enumerate(self.traced.ops):
            self._add(place, op, fixed)
            self._hold(place)
        # All ops read all state that modules hold, so that it is idle nowhere and no planner moves it.
        kind = {self.tensors[index].kind: index for index in self.state}
        gradients = kind[TensorKind.GRADIENT]
        if gpus > 1:
            self.ops.append(
                Op("all-reduce", Phase.COLLECTIVE, 0.0, reads=tuple(t for t in self.state if t != gradients),
                   updates=(gradients,), recomputable=False, step_op=True, collective="gradients")
            )  # fmt: skip
        if self.optimizer_state:
            changed = (kind[TensorKind.WEIGHT], *self.optimizer_state)
            traffic = 2 * sum(self.tensors[t].size_bytes for t in changed) + self.state_bytes[TensorKind.GRADIENT]
            self.ops.append(
                Op("optimizer", Phase.OPTIMIZER, self._memory_s(traffic),
                   reads=tuple(t for t in self.state if t not in changed), updates=changed, recomputable=False,
                   step_op=True, memory_traffic_bytes=traffic)
            )  # fmt: skip
        return Program(name, tuple(self.tensors), tuple(self.ops))

    def _add(self, place: int, op: TracedOp, fixed: set[int]) -> None:
        storages = self.traced.storages
        inside = {s for s in op.writes if op.backward and storages[s].held_to == place}
        index = len(self.ops)
        self.op_of.append(index)
        label = self._unique(f"{op.module}.{op.name}" if op.module else op.name)
        used = [s for s in (*op.reads, *op.updates) if storages[s].role == MADE and s not in op.writes]
        touched = {self.tensor_of[s] for s in used}
        if op.backward:
            touched |= {self.tensor_of[s] for s in self._held_over(place)}
        # What forward changes in place is a new tensor in the plan: no version is ever needed after the next.
        changed = [] if op.backward else [s for s in op.updates if storages[s].role == MADE]
        made = [s for s in (*op.writes, *changed) if s not in inside]
        for storage in made:
            self.tensor_of[storage] = len(self.tensors)
            self.tensors.append(self._tensor(storages[storage], label))
        writes = tuple(self.tensor_of[s] for s in made)
        self.ops.append(
            Op(
                name=label,
                phase=Phase.BACKWARD if op.backward else Phase.FORWARD,
                duration_s=self._seconds(op),
                reads=(*self.state, *sorted(touched - set(writes))),
                writes=writes,
                workspace_bytes=self._workspace_bytes(op, inside),
                recomputable=not op.backward and place not in fixed,
                layer=layer_label(op.module),
                flops=op.vector_flops + sum(op.by_dtype.values()),
                memory_traffic_bytes=op.traffic_bytes,
            )
        )

    def _workspace_bytes(self, op: TracedOp, inside: set[int]) -> int:
        """The most that an op has allocated at any time, less what it leaves, which counts from its start."""

        def size(storages: Iterable[int]) -> int:
            return sum(self.traced.storages[s].size_bytes for s in storages)

        return max(0, max(map(size, op.alive), default=0) - size(op.writes.keys() - inside))

    def _held_over(self, place: int) -> list[int]:
        """Storages that something other than saved tensors holds during an op of backward, from before it."""
        return [
            index for index, storage in enumerate(self.traced.storages)
            if storage.role == MADE and storage.made_by < place <= storage.held_to
        ]  # fmt: skip

    def _hold(self, place: int) -> None:
        """An op that takes no time, where Python lets go of forward storages some time after their last use.

        What it never lets go of in forward (the loss) is there to the end: the last such op, and all of backward, read
        it.
        """
        end = self.traced.forward_end
        for index, storage in enumerate(self.traced.storages):
            if storage.role == MADE and storage.made_by < end <= storage.held_to == place:
                self.held_to[self.tensor_of[index]] = len(self.ops) - 1
        if place >= end:
            return
        op, ending = self.traced.ops[place], []
        for index, storage in enumerate(self.traced.storages):
            if storage.role != MADE or not 0 <= storage.made_by <= place:
                continue
            if storage.held_to == place:
                self.held_to[self.tensor_of[index]] = len(self.ops) - 1
            used = index in op.reads or index in op.writes or index in op.updates
            if (storage.held_to == place and not used) or (storage.held_to >= end == place + 1):
                ending.append(self.tensor_of[index])
        if ending:
            for tensor in ending:
                self.held_to[tensor] = len(self.ops)
            name = self._unique(f"held after {self.ops[-1].name}")
            reads = (*self.state, *sorted(ending))
            self.ops.append(Op(name, Phase.FORWARD, 0.0, reads=reads, recomputable=False))

    def _never_again(self) -> set[int]:
        """Ops of the pass that cannot run again to the same result, or whose result is held through backward."""
        fixed: set[int] = set()
        last_update: dict[int, int] = {}
        for place, op in enumerate(self.traced.ops[: self.traced.forward_end]):
            for storage in op.updates:
                last_update[storage] = place
        for place, op in enumerate(self.traced.ops[: self.traced.forward_end]):
            changed = any(last_update.get(s, -1) >= place for s in (*op.reads, *op.writes, *op.updates))
            held = any(self.traced.storages[s].held_to >= self.traced.forward_end for s in op.writes)
            if op.seeded or changed or held:
                fixed.add(place)
        return fixed

    def _tensor(self, storage: Storage, label: str) -> Tensor:
        gradient = storage.made_by >= self.traced.forward_end
        kind = TensorKind.GRADIENT if gradient else TensorKind.ACTIVATION
        return Tensor(self._unique(f"{label}:out"), storage.size_bytes, kind)

    def _unique(self, name: str) -> str:
        count = self.names[name] = self.names.get(name, -1) + 1
        return f"{name}#{count}" if count else name

    def _seconds(self, op: TracedOp) -> float:
        compute_s = op.vector_flops / (COMPUTE_EFFICIENCY * self.gpu.vector_flops_per_s)
        for dtype, flops in op.by_dtype.items():
            peak = self.gpu.matmul_flops_per_s.get(dtype, self.gpu.vector_flops_per_s)
            compute_s += flops / (COMPUTE_EFFICIENCY * peak)
        return max(compute_s, self._memory_s(op.traffic_bytes))

    def _memory_s(self, traffic_bytes: int) -> float:
        return traffic_bytes / (MEMORY_EFFICIENCY * self.gpu.memory_bandwidth_bytes_per_s)


def layer_label(module: str) -> str:
    """The block that a submodule belongs to: its path up to the first number, `h.0` of `h.0.attn.qkv`."""
    parts = module.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else parts[0]


def parameter_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[int, torch.UntypedStorage]:
    """Storages of an optimizer's state of one parameter, on the parameter's device, by address."""
    return storages_of(dict(optimizer.state.get(parameter, {})), parameter.device)


def optimizer_blocks(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, tuple[tuple[str, ...], int]]:
    """{block of the module: (names of its parameters, bytes of their optimizer state on the device)}.

    Raises InputError if there is no state yet, and for state of parameters that the module does not have.
    """
    if not optimizer.state:
        raise InputError(
            f"optimizer: {type(optimizer).__name__} has no state yet; run one optimizer.step() before the import, or "
            f"leave the optimizer out if it has none (plain SGD)"
        )
    own = {id(parameter) for parameter in module.parameters()}
    others = [parameter for parameter in optimizer.state if id(parameter) not in own]
    if others:
        raise InputError(
            f"optimizer: it has state of {len(others)} parameter(s) that are not in the module, the first of shape "
            f"{list(others[0].shape)}; import the module that holds them all"
        )
    blocks: dict[str, tuple[tuple[str, ...], int]] = {}
    for name, parameter in module.named_parameters():
        size = sum(storage.nbytes() for storage in parameter_state(optimizer, parameter).values())
        if size:
            label = layer_label(name.rpartition(".")[0])
            names, total = blocks.get(label, ((), 0))
            blocks[label] = (*names, name), total + size
    return blocks
