"""One step of a schedule on real arrays: a worker per stream and device, in list order.

Workers dispatch and go on: JAX orders what follows through the arrays. A worker waits where the list demands it: for
room (semantics 5.1), for events and collectives, for its copy engine and links, and before it donates an array that
something else still reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tmojax.execute.admission import Admission
from tmojax.execute.codecs import Recoding
from tmojax.execute.collectives import AllReduce, Meeting
from tmojax.execute.file_store import FileCopy, FileStore
from tmojax.execute.host_pool import HostPool
from tmojax.execute.joined import Segment, Segments
from tmojax.execute.ledger import Ledger
from tmojax.execute.lists import RECODINGS, TRANSFERS, Change, Copy, Node, PreparedList
from tmojax.execute.tokens import Abort, Token, run_workers
from tmojax.problem import PLAIN, Kind, Phase, Problem, Schedule, TensorKind

Array = Any


@dataclass(frozen=True, eq=False)
class Prepared:
    """What every step of a schedule shares. `segments` [device]: its compute instructions.

    `array_bytes` [device][tensor]: bytes of the array that a tensor is. `reductions`: by name of the collective.
    `recodings` [device]: {instruction: codec} of every encode and decode; `encoded_bytes`: by (device, tensor, form).
    `stores` [device][memory]: where the list of a
    device puts copies in a host memory or on a drive, None for device memories, which have a JAX sharding in
    `place_of` [memory].
    """

    problem: Problem
    schedule: Schedule
    lists: tuple[PreparedList, ...]
    array_bytes: tuple[tuple[int, ...], ...]
    segments: Segments
    reductions: Mapping[str, AllReduce]
    recodings: tuple[Mapping[int, Recoding], ...]
    encoded_bytes: Mapping[tuple[int, int, int], int]
    stores: tuple[tuple[HostPool | FileStore | None, ...], ...]
    place_of: tuple[Any, ...]


@dataclass(eq=False)
class Outcome:
    """What a step leaves besides the copies in the table.

    `results`: (device, micro-batch, position among the results of the traced step) -> value. `gradients`: (device,
    tensor) -> value as the optimizer first sees it. `start_s`, `end_s` [device]: seconds per instruction from the start
    of the step, NaN where nothing was timed.
    """

    results: dict[tuple[int, int, int], np.ndarray]
    gradients: dict[tuple[int, int], np.ndarray]
    start_s: list[np.ndarray]
    end_s: list[np.ndarray]


@dataclass(slots=True)
class _Scratch:
    """What a running segment holds besides its copies: bytes, arrays to delete, (micro-batch, position, array)."""

    size_bytes: int
    arrays: list[Array] = field(default_factory=list)
    results: list[tuple[int, int, Array]] = field(default_factory=list)


class StepRun:
    """State of one running step. `table`: every copy and its array; persistent copies stay in it from step to step."""

    def __init__(self, prepared: Prepared, table: dict[Copy, Array], measure: bool, keep_gradients: bool) -> None:
        self.prepared, self.table = prepared, table
        self.problem, self.schedule = prepared.problem, prepared.schedule
        self.measure, self.keep_gradients = measure, keep_gradients
        self.abort = Abort()
        self.tokens = [{index: Token(self.abort) for index in one.nodes} for one in prepared.lists]
        self.segment_of: list[dict[int, Segment]] = [{} for _ in prepared.lists]
        for device, segments in enumerate(prepared.segments):
            for segment in segments:
                token = Token(self.abort)  # one, because who knows that it is complete may delete its array
                self.tokens[device].update(dict.fromkeys(segment.instructions, token))
                self.segment_of[device].update(dict.fromkeys(segment.instructions, segment))
        self.writer: dict[Copy, Token] = {}
        self.scratch: list[dict[int, _Scratch]] = [{} for _ in prepared.lists]
        self.admission = Admission(self.problem.machine, self.schedule, self.abort)
        self.ledgers = [
            Ledger(one, self._initial_bytes(one), self._waiter(device), self._freer(device))
            for device, one in enumerate(prepared.lists)
        ]
        self.meetings: dict[tuple[str, int], Meeting] = {}
        for collective in self.problem.workload.collectives:
            for micro_batch in range(self.problem.workload.micro_batches):
                self.meetings[collective.name, micro_batch] = Meeting(
                    prepared.reductions[collective.name], collective.devices, self.abort
                )
        self.signals = {e: at for one in prepared.lists for e, at in one.signals.items()}
        lengths = [len(rows) for rows in self.schedule.lists]
        self.outcome = Outcome({}, {}, [np.full(n, np.nan) for n in lengths], [np.full(n, np.nan) for n in lengths])
        self.begin = 0.0

    def run(self) -> Outcome:
        """Run all lists to their ends. Raises what a worker raised."""
        works = [self._worker(one.device, nodes) for one in self.prepared.lists for nodes in one.workers().values()]
        self.begin = time.perf_counter()
        run_workers(self.abort, works)
        for ledger in self.ledgers:
            ledger.settle_all()
        for device, left in enumerate(self.scratch):
            for first in list(left):
                self._drop_scratch(device, first)  # of segments that nothing is freed after
        for tokens in self.tokens:
            for token in tokens.values():
                token.wait_complete()
        return self.outcome

    def _worker(self, device: int, nodes: list[Node]) -> Callable[[], None]:
        def work() -> None:
            for node in nodes:
                self.abort.check()
                self._step(device, node)

        return work

    def _step(self, device: int, node: Node) -> None:
        tokens = self.tokens[device]
        if node.kind is Kind.COMPUTE:
            segment = self.segment_of[device][node.index]
            if segment.nodes[0] is node:
                self._await(device, segment)
                self._compute(device, segment)
            return
        self._await(device, node)
        if node.kind is Kind.WAIT:
            signaller, after = self.signals[node.event]
            if after in self.tokens[signaller]:
                self.tokens[signaller][after].wait_complete()
            else:
                self.ledgers[signaller].settle(after)
            tokens[node.index].start()
        elif node.kind is Kind.COLLECTIVE:
            self._collective(device, node)
        elif node.kind in RECODINGS:
            self._recode(device, node)
        else:
            self._transfer(device, node)
        if self.measure and node.kind not in TRANSFERS:
            self._ended(device, node)

    def _await(self, device: int, work: Node | Segment) -> None:
        tokens = self.tokens[device]
        for index in work.after_start:
            tokens[index].wait_started()
        for index in (*work.after_end, *(work.after_start if self.measure else ())):
            tokens[index].wait_complete()

    def _now_s(self) -> float:
        return time.perf_counter() - self.begin

    def _started(self, device: int, node: Node) -> None:
        if self.measure:
            self.outcome.start_s[device][node.index] = self._now_s()

    def _ended(self, device: int, node: Node) -> None:
        self.tokens[device][node.index].wait_complete()
        self.outcome.end_s[device][node.index] = self._now_s()

    # --- instructions ------------------------------------------------------------------------------------------

    def _compute(self, device: int, segment: Segment) -> None:
        program, first = segment.compiled, segment.nodes[0]
        memory = self.problem.machine.devices[device].memory
        self.ledgers[device].make_room(memory, segment.position, segment.instructions)
        if self.keep_gradients:
            for node in segment.nodes:
                self._note_gradients(device, node)
        operands = [self.table[device, *instance, memory, PLAIN] for instance in program.inputs]
        updated = [(device, *instance, memory, PLAIN) for instance in program.updates]
        for copy in updated:
            self._before_donation(copy)
        created = {copy for node in segment.nodes for copy in node.creates}
        dropped: set[Copy] = set()
        if len(segment.nodes) == 1:  # several return only what is wanted, and overwrite nothing
            for copy, kept in zip(first.writes, first.kept, strict=True):
                if not kept:
                    dropped.add(copy)
                elif copy not in created:
                    self.table.pop(copy).delete()
        written = [(device, *instance, memory, PLAIN) for instance in program.writes]
        size_bytes = program.workspace_bytes + sum(map(self._bytes, dropped))
        new_bytes = sum(self._bytes(copy) for copy in written if copy in created)
        self.ledgers[device].allocate(memory, segment.position, size_bytes + new_bytes)
        scratch = _Scratch(size_bytes)
        start_s = self._now_s()
        outputs = program.executable(*operands)
        token = self.tokens[device][first.index]
        for copy, array in zip((*updated, *written), outputs, strict=False):
            if copy in dropped:
                scratch.arrays.append(array)
                continue
            old = self.table.get(copy)
            if old is not None and not old.is_deleted():
                scratch.arrays.append(old)  # an update that the compiler did not make in place
            self._put(copy, array, token)
        results = outputs[len(updated) + len(written) :]
        scratch.arrays += results
        if len(segment.nodes) > 1 or not first.again:
            scratch.results = [(*key, array) for key, array in zip(program.results, results, strict=True)]
        self.scratch[device][first.index] = scratch
        token.start(outputs[0] if outputs else None)
        if self.measure:
            token.wait_complete()
            self._share_time(device, segment, start_s, self._now_s())

    def _share_time(self, device: int, segment: Segment, start_s: float, end_s: float) -> None:
        """Nothing shows when one op of a program ends and the next begins: shares by the durations of the plan."""
        ops = self.problem.workload.program(device).ops
        weights = np.array([ops[node.op].duration_s for node in segment.nodes])
        weights = weights if weights.sum() > 0 else np.ones(len(weights))
        ends = start_s + (end_s - start_s) * np.cumsum(weights) / weights.sum()
        ends[-1] = end_s
        indices = list(segment.instructions)
        self.outcome.start_s[device][indices] = np.concatenate([[start_s], ends[:-1]])
        self.outcome.end_s[device][indices] = ends

    def _collective(self, device: int, node: Node) -> None:
        op = self.problem.workload.program(device).ops[node.op]
        reduction = self.prepared.reductions[op.collective]
        self._make_room(device, node)
        memory = self.problem.machine.devices[device].memory
        if node.allocates:
            self.scratch[device][node.index] = _Scratch(reduction.workspace_bytes)
            self.ledgers[device].allocate(memory, node.index, reduction.workspace_bytes)
        for copy in node.updates:
            self._before_donation(copy)
        meeting = self.meetings[op.collective, node.micro_batch]
        self._started(device, node)
        arrays = meeting.enter(device, [self.table[copy] for copy in node.updates])
        token = self.tokens[device][node.index]
        for copy, array in zip(node.updates, arrays, strict=True):
            self._put(copy, array, token)
        token.start(arrays[0] if arrays else None)

    def _recode(self, device: int, node: Node) -> None:
        (source,), (target,) = node.reads, node.writes
        self._make_room(device, node)
        recoding = self.prepared.recodings[device][node.index]
        if not node.creates:
            self._discard(device, target)
        scratch = _Scratch(recoding.workspace_bytes)
        self.ledgers[device].allocate(
            target[3], node.index, scratch.size_bytes + sum(map(self._bytes, node.creates))
        )  # fmt: skip
        self._started(device, node)
        array = (recoding.encode if node.kind is Kind.ENCODE else recoding.decode)(self.table[source])
        self.scratch[device][node.index] = scratch
        token = self.tokens[device][node.index]
        self._put(target, array, token)
        token.start(array)

    def _transfer(self, device: int, node: Node) -> None:
        (source,), (target,) = node.reads, node.writes
        self._make_room(device, node)
        self.admission.enter(device, node.index, source[3], target[3])
        try:
            if not node.creates:
                self._discard(device, target)
            else:
                self.ledgers[device].allocate(target[3], node.index, self._bytes(target))
            self._started(device, node)
            copied = self._copied(device, self.table[source], target[3])
            token = self.tokens[device][node.index]
            self._put(target, copied, token)
            token.start(None if isinstance(copied, FileCopy) else copied)
            self._ended(device, node)  # the engine is busy until then
        finally:
            self.admission.leave(source[3], target[3])

    def _copied(self, device: int, array: Array | FileCopy, memory: int) -> Array | FileCopy:
        store = self.prepared.stores[device][memory]
        content = array.read() if isinstance(array, FileCopy) else array
        if store is None:
            return jax.device_put(content, self.prepared.place_of[memory])
        return store.load(content) if isinstance(content, np.ndarray) else store.store(content)

    # --- memory ------------------------------------------------------------------------------------------------

    def _make_room(self, device: int, node: Node) -> None:
        for memory in node.allocates:
            self.ledgers[device].make_room(memory, node.index)

    def _put(self, copy: Copy, array: Array, token: Token) -> None:
        self.table[copy] = array
        self.writer[copy] = token

    def _before_donation(self, copy: Copy) -> None:
        """The token of a copy's writer needs its array; so it must be complete before the array is donated."""
        writer = self.writer.get(copy)
        if writer is not None:
            writer.wait_complete()

    def _discard(self, device: int, copy: Copy) -> None:
        array = self.table.pop(copy)
        store = self.prepared.stores[device][copy[3]]
        if store is not None:
            store.give_back(array)
        else:
            array.delete()

    def _bytes(self, copy: Copy) -> int:
        size = self.prepared.array_bytes[copy[0]][copy[1]]
        return size if copy[4] == PLAIN else self.prepared.encoded_bytes[copy[0], copy[1], copy[4]]

    def _initial_bytes(self, one: PreparedList) -> list[int]:
        used = [0] * len(self.problem.machine.memories)
        for copy in one.initial:
            used[copy[3]] += self.table[copy].nbytes
        return used

    def _waiter(self, device: int) -> Callable[[int], None]:
        return lambda index: self.tokens[device][index].wait_complete()

    def _freer(self, device: int) -> Callable[[Change], int]:
        segment_of = self.segment_of[device]

        def free(change: Change) -> int:
            firsts = {segment_of[i].nodes[0].index if i in segment_of else i for i in change.after_end}
            freed = sum(self._drop_scratch(device, first) for first in firsts)
            copy = change.copy
            if copy is None or any(copy in segment_of[i].inside for i in change.after_end if i in segment_of):
                return freed  # what is inside of a segment is among its scratch
            self._discard(device, copy)
            return freed + self._bytes(copy)

        return free

    def _drop_scratch(self, device: int, index: int) -> int:
        """Free what a complete segment, collective or codec holds besides its copies; returns the bytes."""
        scratch = self.scratch[device].pop(index, None)
        if scratch is None:
            return 0
        for micro_batch, position, array in scratch.results:
            self.outcome.results[device, micro_batch, position] = np.array(array)
        for array in scratch.arrays:
            array.delete()
        return scratch.size_bytes

    def _note_gradients(self, device: int, node: Node) -> None:
        program = self.problem.workload.program(device)
        if program.ops[node.op].phase is not Phase.OPTIMIZER:
            return
        for copy in (*node.reads, *node.updates):
            if program.tensors[copy[1]].kind is TensorKind.GRADIENT and copy in self.table:
                self.outcome.gradients.setdefault((device, copy[1]), np.array(self.table[copy]))
