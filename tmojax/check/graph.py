"""The graph of a schedule: one node per instruction, fused collectives, barriers; topological order, cycles, clocks."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from tmojax.check.rules import TooComplex

# Edges of a graph: so many, and so many for each instruction. Entries of the clocks: nodes times chains.
MOST_EDGES, EDGES_EACH = 10_000_000, 10
MOST_CLOCK_ENTRIES = 200_000_000


class Graph:
    """Nodes: instructions list after list, then barriers and starts of transfers. Edges: complete before start."""

    def __init__(self, lengths: list[int]) -> None:
        self.first: list[int] = np.concatenate(([0], np.cumsum(lengths))).tolist()  # first node of each list
        self.instructions = self.first[-1]
        self.extra: list[int] = []  # instruction node that an extra node belongs to; -1: none
        self.starts: dict[int, int] = {}  # instruction node -> node of its start, where that is a node of its own
        self.chains: dict[tuple[int, int], list[int]] = {}  # (device, stream) -> its nodes in order
        self._source: list[int] = []
        self._target: list[int] = []
        self._representative: dict[int, int] = {}

    @property
    def node_count(self) -> int:
        return self.instructions + len(self.extra)

    def edge(self, source: int, target: int) -> None:
        self._source.append(source)
        self._target.append(target)

    def check_size(self) -> None:
        """Raises TooComplex when instructions wait for so many others that the edges would not fit in memory."""
        if len(self._source) > MOST_EDGES + EDGES_EACH * self.instructions:
            raise TooComplex(f"instructions wait for {len(self._source)} others in all; use fewer slices and waits")

    def on_chain(self, device: int, stream: int, node: int) -> None:
        chain = self.chains.get((device, stream))
        if chain is None:
            self.chains[device, stream] = [node]
        else:
            chain.append(node)

    def extra_node(self, instruction_node: int = -1) -> int:
        """A node that is no instruction: a barrier, or what belongs to `instruction_node`."""
        self.extra.append(instruction_node)
        return self.node_count - 1

    def split_start(self, node: int) -> None:
        """Give the start of an instruction a node apart from its end."""
        if node not in self.starts:
            self.starts[node] = self.extra_node(node)

    def instruction(self, node: int) -> tuple[int, int] | None:
        """(device, index) of an instruction node, or of the instruction to which an extra node belongs."""
        if node >= self.instructions:
            node = self.extra[node - self.instructions]
        if node < 0:
            return None
        device = bisect_right(self.first, node) - 1
        return device, node - self.first[device]

    def fuse(self, nodes: list[int]) -> None:
        """Make one node of several: the members of a collective."""
        for node in nodes[1:]:
            self._representative[node] = nodes[0]

    def representative(self, node: int) -> int:
        return self._representative.get(node, node)

    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """(sources, targets) with fused nodes replaced by their representative."""
        names = np.arange(self.node_count)
        if self._representative:
            names[list(self._representative)] = list(self._representative.values())
        return names[np.array(self._source, dtype=np.int64)], names[np.array(self._target, dtype=np.int64)]


def adjacency(count: int, source: np.ndarray, target: np.ndarray) -> tuple[list[int], list[int]]:
    """Compressed rows: the neighbours of node n are `neighbours[start[n]:start[n + 1]]`."""
    order = np.argsort(source, kind="stable")
    start = np.concatenate(([0], np.cumsum(np.bincount(source, minlength=count))))
    return start.tolist(), target[order].tolist()


def topological_order(count: int, source: np.ndarray, target: np.ndarray) -> list[int]:
    """Kahn's algorithm. Nodes on a cycle, or behind one, are missing from the result."""
    start, neighbours = adjacency(count, source, target)
    waiting = np.bincount(target, minlength=count)
    order = np.flatnonzero(waiting == 0).tolist()
    open_edges = waiting.tolist()
    for node in order:  # grows while it is read
        for successor in neighbours[start[node] : start[node + 1]]:
            open_edges[successor] -= 1
            if open_edges[successor] == 0:
                order.append(successor)
    return order


def cycles(count: int, source: np.ndarray, target: np.ndarray) -> list[list[int]]:
    """A short cycle of every strongly connected component that has one."""
    # What no cycle can contain is peeled off from both sides first, which leaves little for the search.
    inside = np.ones(count, dtype=bool)
    inside[topological_order(count, source, target)] = False
    kept = inside[source] & inside[target]
    source, target = source[kept], target[kept]
    behind = np.zeros(count, dtype=bool)
    behind[topological_order(count, target, source)] = True
    inside &= ~behind
    kept = inside[source] & inside[target]
    source, target = source[kept], target[kept]
    start, neighbours = adjacency(count, source, target)
    component = _components(np.flatnonzero(inside).tolist(), count, start, neighbours)
    members: dict[int, list[int]] = {}
    for node in np.flatnonzero(inside).tolist():
        members.setdefault(component[node], []).append(node)
    found = []
    for number, nodes in members.items():
        cycle = _shortest_cycle_through(nodes[0], number, component, start, neighbours)
        if cycle:
            found.append(cycle)
    return found


