"""Where the storages of a step are, and the copies between device and host."""

# PyTorch is optional, and static checks pass without it.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tmojax.execute_torch.host_pool import HostBuffer, HostPool

Instance = tuple[int, int]  # tensor of the workload, micro-batch


@dataclass(frozen=True, slots=True)
class View:
    """A tensor without its memory: how it lies in a storage. `storage`: given for what exists outside of the plan."""

    instance: Instance
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: torch.UntypedStorage | None = None


def view_of(tensor: torch.Tensor, instance: Instance, storage: torch.UntypedStorage | None = None) -> View:
    return View(instance, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), storage)


class Tensors:
    """The storages of one rank that a plan keeps, moves and frees.

    On a GPU, copies run on two streams of their own. Memory belongs to the compute stream: a copy into new memory waits
    for what computed before, and computation waits for the copies of what is freed (semantics 5.1).
    `allocated(storage)` is told of every storage that a copy or a recomputation makes.
    """

    def __init__(self, device: torch.device, pool: HostPool, allocated: Callable[[torch.UntypedStorage], None]) -> None:
        self.device, self._pool, self._allocated = device, pool, allocated
        self._cuda = device.type == "cuda"
        self._out: Any = torch.cuda.Stream(device) if self._cuda else None
        self._in: Any = torch.cuda.Stream(device) if self._cuda else None
        self._on_device: dict[Instance, torch.UntypedStorage] = {}
        self._on_host: dict[Instance, HostBuffer] = {}
        self._copying: dict[Instance, Any] = {}  # events of copies that read or write the device's copy

    def __contains__(self, instance: Instance) -> bool:
        return instance in self._on_device

    def keep(self, instance: Instance, storage: torch.UntypedStorage) -> None:
        self._on_device[instance] = storage

    def offload(self, instance: Instance) -> None:
        """Copy to the host; does nothing where the host has it already."""
        if instance not in self._on_host:
            self._on_host[instance] = self.copy_out(instance, self._on_device[instance])

    def prefetch(self, instance: Instance) -> None:
        """Copy back to the device; does nothing where the device has it still."""
        if instance in self._on_device:
            return
        buffer = self._on_host[instance]
        content = torch.empty(buffer.content.nbytes, dtype=torch.uint8, device=self.device)
        self._allocated(content.untyped_storage())
        self._on_device[instance] = content.untyped_storage()
        self.copy_in(instance, buffer, content.untyped_storage())

    def release(self, instance: Instance) -> None:
        """Free the device's copy. Gradients, which autograd frees itself, are not here."""
        if instance in self._on_device:
            self.settle(instance)
            del self._on_device[instance]

    def release_host(self, instance: Instance) -> None:
        self.give_back(self._on_host.pop(instance))

    def give_back(self, buffer: HostBuffer) -> None:
        self._pool.give_back(buffer)

    def copy_out(
        self, instance: Instance, storage: torch.UntypedStorage, buffer: HostBuffer | None = None
    ) -> HostBuffer:
        """Start a copy of a storage to the host, into `buffer` if one is given."""
        content = self._bytes(storage)
        buffer = buffer or self._pool.take(content.nbytes)
        self._copy(self._out, instance, buffer, buffer.content, content)
        return buffer

    def copy_in(self, instance: Instance, buffer: HostBuffer, storage: torch.UntypedStorage) -> None:
        """Start a copy from the host into a storage of the same size."""
        self._copy(self._in, instance, buffer, self._bytes(storage), buffer.content)

    def tensor(self, view: View) -> torch.Tensor:
        """The tensor itself, on storage that is on the device."""
        storage = view.storage
        if storage is None:
            self.settle(view.instance)
            storage = self._on_device[view.instance]
        empty = torch.empty(0, dtype=view.dtype, device=self.device)
        return empty.set_(storage, view.offset, view.size, view.stride)  # type: ignore[call-overload]

    def under_way(self) -> list[Any]:
        """Events of all that has been started on the device so far; none on a CPU, where everything is done."""
        if not self._cuda:
            return []
        return [s.record_event() for s in (torch.cuda.current_stream(self.device), self._out, self._in)]

    def copies_under_way(self) -> list[Any]:
        """Events of the copies that have been started so far; none on a CPU."""
        return [stream.record_event() for stream in (self._out, self._in)] if self._cuda else []

    def join(self) -> None:
        """Everything that is started from now on waits for everything that was started before."""
        for event in self.under_way():
            for stream in (torch.cuda.current_stream(self.device), self._out, self._in):
                stream.wait_event(event)

    def clear(self) -> None:
        for instance in list(self._on_device):
            self.release(instance)
        for instance in list(self._on_host):
            self.release_host(instance)

    def _bytes(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        return empty.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload]

    def _copy(
        self, stream: Any, instance: Instance, buffer: HostBuffer, target: torch.Tensor, source: torch.Tensor
    ) -> None:
        if stream is None:
            target.copy_(source)
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        for event in (buffer.done, self._copying.get(instance)):
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            buffer.done = self._copying[instance] = torch.cuda.Event()
            buffer.done.record(stream)

    def settle(self, instance: Instance) -> None:
        """What is computed next waits for the copies of this tensor."""
        event = self._copying.pop(instance, None)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
