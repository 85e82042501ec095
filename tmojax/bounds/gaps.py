"""What is idle when, on one device, read so that nothing is assumed that a valid schedule could avoid.

A *slot* is a compute op of a micro-batch, in order. Collectives are not slots; step ops are slots of the last
micro-batch, where they run. A *gap* is a stretch of slots `start < slot < end` in which a tensor instance is touched by
no slot although its content is used again at slot `end`. At the moment at which the op of such a slot starts, the
instance is in device memory, or it has left and comes back by a copy or by a recomputation before `end`
(docs/bounds.md, section 2).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise

import numpy as np

from tmojax.problem import Action, Lifetime, Problem

# Encoding a tensor that spares less than this share of the memory costs nothing in the bound: one column less.
FEW_BYTES_SHARE = 5e-4


class Host(IntEnum):
    """What brings the content of a gap to the host."""

    COPY_OUT = 0  # one copy out of the version, between its last change and its first absence, inside the micro-batch
    SHARED = 1  # a host copy that exists anyway
    PER_STEP = 2  # at least one copy out per step, at any time
    PER_MICRO_BATCH = 3  # at least one copy out per micro-batch, at any time


@dataclass(frozen=True, eq=False)
class Gaps:
    """Arrays of one micro-batch of one device. Q slots, I gaps, S resting tensors.

    slot_op [Q], slot_s [Q] (launch overhead included), step_slot [Q]: step ops. touched_bytes [Q]: bytes of the
    distinct tensors that the op touches, and its workspace. first_allocation: slot. lives [I]: False for a tensor that
    only a recomputation could still use after `start`. tensor, size_bytes, start, end [I]: slots; start -1 is before
    the micro-batch, end Q after it (STATE). made [I]: slot after which a copy out may begin. host [I]: `Host`. may_move
    [I]: moving is an allowed action (data inputs come from the host in any case). producer [I]: slot whose op can write
    it again if `may_recompute`, else -1. whole [I]: what comes in again in the gap is all of the tensor: the op before
    it has written or updated it, or the op behind it updates it, for which slices do not do. run_end [I]: slot from
    whose start on the content is that of a collective, which no run of the producer gives. inputs[slot]: tensors that
    the op of a recomputable slot reads and that might have died. last_use [tensors]: last slot that touches it, -1 for
    none.

    resting, resting_bytes [S]: STATE that no slot touches but the step does, where it may leave. dirty [tensors]: STATE
    that the step updates; late [tensors]: STATE that only compute ops behind the last op of a micro-batch touch;
    late_change: first slot that changes such (Q for none). fixed_resting_bytes: where it may not leave.
    step_input_bytes, input_bytes: data inputs that cross to the device, per step and per micro-batch. may_compress:
    sizes, except touched_bytes, are those of the strongest codec; spare_bytes [I] and resting_spare_bytes [S] are what
    a plain copy takes beyond that, where it is not few. encode_s_per_byte, decode_s_per_byte: what the device takes at
    least per plain byte, beside codec_launch_s for each tensor.
    """

    slot_op: np.ndarray
    slot_s: np.ndarray
    step_slot: np.ndarray
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
    whole: np.ndarray
    run_end: np.ndarray
    inputs: dict[int, tuple[int, ...]]
    last_use: np.ndarray
    resting: np.ndarray
    resting_bytes: np.ndarray
    dirty: np.ndarray
    late: np.ndarray
    late_change: int
    fixed_resting_bytes: int
    may_compress: bool
    spare_bytes: np.ndarray
    resting_spare_bytes: np.ndarray
    encode_s_per_byte: float
    decode_s_per_byte: float
    codec_launch_s: float
    input_bytes: int
    step_input_bytes: int

    def idle_bytes(self) -> np.ndarray:
        """[Q]: bytes of the gaps of living tensors around each slot, plain; these are what may be away there."""
        change = np.zeros(len(self.slot_op) + 1, np.int64)
        plain_bytes = self.size_bytes + self.spare_bytes
        np.add.at(change, self.start[self.lives] + 1, plain_bytes[self.lives])
        np.add.at(change, self.end[self.lives], -plain_bytes[self.lives])
        return np.cumsum(change)[:-1]

    def needed_bytes(self) -> np.ndarray:
        """[Q]: bytes that each slot would find in memory if nothing left and everything were plain."""
        resting_bytes = int(self.resting_bytes.sum() + self.resting_spare_bytes.sum())
        return self.touched_bytes + self.idle_bytes() + resting_bytes + self.fixed_resting_bytes


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


def find_gaps(problem: Problem, device: int, *, last: bool = False) -> Gaps:
    """Read the gaps of one device in the default order, in the last micro-batch with its step ops, or in any other
    one. Tensors with an alias group take part only where they are touched."""
    program = problem.workload.program(device)
    tensors, ops = program.tensors, program.ops
    slot_op = [i for i, op in enumerate(ops) if not op.collective and (last or not op.step_op)]
    slot_of = {op: slot for slot, op in enumerate(slot_op)}
    touches: list[list[int]] = [[] for _ in tensors]
    changes: list[list[int]] = [[] for _ in tensors]  # slots that write or update the tensor
    changed_each_time = np.zeros(len(tensors), bool)  # by an op of every micro-batch
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
                changed_each_time[tensor] |= not op.step_op

    has_host_copy = set(program.inputs)
    rows = _Rows()
    for tensor, spec in enumerate(tensors):
        if spec.alias_group or not touches[tensor]:
            continue
        state = spec.lifetime is Lifetime.STATE
        if state:
            head = (Host.PER_MICRO_BATCH if changed_each_time[tensor]
                    else Host.PER_STEP if updated_at_all[tensor] else Host.SHARED)  # fmt: skip
            if touches[tensor][0] > 0:
                rows.add(tensor, -1, touches[tensor][0], -1, head)
            if touches[tensor][-1] < len(slot_op) - 1:
                # What changed in the last micro-batch and is not there at its end has been copied out before.
                made = changes[tensor][-1] if last and changes[tensor] else -1
                rows.add(tensor, touches[tensor][-1], len(slot_op), touches[tensor][-1] if made < 0 else made,
                         head if made < 0 else Host.COPY_OUT)  # fmt: skip
        old = Host.PER_STEP if state and updated_at_all[tensor] and not changed_each_time[tensor] else Host.SHARED
        _inner_gaps(rows, tensor, touches[tensor], changes[tensor], old)

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
    late = _only_updated(program)
    crossing = [t for t in program.inputs if touched_at_all[t]]
    per_step = [t for t in crossing if tensors[t].lifetime is Lifetime.STEP or not touches[t]]
    size = np.array([_least_bytes(problem, spec.size_bytes) for spec in tensors], np.int64)
    spare = np.array([spec.size_bytes for spec in tensors], np.int64) - size
    spare[spare < FEW_BYTES_SHARE * problem.capacity_bytes(device)] = 0
    # With peers, another device could do the work.
    codecs = problem.machine.codecs if may_compress(problem) and Action.PEER not in problem.actions else ()
    return Gaps(
        slot_op=np.array(slot_op, np.int64),
        slot_s=np.array([ops[i].duration_s + launch_s for i in slot_op]),
        step_slot=np.array([ops[i].step_op for i in slot_op], bool),
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
        whole=np.array(
            [
                start in changes[t] or (end < len(slot_op) and t in ops[slot_op[end]].updates)
                for t, start, end in zip(rows.tensor, rows.start, rows.end, strict=True)
            ],
            bool,
        ),
        run_end=_run_end(program, rows, slot_op, last),
        inputs=inputs,
        last_use=np.array([slots[-1] if slots else -1 for slots in touches], np.int64),
        resting=np.array(resting, np.int64),
        resting_bytes=size[resting],
        dirty=updated_at_all,
        late=late,
        late_change=min((slot_of[i] for i in slot_op if late[list(ops[i].updates)].any()), default=len(slot_op)),
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
        spare_bytes=spare[tensor] if len(tensor) else np.zeros(0, np.int64),
        resting_spare_bytes=spare[resting],
        encode_s_per_byte=min((1.0 / codec.encode_bytes_per_s for codec in codecs), default=0.0),
        decode_s_per_byte=min((1.0 / codec.decode_bytes_per_s for codec in codecs), default=0.0),
        codec_launch_s=launch_s if codecs else 0.0,
        input_bytes=int(sum(size[t] for t in crossing if t not in per_step)),
        step_input_bytes=int(sum(size[t] for t in per_step)),
    )


def may_compress(problem: Problem) -> bool:
    return Action.COMPRESS in problem.actions and bool(problem.machine.codecs)


def _least_bytes(problem: Problem, size_bytes: int) -> int:
    """The fewest bytes that a tensor takes while nothing touches it, in any slices."""
    codecs = problem.machine.codecs if may_compress(problem) else ()
    return min([size_bytes, *(size_bytes * codec.numerator // codec.denominator for codec in codecs)])


def _inner_gaps(rows: _Rows, tensor: int, touches: list[int], changes: list[int], old: Host) -> None:
    """Gaps between two touches in one micro-batch. old: what brings a version to the host that is older than the
    micro-batch."""
    for begin, end in pairwise(touches):
        if end - begin > 1:
            version = max((slot for slot in changes if slot <= begin), default=-1)
            rows.add(tensor, begin, end, version, old if version == -1 else Host.COPY_OUT)


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


def _only_updated(program) -> np.ndarray:
    """[tensors]: STATE without an alias group that compute ops behind the last op of a micro-batch touch, and nothing
    else."""
    end = max((i for i, op in enumerate(program.ops) if not op.step_op and not op.collective), default=-1)
    late = np.array([t.lifetime is Lifetime.STATE and not t.alias_group for t in program.tensors], bool)
    touched = np.zeros(len(late), bool)
    for index, op in enumerate(program.ops):
        used = [*op.reads, *op.writes, *op.updates]
        touched[used] = True
        if index <= end or op.collective:
            late[used] = False
    return late & touched


def _run_end(program, rows: _Rows, slot_op: list[int], last: bool) -> np.ndarray:
    """[I]: the first slot that is certain to start after a collective has changed the tensor of a gap inside it: one
    that touches what this collective, or a later one of the stream, changes. Else the end of the gap."""
    slot_of = {op: slot for slot, op in enumerate(slot_op)}
    place: dict[int, int] = {}  # of the last collective that changed a tensor, in the order of the stream
    behind: list[tuple[int, int]] = []  # (slot, place of the last collective that it waits for)
    changed: dict[int, list[tuple[int, int]]] = {}  # tensor -> (slots before, place) of collectives that change it
    count = 0
    for index, op in enumerate(program.ops):
        if op.collective and (last or not op.step_op):
            for tensor in (*op.writes, *op.updates):
                place[tensor] = count
                changed.setdefault(tensor, []).append((bisect_left(slot_op, index), count))
            count += 1
        elif index in slot_of:
            waits = max((place[t] for t in (*op.reads, *op.updates) if t in place), default=-1)
            if waits >= 0:
                behind.append((slot_of[index], waits))
    run_end = np.array(rows.end, np.int64)
    for i, (tensor, start, end) in enumerate(zip(rows.tensor, rows.start, rows.end, strict=True)):
        inside = [number for before, number in changed.get(tensor, ()) if start < before <= end]
        if inside:
            run_end[i] = min([end, *(slot for slot, waits in behind if slot > start and waits >= inside[0])])
    return run_end


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
