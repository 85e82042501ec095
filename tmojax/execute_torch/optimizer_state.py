"""Optimizer state that a plan moves: it is idle while forward and backward run, and may rest on the host meanwhile.

The optimizer's own tensors stay the same objects. On the device a storage is emptied when it is released
(`resize_(0)`), and filled again when it comes back.
"""

# PyTorch is optional, and static checks pass without it.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from tmojax.errors import InputError
from tmojax.execute_torch.host_pool import HostBuffer, HostPool
from tmojax.execute_torch.tensors import Instance, Tensors
from tmojax.importers.torch_importer import parameter_state


class OptimizerState:
    """The state of an optimizer by tensor of the workload, from step to step.

    `names_of` {tensor: names of the parameters whose state it is}.
    """

    def __init__(self, names_of: Mapping[int, tuple[str, ...]], optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self._names_of = optimizer, names_of
        self._storages: dict[int, list[torch.UntypedStorage]] = {}
        self._sizes: dict[int, list[int]] = {}
        self._on_host: dict[int, list[HostBuffer]] = {}
        self._old: set[int] = set()  # on the host as they were before the last update

    def __contains__(self, tensor: int) -> bool:
        return tensor in self._names_of

    def find(self, module: torch.nn.Module, size_bytes: Mapping[int, int]) -> None:
        """Look up the storages. `size_bytes` [tensor]: as imported.

        Raises InputError for another state than was imported, or than the last step left.
        """
        parameters = dict(module.named_parameters())
        for tensor, names in self._names_of.items():
            found = {
                address: storage
                for name in names if name in parameters
                for address, storage in parameter_state(self.optimizer, parameters[name]).items()
            }  # fmt: skip
            if tensor in self._storages:
                if list(found) != [storage._cdata for storage in self._storages[tensor]]:
                    raise InputError(
                        f"optimizer: its state of {names[0]!r} is another tensor than in the last step; update it in "
                        f"place, or call `state_on_device()` before it is replaced"
                    )
                continue
            sizes = [storage.nbytes() for storage in found.values()]
            if sum(sizes) != size_bytes[tensor]:
                raise InputError(
                    f"optimizer: its state of {names[0]!r} and what belongs to it has {sum(sizes)} bytes, and "
                    f"{size_bytes[tensor]} when it was imported; give the optimizer that the step was imported with"
                )
            self._storages[tensor], self._sizes[tensor] = list(found.values()), sizes

    def on_device(self) -> Iterator[torch.UntypedStorage]:
        """The storages that are on the device."""
        for storages in self._storages.values():
            yield from (storage for storage in storages if storage.nbytes())

    def offload(self, tensor: int, tensors: Tensors) -> None:
        """Copy to the host, over an old copy there; does nothing where the host has it already."""
        if tensor in self._on_host and tensor not in self._old:
            return
        old = self._on_host.get(tensor) or [None] * len(self._storages[tensor])
        self._on_host[tensor] = [
            tensors.copy_out(key, storage, buffer)
            for (key, storage), buffer in zip(self._keyed(tensor), old, strict=True)
        ]  # fmt: skip
        self._old.discard(tensor)

    def prefetch(self, tensor: int, tensors: Tensors) -> list[torch.UntypedStorage]:
        """Copy back to the device; returns the storages that are filled, none where the device has them still."""
        if any(storage.nbytes() for storage in self._storages[tensor]):
            return []
        for (key, storage), size, buffer in zip(
            self._keyed(tensor), self._sizes[tensor], self._on_host[tensor], strict=True
        ):
            storage.resize_(size)
            tensors.copy_in(key, buffer, storage)
        return self._storages[tensor]

    def release(self, tensor: int, tensors: Tensors) -> list[torch.UntypedStorage]:
        """Free the device's copy; returns the storages, which are empty then."""
        for key, storage in self._keyed(tensor):
            tensors.settle(key)
            storage.resize_(0)
        return self._storages[tensor]

    def release_host(self, tensor: int, tensors: Tensors) -> None:
        self._old.discard(tensor)
        for buffer in self._on_host.pop(tensor):
            tensors.give_back(buffer)

    def update(self, tensors: Tensors) -> None:
        """The optimizer's step; it waits for the copies that are under way, and copies on the host are old then."""
        for tensor in self._storages:
            for key, _ in self._keyed(tensor):
                tensors.settle(key)
        self.optimizer.step()
        self._old = set(self._on_host)

    def bring_back(self, pool: HostPool) -> None:
        """All state on the device, none on the host; waits for the copies."""
        if not self._storages:
            return
        device = next(iter(self._storages.values()))[0].device
        tensors = Tensors(device, pool, lambda storage: None)
        for tensor in list(self._on_host):
            self.prefetch(tensor, tensors)
            for key, _ in self._keyed(tensor):
                tensors.settle(key)
            self.release_host(tensor, tensors)

    def _keyed(self, tensor: int) -> Iterator[tuple[Instance, torch.UntypedStorage]]:
        """Storages with numbers of their own below those of micro-batches."""
        for number, storage in enumerate(self._storages[tensor]):
            yield (tensor, -1 - number), storage
