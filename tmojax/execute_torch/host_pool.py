"""Host memory for offloaded tensors: buffers that are used again, step after step."""

# PyTorch is optional, and static checks pass without it.
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(eq=False)
class HostBuffer:
    """A host buffer. `done`: event of the last copy that reads or writes it (None: nothing is under way)."""

    content: torch.Tensor
    done: Any = None


class HostPool:
    """Buffers of one rank, pinned where the device is a GPU. All together never exceed `limit_bytes`.

    `allocated`: buffers made so far; `reused`: copies that went into a buffer from before. `most_bytes`: the most that
    buffers in use had together.
    """

    def __init__(self, limit_bytes: int, pinned: bool) -> None:
        self._limit_bytes, self._pinned = limit_bytes, pinned
        self._free: list[HostBuffer] = []
        self._held_bytes = self._used_bytes = 0
        self.allocated = self.reused = self.most_bytes = 0

    def begin_step(self) -> None:
        """`most_bytes` is counted anew; what rests on the host counts from the start."""
        self.most_bytes = self._used_bytes

    def take(self, size_bytes: int) -> HostBuffer:
        """A buffer of exactly this size; its content is left over from before."""
        self._used_bytes += size_bytes
        self.most_bytes = max(self.most_bytes, self._used_bytes)
        for buffer in self._free:
            if buffer.content.nbytes == size_bytes:
                self._free.remove(buffer)
                self.reused += 1
                return buffer
        self.allocated += 1
        self._held_bytes += size_bytes
        while self._free and self._held_bytes > self._limit_bytes:
            old = self._free.pop(0)
            if old.done is not None:
                old.done.synchronize()
            self._held_bytes -= old.content.nbytes
        return HostBuffer(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._pinned))

    def give_back(self, buffer: HostBuffer) -> None:
        self._used_bytes -= buffer.content.nbytes
        self._free.append(buffer)
