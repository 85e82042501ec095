"""A schedule: one instruction list per device, plus link policies and the placement of persistent state.

An instruction list is a NumPy structured array (`INSTRUCTION`), so that simulator, checker and local search read it
without conversion. The meaning of every instruction is defined in docs/semantics.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

import numpy as np


class Kind(IntEnum):
    COMPUTE = 0
    OFFLOAD = 1
    PREFETCH = 2
    RELEASE = 3
    ENCODE = 4
    DECODE = 5
    COLLECTIVE = 6
    RETIRE = 7
    SIGNAL = 8
    WAIT = 9
    LEND = 10
    RECLAIM = 11


# Streams as named by `wait`: two fixed ones, then one per copy engine of the machine (2 + engine index).
COMPUTE_STREAM = 0
COMMUNICATION_STREAM = 1
FIRST_ENGINE_STREAM = 2

PLAIN = -1  # `form` of an unencoded copy; other forms are indices into Machine.codecs

# One row per instruction; -1 in fields that the kind does not use (parts: 1, size_bytes: 0).
#   compute, collective: op, micro_batch
#   offload, prefetch:   owner, tensor, micro_batch, form, part, parts, memory (source), to_memory (destination)
#   release:             owner, tensor, micro_batch, form, part, parts, memory
#   encode, decode:      owner, tensor, micro_batch, form (the codec), part, parts, memory
#   retire:              after (index of the instruction whose workspace is freed)
#   signal:              event, after (index; the event fires when that instruction is complete)
#   wait:                event, stream
#   lend:                size_bytes, to_device, event (number of the loan); the memory lent is the device's own
#   reclaim:             event (number of the loan)
# `owner` is the device in whose program `tensor` is defined; -1 means the device of the list.
INSTRUCTION = np.dtype(
    [
        ("kind", np.int8),
        ("op", np.int32),
        ("micro_batch", np.int32),
        ("owner", np.int32),
        ("tensor", np.int32),
        ("form", np.int32),
        ("part", np.int32),
        ("parts", np.int32),
        ("memory", np.int32),
        ("to_memory", np.int32),
        ("after", np.int32),
        ("event", np.int32),
        ("stream", np.int32),
        ("to_device", np.int32),
        ("size_bytes", np.int64),
    ]
)

# JSON rows carry exactly these fields, in this order, after the kind's name.
FIELDS: dict[Kind, tuple[str, ...]] = {
    Kind.COMPUTE: ("op", "micro_batch"),
    Kind.COLLECTIVE: ("op", "micro_batch"),
    Kind.OFFLOAD: ("owner", "tensor", "micro_batch", "form", "part", "parts", "memory", "to_memory"),
    Kind.PREFETCH: ("owner", "tensor", "micro_batch", "form", "part", "parts", "memory", "to_memory"),
    Kind.RELEASE: ("owner", "tensor", "micro_batch", "form", "part", "parts", "memory"),
    Kind.ENCODE: ("owner", "tensor", "micro_batch", "form", "part", "parts", "memory"),
    Kind.DECODE: ("owner", "tensor", "micro_batch", "form", "part", "parts", "memory"),
    Kind.RETIRE: ("after",),
    Kind.SIGNAL: ("event", "after"),
    Kind.WAIT: ("event", "stream"),
    Kind.LEND: ("size_bytes", "to_device", "event"),
    Kind.RECLAIM: ("event",),
}


def part_bytes(size_bytes: int, part: int, parts: int) -> int:
    """Bytes of slice `part` of `parts`: slices differ by at most one byte and add up to the whole."""
    return size_bytes * (part + 1) // parts - size_bytes * part // parts


class ListBuilder:
    """Collects the instructions of one device; every method returns the index of the instruction that it added."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def _add(self, kind: Kind, op=-1, micro_batch=-1, owner=-1, tensor=-1, form=PLAIN, part=0, parts=1, memory=-1,
             to_memory=-1, after=-1, event=-1, stream=-1, to_device=-1, size_bytes=0) -> int:  # fmt: skip
        self._rows.append((int(kind), op, micro_batch, owner, tensor, form, part, parts, memory, to_memory, after,
                           event, stream, to_device, size_bytes))  # fmt: skip
        return len(self._rows) - 1

    def compute(self, op: int, micro_batch: int) -> int:
        return self._add(Kind.COMPUTE, op=op, micro_batch=micro_batch)

    def collective(self, op: int, micro_batch: int) -> int:
        return self._add(Kind.COLLECTIVE, op=op, micro_batch=micro_batch)

    def offload(self, tensor: int, micro_batch: int, memory: int, to_memory: int, **copy: int) -> int:
        return self._add(
            Kind.OFFLOAD, tensor=tensor, micro_batch=micro_batch, memory=memory, to_memory=to_memory, **copy
        )

    def prefetch(self, tensor: int, micro_batch: int, memory: int, to_memory: int, **copy: int) -> int:
        return self._add(
            Kind.PREFETCH, tensor=tensor, micro_batch=micro_batch, memory=memory, to_memory=to_memory, **copy
        )

    def release(self, tensor: int, micro_batch: int, memory: int, **copy: int) -> int:
        return self._add(Kind.RELEASE, tensor=tensor, micro_batch=micro_batch, memory=memory, **copy)

    def encode(self, tensor: int, micro_batch: int, memory: int, form: int, **copy: int) -> int:
        return self._add(Kind.ENCODE, tensor=tensor, micro_batch=micro_batch, memory=memory, form=form, **copy)

    def decode(self, tensor: int, micro_batch: int, memory: int, form: int, **copy: int) -> int:
        return self._add(Kind.DECODE, tensor=tensor, micro_batch=micro_batch, memory=memory, form=form, **copy)

    def retire(self, after: int) -> int:
        return self._add(Kind.RETIRE, after=after)

    def signal(self, event: int, after: int) -> int:
        return self._add(Kind.SIGNAL, event=event, after=after)

    def wait(self, event: int, stream: int) -> int:
        return self._add(Kind.WAIT, event=event, stream=stream)

    def lend(self, size_bytes: int, to_device: int, loan: int) -> int:
        return self._add(Kind.LEND, size_bytes=size_bytes, to_device=to_device, event=loan)

    def reclaim(self, loan: int) -> int:
        return self._add(Kind.RECLAIM, event=loan)

    def build(self) -> np.ndarray:
        return np.array(self._rows, dtype=INSTRUCTION)


