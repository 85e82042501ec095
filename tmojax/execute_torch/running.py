"""One step of one rank under way: what is done at every kernel and at every saved tensor.

Two hooks see everything: one on the kernels that forward and backward call, which says where in the plan the step is;
one on the tensors that autograd saves and takes back. Before each op, what the plan puts there is done: copies out and
back, releases, recomputations. The module, its loss and autograd stay as they are.
"""

# PyTorch is optional, and static checks pass without it.
# pyright: reportMissingImports=false

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from tmojax.errors import InputError
from tmojax.execute_torch.host_pool import HostPool
from tmojax.execute_torch.instructions import Instruction, RankList
from tmojax.execute_torch.ledger import Ledger
from tmojax.execute_torch.optimizer_state import OptimizerState
from tmojax.execute_torch.ranks import Ranks
from tmojax.execute_torch.tensors import Tensors, View, view_of
from tmojax.execute_torch.turns import Place
from tmojax.importers.torch_calls import Loss, changed_in_place, require_loss, storages_of
from tmojax.importers.torch_importer import ImportedTorchStep
from tmojax.importers.torch_tracing import CONSTANT, UNPACK
from tmojax.problem import Kind, Phase


def turn_name(place: Place) -> str:
    """The event that a transfer has ended, which others wait for."""
    return f"turn of {place[0]} #{place[1]}"