def _components(nodes: list[int], count: int, start: list[int], neighbours: list[int]) -> list[int]:
    """Tarjan's strongly connected components, without recursion."""
    component = [-1] * count
    index = [-1] * count
    low = [0] * count
    stack: list[int] = []
    next_index = next_component = 0
    for root in nodes:
        if index[root] >= 0:
            continue
        work = [(root, start[root])]
        index[root] = low[root] = next_index
        next_index += 1
        stack.append(root)
        while work:
            node, position = work.pop()
            if position < start[node + 1]:
                work.append((node, position + 1))
                successor = neighbours[position]
                if index[successor] < 0:
                    index[successor] = low[successor] = next_index
                    next_index += 1
                    stack.append(successor)
                    work.append((successor, start[successor]))
                elif component[successor] < 0:
                    low[node] = min(low[node], index[successor])
                continue
            if low[node] == index[node]:
                while True:
                    member = stack.pop()
                    component[member] = next_component
                    if member == node:
                        break
                next_component += 1
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[node])
    return component


def _shortest_cycle_through(
    root: int, number: int, component: list[int], start: list[int], neighbours: list[int]
) -> list[int]:
    """Breadth-first search from `root` back to itself inside its component; empty when it is on no cycle."""
    came_from = {root: root}
    queue = [root]
    for node in queue:  # grows while it is read
        for successor in neighbours[start[node] : start[node + 1]]:
            if successor == root:
                path = [node]
                while path[-1] != root:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if component[successor] == number and successor not in came_from:
                came_from[successor] = node
                queue.append(successor)
    return []


class Clocks:
    """Answers "is `before` complete when `after` starts, whatever the times?" by vector clocks over the streams.

    `clock[n, c]`: how many instructions of chain c (a stream of a list) are complete when node n is. A node on a chain
    is complete before another one starts exactly if the other's clock counts it. A node on no chain (release, barrier,
    signal) is complete when all that it waits for is: every entry of its clock must be reached.

    `order`: a topological order of the edges (and of more, perhaps). `started`: count instructions that have started.
    """

    def __init__(
        self, graph: Graph, order: list[int], source: np.ndarray, target: np.ndarray, started: bool = False
    ) -> None:
        count = graph.node_count
        if count * len(graph.chains) > MOST_CLOCK_ENTRIES:
            raise TooComplex(
                f"order between lists: {count} steps on {len(graph.chains)} streams (a transfer without engines is a "
                f"stream of its own); at most {MOST_CLOCK_ENTRIES} pairs of them are compared"
            )
        self._graph = graph
        self._place: dict[int, tuple[int, int]] = {}
        own: dict[int, list[tuple[int, int]]] = {}
        for chain, nodes in enumerate(graph.chains.values()):
            for position, node in enumerate(nodes, start=1):
                name = graph.representative(node)
                name = graph.starts.get(name, name) if started else name
                self._place.setdefault(name, (chain, position))
                own.setdefault(name, []).append((chain, position))
        start, before = adjacency(count, target, source)
        self._clock = np.zeros((count, max(1, len(graph.chains))), dtype=np.int32)
        self._start = np.zeros_like(self._clock)  # what is complete when the node starts
        clock = self._clock
        for node in order:
            row = clock[node]
            for predecessor in before[start[node] : start[node + 1]]:
                np.maximum(row, clock[predecessor], out=row)
            self._start[node] = row
            for chain, position in own.get(node, ()):
                row[chain] = position

    def at_start(self, node: int) -> np.ndarray:
        """Per chain, how many instructions are complete when a node starts."""
        return self._start[self._graph.representative(node)]

    def at_end(self, node: int) -> np.ndarray:
        """Per chain, how many instructions are complete when a node is; for a node on no chain, what it waits for."""
        return self._clock[self._graph.representative(node)]

    def count(self, chain: int, node: int) -> int:
        """How many instructions of a chain (by its place in `Graph.chains`) are counted when a node starts."""
        node = self._graph.representative(node)
        return int(max(self._start[node, chain], self._start[self._graph.starts.get(node, node), chain]))

    def ordered(self, before: int, after: int) -> bool:
        before, after = self._graph.representative(before), self._graph.representative(after)
        place = self._place.get(before)
        if place is not None:
            return bool(self._start[after, place[0]] >= place[1])
        return bool((self._clock[before] <= self._start[after]).all())
