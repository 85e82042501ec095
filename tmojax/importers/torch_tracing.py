"""What one forward and backward pass of a PyTorch module does, seen without computing it.

The pass runs on fake tensors (shapes and dtypes without data), and a mode below autograd sees every kernel with its
storages. Saved tensors are dropped when autograd packs them: a storage then dies exactly when Python lets it go, and
the time from there to its first use in backward is the time in which a plan may move it.
"""

# PyTorch is optional, and static checks pass without it.
# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from tmojax.errors import InputError
from tmojax.importers.torch_calls import (
    Loss,
    chance_of_dropping,
    changed_in_place,
    flop_formula,
    module_paths,
    node_name,
    require_loss,
    returns_all_elements,
    starts_op,
    step_device,
    storages_of,
)
from tmojax.problem.workload import TensorKind

UNPACK = "unpack"  # in `TracedPass.calls`: autograd takes a saved tensor back
CONSTANT = "constant"  # start of the names of storages that neither kernels made nor the caller gave
MADE = "made"  # the role of a storage that a kernel of the pass allocates; all others exist before it


@dataclass(eq=False)
class Storage:
    """One storage of the pass. `role`: MADE, or a `TensorKind` for what exists before the pass.

    `made_by`: op that allocates it (-1: none). `held_to`: last op through which something other than autograd's
    saved tensors holds it. `saved`: autograd saves it.
    """

    name: str
    size_bytes: int
    role: str
    made_by: int = -1
    held_to: int = -1
    saved: bool = False


@dataclass(eq=False)
class TracedOp:
    """One kernel of forward, or all kernels of one autograd node of backward.

    `name`: the kernel, or the node. `module`: path of the module that called it. `reads`, `writes`, `updates`:
    storages. `alive`: after each kernel, what the op itself has allocated and not freed. `by_dtype`: FLOP of matrix
    products by operand dtype. `seeded`: takes random numbers.
    """

    name: str
    module: str
    backward: bool
    reads: dict[int, None] = field(default_factory=dict)
    writes: dict[int, None] = field(default_factory=dict)
    updates: dict[int, None] = field(default_factory=dict)
    alive: list[frozenset[int]] = field(default_factory=list)
    by_dtype: dict[str, int] = field(default_factory=dict)
    vector_flops: int = 0
    traffic_bytes: int = 0
    seeded: bool = False


@dataclass(frozen=True, eq=False)
class TracedPass:
    """A forward and backward pass. `ops[:forward_end]` are forward. `device`: type of the module's device.

    `calls`: what a dispatch mode and hooks of saved tensors see, in order: (kernel or UNPACK, its op, module). Views,
    which neither allocate nor change anything, have op -1. `calls[:forward_calls]` are forward.
    """

    storages: list[Storage]
    ops: list[TracedOp]
    forward_end: int
    device: str
    calls: list[tuple[str, int, str]]
    forward_calls: int


def trace_pass(module: torch.nn.Module, loss: Loss, batch: Any, fake: bool = True) -> TracedPass:
    """Trace `loss(module, batch)` and its backward pass; `module` is left as it is.

    `fake`: on fake tensors, so nothing is computed. Otherwise on a copy of the module with memory of its own: some
    kernels return more memory than fake tensors know of. (Backward then gets zeros for what was saved.)
    Raises InputError for modules on several devices, a loss that is no number, a pass whose course depends on values
    of tensors, and saved tensors that are changed in place.
    """
    device = step_device(module)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    copied, inputs = _fake_copy(module, batch, mode) if mode else _real_copy(module, batch, device)
    seen = _Seen(device, mode)
    for name, parameter in copied.named_parameters():
        seen.know(parameter, name, TensorKind.WEIGHT)
        if parameter.requires_grad:
            seen.know(parameter.grad, f"grad.{name}", TensorKind.GRADIENT)
    for name, buffer in copied.named_buffers():
        seen.know(buffer, name, TensorKind.WEIGHT)
    for path, leaf in tree_flatten_with_path(inputs)[0]:
        if isinstance(leaf, torch.Tensor):
            seen.know(leaf, "batch" + "".join(str(key) for key in path), TensorKind.INPUT)
    random = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    hooks = torch.autograd.graph.saved_tensors_hooks(seen.pack, seen.unpack)
    try:
        with random, mode or nullcontext(), module_paths(copied, seen.modules), seen, hooks:
            value = require_loss(loss(copied, inputs))
            seen.forward_end, seen.forward_calls = len(seen.ops), len(seen.calls)
            with seen.paused():
                start = torch.ones_like(value)
            value.backward(start)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InputError(
            f"loss: its course depends on the values of tensors ({error}); a plan needs the same kernels in every "
            f"step: leave out .item(), conversions to Python numbers and branches on tensors"
        ) from None
    seen.finish()
    return TracedPass(seen.storages, seen.ops, seen.forward_end, device.type, seen.calls, seen.forward_calls)


