"""What a kernel, a module and an autograd node say about themselves."""

# PyTorch is optional, and static checks pass without it.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

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
