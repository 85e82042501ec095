"""The step of one device as the constraint model sees it: runs, storages with gaps, recomputations.

*Runs* are first executions in the workload's order, collectives included. A *store* is one tensor instance in device
memory (an alias group counts as one). A *gap* is an interval between two uses in which a store may be away; a *rerun*
is one op that may run a second time. Everything is an index into the lists of a `DeviceStep`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tmojax.problem import Action, Lifetime, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.unroll import LONG_GAP


class StoreKind(StrEnum):
    MADE = "made"  # an op of the step writes it
    INPUT = "input"  # comes from the host before its first use, always
    STATE = "state"  # lives across steps


@dataclass(frozen=True)
class Run:
    """op and micro_batch of a first execution; ticks: duration (0 of a collective, which has one for all devices).
    allocates: it has outputs or workspace."""

    op: int
    micro_batch: int
    ticks: int
    workspace_bytes: int
    collective: str
    allocates: bool


@dataclass(frozen=True)
class Gap:
    """before, after: runs that enclose it (-1: start of the step; number of runs: its end). written: run that last
    changed the store before it (-1: content of the step's start). content: gaps of a store with equal numbers hold the
    same version. clean: the host has that version anyway. needed: a run uses the store after it. copies, reruns: what
    is allowed. always: the store is away in any case (inputs). seam: the gap before the first or behind the last use of
    a state tensor that rests on the host."""

    store: int
    before: int
    after: int
    written: int
    content: int
    needed: bool
    copies: bool
    reruns: bool
    clean: bool = False
    always: bool = False
    seam: bool = False


@dataclass
class Store:
    """members: tensors of the storage (one, or an alias group). touches: runs that use it, in order. gaps: indices, in
    order. may_rest: state that may be on the host across the seam of steps. readers: reruns that read it."""

    kind: StoreKind
    members: tuple[int, ...]
    instance: int
    size_bytes: int
    touches: list[int]
    member_last: dict[int, int]
    gaps: list[int] = field(default_factory=list)
    may_rest: bool = False
    readers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Rerun:
    """Second execution of the op of `run`; it must end before run `until` changes one of its inputs (number of runs:
    nothing does). outputs: (store, gap that it can end or -1)."""

    run: int
    until: int
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class DeviceStep:
    device: int
    runs: list[Run]
    stores: list[Store]
    gaps: list[Gap]
    reruns: list[Rerun]

    def items(self) -> int:
        """How many intervals in time a model of this device has at most: runs, copies, reruns."""
        return len(self.runs) + 2 * len(self.gaps) + len(self.reruns)


def device_step(problem: Problem, view: StepView, device: int, ticks_of) -> DeviceStep:
    """Build the step of `device` (`view` may be that of an equal device). `ticks_of(seconds)` rounds up, to 1 at
    least."""
    return _Builder(problem, view, device, ticks_of).step


class _Builder:
    def __init__(self, problem: Problem, view: StepView, device: int, ticks_of) -> None:
        self.problem, self.view, self.device = problem, view, device
        self.workload, self.program = problem.workload, problem.workload.program(device)
        self.offload = Action.OFFLOAD in problem.actions
        self.step = DeviceStep(device, [], [], [], [])
        launch_s = problem.machine.overheads.launch_s
        for op_index, micro_batch in self.workload.sequence(device):
            op = self.program.ops[op_index]
            ticks = 0 if op.collective else ticks_of(op.duration_s + launch_s)
            allocates = bool(op.writes) or op.workspace_bytes > 0
            self.step.runs.append(Run(op_index, micro_batch, ticks, op.workspace_bytes, op.collective, allocates))
        self.run_of = {(run.op, run.micro_batch): index for index, run in enumerate(self.step.runs)}
        self._stores()
        self._candidates()
        self._state()
        if Action.RECOMPUTE in problem.actions:
            self._reruns()

    def _stores(self) -> None:
        """Storages, and where each is touched and changed."""
        self.store_of: dict[tuple[int, int], int] = {}
        self.changes: dict[int, list[int]] = {}
        groups: dict[tuple[object, int], int] = {}
        tensors, step = self.program.tensors, self.step

        def store(tensor: int, instance: int) -> int:
            spec = tensors[tensor]
            key = (spec.alias_group or tensor, instance)
            if key not in groups:
                kind = StoreKind.MADE if self.program.producer[tensor] >= 0 else StoreKind.INPUT
                kind = StoreKind.STATE if spec.lifetime is Lifetime.STATE else kind
                members = [t for t, s in enumerate(tensors) if s.alias_group and s.alias_group == spec.alias_group]
                members = tuple(members) or (tensor,)
                groups[key] = len(step.stores)
                size = max(tensors[t].size_bytes for t in members)
                step.stores.append(Store(kind, members, instance, size, [], {}))
            self.store_of[tensor, instance] = groups[key]
            return groups[key]

        for tensor, spec in enumerate(tensors):
            if spec.lifetime is Lifetime.STATE:
                store(tensor, 0)
        for index, run in enumerate(step.runs):
            op = self.program.ops[run.op]
            for tensor in dict.fromkeys((*op.reads, *op.writes, *op.updates)):
                instance = self.workload.instance(self.device, tensor, run.op, run.micro_batch)
                number = store(tensor, instance)
                touched = step.stores[number]
                if not touched.touches or touched.touches[-1] != index:
                    touched.touches.append(index)
                touched.member_last[tensor] = index
                if tensor in op.writes or tensor in op.updates:
                    self.changes.setdefault(number, []).append(index)
        for number, item in enumerate(step.stores):
            if item.kind is StoreKind.INPUT:
                self._gap(number, Gap(number, -1, item.touches[0], -1, 0, True, True, False, clean=True, always=True))

    def _gap(self, store: int, gap: Gap) -> int:
        self.step.stores[store].gaps.append(len(self.step.gaps))
        self.step.gaps.append(gap)
        return len(self.step.gaps) - 1

    def _candidates(self) -> None:
        """The idle interval of every micro-batch tensor that has one (that of the `StepView`)."""
        view, recompute = self.view, Action.RECOMPUTE in self.problem.actions
        for index, tensor in enumerate(view.tensor.tolist()):
            needed = bool(view.needed[index])
            for micro_batch in range(self.workload.micro_batches):
                number = self.store_of[tensor, micro_batch]
                before = self.run_of[int(view.slot_op[view.idle_from[index]]), micro_batch]
                after = self.run_of[int(view.slot_op[view.idle_to[index]]), micro_batch]
                changes = self.changes[number]
                copies = self.offload and bool(view.may_offload[index]) and (needed or recompute)
                reruns = recompute and bool(view.may_recompute[index]) and len(changes) == 1
                written = max(run for run in changes if run <= before)
                if copies or reruns:
                    self._gap(number, Gap(number, before, after, written, 0, needed, copies, reruns))

    def _state(self) -> None:
        """Long gaps of state that stays on the device across the seam, and state that may rest on the host."""
        if not self.offload:
            return
        resting = {int(t): bool(r) for t, r in zip(self.view.state_tensor, self.view.state_resting, strict=True)}
        shortest = max(2, int(len(self.view.slot_op) * LONG_GAP / 2))
        for number, store in enumerate(self.step.stores):
            if store.kind is not StoreKind.STATE or len(store.members) != 1:
                continue
            (tensor,) = store.members
            store.may_rest = resting[tensor]
            changes = self.changes.get(number, [])
            if store.may_rest and store.touches:
                self._gap(number, Gap(number, -1, store.touches[0], -1, -1, True, True, False, clean=True, seam=True))
            before = -1
            for run in store.touches:
                if run - max(before, 0) > shortest:
                    done = [change for change in changes if change <= before]
                    written = done[-1] if done else -1
                    self._gap(number, Gap(number, before, run, written, len(done), True, True, False))
                before = run
            if store.may_rest and store.touches:
                end = len(self.step.runs)
                written = changes[-1] if changes else -1
                self._gap(number, Gap(number, before, end, written, -2, False, True, False, not changes, seam=True))

    def _reruns(self) -> None:
        step = self.step
        gap_of = {step.gaps[gap].store: gap for gap in range(len(step.gaps)) if step.gaps[gap].reruns}
        for index, run in enumerate(step.runs):
            op = self.program.ops[run.op]
            if not op.recomputable or op.step_op or op.collective:
                continue

            def numbers(tensors, op_index=run.op, micro_batch=run.micro_batch):
                return tuple(
                    dict.fromkeys(
                        self.store_of[t, self.workload.instance(self.device, t, op_index, micro_batch)] for t in tensors
                    )
                )

            outputs = tuple((store, gap_of.get(store, -1)) for store in numbers(op.writes))
            if all(gap < 0 for _, gap in outputs):
                continue
            inputs = numbers(op.reads)
            later = [change for store in inputs for change in self.changes.get(store, ()) if change > index]
            for store in inputs:
                step.stores[store].readers.append(len(step.reruns))
            step.reruns.append(Rerun(index, min(later, default=len(step.runs)), inputs, outputs))
