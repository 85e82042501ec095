"""Cycles and vector clocks against plain searches on small random graphs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tmojax.check.graph import Clocks, Graph, cycles, topological_order


def reachable(count, edges):
    """reach[a][b]: there is a path of at least one edge from a to b."""
    reach = np.zeros((count, count), dtype=bool)
    for a, b in edges:
        reach[a, b] = True
    for middle in range(count):
        reach |= np.outer(reach[:, middle], reach[middle])
    return reach


def arrays(edges):
    pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 9))
    nodes = st.integers(0, count - 1)
    return count, draw(st.lists(st.tuples(nodes, nodes), max_size=16))


@settings(max_examples=500, deadline=None)
@given(graphs())
def test_one_real_cycle_for_every_knot(graph):
    count, edges = graph
    reach = reachable(count, edges)
    knots = {frozenset(np.flatnonzero(reach[n] & reach[:, n]).tolist()) for n in range(count) if reach[n, n]}
    found = cycles(count, *arrays(edges))
    assert len(found) == len(knots)
    for cycle in found:
        assert any(set(cycle) <= knot for knot in knots)
        assert all((a, b) in edges for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    order = topological_order(count, *arrays(edges))
    assert (len(order) == count) == (not knots)
    place = {node: position for position, node in enumerate(order)}
    assert all(place[a] < place[b] for a, b in edges if a in place and b in place)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_clocks_say_what_is_surely_complete(data):
    """Nodes on streams are complete before what they reach; others are when all that they wait for is."""
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    graph = Graph(lengths)
    edges = []
    on_stream = set()
    for device, length in enumerate(lengths):
        last: dict[int, int] = {}
        for node in range(graph.first[device], graph.first[device] + length):
            stream = data.draw(st.integers(-1, 1))
            if stream >= 0:
                graph.on_chain(device, stream, node)
                on_stream.add(node)
                edges += [(last[stream], node)] if stream in last else []
                last[stream] = node
    count = graph.node_count
    extra = data.draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=12))
    edges += [(a, b) for a, b in extra if a < b]
    reach = reachable(count, edges)
    source, target = arrays(edges)
    clocks = Clocks(graph, topological_order(count, source, target), source, target)

    def needs(node):
        """Streamed nodes whose ends decide when a node is complete."""
        return {node} if node in on_stream else {m for m in on_stream if reach[m, node]}

    for a in range(count):
        for b in range(count):
            if a != b:
                assert clocks.ordered(a, b) == all(reach[m, b] for m in needs(a))