def _fake_copy(module: torch.nn.Module, batch: Any, mode: FakeTensorMode) -> tuple[torch.nn.Module, Any]:
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        fake = torch.nn.Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad)
        with mode:
            fake.grad = torch.empty_like(fake, requires_grad=False)
        memo[id(parameter)] = fake
    for buffer in module.buffers():
        memo[id(buffer)] = mode.from_tensor(buffer.detach())
    inputs = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, batch)
    return copy.deepcopy(module, memo), inputs


def _real_copy(module: torch.nn.Module, batch: Any, device: torch.device) -> tuple[torch.nn.Module, Any]:
    copied = copy.deepcopy(module)
    for parameter in copied.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return copied, tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, batch)


class _Seen(TorchDispatchMode):
    """Collects the pass. Its hooks give autograd new storages in backward that stand for the saved ones."""

    def __init__(self, device: torch.device, mode: FakeTensorMode | None) -> None:
        super().__init__()
        self.device, self._fake = device, mode
        self.storages: list[Storage] = []
        self.ops: list[TracedOp] = []
        self.calls: list[tuple[str, int, str]] = []
        self.modules: list[str] = [""]
        self.forward_end = self.forward_calls = -1
        self._live: dict[int, int] = {}  # address of a storage -> its index
        self._watched: dict[int, weakref.ref] = {}
        self._node: Any = None
        self._kept: list[Any] = []
        self._paused = False

    # --- storages ----------------------------------------------------------------------------------------------

    def know(self, tensor: Any, name: str, role: str) -> None:
        """A tensor from before the pass; one storage is one entry, whoever shares it."""
        for address, storage in storages_of(tensor, self.device).items():
            if address not in self._live:
                self._live[address] = len(self.storages)
                self.storages.append(Storage(name, storage.nbytes(), role))
                self._kept.append(storage)

    def _watch(self, address: int, storage: torch.UntypedStorage, index: int, since: int) -> None:
        self._live[address] = index

        def died(_: Any) -> None:
            del self._live[address], self._watched[address]
            self._end(index, since)

        self._watched[address] = weakref.ref(storage, died)

    def _end(self, index: int, since: int) -> None:
        """A storage that stood for `index` since op `since` is gone."""
        last = len(self.ops) - 1
        if since < 0:
            self.storages[index].held_to = last
        else:
            for op in self.ops[since : last + 1]:
                op.reads[index] = None

    def finish(self) -> None:
        for address, ref in list(self._watched.items()):
            if ref() is not None:
                self.storages[self._live[address]].held_to = len(self.ops) - 1

    def _index(self, address: int, storage: torch.UntypedStorage) -> int:
        """Index of a storage; one that no kernel made and nobody announced is a constant, held all the time."""
        if address not in self._live:
            self._live[address] = len(self.storages)
            self.storages.append(Storage(f"{CONSTANT}{len(self.storages)}", storage.nbytes(), TensorKind.INPUT))
            self._kept.append(storage)
        return self._live[address]

    # --- kernels -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self._faked, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if self._paused or func.namespace == "prim":  # prim: questions about fake tensors
            return result
        read = {self._index(*item) for item in storages_of((args, kwargs), self.device).items()}
        results = storages_of(result, self.device)
        new = {address: storage for address, storage in results.items() if address not in self._live}
        changed = {self._live[a] for a in storages_of(changed_in_place(func, args, kwargs), self.device)}
        if not new and not changed:
            self.calls.append((str(func), -1, self.modules[-1]))
            return result
        op = self._backward_op() if self.forward_end >= 0 else self._forward_op(func)
        place = len(self.ops) - 1
        self.calls.append((str(func), place, self.modules[-1]))
        made = []
        sizes = [storage.nbytes() for storage in new.values()]
        if self._fake is not None and returns_all_elements(func, args, kwargs):
            sizes = [next(x for x in args if isinstance(x, torch.Tensor)).numel() * result.itemsize]
        for (address, storage), size_bytes in zip(new.items(), sizes, strict=True):
            made.append(len(self.storages))
            self.storages.append(Storage(func.__name__.split(".")[0], size_bytes, MADE, place))
            self._watch(address, storage, made[-1], -1)
        for index in changed:
            if self.storages[index].saved:
                raise InputError(
                    f"module {self.modules[-1]!r}: {func} changes {self.storages[index].name!r} in place after "
                    f"autograd has saved it, so it can be neither moved nor trusted; use the form that is not in place"
                )
        op.reads.update(dict.fromkeys(read - changed))
        op.writes.update(dict.fromkeys(made))
        op.updates.update(dict.fromkeys(i for i in changed if i not in op.writes))
        op.alive.append(frozenset(i for i in self._live.values() if self.storages[i].made_by == place))
        self._count(op, func, args, kwargs, result, read | set(made))
        return result

    def _faked(self, value: Any) -> Any:
        """A real tensor among fake ones, from outside of module and batch, becomes one of them."""
        if self._fake is None or not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        return self._fake.from_tensor(value)

    def _forward_op(self, func: Any) -> TracedOp:
        self.ops.append(TracedOp(str(func).removeprefix("aten."), self.modules[-1], False))
        return self.ops[-1]

    def _backward_op(self) -> TracedOp:
        """The op of the autograd node that runs."""
        node = torch._C._current_autograd_node()  # the only way to know it from inside a kernel
        if len(self.ops) == self.forward_end or starts_op(node, self._node):
            self._node = node
            self.ops.append(TracedOp(node_name(node), "", True))
        return self.ops[-1]

    def _count(self, op: TracedOp, func: Any, args: Any, kwargs: Any, result: Any, touched: set[int]) -> None:
        counted = flop_formula(func)
        elements = sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        if counted is not None:
            dtype = next(str(leaf.dtype) for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            dtype = dtype.removeprefix("torch.")
            op.by_dtype[dtype] = op.by_dtype.get(dtype, 0) + int(counted(*args, **kwargs, out_val=result))
        else:
            op.vector_flops += elements
        op.traffic_bytes += sum(self.storages[index].size_bytes for index in touched)
        op.seeded |= torch.Tag.nondeterministic_seeded in func.tags and chance_of_dropping(func, args, kwargs) != 0.0

    # --- saved tensors -----------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        if self.forward_end >= 0:
            raise InputError(
                "loss: its backward pass saves tensors for another one (second derivatives, or checkpoints of its "
                "own); leave these out, the plan decides what is recomputed"
            )
        for address, storage in storages_of(tensor, self.device).items():
            index = self._index(address, storage)
            if self.storages[index].role == MADE:
                self.storages[index].saved = True
                return index, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    def unpack(self, packed: Any) -> torch.Tensor:
        if self.forward_end < 0:
            raise InputError("loss: takes gradients itself (torch.autograd.grad); a plan is for one backward pass")
        op = self._backward_op()
        self.calls.append((UNPACK, len(self.ops) - 1, ""))
        if isinstance(packed, torch.Tensor):
            return packed
        index, dtype, size, stride, offset = packed
        op.reads[index] = None
        with self.paused(), torch.no_grad():
            elements = self.storages[index].size_bytes // dtype.itemsize
            stands_in = torch.zeros(elements, dtype=dtype, device=self.device)
        for address, storage in storages_of(stands_in, self.device).items():
            self._watch(address, storage, index, len(self.ops) - 1)
        with self.paused(), torch.no_grad():
            return stands_in.as_strided(size, stride, offset)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
