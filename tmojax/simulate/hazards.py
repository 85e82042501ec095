"""Dependencies inside one instruction list: stream order, hazards (4.2) and memory order (5.1) of docs/semantics.md.

One pass over the list. Everything that takes time runs on a stream, and streams are first in, first out; so "after
a, b and c of this stream" is "after the last of them". Two consequences keep the graph linear in the length of the list:
what an allocation waits for (5.1) is one instruction per memory and stream, and an edge that an earlier instruction of
the same stream already implies is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tmojax.simulate.jit import compiled, compiled_inner

COMPUTE, OFFLOAD, PREFETCH, RELEASE, ENCODE, DECODE, COLLECTIVE, RETIRE, SIGNAL, WAIT, LEND, RECLAIM = range(12)


class Rows(NamedTuple):
    """The list, one entry per instruction. A key numbers the copies that the list can touch.

    `key`: the copy that a release frees, or that is read; `target_key`: the copy that a transfer, encode or decode
    writes. `route`: flow class of a transfer. `after`: of retire and signal; of a reclaim, its lend (-1: none).
    `stream`: the first one of the instruction, -1: none. `retired`: a `retire` of it is written. `workspace_bytes`: of
    encode and decode.
    """

    kind: NDArray[np.int8]
    op: NDArray[np.int64]
    micro_batch: NDArray[np.int64]
    key: NDArray[np.int64]
    memory: NDArray[np.int64]
    target_key: NDArray[np.int64]
    target_memory: NDArray[np.int64]
    route: NDArray[np.int64]
    after: NDArray[np.int64]
    stream: NDArray[np.int64]
    retired: NDArray[np.bool_]
    workspace_bytes: NDArray[np.int64]


class Copies(NamedTuple):
    """The copies that a list can touch, by key. Aliases share a store, named by the key of one of them.

    `persistent`: survives a step. `resident`: there when the first step starts.
    """

    store: NDArray[np.int64]
    persistent: NDArray[np.bool_]
    resident: NDArray[np.bool_]


class Accesses(NamedTuple):
    """What ops touch: for op o, `tensor[ptr[o, m]:ptr[o, m + 1]]` with m = 0 reads, 1 updates, 2 writes (ptr: op x 4).

    `key`: the tensor's instance 0, plain, in the device's memory; the next instance is `stride` further.
    """

    ptr: NDArray[np.int64]
    tensor: NDArray[np.int64]
    workspace_bytes: NDArray[np.int64]
    step_op: NDArray[np.bool_]
    size_bytes: NDArray[np.int64]
    key: NDArray[np.int64]
    stride: NDArray[np.int64]


class Order(NamedTuple):
    """State of the pass. Positions count through all steps; -1: none.

    `stream_of[p]`: first stream of position p. `known[s, u]`: last position on stream u that something on stream s
    waits for. `freed[m, s]`: last position on stream s that a release in memory m waits for. `chain[m]`: the same for
    accesses without a stream, as an auxiliary node. `writer`, `readers` (head of a list of entries): per store, accesses
    since its last release. `resident`: per key; `stored`: resident copies per store. `ran`: op x micro-batch.
    `holds_workspace`: per instruction. `counts`: edges, reader entries, auxiliary nodes.
    """

    stream_of: NDArray[np.int64]
    tail: NDArray[np.int64]
    known: NDArray[np.int64]
    freed: NDArray[np.int64]
    chain: NDArray[np.int64]
    writer: NDArray[np.int64]
    readers: NDArray[np.int64]
    entry_node: NDArray[np.int64]
    entry_next: NDArray[np.int64]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    resident: NDArray[np.bool_]
    stored: NDArray[np.int64]
    ran: NDArray[np.bool_]
    holds_workspace: NDArray[np.bool_]
    counts: NDArray[np.int64]


def order_list(
    rows: Rows, accesses: Accesses, copies: Copies, micro_batches: int, steps: int, streams: int, memories: int,
    memory: int, engine_ptr: NDArray, engine: NDArray, access_count: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:  # fmt: skip
    """Dependencies of one list, issued `steps` times. `memory`: the device's own. `access_count`: of one step's ops.

    Returns (sources, targets, number of auxiliary nodes): node p < len(list) x steps is an instruction, later ones are
    auxiliary instants.
    """
    length, keys = rows.kind.size, copies.store.size
    total = length * steps
    capacity = steps * (2 * access_count + 8 * length) + 1024
    while True:
        order = Order(
            np.tile(rows.stream, steps), np.full(streams, -1), np.full((streams, streams), -1), np.full((memories, streams), -1),
            np.full(memories, -1), np.full(keys, -1), np.full(keys, -1), np.empty(capacity, np.int64),
            np.empty(capacity, np.int64), np.empty(capacity, np.int64), np.empty(capacity, np.int64),
            np.zeros(keys, np.bool_), np.zeros(keys, np.int64), np.zeros((accesses.step_op.size, micro_batches), np.bool_),
            np.zeros(length, np.bool_), np.zeros(3, np.int64),
        )  # fmt: skip
        _order_list(rows, accesses, copies, order, steps, micro_batches - 1, memory, engine_ptr, engine)
        needed = int(order.counts[0])
        if needed <= capacity:
            return order.source[:needed], order.target[:needed], int(order.counts[2])
        capacity = needed


@compiled_inner
def _edge(order, source, target):
    place = order.counts[0]
    order.counts[0] = place + 1
    if place < order.source.size:
        order.source[place] = source
        order.target[place] = target


@compiled_inner
def _after(order, source, target, stream):
    """`target`, on `stream` (-1: none), takes place after position `source`."""
    if source < 0 or source == target:
        return
    other = order.stream_of[source]
    if other >= 0 and stream >= 0:
        if other == stream or order.known[stream, other] >= source:
            return
        order.known[stream, other] = source
    _edge(order, source, target)


@compiled_inner
def _on_stream(order, stream, position, first):
    """`position` is the next of `stream`. The edge is kept even if implied: it is what makes the stream a queue."""
    last = order.tail[stream]
    if last >= 0:
        _edge(order, last, position)
        other = order.stream_of[last]
        order.known[first, other] = max(order.known[first, other], last)
    order.tail[stream] = position


@compiled_inner
def _read(order, store, position, stream):
    _after(order, order.writer[store], position, stream)
    entry = order.readers[store]
    while entry >= 0:
        if stream >= 0 and order.stream_of[order.entry_node[entry]] == stream:
            order.entry_node[entry] = position  # the earlier reader on this stream is done by then
            return
        entry = order.entry_next[entry]
    entry = order.counts[1]
    order.counts[1] = entry + 1
    order.entry_node[entry] = position
    order.entry_next[entry] = order.readers[store]
    order.readers[store] = entry


@compiled_inner
def _write(order, store, position, stream):
    _after(order, order.writer[store], position, stream)
    entry = order.readers[store]
    while entry >= 0:
        _after(order, order.entry_node[entry], position, stream)
        entry = order.entry_next[entry]
    order.readers[store] = -1
    order.writer[store] = position


@compiled_inner
def _free(order, memory, position, auxiliary):
    """Later allocations in `memory` wait for `position`. `auxiliary`: id of the first auxiliary node."""
    stream = order.stream_of[position]
    if stream >= 0:
        order.freed[memory, stream] = max(order.freed[memory, stream], position)
        return
    node = auxiliary + order.counts[2]
    order.counts[2] += 1
    if order.chain[memory] >= 0:
        _edge(order, order.chain[memory], node)
    _edge(order, position, node)
    order.chain[memory] = node


@compiled_inner
def _allocate(order, memory, position, stream):
    for other in range(order.tail.size):
        _after(order, order.freed[memory, other], position, stream)
    if order.chain[memory] >= 0:
        _edge(order, order.chain[memory], position)


@compiled_inner
def _run_op(order, rows, accesses, copies, i, position, stream, last_micro_batch, memory):
    """Compute or collective `i`. Returns whether it holds workspace after this (until it is retired)."""
    resident, stored, ran = order.resident, order.stored, order.ran
    op, micro_batch = rows.op[i], rows.micro_batch[i]
    first = not ran[op, micro_batch]
    ran[op, micro_batch] = True
    instance = last_micro_batch if accesses.step_op[op] else micro_batch
    workspace = accesses.workspace_bytes[op]
    allocates = False
    for e in range(accesses.ptr[op, 0], accesses.ptr[op, 1]):
        tensor = accesses.tensor[e]
        _read(order, copies.store[accesses.key[tensor] + instance * accesses.stride[tensor]], position, stream)
    for e in range(accesses.ptr[op, 1], accesses.ptr[op, 2]):
        tensor = accesses.tensor[e]
        _write(order, copies.store[accesses.key[tensor] + instance * accesses.stride[tensor]], position, stream)
    for e in range(accesses.ptr[op, 2], accesses.ptr[op, 3]):
        tensor = accesses.tensor[e]
        key = accesses.key[tensor] + instance * accesses.stride[tensor]
        store = copies.store[key]
        if resident[key] and not first:
            workspace += accesses.size_bytes[tensor]  # to scratch; the resident copy is not touched
            continue
        _write(order, store, position, stream)
        if not resident[key]:
            resident[key] = True
            allocates = allocates or stored[store] == 0
            stored[store] += 1
    if allocates or workspace > 0:
        _allocate(order, memory, position, stream)
    return workspace > 0


@compiled_inner
def _make_copy(order, rows, copies, i, position, stream):
    """Transfer, encode or decode `i`."""
    resident, stored = order.resident, order.stored
    key = rows.target_key[i]
    store = copies.store[key]
    _read(order, copies.store[rows.key[i]], position, stream)
    _write(order, store, position, stream)
    allocates = rows.workspace_bytes[i] > 0
    if not resident[key]:
        resident[key] = True
        allocates = allocates or stored[store] == 0
        stored[store] += 1
    if allocates:
        _allocate(order, rows.target_memory[i], position, stream)


@compiled_inner
def _release(order, rows, copies, i, position, stream, auxiliary):
    resident, stored = order.resident, order.stored
    key, memory = rows.key[i], rows.memory[i]
    store = copies.store[key]
    if order.writer[store] >= 0:
        _after(order, order.writer[store], position, stream)
        _free(order, memory, order.writer[store], auxiliary)
    entry = order.readers[store]
    while entry >= 0:
        _after(order, order.entry_node[entry], position, stream)
        _free(order, memory, order.entry_node[entry], auxiliary)
        entry = order.entry_next[entry]
    if resident[key]:
        resident[key] = False
        stored[store] -= 1
    if stored[store] == 0:  # what is written here next is another allocation, which waits by 5.1
        order.writer[store] = -1
        order.readers[store] = -1


@compiled_inner
def _start_step(order, copies, step):
    """Instances of a micro-batch or step are new in every step; persistent copies and what they wait for carry over."""
    resident, stored, ran = order.resident, order.stored, order.ran
    ran[:] = False
    stored[:] = 0
    for key in range(resident.size):
        if step == 0 or not copies.persistent[key]:
            resident[key] = copies.resident[key]
            order.writer[key] = -1
            order.readers[key] = -1
        if resident[key]:
            stored[copies.store[key]] += 1


@compiled
def _order_list(rows, accesses, copies, order, steps, last_micro_batch, memory, engine_ptr, engine):
    length = rows.kind.size
    total = length * steps
    for step in range(steps):
        _start_step(order, copies, step)
        for i in range(length):
            position = step * length + i
            kind, stream = rows.kind[i], rows.stream[i]
            if kind == COMPUTE or kind == COLLECTIVE:
                _on_stream(order, stream, position, stream)
                order.holds_workspace[i] = _run_op(
                    order, rows, accesses, copies, i, position, stream, last_micro_batch, memory
                )
                if order.holds_workspace[i] and not rows.retired[i]:
                    _free(order, memory, position, total)
            elif kind == OFFLOAD or kind == PREFETCH:
                for e in range(engine_ptr[rows.route[i]], engine_ptr[rows.route[i] + 1]):
                    _on_stream(order, 2 + engine[e], position, stream)
                _make_copy(order, rows, copies, i, position, stream)
            elif kind == ENCODE or kind == DECODE:
                _on_stream(order, stream, position, stream)
                _make_copy(order, rows, copies, i, position, stream)
                order.holds_workspace[i] = rows.workspace_bytes[i] > 0
                if order.holds_workspace[i] and not rows.retired[i]:
                    _free(order, rows.target_memory[i], position, total)
            elif kind == RELEASE:
                _release(order, rows, copies, i, position, stream, total)
            elif kind == WAIT:
                _on_stream(order, stream, position, stream)
            elif kind == LEND:
                _allocate(order, memory, position, stream)
            elif kind == RECLAIM:
                lend = rows.after[i]
                if lend >= 0:
                    _after(order, step * length + lend, position, stream)
                for other in range(max(lend, 0), i):
                    if rows.kind[other] == WAIT:
                        _after(order, step * length + other, position, stream)
                        _free(order, memory, step * length + other, total)
            else:
                after = step * length + rows.after[i]
                _after(order, after, position, stream)
                if kind == RETIRE and order.holds_workspace[rows.after[i]]:
                    coded = rows.kind[rows.after[i]] == ENCODE or rows.kind[rows.after[i]] == DECODE
                    _free(order, rows.target_memory[rows.after[i]] if coded else memory, after, total)
