"""Dependencies inside one instruction list: stream order, hazards (4.2) and memory order (5.1) of docs/semantics.md.

One pass over the list. Everything that takes time runs on a stream, and streams are first in, first out; so "after a, b
and c of this stream" is "after the last of them". Two consequences keep the graph linear in the length of the list:
what an allocation waits for (5.1) is one instruction per memory and stream, and an edge that an earlier instruction of
the same stream already implies is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tmojax.simulate.jit import compiled

COMPUTE, OFFLOAD, PREFETCH, RELEASE, ENCODE, DECODE, COLLECTIVE, RETIRE, SIGNAL, WAIT, LEND, RECLAIM = range(12)


class Rows(NamedTuple):
    """The list, one entry per instruction. A key numbers the copies that the list can touch.

    `key`: the copy that a release frees, or that is read; `target_key`: the copy that a transfer, encode or decode
    writes. `route`: flow class of a transfer. `after`: of retire and signal; of a reclaim, its lend (-1: none).
    `stream`: the first one of the instruction, -1: none. `retired`: a `retire` of it is written. `workspace_bytes`: of
    encode and decode.
    """

    kind: NDArray[np.int64]
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

    `persistent`: survives a step. `resident`: there when the first step starts. Keys of one tensor instance stand
    together, variants x `memories` of them. `whole[v]`: for a plain slice, how much further (< 0) the key of the whole
    plain copy in the same memory is; 0 for that whole, 1 for encoded variants. `slices`: rows (n, how much further than
    the whole the first of n plain slices is).
    """

    store: NDArray[np.int64]
    persistent: NDArray[np.bool_]
    resident: NDArray[np.bool_]
    whole: NDArray[np.int64]
    slices: NDArray[np.int64]
    memories: int


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

    `edges`: rows (source, target). `counts`: edges, auxiliary nodes. `stream_of[p]`: first stream of position p.
    `tail`: last position on each stream. `known[s, u]`: last position on stream u that something on stream s waits for.
    `freed[m, s]`: last position on stream s that a release in memory m waits for. `chain[m]`: the same for accesses
    without a stream, as an auxiliary node. `writer`, `readers`: per store, since its last release; readers are lists in
    `entries`, rows (position, next entry). `resident`: per key; `stored`: resident copies per store. `ran`: op x
    micro-batch. `holds_workspace`: per instruction. `needs`: what one instruction waits for.
    """

    edges: NDArray[np.int64]
    counts: NDArray[np.int64]
    stream_of: NDArray[np.int64]
    tail: NDArray[np.int64]
    known: NDArray[np.int64]
    freed: NDArray[np.int64]
    chain: NDArray[np.int64]
    writer: NDArray[np.int64]
    readers: NDArray[np.int64]
    entries: NDArray[np.int64]
    resident: NDArray[np.bool_]
    stored: NDArray[np.int64]
    ran: NDArray[np.bool_]
    holds_workspace: NDArray[np.bool_]
    needs: NDArray[np.int64]


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
    touched = steps * (access_count + 2 * length) * (1 + int(copies.slices[:, 0].sum())) + 1
    capacity = 2 * touched + 6 * total
    while True:
        order = Order(
            np.empty((capacity, 2), np.int64), np.zeros(2, np.int64), np.tile(rows.stream, steps), np.full(streams, -1),
            np.full((streams, streams), -1), np.full((memories, streams), -1), np.full(memories, -1), np.full(keys, -1),
            np.full(keys, -1), np.empty((touched, 2), np.int64), np.zeros(keys, np.bool_), np.zeros(keys, np.int64),
            np.zeros((accesses.step_op.size, micro_batches), np.bool_), np.zeros(length, np.bool_),
            np.empty(2 * touched + total + 2 * streams, np.int64),
        )  # fmt: skip
        _order_list(rows, accesses, copies, order, steps, micro_batches - 1, memory, engine_ptr, engine)
        needed = int(order.counts[0])
        if needed <= capacity:
            return order.edges[:needed, 0], order.edges[:needed, 1], int(order.counts[1])
        capacity = needed


@compiled
def _order_list(rows, accesses, copies, order, steps, last_micro_batch, memory, engine_ptr, engine):
    # One function on purpose: a call that hands over a dozen arrays costs more than what it would do here.
    kinds, ops, micro_batches, keys, memories = rows.kind, rows.op, rows.micro_batch, rows.key, rows.memory
    target_keys, target_memories, routes, after = rows.target_key, rows.target_memory, rows.route, rows.after
    streams, retired, coding_bytes = rows.stream, rows.retired, rows.workspace_bytes
    access_ptr, access_tensor, op_bytes, step_op = (
        accesses.ptr, accesses.tensor, accesses.workspace_bytes, accesses.step_op
    )  # fmt: skip
    size_bytes, first_key, stride = accesses.size_bytes, accesses.key, accesses.stride
    store_of, persistent, resident_at_start = copies.store, copies.persistent, copies.resident
    whole, slices, memory_count = copies.whole, copies.slices, copies.memories
    edges, stream_of, tail, known = order.edges, order.stream_of, order.tail, order.known
    freed, chain, writer, readers, entries = order.freed, order.chain, order.writer, order.readers, order.entries
    resident, stored, ran, holds_workspace = order.resident, order.stored, order.ran, order.holds_workspace
    needs = order.needs
    length = kinds.size
    edge_count, entry_count, auxiliary_count = 0, 0, 0
    for step in range(steps):
        # Instances of a micro-batch or step are new in every step; persistent copies, and who used them, carry over.
        ran[:] = False
        stored[:] = 0
        for key in range(resident.size):
            if step == 0 or not persistent[key]:
                resident[key] = resident_at_start[key]
                writer[key] = -1
                readers[key] = -1
            if resident[key]:
                stored[store_of[key]] += 1

        for i in range(length):
            position = step * length + i
            kind, stream = kinds[i], streams[i]
            runs_op = kind == COMPUTE or kind == COLLECTIVE
            codes = kind == ENCODE or kind == DECODE
            transfers = kind == OFFLOAD or kind == PREFETCH
            need_count = 0
            frees_in = -1  # memory in which this instruction frees something

            # Hazards: `needs` collects earlier accesses in the way.
            if runs_op or codes or transfers:
                begin, update, write, end = 0, 1, 1, 2  # a copy: reads keys[i], writes target_keys[i]
                instance, workspace = 0, coding_bytes[i]
                first = True
                if runs_op:
                    op = ops[i]
                    begin, update, write, end = (
                        access_ptr[op, 0],
                        access_ptr[op, 1],
                        access_ptr[op, 2],
                        access_ptr[op, 3],
                    )
                    first = not ran[op, micro_batches[i]]
                    ran[op, micro_batches[i]] = True
                    instance = last_micro_batch if step_op[op] else micro_batches[i]
                    workspace = op_bytes[op]
                allocates = False
                for e in range(begin, end):
                    if runs_op:
                        tensor = access_tensor[e]
                        key = first_key[tensor] + instance * stride[tensor]
                        if e >= write and not first and resident[key]:
                            workspace += size_bytes[tensor]  # to scratch; the resident copy is not touched
                            continue
                    else:
                        key = keys[i] if e == begin else target_keys[i]
                    if e < update:
                        pieces = 1
                        if not resident[key]:  # 3.7: a slice is read from the whole, the whole from all its slices
                            further = whole[key // memory_count % whole.size]
                            if further < 0 and resident[key + further]:
                                key += further
                            for row in range(slices.shape[0] if further == 0 else 0):
                                complete = True
                                for piece in range(slices[row, 0]):
                                    complete = complete and resident[key + slices[row, 1] + piece * memory_count]
                                if complete:
                                    pieces = slices[row, 0]
                                    key += slices[row, 1]
                                    break
                        for piece in range(pieces):
                            store = store_of[key + piece * memory_count]
                            needs[need_count] = writer[store]
                            need_count += 1
                            entry = readers[store]
                            while entry >= 0 and (stream < 0 or stream_of[entries[entry, 0]] != stream):
                                entry = entries[entry, 1]
                            if entry >= 0:
                                entries[entry, 0] = position  # the earlier reader on this stream is done by then
                            else:
                                entries[entry_count, 0] = position
                                entries[entry_count, 1] = readers[store]
                                readers[store] = entry_count
                                entry_count += 1
                        continue
                    store = store_of[key]
                    needs[need_count] = writer[store]
                    need_count += 1
                    entry = readers[store]
                    while entry >= 0:
                        needs[need_count] = entries[entry, 0]
                        need_count += 1
                        entry = entries[entry, 1]
                    readers[store] = -1
                    writer[store] = position
                    if e >= write and not resident[key]:
                        resident[key] = True
                        stored[store] += 1
                        allocates = allocates or stored[store] == 1
                where = memory if runs_op else target_memories[i]
                if allocates or workspace > 0:
                    for other in range(tail.size):
                        needs[need_count] = freed[where, other]
                        need_count += 1
                    needs[need_count] = chain[where]
                    need_count += 1
                holds_workspace[i] = workspace > 0
                if workspace > 0 and not retired[i]:
                    frees_in = where
            elif kind == RELEASE:
                frees_in = memories[i]
                store = store_of[keys[i]]
                needs[need_count] = writer[store]
                need_count += 1
                entry = readers[store]
                while entry >= 0:
                    needs[need_count] = entries[entry, 0]
                    need_count += 1
                    entry = entries[entry, 1]
                if resident[keys[i]]:
                    resident[keys[i]] = False
                    stored[store] -= 1
                if stored[store] == 0:  # what is written here next is another allocation, which waits by 5.1
                    writer[store] = -1
                    readers[store] = -1
            elif kind == LEND:
                for other in range(tail.size):
                    needs[need_count] = freed[memory, other]
                    need_count += 1
                needs[need_count] = chain[memory]
                need_count += 1
            elif kind == RECLAIM:
                frees_in = memory
                if after[i] >= 0:
                    needs[need_count] = step * length + after[i]
                    need_count += 1
                for other in range(max(after[i], 0), i):
                    if kinds[other] == WAIT:
                        needs[need_count] = step * length + other
                        need_count += 1
            elif kind != WAIT:  # retire, signal
                needs[need_count] = step * length + after[i]
                need_count += 1
                if kind == RETIRE and holds_workspace[after[i]]:
                    target = kinds[after[i]]
                    frees_in = target_memories[after[i]] if target == ENCODE or target == DECODE else memory

            # Streams. These edges stay even if implied: they are what makes a stream a queue.
            if stream >= 0:
                begin, end = (engine_ptr[routes[i]], engine_ptr[routes[i] + 1]) if transfers else (0, 1)
                for e in range(begin, end):
                    on = 2 + engine[e] if transfers else stream
                    last = tail[on]
                    tail[on] = position
                    if last >= 0:
                        if edge_count < edges.shape[0]:
                            edges[edge_count, 0] = last
                            edges[edge_count, 1] = position
                        edge_count += 1
                        other = stream_of[last]
                        known[stream, other] = max(known[stream, other], last)

            # Edges for the needs, unless the stream implies them.
            for n in range(need_count):
                source = needs[n]
                if source < 0 or source == position:
                    continue
                other = stream_of[source] if source < stream_of.size else -1
                if other >= 0 and stream >= 0:
                    if other == stream or known[stream, other] >= source:
                        continue
                    known[stream, other] = source
                if edge_count < edges.shape[0]:
                    edges[edge_count, 0] = source
                    edges[edge_count, 1] = position
                edge_count += 1

            # Frees: later allocations wait for what a release waits for, or for this instruction if it ends workspace.
            if frees_in >= 0:
                if runs_op or codes:
                    needs[0] = position
                    need_count = 1
                for n in range(need_count):
                    source = needs[n]
                    if source < 0:
                        continue
                    other = stream_of[source]
                    if other >= 0:
                        freed[frees_in, other] = max(freed[frees_in, other], source)
                        continue
                    node = stream_of.size + auxiliary_count
                    auxiliary_count += 1
                    for previous in (chain[frees_in], source):
                        if previous >= 0:
                            if edge_count < edges.shape[0]:
                                edges[edge_count, 0] = previous
                                edges[edge_count, 1] = node
                            edge_count += 1
                    chain[frees_in] = node
    order.counts[0] = edge_count
    order.counts[1] = auxiliary_count
