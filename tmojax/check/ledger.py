"""Bytes of one list in every memory, position by position (semantics 5.2)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tmojax.check.static import Static


@dataclass(frozen=True, slots=True)
class Overflow:
    """An allocating position at which a private memory is over its limit."""

    instruction: int
    memory: int
    bytes_over: int


class Ledger:
    """Allocations and frees of one list. A position's bytes include its own allocations, without what was freed before.

    Items are copies (their storage number, 0 or more) or scratch of instruction i (`-1 - i`: workspace, loans).
    """

    def __init__(self, static: Static, device: int) -> None:
        count = len(static.machine.memories)
        self.used_bytes = [0] * count
        self.peak_bytes = [0] * count
        self.peak_position = [-1] * count
        self.overflows: list[Overflow] = []
        own = static.devices[device].memory
        # Limits that this list alone decides; shared memories are summed over the lists afterwards.
        self._limit = [-1] * count
        if static.is_private(own):
            self._limit[own] = static.available_bytes(own)
        # (position, memory, item, bytes: positive for an allocation), to reconstruct what was there.
        self.log: list[tuple[int, int, int, int]] = []

    def allocate(self, position: int, memory: int, item: int, size_bytes: int) -> None:
        self.used_bytes[memory] += size_bytes
        self.log.append((position, memory, item, size_bytes))

    def free(self, position: int, memory: int, item: int, size_bytes: int) -> None:
        self.used_bytes[memory] -= size_bytes
        self.log.append((position, memory, item, -size_bytes))

    def settle(self, position: int, memory: int) -> None:
        """All allocations of this position in `memory` are entered: compare with the peak and the limit."""
        used = self.used_bytes[memory]
        if used > self.peak_bytes[memory]:
            self.peak_bytes[memory] = used
            self.peak_position[memory] = position
        limit = self._limit[memory]
        if 0 <= limit < used:
            self.overflows.append(Overflow(position, memory, used - limit))

    def largest(self, memory: int, positions: list[int], count: int = 5) -> dict[int, list[tuple[int, int]]]:
        """The largest (item, bytes) in a memory at each of the given positions."""
        wanted = sorted(set(positions))
        found: dict[int, list[tuple[int, int]]] = {}
        there: dict[int, int] = {}
        entries = [entry for entry in self.log if entry[1] == memory]
        cursor = 0
        for position in wanted:
            while cursor < len(entries):
                at, _, item, size_bytes = entries[cursor]
                # What a position allocates is there, what is freed behind it still is.
                if at > position or (at == position and size_bytes < 0):
                    break
                there[item] = there.get(item, 0) + size_bytes
                if there[item] <= 0:
                    del there[item]
                cursor += 1
            found[position] = heapq.nlargest(count, there.items(), key=lambda entry: (entry[1], -entry[0]))
        return found
