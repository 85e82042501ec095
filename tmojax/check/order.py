"""What must be complete before what inside one list: streams, hazards, allocations behind frees (semantics 4, 5.1).

The result is a set of edges between nodes of the schedule's graph. An edge means: the first is complete before the
second starts. Edges that a stream implies are left out, so their number stays linear in the list.
"""

from __future__ import annotations

from bisect import bisect_right

from tmojax.check.graph import Graph


class ListOrder:
    """Collects the edges of one list, in list order.

    A `lane` is the first stream of an instruction; two instructions of one lane are ordered by it. Instructions that
    use no engine have a lane of their own.
    """

    def __init__(self, graph: Graph, device: int) -> None:
        self._graph = graph
        self._device = device
        self._last_on_stream: dict[int, int] = {}
        self._written: dict[int, tuple[int, int]] = {}  # storage -> (lane, node) of the last write
        self._readers: dict[int, dict[int, int]] = {}  # storage -> lane -> last node that read since that write
        self._freed: dict[int, list[int]] = {}  # memory -> frees since the last allocation there
        self._barrier: dict[int, int] = {}  # memory -> node that stands for all frees before the last allocation
        self.waits: list[int] = []  # nodes of the waits so far

    def issue(self, node: int, streams: tuple[int, ...]) -> int:
        """Put an instruction on its streams; returns its lane."""
        last = self._last_on_stream
        for stream in streams:
            before = last.get(stream)
            if before is not None:
                self._graph.edge(before, node)
            last[stream] = node
            self._graph.on_chain(self._device, stream, node)
        if streams:
            return streams[0]
        self._graph.on_chain(self._device, -node - 1, node)
        return -node - 1

    def read(self, storage: int, node: int, lane: int) -> None:
        written = self._written.get(storage)
        if written is not None and written[0] != lane:
            self._graph.edge(written[1], node)
        readers = self._readers.get(storage)
        if readers is None:
            self._readers[storage] = {lane: node}
        else:
            readers[lane] = node

    def write(self, storage: int, node: int, lane: int) -> None:
        written = self._written.get(storage)
        if written is not None and written[0] != lane:
            self._graph.edge(written[1], node)
        for reader_lane, reader in self._readers.pop(storage, {}).items():
            if reader_lane != lane and reader != node:
                self._graph.edge(reader, node)
        self._written[storage] = (lane, node)

    def release(self, storage: int, memory: int, node: int) -> None:
        """A release is complete when the last access of the storage is."""
        written = self._written.get(storage)
        if written is not None:
            self._graph.edge(written[1], node)
        for reader in self._readers.get(storage, {}).values():
            self._graph.edge(reader, node)
        self.free(memory, node)

    def free(self, memory: int, node: int) -> None:
        """Later allocations in `memory` wait for `node`."""
        self._freed.setdefault(memory, []).append(node)

    def allocate(self, memory: int, node: int) -> None:
        """`node` waits for every free in `memory` before it, through one barrier node that the next ones share."""
        freed = self._freed.pop(memory, None)
        barrier = self._barrier.get(memory)
        if freed:
            if barrier is None and len(freed) == 1:
                barrier = freed[0]
            else:
                previous, barrier = barrier, self._graph.extra_node()
                if previous is not None:
                    self._graph.edge(previous, barrier)
                for free in freed:
                    self._graph.edge(free, barrier)
            self._barrier[memory] = barrier
        if barrier is not None:
            self._graph.edge(barrier, node)

    def reclaim(self, node: int, lend: int) -> None:
        """A reclaim is complete when the waits between its lend and it are (3.6)."""
        self._graph.edge(lend, node)
        for wait in self.waits[bisect_right(self.waits, lend) :]:
            self._graph.edge(wait, node)
