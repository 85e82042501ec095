"""One device's step as arrays: slots of a micro-batch, idle intervals, and what may be done in them.

This is the common reading of a workload for everything that *plans* (relaxation, bounds, ILPs, decode). The checker and
the simulator do not use it.

A *slot* is one op of a micro-batch, in order. A *candidate* is a micro-batch tensor with an idle interval: between its
last forward use and its first backward use, or, for a tensor that backward does not use itself, between its last
forward use and the first recomputation that could need it. Its idle slots are `idle_from < q < idle_to`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tmojax.problem.problem import Problem
from tmojax.problem.workload import Lifetime, Phase, Program

NEVER = 2**62  # behind all ops


@dataclass(frozen=True, eq=False)
class StepView:
    """Arrays describing the step of one device. Shapes: Q slots, I candidates, S state tensors, U step ops.

    slot_op [Q]: op index. slot_s [Q]: duration with launch overhead, seconds (0 for none). forward_end: first slot that
    is not forward. base_bytes [Q]: bytes resident at each slot of an interior micro-batch when every candidate is away
    in its whole idle interval: all STATE tensors, inputs of the whole step that micro-batch ops use, tensors in use,
    workspace. keep_bytes [Q]: the same when everything that backward uses is kept.

    tensor, size_bytes, idle_from, idle_to [I]; producer_slot [I]: slot that writes it. needed [I]: backward uses it
    (else it is only of use to recomputations). may_recompute, may_offload [I]: an op is not run again where
    what it reads or writes has been updated in place. same_until [I]: the op before which its producer can run again at
    the latest, for that reason (`NEVER`: none). recompute_inputs [I]: candidates that
    its producer reads.
    recompute_s [I]: duration of its producer. dependents [I]: candidates whose producer reads it.

    state_tensor, state_bytes [S]; state_resting [S]: touched by no micro-batch op, so idle from one update to the next.
    step_op [U], step_s [U]: step ops that are not collectives, in order. collective_op: step ops that are.
    """

    device: int
    micro_batches: int
    slot_op: np.ndarray
    slot_s: np.ndarray
    forward_end: int
    base_bytes: np.ndarray
    keep_bytes: np.ndarray
    tensor: np.ndarray
    size_bytes: np.ndarray
    idle_from: np.ndarray
    idle_to: np.ndarray
    producer_slot: np.ndarray
    needed: np.ndarray
    may_recompute: np.ndarray
    same_until: np.ndarray
    may_offload: np.ndarray
    recompute_s: np.ndarray
    recompute_inputs: tuple[tuple[int, ...], ...]
    dependents: tuple[tuple[int, ...], ...]
    state_tensor: np.ndarray
    state_bytes: np.ndarray
    state_resting: np.ndarray
    step_op: np.ndarray
    step_s: np.ndarray
    collective_op: np.ndarray

    @property
    def compute_s(self) -> float:
        """Seconds of compute of the whole step without recomputation: K micro-batches and the step ops."""
        return self.micro_batches * float(self.slot_s.sum()) + float(self.step_s.sum())


def view_step(problem: Problem, device: int) -> StepView:
    """Build the `StepView` of one device. Shapes and units as in `StepView`."""
    workload, program = problem.workload, problem.workload.program(device)
    launch_s = problem.machine.overheads.launch_s
    slot_op = [index for index, op in enumerate(program.ops) if not op.step_op]
    slot_of = {op: slot for slot, op in enumerate(slot_op)}
    forward_end = next(
        (slot for slot, op in enumerate(slot_op) if program.ops[op].phase is not Phase.FORWARD), len(slot_op)
    )
    uses: list[list[int]] = [[] for _ in program.tensors]
    used_by_step = np.zeros(len(program.tensors), bool)
    for index, op in enumerate(program.ops):
        for tensor in dict.fromkeys((*op.reads, *op.writes, *op.updates)):
            if op.step_op:
                used_by_step[tensor] = True
            else:
                uses[tensor].append(slot_of[index])

    candidates: list[int] = []
    idle_from: list[int] = []
    idle_to: list[int] = []
    needed: list[bool] = []
    for tensor, spec in enumerate(program.tensors):
        producer = program.producer[tensor]
        if spec.lifetime is not Lifetime.MICRO_BATCH or producer == -1 or used_by_step[tensor] or spec.alias_group:
            continue
        slots = uses[tensor]
        if slot_of[producer] < forward_end:
            before = [slot for slot in slots if slot < forward_end]
            after = slots[len(before) :]
            candidates.append(tensor)
            idle_from.append(before[-1])
            idle_to.append(after[0] if after else -1)
            needed.append(bool(after))
        elif len(slots) > 1:
            cumulative = np.concatenate([[0.0], np.cumsum([program.ops[op].duration_s for op in slot_op])])
            gaps = [cumulative[b] - cumulative[a + 1] for a, b in pairwise(slots)]
            longest = int(np.argmax(gaps))
            if slots[longest + 1] - slots[longest] > 1:
                candidates.append(tensor)
                idle_from.append(slots[longest])
                idle_to.append(slots[longest + 1])
                needed.append(True)

    index_of = {tensor: index for index, tensor in enumerate(candidates)}
    forward = [slot_of[program.producer[t]] < forward_end for t in candidates]
    recompute_inputs = tuple(
        tuple(
            index_of[u] for u in dict.fromkeys(program.ops[program.producer[t]].reads) if u in index_of and is_forward
        )
        for t, is_forward in zip(candidates, forward, strict=True)
    )
    dependents: list[list[int]] = [[] for _ in candidates]
    for index, inputs in enumerate(recompute_inputs):
        for source in inputs:
            dependents[source].append(index)
    # A tensor that only recomputations use is wanted when the first of them can run; later tensors are settled first.
    for index in sorted(range(len(candidates)), key=lambda i: -slot_of[program.producer[candidates[i]]]):
        if not needed[index]:
            wanted = [idle_to[d] for d in dependents[index] if idle_to[d] >= 0]
            idle_to[index] = min(wanted, default=-1)
    keep = [index for index in range(len(candidates)) if idle_to[index] >= 0]
    renumber = {old: new for new, old in enumerate(keep)}

    intervals = {t: (idle_from[i], idle_to[i], needed[i]) for i, t in enumerate(candidates)}
    base, kept = _profiles(problem, device, slot_of, uses, used_by_step, intervals)
    ops = [program.ops[program.producer[candidates[i]]] for i in keep]
    changers: dict[int, list[int]] = {}
    for index, op in enumerate(program.ops):
        for tensor in op.updates:
            changers.setdefault(tensor, []).append(index)
    same_until = [_same_until(program, program.producer[candidates[i]], changers) for i in keep]
    state = [t for t, spec in enumerate(program.tensors) if spec.lifetime is Lifetime.STATE]
    step_ops = [i for i, op in enumerate(program.ops) if op.step_op and not op.collective]
    return StepView(
        device=device,
        micro_batches=workload.micro_batches,
        slot_op=np.array(slot_op, np.int64),
        slot_s=np.array([program.ops[op].duration_s + launch_s for op in slot_op]),
        forward_end=forward_end,
        base_bytes=base,
        keep_bytes=kept,
        tensor=np.array([candidates[i] for i in keep], np.int64),
        size_bytes=np.array([program.tensors[candidates[i]].size_bytes for i in keep], np.int64),
        idle_from=np.array([idle_from[i] for i in keep], np.int64),
        idle_to=np.array([idle_to[i] for i in keep], np.int64),
        producer_slot=np.array([slot_of[program.producer[candidates[i]]] for i in keep], np.int64),
        needed=np.array([needed[i] for i in keep], bool),
        may_recompute=np.array(
            [
                op.recomputable and forward[i] and slot_op[idle_to[i]] <= until
                for i, op, until in zip(keep, ops, same_until, strict=True)
            ],
            bool,
        ),
        same_until=np.array(same_until, np.int64),
        may_offload=np.array([idle_to[i] - idle_from[i] > 1 for i in keep], bool),
        recompute_s=np.array([op.duration_s + launch_s for op in ops]),
        recompute_inputs=tuple(tuple(renumber[j] for j in recompute_inputs[i] if j in renumber) for i in keep),
        dependents=tuple(tuple(renumber[j] for j in dependents[i] if j in renumber) for i in keep),
        state_tensor=np.array(state, np.int64),
        state_bytes=np.array([program.tensors[t].size_bytes for t in state], np.int64),
        state_resting=np.array([not uses[t] for t in state], bool),
        step_op=np.array(step_ops, np.int64),
        step_s=np.array([program.ops[i].duration_s + launch_s for i in step_ops]),
        collective_op=np.array([i for i, op in enumerate(program.ops) if op.collective], np.int64),
    )


def _same_until(program: Program, index: int, changers: dict[int, list[int]]) -> int:
    """The op before which another run of op `index` still reads, and brings back, the versions of the first run.
    changers: per tensor, the ops that update it in place. What they changed before the first run, it has read already;
    in a step of several micro-batches, those of the next one run behind all slots of this one."""
    op = program.ops[index]
    if op.updates:
        return -1
    later = [other for t in (*op.reads, *op.writes) for other in changers.get(t, ()) if other > index]
    return min(later, default=NEVER)


def _profiles(problem, device, slot_of, uses, used_by_step, intervals) -> tuple[np.ndarray, np.ndarray]:
    """(base_bytes, keep_bytes) per slot; an alias group counts once, with its largest member, while any of it lives."""
    program = problem.workload.program(device)
    slots = len(slot_of)
    change = np.zeros((2, slots + 1), np.int64)
    groups: dict[object, list[int]] = {}
    for tensor, spec in enumerate(program.tensors):
        if spec.lifetime is Lifetime.MICRO_BATCH and uses[tensor]:
            groups.setdefault(spec.alias_group or tensor, []).append(tensor)
        elif spec.lifetime is Lifetime.STATE:
            change[:, 0] += spec.size_bytes
        elif uses[tensor]:
            # An input of the whole step, which only a single micro-batch brings in late or lets go early.
            single = problem.workload.micro_batches == 1
            change[:, uses[tensor][0] if single else 0] += spec.size_bytes
            change[:, uses[tensor][-1] + 1 if single and not used_by_step[tensor] else slots] -= spec.size_bytes
    for members in groups.values():
        size = max(program.tensors[t].size_bytes for t in members)
        first = min(uses[t][0] for t in members)
        last = max(slots - 1 if used_by_step[t] else uses[t][-1] for t in members)
        change[:, first] += size
        change[:, last + 1] -= size
        idle = intervals.get(members[0])
        if idle is not None and idle[2]:
            change[0, idle[0] + 1] -= size
            change[0, idle[1]] += size
    profile = np.cumsum(change[:, :slots], axis=1)
    workspace = np.array([program.ops[op].workspace_bytes for op in slot_of], np.int64)
    return profile[0] + workspace, profile[1] + workspace
