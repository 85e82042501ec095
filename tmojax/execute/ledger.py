"""Bytes that one list really holds in every memory, and the dispatch that waits for room (semantics 5.1).

Arrays are counted with their own bytes from the dispatch that makes them until they are deleted, segments with the
workspace that the compiler measured. The count is compared with the plan's at every position.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tmojax.errors import TmojaxError
from tmojax.execute.lists import Change, PreparedList


class MemoryExceeded(TmojaxError):
    """More bytes are live than the plan counts at that position: an error of the runtime, not of the plan."""


@dataclass(frozen=True)
class MemoryCount:
    """Bytes in one memory by one list: `counted_bytes` and `planned_bytes` {position: bytes}, -1 for the start."""

    counted_bytes: dict[int, int]
    planned_bytes: dict[int, int]

    @property
    def counted_peak_bytes(self) -> int:
        return max(self.counted_bytes.values(), default=0)

    @property
    def planned_peak_bytes(self) -> int:
        return max(self.planned_bytes.values(), default=0)


class _PendingChange:
    """A change that has not taken effect."""

    __slots__ = ("change", "done", "lock")

    def __init__(self, change: Change) -> None:
        self.change, self.done, self.lock = change, False, threading.Lock()


class Ledger:
    """The live bytes of one list during one step.

    `wait_complete(instruction)` blocks until an instruction of the list is complete; `free(change)` deletes what the
    change names and returns its bytes.
    """

    def __init__(
        self,
        prepared: PreparedList,
        initial_bytes: list[int],
        wait_complete: Callable[[int], None],
        free: Callable[[Change], int],
    ) -> None:
        self._prepared, self._wait_complete, self._free = prepared, wait_complete, free
        self._pending = [[_PendingChange(change) for change in changes] for changes in prepared.changes]
        self._by_position = {id(pending.change): pending for changes in self._pending for pending in changes}
        self._settled = [0] * len(self._pending)
        self._live = list(initial_bytes)
        self._furthest = [-1] * len(self._pending)
        self._counted: list[dict[int, int]] = [{-1: size} for size in initial_bytes]
        self._lock = threading.Lock()

    def make_room(self, memory: int, position: int, own: Collection[int] = ()) -> None:
        """Wait until everything that stands before `position` in the list has been freed in `memory`.

        `own`: instructions that are about to be dispatched together; what waits for them is not waited for.
        """
        changes, together = self._pending[memory], frozenset(own)
        place = settled = self._settled[memory]
        while place < len(changes) and changes[place].change.position < position:
            if together.isdisjoint(changes[place].change.after_end):
                self._settle(changes[place])
                settled += place == settled  # of what is settled, only the front need not be looked at again
            place += 1
        self._settled[memory] = max(self._settled[memory], settled)

    def settle(self, position: int) -> None:
        """Wait until the release, retire, lend or reclaim at `position` has taken effect."""
        change = self._prepared.change_of[position]
        if change.loan_bytes > 0:
            self.make_room(change.memory, position)
        self._settle(self._by_position[id(change)])

    def settle_all(self) -> None:
        """Wait for everything that is still to be freed."""
        for changes in self._pending:
            for pending in changes:
                self._settle(pending)

    def _settle(self, pending: _PendingChange) -> None:
        if pending.done:
            return
        change = pending.change
        for instruction in change.after_end:
            self._wait_complete(instruction)
        with pending.lock:
            if pending.done:
                return
            if change.loan_bytes > 0:
                self.allocate(change.memory, change.position, change.loan_bytes)
            else:
                freed = -change.loan_bytes or self._free(change)
                with self._lock:
                    self._live[change.memory] -= freed
            pending.done = True

    def allocate(self, memory: int, position: int, size_bytes: int) -> None:
        """Count bytes that the instruction at `position` is about to allocate. Raises MemoryExceeded."""
        planned = self._prepared.planned_bytes[memory]
        with self._lock:
            self._live[memory] += size_bytes
            live = self._live[memory]
            self._furthest[memory] = max(self._furthest[memory], position)
            furthest = self._furthest[memory]
            counted = self._counted[memory]
            counted[furthest] = max(counted.get(furthest, 0), live)
        if live > planned[furthest]:
            raise MemoryExceeded(
                f"list {self._prepared.device}, memory {memory}: {live} bytes are live at instruction {furthest}, "
                f"and the plan counts {planned[furthest]}"
            )

    def counts(self) -> tuple[MemoryCount, ...]:
        """One count per memory, in the machine's order."""
        return tuple(
            MemoryCount(dict(counted), self._prepared.planned_bytes[memory])
            for memory, counted in enumerate(self._counted)
        )