class RunningStep(TorchDispatchMode):
    """One step under way."""

    def __init__(
        self, imported: ImportedTorchStep, rank_list: RankList, pool: HostPool, ranks: Ranks, device: torch.device,
        measure: bool, state: OptimizerState | None, turns: tuple[dict[int, tuple[Place, ...]], frozenset[int]],
    ) -> None:  # fmt: skip
        super().__init__()
        self._traced, self._list, self._ranks, self._device = imported.traced, rank_list, ranks, device
        self._workload, self._program = imported.workload, imported.workload.programs[0]
        self._op_of, self._run_by_kernels = imported.op_of, frozenset(imported.op_of)
        self._pool, self._measure = pool, measure
        self._with_constants = {
            place for place, op in enumerate(self._traced.ops)
            if any(self._traced.storages[s].name.startswith(CONSTANT) for s in op.reads)
        }  # fmt: skip
        self.ledger = Ledger()
        self._tensors = Tensors(device, pool, self._count)
        self._next = 0  # instruction of the list
        self._position = -1  # the instruction that is under way
        self._event = 0  # of `TracedPass.calls`
        self._op = -1  # of the pass
        self._micro_batch = 0
        self._tensor_at: dict[int, int] = {}  # address of a storage -> tensor of the workload
        self._recorded: dict[int, tuple[Any, Any, Any]] = {}
        self._started_s = 0.0
        self.op_s: dict[int, float] = {}
        self._state = state
        self._turns, self._others_wait_for = turns

    @property
    def most_host_bytes(self) -> int:
        return self._pool.most_bytes

    # --- the step ----------------------------------------------------------------------------------------------

    def place_state(self, module: torch.nn.Module) -> None:
        """Bring optimizer state to where the plan has it at the start; in a first step all of it is on the device."""
        if self._state is None:
            return
        self._state.find(module, {t: self._program.tensors[t].size_bytes for t in self._list.homes})
        for tensor, (on_device, on_host) in self._list.homes.items():
            if on_host:
                self._state.offload(tensor, self._tensors)
            if not on_device:
                self._state.release(tensor, self._tensors)
        for storage in self._state.on_device():
            self.ledger.add(storage, self._position)

    def micro_batch(self, number: int, module: torch.nn.Module, loss: Loss, batch: Any) -> torch.Tensor:
        self._event, self._op, self._micro_batch = 0, -1, number
        inputs = tree_map(lambda x: x.to(self._device) if isinstance(x, torch.Tensor) else x, batch)
        state = [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters())]
        brought = storages_of(inputs, self._device)
        for storage in {**storages_of(state, self._device), **brought}.values():
            if not self.ledger.knows(storage._cdata):
                self.ledger.add(storage, self._position)
        with self, torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            value = require_loss(loss(module, inputs))
            if self._event != self._traced.forward_calls:
                raise self._another("the end of forward")
            with _disable_current_modes(), torch.no_grad():
                start = torch.full_like(value, 1 / self._workload.micro_batches)
            value.backward(start)
        if self._event != len(self._traced.calls):
            raise self._another("the end of backward")
        self._note_time()
        self._recorded.clear()
        for address in brought:
            self.ledger.forget(address)
        return value.detach().clone()  # not a Python number yet, which would wait for the device

    def finish(self, module: torch.nn.Module) -> None:
        """What the plan does after the last micro-batch."""
        for index in range(self._next, len(self._list.instructions)):
            self._position = index
            if self._list.instructions[index].kind is Kind.COLLECTIVE:
                self._ranks.average([p.grad for p in module.parameters() if p.grad is not None])
            else:
                self._do(self._list.instructions[index])

    def close(self) -> None:
        self._tensors.clear()
        self.ledger.close()

    # --- kernels -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        place = self._arrive(str(func))
        if place < 0:
            return func(*args, **kwargs)
        if place in self._with_constants:
            for address, storage in storages_of((args, kwargs), self._device).items():
                if not self.ledger.knows(address):
                    self.ledger.add(storage, self._position)
        op = self._op_of[place]
        if (op, self._micro_batch) in self._list.repeated:
            self._recorded[op] = (func, *tree_map(self._as_view, (args, kwargs)))
        result = func(*args, **kwargs)
        new = self._new(result)
        if place >= self._traced.forward_end:
            for storage in new:
                self._count(storage)
            return result
        writes = self._program.ops[op].writes
        if self._traced.ops[place].updates:
            changed = storages_of(changed_in_place(func, args, kwargs), self._device)
            new += [storage for address, storage in changed.items() if address in self._tensor_at]
        found, expected = [s.nbytes() for s in new], [self._program.tensors[tensor].size_bytes for tensor in writes]
        if found != expected:
            raise InputError(
                f"step: {func} returns {found} bytes, and {expected} in the step that was imported; import it with a "
                f"batch of the same shapes, and if that is so already (fake tensors do not know what some kernels "
                f"allocate), with fake=False"
            )
        for tensor, storage in zip(writes, new, strict=True):
            address = storage._cdata
            if address not in self._tensor_at:
                self._count(storage, lambda address=address: self._tensor_at.pop(address, None))
            self._tensor_at[address] = tensor
            self._tensors.keep((tensor, self._micro_batch), storage)
        return result

    def _arrive(self, what: str) -> int:
        """The step calls a kernel or takes back a saved tensor: do what the plan does before. Returns the op."""
        if self._event >= len(self._traced.calls) or self._traced.calls[self._event][0] != what:
            raise self._another(what)
        place = self._traced.calls[self._event][1]
        self._event += 1
        if place >= 0 and place != self._op:
            self._op = place
            with _disable_current_modes(), torch.no_grad():
                self._advance(self._op_of[place])
        return place

    def _advance(self, op: int) -> None:
        self._note_time()
        while True:
            self._position = self._next
            instruction = self._list.instructions[self._next]
            self._next += 1
            if instruction.kind is Kind.COMPUTE and not instruction.again and instruction.op in self._run_by_kernels:
                break
            self._do(instruction)
        if (instruction.op, instruction.micro_batch) != (op, self._micro_batch):
            raise self._another(self._program.ops[op].name)
        self._started_s = self._now_s()

    def _do(self, instruction: Instruction) -> None:
        position = self._position
        for place in self._turns.get(position, ()):
            self._ranks.wait(turn_name(place))
        self._carry_out(instruction)
        if position in self._others_wait_for:
            self._ranks.signal(turn_name((self._ranks.rank, position)), self._tensors.copies_under_way())

    def _carry_out(self, instruction: Instruction) -> None:
        kind, instance = instruction.kind, (instruction.tensor, instruction.micro_batch)
        if (
            self._state is not None
            and self._program.ops[instruction.op].phase is Phase.OPTIMIZER
            and kind is Kind.COMPUTE
        ):
            self._state.update(self._tensors)
        elif self._state is not None and instruction.tensor in self._state:
            self._move_state(self._state, instruction)
        elif kind is Kind.COMPUTE and instruction.again:
            self._repeat(instruction.op)
        elif kind in (Kind.OFFLOAD, Kind.PREFETCH):
            (self._tensors.offload if instruction.from_device else self._tensors.prefetch)(instance)
        elif kind is Kind.RELEASE:
            (self._tensors.release if instruction.from_device else self._tensors.release_host)(instance)
        elif kind is Kind.SIGNAL and instruction.event in self._list.for_others:
            self._ranks.signal(instruction.event, self._tensors.under_way())
        elif kind is Kind.WAIT and instruction.event in self._list.from_others:
            self._ranks.wait(instruction.event)
        elif kind is Kind.WAIT:
            self._tensors.join()

    def _move_state(self, state: OptimizerState, instruction: Instruction) -> None:
        tensor, kind = instruction.tensor, instruction.kind
        if kind is Kind.RELEASE and not instruction.from_device:
            state.release_host(tensor, self._tensors)
        elif kind is Kind.RELEASE:
            for storage in state.release(tensor, self._tensors):
                self.ledger.forget(storage._cdata)
        elif instruction.from_device:
            state.offload(tensor, self._tensors)
        else:
            for storage in state.prefetch(tensor, self._tensors):
                self._count(storage)

    def _repeat(self, op: int) -> None:
        """Recompute an op; results that are on the device already are dropped."""
        func, args, kwargs = self._recorded[op]
        args, kwargs = tree_map(lambda x: self._tensors.tensor(x) if isinstance(x, View) else x, (args, kwargs))
        # As the first time: with gradients on, which some kernels ask for, and below autograd, which would save again.
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            result = func(*args, **kwargs)
        for tensor, storage in zip(self._program.ops[op].writes, self._new(result), strict=True):
            self._count(storage)
            if (tensor, self._micro_batch) not in self._tensors:
                self._tensors.keep((tensor, self._micro_batch), storage)

    def _as_view(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != self._device.type:
            return value
        storage = value.untyped_storage()
        tensor = self._tensor_at.get(storage._cdata)
        if tensor is None:
            return view_of(value, (-1, -1), storage)
        return view_of(value, (tensor, self._micro_batch))

    # --- saved tensors -----------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Any:
        view = self._as_view(tensor)
        return tensor if not isinstance(view, View) or view.storage is not None else view

    def _unpack(self, packed: Any) -> torch.Tensor:
        self._arrive(UNPACK)
        if isinstance(packed, torch.Tensor):
            return packed
        with _disable_current_modes(), torch.no_grad():
            return self._tensors.tensor(packed)

    # --- counts ------------------------------------------------------------------------------------------------

    def _new(self, result: Any) -> list[torch.UntypedStorage]:
        return [s for address, s in storages_of(result, self._device).items() if not self.ledger.knows(address)]

    def _count(self, storage: torch.UntypedStorage, on_end: Callable[[], object] | None = None) -> None:
        planned = self._list.instructions[self._position].planned_bytes if self._position >= 0 else None
        self.ledger.add(storage, self._position, planned, on_end)

    def _now_s(self) -> float:
        if self._measure and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() if self._measure else 0.0

    def _note_time(self) -> None:
        """The op that was under way ends."""
        last = self._list.instructions[self._position] if self._position >= 0 else None
        if self._measure and last is not None and last.kind is Kind.COMPUTE:
            self.op_s[last.op] = self._now_s() - self._started_s

    def _another(self, what: str) -> InputError:
        place = self._event
        expected = self._traced.calls[place][0] if place < len(self._traced.calls) else "the end of the step"
        return InputError(
            f"step: after {place} kernels and saved tensors comes {what}, and {expected} in the step that was "
            f"imported; the plan is of another step: import it with the same module, loss and shapes, and plan that"
        )
