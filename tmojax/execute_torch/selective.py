"""A plan as selective checkpoints: `torch.utils.checkpoint` around chosen submodules, with a policy for each kernel.

PyTorch has `CheckpointPolicy.MUST_CPU_OFFLOAD` for that, but in eager mode (2.13) it recomputes what has this policy,
without a word. `SelectiveCheckpoints.contexts` therefore saves, offloads and recomputes itself; `policies` gives the
same decisions to `create_selective_checkpoint_contexts`, for a step that is compiled (`OffloadingPartition`).
"""

# PyTorch is optional, and static checks pass without it.
# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tmojax.errors import InputError, TmojaxError
from tmojax.execute_torch.host_pool import HostPool
from tmojax.execute_torch.instructions import schedule_for_hooks
from tmojax.execute_torch.tensors import Tensors, View, view_of
from tmojax.importers.torch_calls import step_device, storages_of
from tmojax.importers.torch_importer import ImportedTorchStep
from tmojax.planners.by_name import ByName
from tmojax.problem import Kind, Problem, Schedule
from tmojax.problem.io import PlanFile

Contexts = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]
_IGNORED = "aten.detach.default"  # checkpoints detach more often in forward than in recomputation


class KernelAction(StrEnum):
    """What a checkpoint does with the results of a kernel."""

    SAVE = "save"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


_POLICY = {
    KernelAction.SAVE: CheckpointPolicy.MUST_SAVE,
    KernelAction.OFFLOAD: CheckpointPolicy.MUST_CPU_OFFLOAD,
    KernelAction.RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE,
}


class _Region:
    """What a submodule calls in forward. `op_of`: op of the workload, by kernel and how many such calls were before
    (-1 for views). `inside`: tensors that nothing outside reads in forward. Raises InputError if it cannot be run
    twice."""

    def __init__(self, imported: ImportedTorchStep, path: str) -> None:
        traced, program = imported.traced, imported.workload.programs[0]
        places = [
            place for place, (_, _, module) in enumerate(traced.calls[: traced.forward_calls])
            if module == path or module.startswith(f"{path}.")
        ]  # fmt: skip
        if not path or not places:
            modules = sorted({module for _, _, module in traced.calls if module})
            raise InputError(f"paths: no submodule {path!r} computes anything in the step; it has {', '.join(modules)}")
        if places[-1] - places[0] + 1 != len(places):
            raise InputError(f"paths: {path!r} is called more than once in a step; a checkpoint needs one call")
        self.path = path
        self.op_of: dict[tuple[str, int], int] = {}
        seen: Counter[str] = Counter()
        own = set()
        for name, place, _ in traced.calls[places[0] : places[-1] + 1]:
            if name == _IGNORED:
                continue
            if place >= 0 and traced.ops[place].updates:
                raise InputError(
                    f"paths: {path!r} changes tensors in place ({name}), which a checkpoint would do twice; use forms "
                    f"that do not, or run the plan with PlannedTorchStep"
                )
            self.op_of[name, seen[name]] = imported.op_of[place] if place >= 0 else -1
            seen[name] += 1
            own.add(place)
        self.ops = sorted({op for op in self.op_of.values() if op >= 0})
        read_outside = {
            tensor
            for place, op in enumerate(traced.ops[: traced.forward_end])
            if place not in own
            for tensor in program.ops[imported.op_of[place]].reads
        }
        self.inside = {tensor for op in self.ops for tensor in program.ops[op].writes} - read_outside


def selective_planner(imported: ImportedTorchStep, paths: Sequence[str], **settings: Any) -> ByName:
    """The planner `by-name`, restricted to what checkpoints around the submodules `paths` can do.

    A kernel is a name; what a submodule hands on, and all outside of them, is kept. `settings` are the planner's other
    fields (`tie_layers`: layers are decided together). Raises InputError for submodules that cannot be checkpointed.
    """
    program = imported.workload.programs[0]
    regions = [_Region(imported, path) for path in paths]
    names = {
        program.ops[op].name: tuple(program.tensors[t].name for t in program.ops[op].writes if t in region.inside)
        for region in regions
        for op in region.ops
    }
    decided = {tensor for tensors in names.values() for tensor in tensors}
    made = {program.tensors[t].name for op in imported.op_of for t in program.ops[op].writes}
    return ByName(
        names={name: tensors for name, tensors in names.items() if tensors},
        kept=tuple(sorted(made - decided)),
        **settings,
    )