class LinkPolicyKind(StrEnum):
    FAIR = "fair"
    FCFS = "fcfs"
    PRIORITY = "priority"
    ORDER = "order"


@dataclass(frozen=True, slots=True)
class LinkPolicy:
    """Who may use a link. `fair` admits everybody (max-min shares); the others admit `slots` transfers at a time.

    `device_rank`: for `priority`, devices from first to last. `sequence`: for `order`, every transfer that uses the
    link as (device, instruction index), in the order in which they start.
    """

    kind: LinkPolicyKind = LinkPolicyKind.FAIR
    slots: int = 1
    device_rank: tuple[int, ...] = ()
    sequence: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the current copies of one STATE tensor are when a step starts, and again when it ends: memory indices."""

    tensor: int
    memories: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """What every planner produces.

    `lists[d]`: structured array of dtype INSTRUCTION for device d. `initial[d]`: placement of every STATE tensor of
    d's program. `link_policies`: one per link of the machine (empty: all fair). `order`: name of the op order that
    first executions follow.
    """

    lists: tuple[np.ndarray, ...]
    initial: tuple[tuple[Placement, ...], ...]
    link_policies: tuple[LinkPolicy, ...] = field(default=())
    order: str = "default"

    def same_as(self, other: Schedule) -> bool:
        return (
            len(self.lists) == len(other.lists)
            and all(np.array_equal(a, b) for a, b in zip(self.lists, other.lists, strict=True))
            and (self.initial, self.link_policies, self.order) == (other.initial, other.link_policies, other.order)
        )
