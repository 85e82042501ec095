"""What the event loop reads: the lowered schedule, and how links are shared in one run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Graph(NamedTuple):
    """The lowered schedule. `n` nodes, `c` flow classes (one per route, then one per collective), `d` devices.

    `device`, `position`: list and place in it (ties are served in this order). `flow_bytes`: bytes on the most loaded
    link. `waiting`: number of predecessors. `succ[succ_ptr[v]:succ_ptr[v+1]]`: successors. Per class: links with the
    share of `flow_bytes` that crosses each, engines, memory that bytes leave and enter (-1: collective), devices.
    """

    kind: NDArray[np.int8]
    device: NDArray[np.int32]
    position: NDArray[np.int32]
    flow_class: NDArray[np.int32]
    flow_bytes: NDArray[np.float64]
    waiting: NDArray[np.int32]
    succ_ptr: NDArray[np.int32]
    succ: NDArray[np.int32]
    link_ptr: NDArray[np.int64]
    link: NDArray[np.int64]
    coefficient: NDArray[np.float64]
    engine_ptr: NDArray[np.int64]
    engine: NDArray[np.int64]
    source: NDArray[np.int32]
    destination: NDArray[np.int32]
    member_ptr: NDArray[np.int64]
    member: NDArray[np.int32]
    device_memory: NDArray[np.int32]
    memories: int
    engines: int


class Rules(NamedTuple):
    """How links are shared in one run. Shapes: link; rank: class x device; order: nodes of link l's sequence.

    `interference`: factors of compute during copy in, copy out, collective; of collective and of copy during compute.
    """

    bandwidth: NDArray[np.float64]
    policy: NDArray[np.int8]
    slots: NDArray[np.int32]
    rank: NDArray[np.int32]
    order_ptr: NDArray[np.int32]
    order: NDArray[np.int32]
    interference: NDArray[np.float64]


class State(NamedTuple):
    """What the event loop works on, by node, device, link, engine or memory; the first four are its answer.

    Allocated outside of the compiled code (which then needs no memory management and compiles much faster).
    """

    start_s: NDArray[np.float64]
    flow_start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    busy_s: NDArray[np.float64]
    # node
    waiting: NDArray[np.int32]
    stack: NDArray[np.int32]
    fixed: NDArray[np.int32]
    fixed_end: NDArray[np.float64]
    queue: NDArray[np.int32]
    queue_s: NDArray[np.float64]
    asking: NDArray[np.int32]
    asked_s: NDArray[np.float64]
    flows: NDArray[np.int32]
    flow: NDArray[np.float64]  # x 4
    share: NDArray[np.float64]
    # device
    computing: NDArray[np.int32]
    compute_end: NDArray[np.float64]
    compute_left: NDArray[np.float64]
    compute_since: NDArray[np.float64]
    compute_factor: NDArray[np.float64]
    collectives: NDArray[np.int32]
    # engine
    engine_busy: NDArray[np.bool_]
    claimed: NDArray[np.bool_]
    # memory
    entering: NDArray[np.int32]
    leaving: NDArray[np.int32]
    # link
    used: NDArray[np.int32]
    turn: NDArray[np.int32]
    on_link: NDArray[np.int32]
    busy_since: NDArray[np.float64]
    shown: NDArray[np.float64]
    rate: NDArray[np.float64]
    left: NDArray[np.float64]
    weight: NDArray[np.float64]
    users: NDArray[np.int32]


def new_state(graph: Graph, links: int) -> State:
    """Room for one run at a time of a graph; the event loop initialises what it needs."""
    nodes, devices = graph.kind.size, graph.device_memory.size

    def numbers(size: int) -> NDArray[np.float64]:
        return np.empty(size, np.float64)

    def counts(size: int) -> NDArray[np.int32]:
        return np.empty(size, np.int32)

    return State(
        numbers(nodes), numbers(nodes), numbers(nodes), numbers(links), counts(nodes), counts(nodes), counts(nodes),
        numbers(nodes), counts(nodes), numbers(nodes), counts(nodes), numbers(nodes), counts(nodes),
        np.empty((nodes, 4)), numbers(nodes), counts(devices), numbers(devices), numbers(devices), numbers(devices),
        numbers(devices), counts(devices), np.empty(graph.engines, np.bool_), np.empty(graph.engines, np.bool_),
        counts(graph.memories), counts(graph.memories), counts(links), counts(links), counts(links), numbers(links),
        numbers(links), numbers(links), numbers(links), numbers(links), counts(links),
    )  # fmt: skip