class SelectiveCheckpoints:
    """The part of a plan for one device, as checkpoints around submodules.

    `actions` {kernel: action}. `planned_bytes`: what one micro-batch sends to the host by the plan. `sent_bytes`: what
    has been sent so far, in all micro-batches.
    """

    def __init__(
        self, imported: ImportedTorchStep, problem: Problem, plan: PlanFile | Schedule, paths: Sequence[str],
        device: int = 0,
    ) -> None:  # fmt: skip
        """Raises InputError for a plan of another problem or step, one that the checker rejects, submodules that are
        not in the step or cannot run twice, a device that the plan does not have, and decisions that checkpoints
        cannot carry out."""
        schedule = schedule_for_hooks(imported, problem, plan)
        if not 0 <= device < problem.workload.device_count:
            raise InputError(
                f"device: {device} is none of the plan's {problem.workload.device_count}; import and plan the step "
                f"with gpus=N for N ranks, and give the rank"
            )
        self._program = imported.workload.programs[0]
        self._regions = {path: _Region(imported, path) for path in paths}
        self._offloaded, repeated = _decided(problem, schedule, device)
        inside = {tensor for region in self._regions.values() for tensor in region.inside}
        for tensor in sorted(self._offloaded | {t for op in repeated for t in self._program.ops[op].writes}):
            if tensor not in inside and (tensor in self._offloaded or self._program.producer[tensor] not in repeated):
                self._refuse(tensor)
        needed = {t for op in self._program.ops if op.phase == "backward" for t in op.reads}
        self._action: dict[int, KernelAction] = {}
        for region in self._regions.values():
            for op in region.ops:
                writes = set(self._program.ops[op].writes)
                outputs = writes - region.inside
                if op in repeated and outputs:
                    self._refuse(min(outputs))
                if op in repeated or not writes & needed:
                    self._action[op] = KernelAction.RECOMPUTE
                else:
                    offload = bool(writes & self._offloaded)
                    self._action[op] = KernelAction.OFFLOAD if offload else KernelAction.SAVE
        outside = [op for op in repeated if op not in self._action]
        if outside:
            self._refuse(self._program.ops[outside[0]].writes[0])
        self.actions = {self._program.ops[op].name: action for op, action in self._action.items()}
        self.planned_bytes = sum(self._program.tensors[t].size_bytes for t in self._offloaded)
        self.sent_bytes = 0
        self.serials = itertools.count()  # one for each run of a region, so that their tensors are told apart
        self._calls: Counter[str] = Counter()
        self._tensors: Tensors | None = None

    def _refuse(self, tensor: int) -> None:
        raise InputError(
            f"plan: it offloads or recomputes {self._program.tensors[tensor].name!r}, which checkpoints around "
            f"{', '.join(self._regions)} keep on the device (they hold what submodules take in and hand on); plan with "
            f"selective_planner, or run this plan with PlannedTorchStep"
        )

    @contextmanager
    def applied(self, module: torch.nn.Module) -> Iterator[None]:
        """While it lasts, the submodules of `module` run under their checkpoints, forward and backward."""
        device = step_device(module)
        if self._tensors is None:
            pool = HostPool(self.planned_bytes, pinned=device.type == "cuda")
            self._tensors = Tensors(device, pool, lambda storage: None)
        parts = {path: module.get_submodule(path) for path in self._regions}
        before: dict[str, Any] = {path: part.__dict__.get("forward") for path, part in parts.items()}
        for path, part in parts.items():
            part.forward = self._under_checkpoint(path, part.forward)
        try:
            yield
        finally:
            for path, part in parts.items():
                del part.forward
                if before[path] is not None:
                    part.forward = before[path]

    def _under_checkpoint(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=self.contexts(path), **kwargs)

        return run

    def contexts(self, path: str) -> Contexts:
        """`context_fn` of a checkpoint around the submodule `path`, while `applied` lasts. For eager mode."""
        region = self._region(path)

        def make() -> tuple[AbstractContextManager, AbstractContextManager]:
            if self._tensors is None:
                raise InputError("contexts: use them inside of `with checkpoints.applied(module)`")
            self._calls[path] += 1
            saved: dict[tuple[str, int], Any] = {}
            return _Saving(self, region, saved), _Restoring(self._tensors, saved)

        return make

    def policies(self, path: str) -> Contexts:
        """`context_fn` of a checkpoint around the submodule `path` by PyTorch's own policies.

        For `torch.compile` with an `OffloadingPartition`; in eager mode PyTorch recomputes what the plan offloads.
        """
        region = self._region(path)

        def make() -> tuple[AbstractContextManager, AbstractContextManager]:
            seen: Counter[tuple[bool, str]] = Counter()

            def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
                phase = context.is_recompute, str(func)
                op = region.op_of.get((str(func), seen[phase]), -1)
                seen[phase] += 1
                action = self._action[op] if op >= 0 else KernelAction.RECOMPUTE
                return _POLICY[action]

            return create_selective_checkpoint_contexts(policy)

        return make

    def verify(self) -> None:
        """Compare the bytes that were sent to the host with the plan. Raises TmojaxError if they differ."""
        runs = set(self._calls.values())
        if len(runs) != 1 or set(self._calls) != set(self._regions):
            raise TmojaxError(f"checkpoints: submodules ran {dict(self._calls)} times; run whole steps, then verify")
        expected = self.planned_bytes * runs.pop()
        if self.sent_bytes != expected:
            raise TmojaxError(f"checkpoints: {self.sent_bytes} bytes went to the host, and the plan has {expected}")

    def _region(self, path: str) -> _Region:
        if path not in self._regions:
            raise InputError(f"paths: {path!r} is not among the submodules of these checkpoints: {[*self._regions]}")
        return self._regions[path]

    # --- what the contexts do ----------------------------------------------------------------------------------

    def keep(self, op: int, result: Any, operands: Any, serial: int) -> Any:
        """What is saved of a kernel: its results, with views in place of what went to the host. None: nothing is."""
        tensors = self._tensors
        assert tensors is not None
        action = self._action[op]
        if action is KernelAction.RECOMPUTE:
            return None
        old = storages_of(operands, tensors.device)
        new = [address for address in storages_of(result, tensors.device) if address not in old]
        tensor_at = dict(zip(new, self._program.ops[op].writes, strict=True))

        def one(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            tensor = tensor_at.get(value.untyped_storage()._cdata, -1)
            if action is not KernelAction.OFFLOAD or tensor not in self._offloaded:
                return value.detach()
            instance = tensor, serial
            tensors.keep(instance, value.untyped_storage())
            tensors.offload(instance)
            tensors.release(instance)
            self.sent_bytes += value.untyped_storage().nbytes()
            return view_of(value, instance)

        return tree_map(one, result)


class _Saving(TorchDispatchMode):
    """Forward of a region: notes what is saved of each kernel."""

    def __init__(self, owner: SelectiveCheckpoints, region: _Region, saved: dict[tuple[str, int], Any]) -> None:
        super().__init__()
        self._owner, self._region, self._saved = owner, region, saved
        self._seen: Counter[str] = Counter()
        self._serial = next(owner.serials)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func)
        result = func(*args, **kwargs)
        if name == _IGNORED or func.namespace == "prim":
            return result
        key = name, self._seen[name]
        self._seen[name] += 1
        if key not in self._region.op_of:
            raise InputError(
                f"module {self._region.path!r}: calls {name} {key[1] + 1} time(s), other than in the step that was "
                f"imported; the plan is of another step: import it with the same module and shapes"
            )
        op = self._region.op_of[key]
        if op >= 0:
            kept = self._owner.keep(op, result, (args, kwargs), self._serial)
            if kept is not None:
                self._saved[key] = kept
        return result


