"""Host memory for offloaded tensors: buffers that are used again, step after step.

On GPUs the runtime of JAX serves `pinned_host` from a pool of its own, so deleted buffers are pooled there. The CPU
backend allocates every buffer anew; there this pool keeps the buffers that are released and writes into them.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from tmojax.errors import InputError

Array = Any
HOST_KIND = "pinned_host"


def host_sharding(device: Any) -> SingleDeviceSharding:
    """Where the offloaded tensors of a device go. Raises InputError where the backend has no such memory."""
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_KIND not in kinds:
        raise InputError(
            f"device {device}: the backend has no memory of kind {HOST_KIND!r}, it has {', '.join(kinds)}; use a JAX "
            f"version whose backend has it (0.10.1 and later on CPU and GPU)"
        )
    return SingleDeviceSharding(device, memory_kind=HOST_KIND)


class HostPool:
    """Host buffers of one device. In use and free ones together never exceed `limit_bytes`.

    `allocated`: buffers made so far; `reused`: copies that went into a buffer from before.
    """

    def __init__(self, device: Any, limit_bytes: int) -> None:
        self._sharding = host_sharding(device)
        self._keeps = device.platform == "cpu"
        self._limit_bytes = limit_bytes
        self._free: dict[tuple, list[Array]] = {}
        self._held_bytes = 0
        self._lock = threading.Lock()
        self.allocated = self.reused = 0

    def store(self, array: Array) -> Array:
        """A copy of a device array in host memory; complete on return where it reuses a buffer."""
        buffer = self._take(array)
        if buffer is None:
            return jax.device_put(array, self._sharding)
        array.block_until_ready()
        ctypes.memmove(buffer.unsafe_buffer_pointer(), array.unsafe_buffer_pointer(), buffer.nbytes)
        return buffer

    def load(self, value: np.ndarray) -> Array:
        """A copy of an array of the caller's in host memory."""
        buffer = self._take(value)
        if buffer is None:
            # The backend may take over the memory that it is given, so it gets its own.
            return jax.device_put(np.array(value), self._sharding)
        whole = np.ascontiguousarray(value)
        ctypes.memmove(buffer.unsafe_buffer_pointer(), whole.ctypes.data, buffer.nbytes)
        return buffer

    def give_back(self, array: Array) -> None:
        """The copy is released; nothing reads it any more."""
        if not self._keeps:
            array.delete()
            return
        with self._lock:
            self._free.setdefault((array.shape, array.dtype), []).append(array)

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers, in use and free."""
        return self._held_bytes

    def _take(self, array: Array) -> Array | None:
        if not self._keeps:
            self.allocated += 1
            return None
        with self._lock:
            found = self._free.get((array.shape, array.dtype))
            if found:
                self.reused += 1
                return found.pop()
            self._held_bytes += array.nbytes
            self.allocated += 1
            # Free buffers of other shapes must go before a new one exceeds what the plan has on the host.
            for buffers in self._free.values():
                while buffers and self._held_bytes > self._limit_bytes:
                    old = buffers.pop()
                    self._held_bytes -= old.nbytes
                    old.delete()
            return None
