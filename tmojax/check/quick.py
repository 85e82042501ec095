"""The quick path of the checker: proves the usual kind of schedule valid in compiled code, or says that it cannot tell.

It handles schedules of plain whole copies in which every list uses its own tensors, without aliases, loans or turns on
links, and whose lists can also be executed strictly in list order. It never reports a violation: at the first thing
that is unusual or wrong it gives up, and the detailed walk decides. So a mistake here could only accept what is wrong;
tests hold both paths to the same reports.

No graph is built. Inside a list everything waits only for earlier instructions of the list (semantics 4, 5.1), so if
the lists can be executed in list order, with waits and collectives respected, there is no cycle (section 7).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from tmojax.check.rules import CheckReport
from tmojax.check.static import EXECUTIONS, TRANSFERS, DeviceTable, Static
from tmojax.problem.schedule import PLAIN, Kind, LinkPolicyKind, Schedule

_COMPUTE, _COLLECTIVE, _OFFLOAD, _PREFETCH = (
    int(Kind.COMPUTE), int(Kind.COLLECTIVE), int(Kind.OFFLOAD), int(Kind.PREFETCH),
)  # fmt: skip
_RELEASE, _RETIRE, _SIGNAL, _WAIT = int(Kind.RELEASE), int(Kind.RETIRE), int(Kind.SIGNAL), int(Kind.WAIT)
_HANDLED = (_COMPUTE, _COLLECTIVE, _OFFLOAD, _PREFETCH, _RELEASE, _RETIRE, _SIGNAL, _WAIT)
_LARGEST = 5
_MOST_ENTRIES = 100_000_000  # tensor instances times memories, over all lists: of the tables of versions
_ABSENT, _UNWRITTEN = -3, -2


def _compiled(function: Callable[..., Any]) -> Any:
    """Compile, and keep the machine code on disk where a cache directory can be written."""
    try:
        return numba.njit(cache=True)(function)
    except RuntimeError:
        return numba.njit(function)


@_compiled
def _walk(kinds, ops, batches, tensors, sources, targets, afters, retired, sequence, op_start, op_tensor, op_role,
          op_workspace, op_step, op_again, per_batch, sizes, is_state, content, newest, own, used, peak,
          peak_position, log_position, log_item, log_bytes):  # fmt: skip
    """Walk one list. Returns the number of entries in the log of the own memory, or -1: not proved.

    `content[instance, memory]`: version, or _ABSENT. `op_tensor[op_start[o]:op_start[o + 1]]`: reads, updates and
    writes of op o, in this order, with `op_role` 0, 1 and 2. Run r = op * K + micro-batch makes version r + 1.
    """
    micro_batches = newest.shape[0] // per_batch.shape[0]
    ran = np.zeros(op_workspace.shape[0] * micro_batches, dtype=np.bool_)
    found = np.full(op_tensor.shape[0] * micro_batches, _ABSENT, dtype=np.int64)  # versions that first runs read
    held = np.zeros(kinds.shape[0], dtype=np.int64)
    turn = entries = 0
    for index in range(kinds.shape[0]):
        kind = kinds[index]
        if kind == _COMPUTE or kind == _COLLECTIVE:
            op, k = ops[index], batches[index]
            at = micro_batches - 1 if op_step[op] else k
            run = op * micro_batches + k
            first = not ran[run]
            if first:
                if turn >= sequence.shape[0] or sequence[turn] != run:
                    return -1
                turn += 1
                ran[run] = True
            elif kind == _COLLECTIVE or not op_again[op]:
                return -1
            scratch, allocates = op_workspace[op], False
            for place in range(op_start[op], op_start[op + 1]):
                tensor, role = op_tensor[place], op_role[place]
                instance = tensor * micro_batches + at * per_batch[tensor]
                if role < 2:
                    version = content[instance, own]
                    if version == _ABSENT or version != newest[instance]:
                        return -1
                    slot = place * micro_batches + k
                    if first:
                        found[slot] = version
                    elif found[slot] != version:
                        return -1
                    continue
                if content[instance, own] == _ABSENT:
                    allocates = True
                    used[own] += sizes[tensor, own]
                    log_position[entries], log_item[entries] = index, instance
                    log_bytes[entries] = sizes[tensor, own]
                    entries += 1
                elif not first:
                    scratch += sizes[tensor, own]
                    continue
                if first:
                    newest[instance] = run + 1
                content[instance, own] = run + 1
            for place in range(op_start[op], op_start[op + 1]):
                if op_role[place] == 1:
                    instance = op_tensor[place] * micro_batches + at * per_batch[op_tensor[place]]
                    newest[instance] = content[instance, own] = run + 1
            if scratch > 0:
                allocates = True
                used[own] += scratch
                log_position[entries], log_item[entries], log_bytes[entries] = index, -1 - index, scratch
                entries += 1
            if used[own] < 0:  # beyond 64 bits: workspace that is held may add up to more than all tensors
                return -1
            if allocates and used[own] > peak[own]:
                peak[own], peak_position[own] = used[own], index
            if retired[index]:
                held[index] = scratch
            elif scratch > 0:
                used[own] -= scratch
                log_position[entries], log_item[entries], log_bytes[entries] = index, -1 - index, -scratch
                entries += 1
        elif kind == _OFFLOAD or kind == _PREFETCH:
            tensor, source, target = tensors[index], sources[index], targets[index]
            instance = tensor * micro_batches + batches[index]
            version = content[instance, source]
            if version == _ABSENT or version != newest[instance]:
                return -1
            if content[instance, target] == _ABSENT:
                used[target] += sizes[tensor, target]
                if target == own:
                    log_position[entries], log_item[entries] = index, instance
                    log_bytes[entries] = sizes[tensor, target]
                    entries += 1
                if used[target] < 0:
                    return -1
                if used[target] > peak[target]:
                    peak[target], peak_position[target] = used[target], index
            content[instance, target] = version
        elif kind == _RELEASE:
            tensor, memory = tensors[index], sources[index]
            instance = tensor * micro_batches + batches[index]
            version = content[instance, memory]
            if version == _ABSENT:
                return -1
            content[instance, memory] = _ABSENT
            used[memory] -= sizes[tensor, memory]
            if memory == own:
                log_position[entries], log_item[entries] = index, instance
                log_bytes[entries] = -sizes[tensor, memory]
                entries += 1
            if is_state[tensor] and version == newest[instance]:
                left = False
                for other in range(content.shape[1]):
                    left |= content[instance, other] == version
                if not left:
                    return -1
        elif kind == _RETIRE:
            size = held[afters[index]]
            used[own] -= size
            log_position[entries], log_item[entries], log_bytes[entries] = index, -1 - afters[index], -size
            entries += 1
    return entries if turn == sequence.shape[0] else -1


def quick_report(static: Static, schedule: Schedule) -> CheckReport | None:
    """The report of a valid schedule, equal to that of the detailed check; None: not proved valid here.

    The schedule must have passed `check_shape`.
    """
    machine, devices = static.machine, range(len(static.devices))
    instances = sum(len(table.sizes) * table.micro_batches for table in static.devices)
    if instances * len(machine.memories) > _MOST_ENTRIES:
        return None
    if any(policy.kind is LinkPolicyKind.ORDER for policy in schedule.link_policies):
        return None
    if not all(_usual(static, device, schedule.lists[device]) for device in devices):
        return None
    if not _runs_in_list_order(static, schedule):
        return None
    programs = static.problem.workload.device_program
    one_of_each = dict(zip(programs, devices, strict=True))
    arrays = {program: _ProgramArrays(static, static.devices[d], schedule.order) for program, d in one_of_each.items()}
    lists = [_QuickList(static, schedule, device, arrays[programs[device]]) for device in devices]
    if not all(item.walk() for item in lists):
        return None
    names = [memory.name for memory in machine.memories]
    peaks = []
    for memory, spec in enumerate(machine.memories):
        using = static.owners[memory] if static.is_private(memory) else devices
        peak = sum(int(lists[device].peak[memory]) for device in using)
        if peak > static.available_bytes(memory) or 0 <= spec.pinned_limit_bytes < peak:
            return None
        peaks.append(peak)
    totals = [sum(int(item.initial_bytes[memory]) for item in lists) for memory in range(len(names))]
    return CheckReport(
        violations=(),
        peak_bytes=dict(zip(names, peaks, strict=True)),
        peak_position=tuple(item.peak_at for item in lists),
        largest_at_peak=tuple(item.largest() for item in lists),
        initial_bytes=dict(zip(names, totals, strict=True)),
        instructions=sum(len(rows) for rows in schedule.lists),
    )


def _usual(static: Static, device: int, rows: np.ndarray) -> bool:
    """Plain whole copies of own tensors, in the own memory or in shared ones, and nothing rare."""
    table, machine = static.devices[device], static.machine
    kinds = rows["kind"]
    moves = np.isin(kinds, TRANSFERS)
    copies = moves | (kinds == _RELEASE)
    allowed = np.array([m == table.memory or not static.is_private(m) for m in range(len(machine.memories))])
    ways = np.unique(np.stack((rows["memory"][moves], rows["to_memory"][moves])), axis=1).T.tolist()
    return bool(
        np.isin(kinds, _HANDLED).all()
        and not any(table.group)
        and (rows["form"][copies] == PLAIN).all()
        and (rows["parts"][copies] == 1).all()
        and np.isin(rows["owner"][copies], (-1, device)).all()
        and allowed[rows["memory"][copies]].all()
        and allowed[rows["to_memory"][moves]].all()
        and all(machine.has_route(source, target) for source, target in ways)
    )


def _runs_in_list_order(static: Static, schedule: Schedule) -> bool:
    """Can the lists be executed each in its own order, with waits and collectives respected?"""
    queues: list[list[tuple[int, object]]] = []
    signals: list[int] = []
    for device, rows in enumerate(schedule.lists):
        table = static.devices[device]
        queue: list[tuple[int, object]] = []
        for index in np.flatnonzero(np.isin(rows["kind"], (_SIGNAL, _WAIT, _COLLECTIVE))).tolist():
            kind, after = int(rows["kind"][index]), int(rows["after"][index])
            if kind == _COLLECTIVE:
                name, k = table.program.ops[rows["op"][index]].collective, int(rows["micro_batch"][index])
                if device not in static.problem.workload.collective(name).devices:
                    return False
                queue.append((kind, (name, k)))
                continue
            if kind == _SIGNAL:
                if not 0 <= after < index or rows["kind"][after] == _SIGNAL:
                    return False
                signals.append(int(rows["event"][index]))
            queue.append((kind, int(rows["event"][index])))
        queues.append(queue[::-1])
    if len(signals) != len(set(signals)):
        return False
    fired: set[object] = set()
    moved = True
    while moved and any(queues):
        moved = False
        for queue in queues:
            while queue and (queue[-1][0] == _SIGNAL or (queue[-1][0] == _WAIT and queue[-1][1] in fired)):
                kind, event = queue.pop()
                if kind == _SIGNAL:
                    fired.add(event)
                moved = True
        for head in {queue[-1] for queue in queues if queue and queue[-1][0] == _COLLECTIVE}:
            name, _ = head[1]  # type: ignore[misc]
            members = static.problem.workload.collective(name).devices
            if all(queues[device] and queues[device][-1] == head for device in members):
                for device in members:
                    queues[device].pop()
                moved = True
    return not any(queues)


class _ProgramArrays:
    """What the compiled walk reads of a program; devices that run the same share it."""

    def __init__(self, static: Static, table: DeviceTable, order: str) -> None:
        ops, memories = table.program.ops, len(static.machine.memories)
        self.sizes = np.empty((len(table.sizes), memories), dtype=np.int64)
        for memory in range(memories):
            self.sizes[:, memory] = [static.charged_bytes(memory, size) for size in table.sizes]
        self.per_micro_batch = np.array(table.per_micro_batch, dtype=np.int64)
        self.is_state = np.array(table.is_state, dtype=bool)
        touched = [group for op in ops for group in (op.reads, op.updates, op.writes)]
        counts = np.array([len(group) for group in touched], dtype=np.int64)
        self.writes = counts[2::3]
        self.op_start = np.concatenate(([0], np.cumsum(counts.reshape(-1, 3).sum(axis=1))))
        self.op_tensor = np.array([tensor for group in touched for tensor in group], dtype=np.int64)
        self.op_role = np.repeat(np.tile(np.arange(3), len(ops)), counts)
        self.workspace = np.array([op.workspace_bytes for op in ops], dtype=np.int64)
        self.step_op = np.array([op.step_op for op in ops], dtype=bool)
        self.recomputable = np.array([op.recomputable for op in ops], dtype=bool)
        runs = np.array(static.sequence(table.device, order), dtype=np.int64).reshape(-1, 2)
        self.sequence = runs[:, 0] * table.micro_batches + runs[:, 1]


class _QuickList:
    """Arrays of one list for the compiled walk, and what it found."""

    def __init__(self, static: Static, schedule: Schedule, device: int, arrays: _ProgramArrays) -> None:
        self._static, self._device, self._rows, self._arrays = static, device, schedule.lists[device], arrays
        self._table = table = static.devices[device]
        memories, count = len(static.machine.memories), table.micro_batches
        self._content = np.full((len(table.sizes) * count, memories), _ABSENT, dtype=np.int64)
        self._newest = np.full(len(self._content), _UNWRITTEN, dtype=np.int64)
        inputs = [t * count + k for t in sorted(table.inputs) for k in range(table.instance_count(t))]
        placed = [(p.tensor * count, memory) for p in schedule.initial[device] for memory in p.memories]
        # (instance, memory) of inputs and of STATE tensors at the start
        self._inputs = np.array([(instance, table.host_memory) for instance in inputs], dtype=np.int64).reshape(-1, 2).T
        self._placed = np.array(placed, dtype=np.int64).reshape(-1, 2).T
        self._start = np.concatenate((self._inputs, self._placed), axis=1)
        instance, memory = self._start
        self._content[instance, memory] = self._newest[instance] = 0
        self._start_bytes = arrays.sizes[instance // count, memory]
        self.initial_bytes = np.zeros(memories, dtype=np.int64)
        np.add.at(self.initial_bytes, memory, self._start_bytes)
        self.peak = self.initial_bytes.copy()
        self.peak_at = -1

    def walk(self) -> bool:
        """Is the list right by itself? Capacity is left to the caller."""
        static, table, rows = self._static, self._table, self._rows
        memories = range(self._content.shape[1])
        allowed = [memory == table.memory or not static.is_private(memory) for memory in memories]
        if not np.array(allowed)[self._start[1]].all():
            return False
        retires = np.flatnonzero(rows["kind"] == _RETIRE)
        after = rows["after"][retires]
        if ((after < 0) | (after >= retires)).any() or len(np.unique(after)) != len(after):
            return False
        if not np.isin(rows["kind"][after], (_COMPUTE, _COLLECTIVE)).all():
            return False
        retired = np.zeros(len(rows), dtype=bool)
        retired[after] = True
        entries, positions = self._run(retired)
        if entries < 0:
            return False
        self.peak_at = int(positions[table.memory])
        self._log = tuple(column[:entries] for column in self._log)
        return self._ends_right()

    def _run(self, retired: np.ndarray) -> tuple[int, np.ndarray]:
        arrays, rows = self._arrays, self._rows
        runs = np.isin(rows["kind"], EXECUTIONS)
        room = int(arrays.writes[rows["op"][runs]].sum()) + 2 * len(rows)
        self._log = tuple(np.empty(room, dtype=np.int64) for _ in range(3))
        positions = np.full(len(self.peak), -1, dtype=np.int64)
        columns = [np.ascontiguousarray(rows[name]) for name in
                   ("kind", "op", "micro_batch", "tensor", "memory", "to_memory", "after")]  # fmt: skip
        entries = _walk(
            *columns, retired, arrays.sequence, arrays.op_start, arrays.op_tensor, arrays.op_role, arrays.workspace,
            arrays.step_op, arrays.recomputable, arrays.per_micro_batch, arrays.sizes, arrays.is_state,
            self._content, self._newest, self._table.memory, self.initial_bytes.copy(), self.peak, positions,
            *self._log,
        )  # fmt: skip
        return entries, positions

    def _ends_right(self) -> bool:
        """STATE where it was, current; nothing else left but inputs in host memory (6.5)."""
        instance, memory = self._placed
        if (self._content[instance, memory] != self._newest[instance]).any():
            return False
        self._content[instance, memory] = _ABSENT
        self._content[self._inputs[0], self._inputs[1]] = _ABSENT
        return bool((self._content == _ABSENT).all())

    def largest(self) -> tuple[tuple[str, int], ...]:
        """The largest (name, bytes) in the device's memory at its fullest position."""
        table = self._table
        position, item, size = self._log
        # What the position allocates is there, what is freed behind it still is.
        kept = (position < self.peak_at) | ((position == self.peak_at) & (size > 0))
        own = self._start[1] == table.memory
        at_start, start_bytes = self._start[0][own], self._start_bytes[own]
        items, inverse = np.unique(np.concatenate((at_start, item[kept])).astype(np.int64), return_inverse=True)
        totals = np.zeros(len(items), dtype=np.int64)
        np.add.at(totals, inverse, np.concatenate((start_bytes, size[kept])).astype(np.int64))
        order = np.lexsort((items, -totals))[:_LARGEST]
        return tuple((self._name(int(items[i])), int(totals[i])) for i in order if totals[i] > 0)

    def _name(self, item: int) -> str:
        static, table, device = self._static, self._table, self._device
        if item < 0:
            index = -1 - item
            return f"scratch of {static.describe(device, index, self._rows[index])}"
        key = (device, *divmod(item, table.micro_batches), table.memory, PLAIN, 0, 1)
        return static.copy_name(key, device, with_memory=False)
