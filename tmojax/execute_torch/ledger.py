"""Bytes that a rank really has on its device: every storage from the kernel that makes it until it is freed."""

# PyTorch is optional, and static checks pass without it.
# pyright: reportMissingImports=false

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from tmojax.errors import TmojaxError


class MemoryExceeded(TmojaxError):
    """More bytes are live than the plan counts at that position: an error of the runtime, not of the plan."""


class Ledger:
    """Live bytes of one step. `counted_bytes`: {position of the list: most bytes since the position before}.

    What kernels allocate inside (scratch of a library) is not a storage and is not counted.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.counted_bytes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref] = {}
        self._sizes: dict[int, int] = {}

    def knows(self, address: int) -> bool:
        return address in self._watched

    def add(
        self,
        storage: torch.UntypedStorage,
        position: int,
        planned_bytes: int | None = None,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        """Count a storage that exists from now on. `on_end` runs when it is freed.

        Raises MemoryExceeded if more is live than `planned_bytes` (None: no limit, for what the caller brings).
        """
        address, size_bytes = storage._cdata, storage.nbytes()

        def freed(_: object) -> None:
            del self._watched[address], self._sizes[address]
            self.live_bytes -= size_bytes
            if on_end is not None:
                on_end()

        self._watched[address], self._sizes[address] = weakref.ref(storage, freed), size_bytes
        self.live_bytes += size_bytes
        self.counted_bytes[position] = max(self.counted_bytes.get(position, 0), self.live_bytes)
        if planned_bytes is not None and self.live_bytes > planned_bytes:
            raise MemoryExceeded(
                f"{self.live_bytes} bytes are live on the device at instruction {position}, and the plan counts "
                f"{planned_bytes}"
            )

    def forget(self, address: int) -> None:
        """Count a storage no longer, although the caller still has it."""
        if self._watched.pop(address, None) is not None:
            self.live_bytes -= self._sizes.pop(address)

    def close(self) -> None:
        """Forget everything: the step is over."""
        self._watched.clear()
