"""What one forward and backward pass of a PyTorch module does, seen without running it.

The pass runs on fake tensors (shapes and dtypes without data), below autograd, so every kernel is seen once with its
storages. Saved tensors are dropped when autograd packs them: a storage then dies exactly when Python lets it go, and
the time from there to its first use in backward is the time in which a plan may move it.
"""

# PyTorch is optional, and static checks pass without it.
# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from tmojax.errors import InputError
from tmojax.problem.workload import TensorKind

UNPACK = "unpack"  # in `TracedPass.calls`: autograd takes a saved tensor back
CONSTANT = "constant"  # start of the names of storages that neither kernels made nor the caller gave
MADE = "made"  # the role of a storage that a kernel of the pass allocates; all others exist before it
Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


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


def trace_pass(module: torch.nn.Module, loss: Loss, batch: Any) -> TracedPass:
    """Trace `loss(module, batch)` and its backward pass. Nothing is computed and `module` is left as it is.

    Raises InputError for modules on several devices, a loss that is no number, a pass whose course depends on values
    of tensors, and saved tensors that are changed in place.
    """
    device = step_device(module)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        fake = torch.nn.Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad)
        with mode:
            fake.grad = torch.empty_like(fake, requires_grad=False)
        memo[id(parameter)] = fake
    for buffer in module.buffers():
        memo[id(buffer)] = mode.from_tensor(buffer.detach())
    copied = copy.deepcopy(module, memo)
    inputs = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, batch)
    seen = _Seen(device)
    for name, parameter in copied.named_parameters():
        seen.know(parameter, name, TensorKind.WEIGHT)
        if parameter.requires_grad:
            seen.know(parameter.grad, f"grad.{name}", TensorKind.GRADIENT)
    for name, buffer in copied.named_buffers():
        seen.know(buffer, name, TensorKind.WEIGHT)
    for path, leaf in tree_flatten_with_path(inputs)[0]:
        if isinstance(leaf, torch.Tensor):
            seen.know(leaf, "batch" + "".join(str(key) for key in path), TensorKind.INPUT)
    try:
        with mode, module_paths(copied, seen.modules), seen, torch.autograd.graph.saved_tensors_hooks(
            seen.pack, seen.unpack
        ):
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


def step_device(module: torch.nn.Module) -> torch.device:
    """The one device of a module's parameters. Raises InputError if there is none or several."""
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) != 1:
        raise InputError(f"module: its parameters are on {sorted(map(str, devices)) or 'no device'}; one is needed")
    return devices.pop()


def require_loss(value: Any) -> torch.Tensor:
    """`value`, if it is a number that backward can start from. Raises InputError otherwise."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        what = f"{tuple(value.shape)} tensor" if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(f"loss: returned a {what}; it must return one number (a tensor) that depends on parameters")
    return value


@contextmanager
def module_paths(module: torch.nn.Module, stack: list[str]) -> Iterator[None]:
    """While it lasts, `stack[-1]` is the path of the submodule that runs ("" outside of all)."""

    def leave(*_: Any) -> None:
        stack.pop()

    hooks = []
    for path, part in module.named_modules():
        hooks.append(part.register_forward_pre_hook(lambda *_, path=path: stack.append(path)))
        hooks.append(part.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def storages_of(values: Any, device: torch.device) -> dict[int, torch.UntypedStorage]:
    """Storages on `device` of all tensors in a tree, by address of the storage. Raises InputError for tensors
    without one (sparse, quantised, conjugated)."""
    found = {}
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.device.type == device.type:
            if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_conj() or leaf.is_neg():
                raise InputError(f"loss: uses a {leaf.layout} tensor of {leaf.dtype} that is not plain and dense")
            storage = leaf.untyped_storage()
            found[storage._cdata] = storage
    return found


def starts_op(node: Any, before: Any) -> bool:
    """Does an op of backward start with `node`? Sums of gradients, in parameters and between nodes, belong to the
    node before them."""
    return node is not None and node is not before and not node.name().endswith("AccumulateGrad")


def node_name(node: Any) -> str:
    return node.name() if node is not None else "start"


def changed_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a kernel overwrites: what its schema says, and running statistics, of which it does not."""
    changed: list[Any] = []
    for place, spec in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(spec.name)
        statistics = "batch_norm" in func.__name__ and spec.name in ("running_mean", "running_var")
        if statistics or (spec.alias_info is not None and spec.alias_info.is_write):
            changed.extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return changed


class _Seen(TorchDispatchMode):
    """Collects the pass. Its hooks give autograd new storages in backward that stand for the saved ones."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
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
        kwargs = kwargs or {}
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
        if any(spec.name == "reduction" for spec in func._schema.arguments):
            sizes = self._sizes_of_loss(func, args, kwargs)
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

    def _sizes_of_loss(self, func: Any, args: Any, kwargs: Any) -> list[int]:
        """Bytes of the results of a loss kernel. Some return a number in a storage for all elements, which fake
        tensors do not know: so it runs once on zeros."""
        with _disable_current_modes(), torch.no_grad():
            args, kwargs = tree_map(
                lambda x: torch.zeros(x.size(), dtype=x.dtype, device=x.device) if isinstance(x, torch.Tensor) else x,
                (args, kwargs),
            )
            return [storage.nbytes() for storage in storages_of(func(*args, **kwargs), self.device).values()]

    def _count(self, op: TracedOp, func: Any, args: Any, kwargs: Any, result: Any, touched: set[int]) -> None:
        counted = flop_registry.get(func._overloadpacket)
        elements = sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        if counted is not None:
            dtype = next(str(leaf.dtype) for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            dtype = dtype.removeprefix("torch.")
            op.by_dtype[dtype] = op.by_dtype.get(dtype, 0) + int(counted(*args, **kwargs, out_val=result))
        else:
            op.vector_flops += elements
        op.traffic_bytes += sum(self.storages[index].size_bytes for index in touched)
        op.seeded |= torch.Tag.nondeterministic_seeded in func.tags and _chance(func, args, kwargs) != 0.0

    # --- saved tensors -----------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        if self.forward_end >= 0:
            raise InputError("loss: its backward pass is differentiated again; plans are for one backward pass")
        for address, storage in storages_of(tensor, self.device).items():
            index = self._index(address, storage)
            if self.storages[index].role == MADE:
                self.storages[index].saved = True
                return index, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    def unpack(self, packed: Any) -> torch.Tensor:
        op = self._backward_op()
        self.calls.append((UNPACK, len(self.ops) - 1, ""))
        if isinstance(packed, torch.Tensor):
            return packed
        index, dtype, size, stride, offset = packed
        op.reads[index] = None
        with self.paused(), torch.no_grad():
            elements = self.storages[index].size_bytes // dtype.itemsize
            stands_in = torch.empty(elements, dtype=dtype, device=self.device)
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


def _chance(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The probability of dropping that a kernel is called with; 1 if it has no such argument."""
    for place, spec in enumerate(func._schema.arguments):
        if spec.name == "dropout_p":
            return float(args[place] if place < len(args) else kwargs.get("dropout_p", spec.default_value or 0.0))
    return 1.0
