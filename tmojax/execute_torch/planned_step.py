"""A PyTorch training step of one rank that runs by a plan, in eager mode, through hooks (`running`)."""

# PyTorch is optional, and static checks pass without it.
# pyright: reportMissingImports=false

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tmojax.errors import InputError
from tmojax.execute_torch.host_pool import HostPool
from tmojax.execute_torch.instructions import RankList, prepare_rank, schedule_for_hooks
from tmojax.execute_torch.optimizer_state import OptimizerState
from tmojax.execute_torch.ranks import Ranks
from tmojax.execute_torch.running import RunningStep
from tmojax.execute_torch.turns import find_turns
from tmojax.importers.torch_calls import Loss, step_device
from tmojax.importers.torch_importer import ImportedTorchStep
from tmojax.problem import Problem, Schedule
from tmojax.problem.io import PlanFile


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """What one step gives besides gradients, which are in `parameter.grad`.

    `losses` [micro-batch]. `counted_bytes`, `planned_bytes` {position of the list: bytes on the device}, -1 for the
    start. `host_bytes`, `planned_host_bytes`: most at any time. `op_s` {op: seconds} of the last micro-batch, empty
    unless measured.
    """

    losses: tuple[float, ...]
    counted_bytes: dict[int, int]
    planned_bytes: dict[int, int]
    host_bytes: int
    planned_host_bytes: int
    op_s: dict[int, float]

    @property
    def counted_peak_bytes(self) -> int:
        return max(self.counted_bytes.values())

    @property
    def planned_peak_bytes(self) -> int:
        return max(self.planned_bytes.values())


class PlannedTorchStep:
    """The step of one rank by its part of a plan.

    `rank` and the number of ranks are those of `group` (the default group of `torch.distributed`) where the workload
    has several devices; gradients are then averaged over them.
    """

    def __init__(
        self,
        imported: ImportedTorchStep,
        problem: Problem,
        plan: PlanFile | Schedule,
        *,
        group: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """`optimizer`: the one that the step was imported with; its `step()` is then part of the planned step, and its
        state may move.

        Raises InputError for a plan of another problem or step, one that the checker rejects, what hooks cannot
        move, and another number of ranks than the plan has devices."""
        schedule = schedule_for_hooks(imported, problem, plan)
        self._ranks = Ranks(problem, group)
        self._imported, self._workload = imported, problem.workload
        if optimizer is not None and not imported.optimizer_state:
            raise InputError("optimizer: the step was imported without one; give it to import_torch_step too")
        self._state = None if optimizer is None else OptimizerState(imported.optimizer_state, optimizer)
        self._list: RankList = prepare_rank(imported, problem, schedule, self._ranks.rank, optimizer is not None)
        turns = find_turns(problem, schedule)
        self._turns = turns.of(self._ranks.rank)
        if turns.told:
            warnings.warn(
                f"plan: turns on links ({'; '.join(turns.told)}) are not enforced between processes, whose copies "
                f"share links as the hardware does; results are the same, times may differ",
                stacklevel=2,
            )
        self._pool: HostPool | None = None

    @property
    def host_buffers(self) -> tuple[int, int]:
        """Host buffers allocated so far, and copies that went into a buffer from before."""
        return (self._pool.allocated, self._pool.reused) if self._pool is not None else (0, 0)

    def state_on_device(self) -> None:
        """Bring the optimizer's state back to the device, to save it for example; the next step moves it again."""
        if self._state is not None and self._pool is not None:
            self._state.bring_back(self._pool)

    def step(
        self, module: torch.nn.Module, loss: Loss, batches: Sequence[Any], *, measure: bool = False
    ) -> StepOutcome:
        """Run `loss(module, batch)` and backward for each of K micro-batches; gradients are set, not added.

        `batches`: one per micro-batch, on any device. `measure`: time every op, waiting for it.
        Raises InputError if the kernels are others than those that were imported, and for tensors without memory.
        """
        device = step_device(module)
        if device.type != self._imported.traced.device:
            raise InputError(f"module: is on {device}, and was imported on {self._imported.traced.device!r}")
        if len(batches) != self._workload.micro_batches:
            count = self._workload.micro_batches
            raise InputError(f"batches: {len(batches)} given, and the plan has {count} micro-batch(es)")
        _require_memory(module, batches)
        if self._pool is None:
            self._pool = HostPool(self._list.host_bytes, pinned=device.type == "cuda")
        for parameter in module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.zero_()
        self._ranks.begin_step()
        self._pool.begin_step()
        running = RunningStep(
            self._imported, self._list, self._pool, self._ranks, device, measure, self._state, self._turns
        )  # fmt: skip
        try:
            running.place_state(module)
            losses = [running.micro_batch(k, module, loss, batch) for k, batch in enumerate(batches)]
            running.finish(module)
        finally:
            running.close()
        return StepOutcome(
            losses=tuple(float(value) for value in losses),
            counted_bytes=running.ledger.counted_bytes,
            planned_bytes={
                -1: self._list.first_bytes,
                **{i: one.planned_bytes for i, one in enumerate(self._list.instructions)},
            },
            host_bytes=running.most_host_bytes,
            planned_host_bytes=self._list.host_bytes,
            op_s=running.op_s,
        )


def _require_memory(module: torch.nn.Module, batches: Sequence[Any]) -> None:
    """Raises InputError for a tensor whose storage was freed: resized to nothing (as FSDP does), or given away."""
    named = [*module.named_parameters(), *module.named_buffers()]
    named += [(f"batches[{k}]", leaf) for k, batch in enumerate(batches) for leaf in tree_leaves(batch)]
    for name, tensor in named:
        if isinstance(tensor, torch.Tensor) and tensor.numel() and not tensor.untyped_storage().nbytes():
            raise InputError(
                f"{name}: the tensor has no memory, its storage was freed (FSDP does that between uses); give whole "
                f"tensors, a plan moves them itself"
            )
