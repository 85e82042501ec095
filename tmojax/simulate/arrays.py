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
    link_ptr: NDArray[np.int32]
    link: NDArray[np.int32]
    coefficient: NDArray[np.float64]
    engine_ptr: NDArray[np.int32]
    engine: NDArray[np.int32]
    source: NDArray[np.int32]
    destination: NDArray[np.int32]
    member_ptr: NDArray[np.int32]
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