class _Restoring(TorchDispatchMode):
    """Recomputation of a region: gives back what was saved instead of running the kernel."""

    def __init__(self, tensors: Tensors, saved: dict[tuple[str, int], Any]) -> None:
        super().__init__()
        self._tensors, self._saved = tensors, saved
        self._seen: Counter[str] = Counter()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for kept in self._saved.values():  # backward does not need them
            tree_map(lambda x: self._tensors.release_host(x.instance) if isinstance(x, View) else None, kept)
        self._saved.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        kept = None
        if name != _IGNORED and func.namespace != "prim":
            kept = self._saved.pop((name, self._seen[name]), None)
            self._seen[name] += 1
        if kept is None:
            return func(*args, **(kwargs or {}))
        with torch.no_grad(), _disable_current_modes():
            return tree_map(lambda x: self._back(x) if isinstance(x, View) else x, kept)

    def _back(self, view: View) -> torch.Tensor:
        self._tensors.prefetch(view.instance)
        tensor = self._tensors.tensor(view)
        self._tensors.release(view.instance)
        self._tensors.release_host(view.instance)
        return tensor


def _decided(problem: Problem, schedule: Schedule, device: int) -> tuple[set[int], set[int]]:
    """(tensors that are offloaded, ops that are recomputed) by one device, the same in all micro-batches."""
    rows, first = schedule.lists[device], None
    program = problem.workload.program(device)
    for micro_batch in range(problem.workload.micro_batches):
        mine = rows[rows["micro_batch"] == micro_batch]
        offloaded = set(mine["tensor"][mine["kind"] == Kind.OFFLOAD].tolist())
        runs = Counter(mine["op"][mine["kind"] == Kind.COMPUTE].tolist())
        here = offloaded, {op for op, count in runs.items() if count > 1}
        first = first or here
        if here != first:
            raise InputError(
                f"plan: micro-batch {micro_batch} of {problem.machine.devices[device].name} is decided otherwise than "
                f"micro-batch 0; checkpoints do the same in all: plan with selective_planner, or use PlannedTorchStep"
            )
    assert first is not None
    state = [t for t in first[0] if program.producer[t] < 0]
    if state:
        raise InputError(f"plan: it offloads {program.tensors[state[0]].name!r}, which PyTorch holds on the device")
    return first
