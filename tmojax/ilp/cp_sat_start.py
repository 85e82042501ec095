"""From any planner's schedule to a solution of the constraint model, for hints and for improvement.

The lists say what happens and in which order; the exact simulation says who was first on the shared links. With those
orders kept, everything is placed as early as the model's fixed rates allow. Of a schedule whose links serve one after
the other (`fcfs`, `priority`, `order`) the result is no later than its own simulation, apart from rounding and from
turns that copies and collectives have to take in the model; where they share a link fairly, it may be later.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tmojax.ilp.cp_sat_links import IN, OUT
from tmojax.ilp.cp_sat_placing import Item, NotInModelError, Placing
from tmojax.ilp.cp_sat_step import Gap, StoreKind
from tmojax.ilp.cp_sat_times import DeviceTimes, Model
from tmojax.problem import PLAIN, Kind, Schedule
from tmojax.simulate import simulate


@dataclass
class _Access:
    """Items that wrote and read a copy since its last write, and all of them since it was allocated."""

    writes: set[int] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)
    every: set[int] = field(default_factory=set)


def read_schedule(model: Model, schedule: Schedule) -> tuple[DeviceTimes, ...]:
    """The solution that does what `schedule` does. Raises NotInModelError."""
    if schedule.order != "default":
        raise NotInModelError(f"op order {schedule.order!r}; the model has the default order")
    reader = _Reader(model, schedule)
    return reader.times()


class _Reader:
    def __init__(self, model: Model, schedule: Schedule) -> None:
        self.model, self.schedule = model, schedule
        self.simulation = simulate(model.problem, schedule)
        self.items: list[Item] = []
        self.exchanges: dict[tuple[str, int], int] = {}
        self.frees: list[list[tuple[int, set[int]]]] = []  # per device: (row, items that the free waits for)
        self.lists = [_List(self, device) for device in range(len(model.steps))]
        for item in self.lists:
            item.read()

    def times(self) -> tuple[DeviceTimes, ...]:
        Placing(self.model, self.items, self.frees).run()
        for item in self.items:
            kind = item.key[0]
            if kind == "exchange":
                for device, step in enumerate(self.model.steps):
                    for index, run in enumerate(step.runs):
                        if (run.collective, run.micro_batch) == item.key[1:]:
                            self.lists[device].times.runs[index] = item.start
            elif kind == "run":
                self.lists[item.device].times.runs[item.key[1]] = item.start
            elif kind == "rerun":
                self.lists[item.device].times.reruns[item.key[1]] = item.start
            else:
                times = self.lists[item.device].times
                (times.out if kind == "out" else times.into)[item.key[1]] = item.start
        return tuple(item.times for item in self.lists)


class _List:
    """Reads one list."""

    def __init__(self, reader: _Reader, device: int) -> None:
        self.reader, self.device = reader, device
        self.model, self.step = reader.model, reader.model.steps[device]
        spec = self.model.problem.machine.devices[device]
        self.memory, self.host = spec.memory, spec.host_memory
        self.program = self.model.problem.workload.program(device)
        self.times = DeviceTimes([-1] * len(self.step.runs))
        self.store_of = {(t, s.instance): n for n, s in enumerate(self.step.stores) for t in s.members}
        self.run_of = {(run.op, run.micro_batch): index for index, run in enumerate(self.step.runs)}
        self.rerun_of = {item.run: number for number, item in enumerate(self.step.reruns)}
        self.done = 0
        self.resident: set[int] = set()
        self.restored_by: dict[int, int] = {}  # store -> gap that a rerun has just ended, until something reads it
        self.pending: dict[int, int] = {}  # state store -> item of a copy out that no gap is known for yet
        self.device_copies: dict[int, _Access] = {}
        self.host_copies: dict[int, _Access] = {}
        self.stream: dict[object, int] = {}
        self.frees: list[tuple[int, set[int]]] = []
        self.collective_tail: set[int] = set()
        reader.frees.append(self.frees)

    def read(self) -> None:
        for placement in self.reader.schedule.initial[self.device]:
            store = self.store_of[placement.tensor, 0]
            if placement.memories == (self.host,) and self.step.stores[store].may_rest:
                self.times.resting.add(store)
            elif placement.memories != (self.memory,):
                raise NotInModelError("the placement of persistent state")
            else:
                self.resident.add(store)
        for row, fields in enumerate(self.reader.schedule.lists[self.device]):
            kind = Kind(fields["kind"])
            if kind in (Kind.COMPUTE, Kind.COLLECTIVE):
                self._run(row, int(fields["op"]), int(fields["micro_batch"]))
            elif kind in (Kind.OFFLOAD, Kind.PREFETCH):
                self._copy(row, fields)
            elif kind is Kind.RELEASE:
                self._release(row, fields)
            elif kind is Kind.RETIRE:
                continue  # it is the end of an op, which the placing knows
            elif kind not in (Kind.SIGNAL, Kind.WAIT):
                raise NotInModelError(f"instruction {kind.name.lower()}")
        if self.pending:
            raise NotInModelError("state that leaves and does not come back")
        self._retires()

    def _retires(self) -> None:
        """Workspace is freed where the list says so, or directly behind its instruction."""
        rows = self.reader.schedule.lists[self.device]
        written = {int(r["after"]): n for n, r in enumerate(rows) if r["kind"] == Kind.RETIRE}
        for number, item in enumerate(self.reader.items):
            for device, row in item.rows:
                if device == self.device and item.key[0] in ("run", "rerun", "exchange"):
                    run = self.step.runs[self._run_index(item, row)]
                    if run.workspace_bytes or (item.key[0] == "rerun" and row in written):
                        self.frees.append((written.get(row, row), {number}))
        self.frees.sort(key=lambda free: free[0])

    def _run_index(self, item: Item, row: int) -> int:
        fields = self.reader.schedule.lists[self.device][row]
        return self.run_of[int(fields["op"]), int(fields["micro_batch"])]

    def _item(self, row: int, key: tuple, ticks: int, order_s: float, streams: list[object]) -> int:
        items = self.reader.items
        if key[0] == "exchange" and key[1:] in self.reader.exchanges:
            number = self.reader.exchanges[key[1:]]
        else:
            number = len(items)
            items.append(Item(key, self.device, ticks, order_s))
            if key[0] == "exchange":
                self.reader.exchanges[key[1:]] = number
        items[number].rows.append((self.device, row))
        for stream in streams:
            if stream in self.stream:
                items[number].need.add(self.stream[stream])
            self.stream[stream] = number
        return number

    def _run(self, row: int, op_index: int, micro_batch: int) -> None:
        index = self.run_of.get((op_index, micro_batch), -1)
        op, run = self.program.ops[op_index], self.step.runs[index]
        again = index < self.done
        start_s = float(self.reader.simulation.start_s[self.device][row])
        if again:
            if index not in self.rerun_of or self.rerun_of[index] in self.times.reruns:
                raise NotInModelError(f"op {op.name!r} runs more often than the model lets it")
            key = ("rerun", self.rerun_of[index])
            self.times.reruns[self.rerun_of[index]] = -1
            number = self._item(row, key, run.ticks, start_s, ["compute"])
        elif run.collective:
            key = ("exchange", run.collective, run.micro_batch)
            ticks = self.model.network.exchanges[run.collective].ticks
            number = self._item(row, key, ticks, start_s, ["communication"])
            if "compute" in self.stream:
                self.reader.items[number].after_start.add(self.stream["compute"])
        else:
            number = self._item(row, ("run", index), run.ticks, start_s, ["compute"])
            self.reader.items[number].after_start |= self.collective_tail
            self.collective_tail = set()
        item = self.reader.items[number]
        item.allocates = run.allocates
        stores = {t: self.store_of[t, self.model.problem.workload.instance(self.device, t, op_index, micro_batch)]
                  for t in (*op.reads, *op.writes, *op.updates)}  # fmt: skip
        for tensor in op.reads:
            self._touch(number, stores[tensor], writes=False)
            if run.collective:
                self._feeds(stores[tensor])
        for tensor in (*op.writes, *op.updates):
            store = stores[tensor]
            if again and store in self.resident:
                continue
            if again:
                gap = dict(self.step.reruns[self.rerun_of[index]].outputs).get(store, -1)
                if gap >= 0:
                    self.restored_by[store] = gap
            self._touch(number, store, writes=True)
            if run.collective and tensor in op.updates:
                self._feeds(store)
            self.resident.add(store)
        if not again:
            self.done = max(self.done, index + 1)
        if run.collective and run.allocates:
            self.collective_tail.add(number)

    def _feeds(self, store: int) -> None:
        """What a collective waits for has to start before the op behind the collective does."""
        copies = self.device_copies[store].writes
        self.collective_tail |= {n for n in copies if self.reader.items[n].key[0] in ("into", "rerun")}

    def _touch(self, number: int, store: int, *, writes: bool, on_host: bool = False) -> None:
        copies = self.host_copies if on_host else self.device_copies
        access = copies.setdefault(store, _Access())
        item = self.reader.items[number]
        item.need |= (access.writes | access.reads if writes else access.writes) - {number}
        if writes:
            access.writes, access.reads = {number}, set()
        else:
            access.reads.add(number)
            if not on_host and store in self.restored_by:
                self.times.again.add(self.restored_by.pop(store))
        access.every.add(number)

    def _copy(self, row: int, fields) -> None:
        plain = fields["owner"] == -1 and fields["form"] == PLAIN and fields["parts"] == 1
        way = OUT if fields["memory"] == self.memory else IN
        ends = (self.memory, self.host) if way == OUT else (self.host, self.memory)
        if not plain or (int(fields["memory"]), int(fields["to_memory"])) != ends:
            raise NotInModelError("a copy other than of a whole plain tensor to or from the device's host memory")
        store = self.store_of.get((int(fields["tensor"]), int(fields["micro_batch"])), -1)
        if store < 0 or len(self.step.stores[store].members) > 1:
            raise NotInModelError("a copy of a tensor that the model keeps")
        gap = self._gap(store, way)
        path = self.model.network.paths[self.device][way]
        size = self.step.stores[store].size_bytes
        ticks = self.model.network.copy_ticks(self.device, way, size)
        end_s = float(self.reader.simulation.end_s[self.device][row])
        key = ("out" if way == OUT else "into", gap)
        number = self._item(row, key, ticks, end_s - ticks * self.model.network.tick_s, list(path.engines))
        self.reader.items[number].allocates = way == IN
        self._touch(number, store, writes=way == IN)
        self._touch(number, store, writes=way == OUT, on_host=True)
        if gap < 0:
            self.pending[store] = number
        elif way == OUT:
            self._claim(self.times.out, gap)
        else:
            self._claim(self.times.into, gap)
            self.resident.add(store)
            if store in self.pending:
                leaving = self.pending.pop(store)
                self.reader.items[leaving].key = ("out", gap)
                self._claim(self.times.out, gap)

    def _claim(self, taken: dict[int, int], gap: int) -> None:
        if gap in taken or gap in self.times.again:
            raise NotInModelError("a tensor that leaves twice where the model lets it leave once")
        taken[gap] = -1

    def _gap(self, store: int, way: int) -> int:
        """The gap that a copy belongs to; -1 for state that leaves, which is known when it comes back."""
        spec = self.step.stores[store]

        def of(test) -> int:
            found = [gap for gap in spec.gaps if test(self.step.gaps[gap])]
            if not found:
                raise NotInModelError(f"a copy of {self.program.tensors[spec.members[0]].name!r} at that place")
            return found[0]

        if spec.kind is StoreKind.STATE and store in self.times.resting:
            return of(lambda gap: gap.seam and (gap.before < 0) == (way == IN))
        if spec.kind is StoreKind.STATE:
            done = self.done
            return -1 if way == OUT else of(lambda gap: not gap.seam and gap.after >= done)
        return of(lambda gap: _has(gap, way))

    def _release(self, row: int, fields) -> None:
        store = self.store_of.get((int(fields["tensor"]), int(fields["micro_batch"])), -1)
        if store < 0:
            return  # an input that no op of this list reads
        if fields["memory"] == self.memory:
            access = self.device_copies.pop(store, _Access())
            if len(self.step.stores[store].members) > 1:
                self.device_copies[store] = access  # other members may still be there
            else:
                self.resident.discard(store)
                self.restored_by.pop(store, None)
            self.frees.append((row, access.every))
        else:
            self.host_copies.pop(store, None)


def _has(gap: Gap, way: int) -> bool:
    return gap.always if way == IN and gap.always else gap.copies and not gap.always
