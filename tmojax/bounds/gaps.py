"""What is idle when, on one device, read so that nothing is assumed that a valid schedule could avoid.

A *slot* is a compute op of a micro-batch, in order; collectives and step ops are not slots. A *gap* is a stretch of
slots `start < slot < end` in which a tensor instance is touched by no slot although its content is used again at slot
`end`. At the moment at which the op of such a slot starts, the instance is in device memory, or it has left and comes
back by a copy or by a recomputation before `end` (docs/bounds.md, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise

import numpy as np

from tmojax.problem import Action, Lifetime, Problem


class Host(IntEnum):
    """What brings the content of a gap to the host."""

    COPY_OUT = 0  # one copy out of the version, between its last change and its first absence, inside the micro-batch
    SHARED = 1  # a host copy that exists anyway
    PER_STEP = 2  # at least one copy out per step, at any time
    PER_MICRO_BATCH = 3  # at least one copy out per micro-batch, at any time


@dataclass(frozen=True, eq=False)
class Gaps:
    """Arrays of one device. Q slots, I gaps, S resting tensors.

    slot_op [Q], slot_s [Q] (launch overhead included). touched_bytes [Q]: bytes of the distinct tensors that the op
    touches, and its workspace. first_allocation: slot. lives [I]: False for a tensor that only a recomputation could
    still use after `start`. tensor, size_bytes, start, end [I]: slots; start -1 is before the micro-batch, end Q
    after it (STATE). made [I]: slot after which a copy out may begin. host [I]: `Host`. may_move [I]: moving is an
    allowed action (data inputs come from the host in any case). producer [I]: slot whose op can write it again if
    `may_recompute`, else -1. inputs[slot]: tensors that the op of a recomputable slot reads and that might have died.
    last_use [tensors]: last slot that touches it, -1 for none.

    resting_bytes, resting_dirty [S]: STATE that no slot touches but the step does, where it may leave; resting_late
    [S]: only step ops of the compute stream behind the last slot touch it; resting_changed_s, resting_left_s [S]: least
    seconds from the end of the last slot to that of its last update, and from its first use to the end of the step;
    fixed_resting_bytes: where it may not leave. step_input_bytes, input_bytes: data inputs that cross to the device,
    per step and per micro-batch. may_compress: sizes, except touched_bytes, are those of the strongest codec.
    """

    slot_op: np.ndarray
    slot_s: np.ndarray
    touched_bytes: np.ndarray
    first_allocation: int
    lives: np.ndarray
    tensor: np.ndarray
    size_bytes: np.ndarray
    start: np.ndarray
    end: np.ndarray
    made: np.ndarray
    host: np.ndarray
    may_move: np.ndarray
    producer: np.ndarray
    inputs: dict[int, tuple[int, ...]]
    last_use: np.ndarray
    resting_bytes: np.ndarray
    resting_dirty: np.ndarray
    resting_late: np.ndarray
    resting_changed_s: np.ndarray
    resting_left_s: np.ndarray
    fixed_resting_bytes: int
    may_compress: bool
    input_bytes: int
    step_input_bytes: int

    def idle_bytes(self) -> np.ndarray:
        """[Q]: bytes of the gaps of living tensors around each slot; these are what may be away there."""
        change = np.zeros(len(self.slot_op) + 1, np.int64)
        np.add.at(change, self.start[self.lives] + 1, self.size_bytes[self.lives])
        np.add.at(change, self.end[self.lives], -self.size_bytes[self.lives])
        return np.cumsum(change)[:-1]

    def needed_bytes(self) -> np.ndarray:
        """[Q]: bytes that each slot would find in memory if nothing left."""
        return self.touched_bytes + self.idle_bytes() + int(self.resting_bytes.sum()) + self.fixed_resting_bytes


@dataclass
class _Rows:
    tensor: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    host: list[Host] = field(default_factory=list)
    lives: list[bool] = field(default_factory=list)

    def add(self, tensor: int, start: int, end: int, made: int, host: Host, lives: bool = True) -> None:
        for name, value in (
            ("tensor", tensor),
            ("start", start),
            ("end", end),
            ("made", made),
            ("host", host),
            ("lives", lives),
        ):
            getattr(self, name).append(value)


def find_gaps(problem: Problem, device: int) -> Gaps:
    """Read the gaps of one device in the default order. Tensors with an alias group take part only where they are
    touched."""
    program = problem.workload.program(device)
    tensors, ops = program.tensors, program.ops
    slot_op = [i for i, op in enumerate(ops) if not op.step_op and not op.collective]
    slot_of = {op: slot for slot, op in enumerate(slot_op)}
    touches: list[list[int]] = [[] for _ in tensors]
    changes: list[list[int]] = [[] for _ in tensors]  # slots that write or update the tensor
    touched_at_all = np.zeros(len(tensors), bool)
    updated_at_all = np.zeros(len(tensors), bool)
    for index, op in enumerate(ops):
        for tensor in dict.fromkeys((*op.reads, *op.writes, *op.updates)):
            touched_at_all[tensor] = True
            if index in slot_of:
                touches[tensor].append(slot_of[index])
        updated_at_all[list(op.updates)] = True
        if index in slot_of:
            for tensor in (*op.writes, *op.updates):
                changes[tensor].append(slot_of[index])

    has_host_copy = set(program.inputs)
    rows = _Rows()
    for tensor, spec in enumerate(tensors):
        if spec.alias_group or not touches[tensor]:
            continue
        state = spec.lifetime is Lifetime.STATE
        if state:
            head = (Host.PER_MICRO_BATCH if changes[tensor]
                    else Host.PER_STEP if updated_at_all[tensor] else Host.SHARED)  # fmt: skip
            if touches[tensor][0] > 0:
                rows.add(tensor, -1, touches[tensor][0], -1, head)
            if touches[tensor][-1] < len(slot_op) - 1:
                rows.add(tensor, touches[tensor][-1], len(slot_op), touches[tensor][-1], head)
        _inner_gaps(rows, tensor, touches[tensor], changes[tensor], state and bool(updated_at_all[tensor]))

    recompute = Action.RECOMPUTE in problem.actions
    producer_slot = [
        slot_of.get(program.producer[t], -1) if program.producer[t] != -1 else -1 for t in range(len(tensors))
    ]

    def can_rerun(slot: int) -> bool:
        return recompute and slot >= 0 and ops[slot_op[slot]].recomputable and not ops[slot_op[slot]].updates

    inputs: dict[int, tuple[int, ...]] = {}
    if recompute:
        _dead_gaps(rows, program, touches, changes, slot_op, producer_slot, can_rerun, has_host_copy, inputs)

    tensor = np.array(rows.tensor, np.int64)
    # A later version than the one that the producer wrote comes from an update in place, which cannot run again.
    producer = np.array([made if made == producer_slot[t] and can_rerun(made) else -1
                         for t, made in zip(rows.tensor, rows.made, strict=True)], np.int64)  # fmt: skip
    moves = bool({Action.OFFLOAD, Action.PEER} & problem.actions)
    launch_s = problem.machine.overheads.launch_s
    # Without the action, STATE that no op changes may still start in host memory and be copied in when it is used.
    clean = np.array([spec.lifetime is Lifetime.STATE for spec in tensors], bool) & ~updated_at_all
    resting = [t for t, spec in enumerate(tensors) if spec.lifetime is Lifetime.STATE and not touches[t]
               and touched_at_all[t] and not spec.alias_group and (moves or clean[t])]  # fmt: skip
    late, changed_s, left_s = _update_section(program, resting, slot_op, launch_s)
    crossing = [t for t in program.inputs if touched_at_all[t]]
    per_step = [t for t in crossing if tensors[t].lifetime is Lifetime.STEP or not touches[t]]
    size = np.array([_least_bytes(problem, spec.size_bytes) for spec in tensors], np.int64)
    return Gaps(
        slot_op=np.array(slot_op, np.int64),
        slot_s=np.array([ops[i].duration_s + launch_s for i in slot_op]),
        touched_bytes=np.array([_touched_bytes(program, i) for i in slot_op], np.int64),
        first_allocation=_first_allocation(program, slot_op),
        lives=np.array(rows.lives, bool),
        tensor=tensor,
        size_bytes=size[tensor] if len(tensor) else np.zeros(0, np.int64),
        start=np.array(rows.start, np.int64),
        end=np.array(rows.end, np.int64),
        made=np.array(rows.made, np.int64),
        host=np.array(rows.host, np.int64),
        may_move=np.array([moves or t in has_host_copy or bool(clean[t]) for t in rows.tensor], bool),
        producer=producer,
        inputs=inputs,
        last_use=np.array([slots[-1] if slots else -1 for slots in touches], np.int64),
        resting_bytes=size[resting],
        resting_dirty=updated_at_all[resting],
        resting_late=late,
        resting_changed_s=changed_s,
        resting_left_s=left_s,
        fixed_resting_bytes=int(
            sum(
                size[t]
                for t in range(len(tensors))
                if tensors[t].lifetime is Lifetime.STATE
                and not touches[t]
                and touched_at_all[t]
                and not tensors[t].alias_group
            )
            - size[resting].sum()
        ),
        may_compress=may_compress(problem),
        input_bytes=int(sum(size[t] for t in crossing if t not in per_step)),
        step_input_bytes=int(sum(size[t] for t in per_step)),
    )


def may_compress(problem: Problem) -> bool:
    return Action.COMPRESS in problem.actions and bool(problem.machine.codecs)


def _least_bytes(problem: Problem, size_bytes: int) -> int:
    """The fewest bytes that a tensor takes while nothing touches it, in any slices."""
    codecs = problem.machine.codecs if may_compress(problem) else ()
    return min([size_bytes, *(size_bytes * codec.numerator // codec.denominator for codec in codecs)])


def _inner_gaps(rows: _Rows, tensor: int, touches: list[int], changes: list[int], dirty_in_step: bool) -> None:
    """Gaps between two touches in one micro-batch."""
    for begin, end in pairwise(touches):
        if end - begin > 1:
            version = max((slot for slot in changes if slot <= begin), default=-1)
            host = Host.PER_STEP if dirty_in_step and not changes else Host.SHARED
            rows.add(tensor, begin, end, version, host if version == -1 else Host.COPY_OUT)


def _dead_gaps(rows, program, touches, changes, slot_op, producer_slot, can_rerun, has_host_copy, inputs) -> None:
    """Tensors that a recomputation may want after their last use: a gap from there to the last slot that could want it.

    `inputs` receives, for every slot that may run again, the tensors that it reads. Tensors of STATE, of alias groups
    and those that collectives write are taken to be available.
    """
    wanted_until: dict[int, int] = {}
    pending = [(t, end) for t, end in zip(rows.tensor, rows.end, strict=True)]
    while pending:
        tensor, end = pending.pop()
        slot = producer_slot[tensor]
        if not can_rerun(slot):
            continue
        if slot not in inputs:
            inputs[slot] = tuple(
                t for t in dict.fromkeys(program.ops[slot_op[slot]].reads)
                if program.tensors[t].lifetime is Lifetime.MICRO_BATCH and not program.tensors[t].alias_group
                and (producer_slot[t] >= 0 or t in has_host_copy)
            )  # fmt: skip
        for source in inputs[slot]:
            if touches[source][-1] < end - 1 and wanted_until.get(source, -1) < end:
                wanted_until[source] = end
                pending.append((source, end))
    for tensor, end in sorted(wanted_until.items()):
        start = touches[tensor][-1]
        made = max((slot for slot in changes[tensor] if slot <= start), default=-1)
        rows.add(tensor, start, end, made, Host.COPY_OUT if made >= 0 else Host.SHARED, lives=False)


def _update_section(program, resting: list[int], slot_op: list[int], launch_s: float):
    """(late, changed_s, left_s) of the resting tensors, as in `Gaps`."""
    end = slot_op[-1] if slot_op else -1
    late = np.ones(len(resting), bool)
    changed_s, left_s = np.zeros(len(resting)), np.zeros(len(resting))
    section = [op for op in program.ops[end + 1 :] if not op.collective]
    ends = np.cumsum([op.duration_s + launch_s for op in section])
    for place, tensor in enumerate(resting):
        users = [op for op in program.ops if tensor in (*op.reads, *op.writes, *op.updates)]
        late[place] = all(op in section for op in users)
        if late[place]:
            mine = [i for i, op in enumerate(section) if tensor in (*op.reads, *op.writes, *op.updates)]
            updates = [i for i in mine if tensor in section[i].updates]
            changed_s[place] = ends[updates[-1]] if updates else 0.0
            left_s[place] = ends[-1] - ends[mine[0]] + section[mine[0]].duration_s + launch_s
    return late, changed_s, left_s


def _first_allocation(program, slot_op: list[int]) -> int:
    """The first slot whose op is certain to allocate: from its start on, the limit of memory has been checked."""
    for slot, index in enumerate(slot_op):
        op = program.ops[index]
        if op.workspace_bytes or any(
            program.tensors[t].size_bytes and not program.tensors[t].alias_group for t in op.writes
        ):
            return slot
    return len(slot_op)


def _touched_bytes(program, op: int) -> int:
    spec = program.ops[op]
    storages: dict[object, int] = {}
    for tensor in (*spec.reads, *spec.writes, *spec.updates):
        key = program.tensors[tensor].alias_group or tensor
        storages[key] = max(storages.get(key, 0), program.tensors[tensor].size_bytes)
    return sum(storages.values()) + spec.workspace_bytes
