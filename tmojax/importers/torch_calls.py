"""What a kernel, a module and an autograd node say about themselves."""

# PyTorch is optional, and static checks pass without it.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from tmojax.errors import InputError

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


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


def chance_of_dropping(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The probability of dropping that a kernel is called with; 1 if it has no such argument."""
    for place, spec in enumerate(func._schema.arguments):
        if spec.name == "dropout_p":
            return float(args[place] if place < len(args) else kwargs.get("dropout_p", spec.default_value or 0.0))
    return 1.0


def returns_all_elements(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Does a loss kernel return its number in a storage that has room for all elements?

    Some do (`mse_loss` on CPU), and fake tensors do not know; so the kernel runs on two elements.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    reduces = any(spec.name == "reduction" for spec in func._schema.arguments) and "backward" not in func.__name__
    if not reduces or len(tensors) < 2 or any(tensor.shape != tensors[0].shape for tensor in tensors):
        return False
    with _disable_current_modes(), torch.no_grad():
        args, kwargs = tree_map(
            lambda x: torch.zeros(2, dtype=x.dtype, device=x.device) if isinstance(x, torch.Tensor) else x,
            (args, kwargs),
        )
        result = func(*args, **kwargs)
    return result.numel() == 1 and result.untyped_storage().nbytes() == 2 * result.itemsize


def flop_formula(func: Any) -> Callable[..., int] | None:
    """PyTorch's formula for the operations of a kernel; it has none for element-wise kernels."""
    name = func._overloadpacket.__name__
    if name.endswith(("_for_cpu", "_for_cpu_backward")):  # attention: the same operations as on a GPU
        return flop_registry.get(getattr(torch.ops.aten, name.replace("_for_cpu", "")))
    return flop_registry.get(func._overloadpacket)
