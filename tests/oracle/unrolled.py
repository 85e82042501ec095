"""What one list says, read in list order on hash values: per instruction what it reads, writes, allocates and frees,
and which instructions must be complete before it starts. The first part of the oracle; shares no code with the checker.

Everything is found the slow and plain way: hazards by comparing all pairs of instructions (semantics 4.2), allocations
behind frees by looking at all frees before (5.1).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tmojax.problem import PLAIN, Kind, Lifetime, MemoryKind, Problem, Schedule, part_bytes

Copy = tuple[int, int, int, int, int, int, int]  # owner, tensor, micro-batch, memory, form, part, parts
Instance = tuple[int, int, int]  # owner, tensor, micro-batch
LOST = ("lost",)


class Fault(Exception):
    """Something that goes wrong. `args[0]` names the kind of fault, `args[1]` says where."""


def need(condition: object, kind: str, where: object = "") -> None:
    if not condition:
        raise Fault(kind, where)


@dataclass
class Step:
    """One instruction. `preds`: indices in the list that must be complete before it starts.

    `reads`: (copy, expected value or None when another list decides it, made by this list). `writes`: (copy, what the
    value is computed from: None for a copy of what is read). `makes`: (instance, tag) that get a new version.
    `allocates`/`frees`: (memory, bytes). `spoils`: copies whose storage is overwritten by another tensor.
    """

    index: int
    kind: Kind
    streams: tuple[object, ...] = ()
    preds: set[int] = field(default_factory=set)
    reads: list[tuple[Copy, object, bool]] = field(default_factory=list)
    writes: list[tuple[Copy, object]] = field(default_factory=list)
    spoils: list[Copy] = field(default_factory=list)
    makes: list[tuple[Instance, object]] = field(default_factory=list)
    allocates: list[tuple[int, int]] = field(default_factory=list)
    frees: list[tuple[int, int]] = field(default_factory=list)
    appear: list[Copy] = field(default_factory=list)
    vanish: list[Copy] = field(default_factory=list)
    event: int = -1
    collective: tuple[str, int, int] | None = None
    run: tuple[object, ...] | None = None  # what the values that it makes depend on, besides what it reads
    loan: tuple[int, int] | None = None  # device that borrows, bytes (negative: given back)

    @property
    def takes_time(self) -> bool:
        return bool(self.streams) and self.kind is not Kind.WAIT


class Unrolled:
    """One list, read in order. Raises Fault for what is wrong whatever the order of events."""

    def __init__(self, problem: Problem, schedule: Schedule, device: int) -> None:
        self.problem, self.schedule, self.device = problem, schedule, device
        self.machine, self.workload = problem.machine, problem.workload
        self.program = self.workload.program(device)
        self.rows = schedule.lists[device]
        spec = self.machine.devices[device]
        self.gpu, self.host = spec.memory, spec.host_memory
        self.last = self.workload.micro_batches - 1
        self.resident: dict[Copy, object] = {}
        self.newest: dict[Instance, object] = {}
        self.root: dict[Instance, object] = {}  # of tensors with aliases: the value of which it is a view
        self.reference = reference_inputs(problem, device, schedule.order)
        self.turns = self.workload.sequence(device, schedule.order)
        self.steps: list[Step] = []
        self._ran: set[tuple[int, int]] = set()
        self._touched: list[list[tuple[object, bool]]] = []  # per instruction: (storage, writes)
        self._loans: dict[int, tuple[int, int, int]] = {}  # number -> lend, bytes, device; -1 when reclaimed
        self._workspace: dict[int, int] = {}
        self._retires: dict[int, int] = {}
        self._entered: dict[tuple[str, int], int] = {}
        self.signals: dict[int, int] = {}
        self.start: dict[Copy, object] = {}
        self._place()
        self._pair()
        for index in range(len(self.rows)):
            self._read(index)
        self._finish()

    # --- sizes and places ----------------------------------------------------------------------------------------

    def charged(self, memory: int, size: int) -> int:
        spec = self.machine.memories[memory]
        if spec.kind is MemoryKind.HOST and spec.pinned_power_of_two:
            block = 1
            while block < size:
                block *= 2
            return block if size else 0
        return size

    def group(self, owner: int, tensor: int) -> str:
        return self.workload.program(owner).tensors[tensor].alias_group

    def storage(self, copy: Copy) -> object:
        group = self.group(copy[0], copy[1])
        return (copy[0], group, *copy[2:]) if group else copy

    def neighbours(self, copy: Copy) -> list[Copy]:
        """Other resident copies in the same storage."""
        return [c for c in self.resident if c != copy and self.storage(c) == self.storage(copy)]

    def bytes_of(self, copy: Copy) -> int:
        owner, tensor, _, memory, form, part, parts = copy
        tensors, group = self.workload.program(owner).tensors, self.group(owner, tensor)
        sizes = [t.size_bytes for t in tensors if t.alias_group == group] if group else [tensors[tensor].size_bytes]
        size = max(part_bytes(size, part, parts) for size in sizes)
        if form != PLAIN:
            size = self.machine.codecs[form].encoded_bytes(size)
        return self.charged(memory, size)

    def _place(self) -> None:
        copies = []
        for tensor in self.program.inputs:
            count = self.last + 1 if self.program.tensors[tensor].lifetime is Lifetime.MICRO_BATCH else 1
            copies += [(self.device, tensor, k, self.host, PLAIN, 0, 1) for k in range(count)]
        for placement in self.schedule.initial[self.device]:
            copies += [(self.device, placement.tensor, 0, m, PLAIN, 0, 1) for m in placement.memories]
        self.initial: list[tuple[int, int]] = []
        for copy in copies:
            value = ("start", *copy[:3])
            if not self.neighbours(copy):
                self.initial.append((copy[3], self.bytes_of(copy)))
            self.newest[copy[:3]] = self.resident[copy] = self.start[copy] = value
            group = self.group(*copy[:2])
            self.root[copy[:3]] = ("start", self.device, group, copy[2]) if group else value

    def _pair(self) -> None:
        for index, row in enumerate(self.rows):
            if row["kind"] == Kind.RETIRE:
                after = int(row["after"])
                works = (Kind.COMPUTE, Kind.COLLECTIVE, Kind.ENCODE, Kind.DECODE)
                need(0 <= after < index and self.rows[after]["kind"] in works, "retire", index)
                need(after not in self._retires, "retire", index)
                self._retires[after] = index

    # --- one instruction -----------------------------------------------------------------------------------------

    def _read(self, index: int) -> None:
        row = self.rows[index]
        kind = Kind(int(row["kind"]))
        step = Step(index, kind)
        self.steps.append(step)
        self._touched.append([])
        owner = self.device if row["owner"] == -1 else int(row["owner"])
        name = (owner, int(row["tensor"]), int(row["micro_batch"]))
        copy = (*name, int(row["memory"]), int(row["form"]), int(row["part"]), int(row["parts"]))
        if kind in (Kind.COMPUTE, Kind.COLLECTIVE):
            self._execute(step, int(row["op"]), int(row["micro_batch"]))
        elif kind in (Kind.OFFLOAD, Kind.PREFETCH):
            need(self.machine.has_route(copy[3], int(row["to_memory"])), "no route", index)
            engines = self.machine.route(copy[3], int(row["to_memory"])).engines
            step.streams = tuple(("engine", engine) for engine in engines)
            self._copy(step, copy, (*name, int(row["to_memory"]), *copy[4:]), 0)
        elif kind in (Kind.ENCODE, Kind.DECODE):
            step.streams = (("compute", self.device),)
            plain = (*copy[:4], PLAIN, *copy[5:])
            size = self.workload.program(owner).tensors[name[1]].size_bytes
            workspace = self.machine.codecs[copy[4]].workspace_bytes(part_bytes(size, copy[5], copy[6]))
            source, target = (plain, copy) if kind is Kind.ENCODE else (copy, plain)
            self._copy(step, source, target, workspace)
        elif kind is Kind.RELEASE:
            need(copy in self.resident, "release of what is not there", index)
            del self.resident[copy]
            step.vanish.append(copy)
            touched = range(index)
            step.preds |= {i for i in touched if any(s == self.storage(copy) for s, _ in self._touched[i])}
            if not self.neighbours(copy):
                step.frees.append((copy[3], self.bytes_of(copy)))
            else:
                step.frees.append((copy[3], 0))
        elif kind is Kind.RETIRE:
            after = int(row["after"])
            step.preds.add(after)
            step.frees.append((self.gpu, self._workspace[after]))
        elif kind is Kind.SIGNAL:
            after = int(row["after"])
            need(0 <= after < index, "signal", index)
            allowed = self.steps[after].streams or self.steps[after].kind in (Kind.RELEASE, Kind.RETIRE, Kind.LEND)
            need(allowed and int(row["event"]) not in self.signals, "signal", index)
            self.signals[int(row["event"])] = index
            step.preds.add(after)
        elif kind is Kind.WAIT:
            step.event, stream = int(row["event"]), int(row["stream"])
            fixed = (("compute", self.device), ("communication", self.device))
            step.streams = (fixed[stream] if stream < 2 else ("engine", stream - 2),)
        elif kind is Kind.LEND:
            number, size, to = int(row["event"]), int(row["size_bytes"]), int(row["to_device"])
            need(number not in self._loans, "loan", index)
            self._loans[number] = (index, size, to)
            step.loan = (to, size)
            self._allocate(step, self.gpu, size)
        else:
            lend, size, to = self._loans.get(int(row["event"]), (-1, 0, 0))
            need(lend >= 0, "loan", index)
            self._loans[int(row["event"])] = (-1, 0, 0)
            step.loan = (to, -size)
            step.preds |= {lend, *(i for i in range(lend, index) if self.steps[i].kind is Kind.WAIT)}
            step.frees.append((self.gpu, size))
        for stream in step.streams:
            step.preds |= {i for i in range(index) if stream in self.steps[i].streams}
        for storage, writes in self._touched[index]:
            for i in range(index):
                freed = writes and any(self.storage(c) == storage for c in self.steps[i].vanish)
                if freed or any(s == storage and (w or writes) for s, w in self._touched[i]):
                    step.preds.add(i)

    def _allocate(self, step: Step, memory: int, size: int) -> None:
        step.allocates.append((memory, size))
        step.preds |= {s.index for s in self.steps[: step.index] if any(m == memory for m, _ in s.frees)}

    def _source(self, step: Step, copy: Copy, updates: bool = False) -> list[tuple[Copy, object, bool]]:
        """What a read of a copy reads (3.7)."""
        own = copy[0] == self.device
        expected = self.newest.get(copy[:3]) if own else None
        need(not own or expected is not None, "never written", step.index)
        owner, tensor, k, memory, form, _, parts = copy
        found = [copy] if copy in self.resident else []
        if not found and form == PLAIN and not updates:
            if parts > 1:
                found = [c for c in [(owner, tensor, k, memory, PLAIN, 0, 1)] if c in self.resident]
            else:
                for n in sorted({c[6] for c in self.resident if c[:5] == copy[:5] and c[6] > 1}):
                    slices = [(owner, tensor, k, memory, PLAIN, i, n) for i in range(n)]
                    if not found and all(c in self.resident for c in slices):
                        found = slices
        if not found:
            need(not updates, "update of what is not there", step.index)
            return [(copy, expected, False)]
        if own:
            need(all(self.resident[c] == expected for c in found), "stale", step.index)
        for c in found:
            self._touched[step.index].append((self.storage(c), False))
        return [(c, expected, True) for c in found]

    def _copy(self, step: Step, source: Copy, target: Copy, workspace: int) -> None:
        step.reads = self._source(step, source)
        self._write(step, target, None)
        value = step.reads[0][1]
        self.resident[target] = ("read by", self.device, step.index) if value is None else value
        self._scratch(step, workspace)

    def _write(self, step: Step, copy: Copy, tag: object, views: frozenset[Copy] = frozenset()) -> None:
        if copy not in self.resident:
            if not self.neighbours(copy):
                self._allocate(step, copy[3], self.bytes_of(copy))
            step.appear.append(copy)
        step.writes.append((copy, tag))
        self._touched[step.index].append((self.storage(copy), True))
        root = self.root.get(copy[:3])
        for other in self.neighbours(copy):
            if other not in views and self.root.get(other[:3]) != root:
                self.resident[other] = LOST
                step.spoils.append(other)

    def _scratch(self, step: Step, size: int) -> None:
        self._workspace[step.index] = size
        if size:
            self._allocate(step, self.gpu, size)
            if step.index not in self._retires:
                step.frees.append((self.gpu, size))

    def _execute(self, step: Step, op_index: int, k: int) -> None:
        op = self.program.ops[op_index]
        step.streams = (("communication" if op.collective else "compute", self.device),)
        first = (op_index, k) not in self._ran
        if first:
            need(len(self._ran) < len(self.turns) and self.turns[len(self._ran)] == (op_index, k), "order", step.index)
            self._ran.add((op_index, k))
        else:
            need(op.recomputable and not op.collective, "runs again", step.index)
        if op.collective:
            turn = self._entered[op.collective, k] = self._entered.get((op.collective, k), 0) + 1
            need(self.device in self.workload.collective(op.collective).devices, "collective", step.index)
            step.collective = (op.collective, k, turn)

        def here(tensor: int) -> Copy:
            instance = self.workload.instance(self.device, tensor, op_index, k)
            return (self.device, tensor, instance, self.gpu, PLAIN, 0, 1)

        for tensor in op.reads:
            step.reads += self._source(step, here(tensor))
        for tensor in op.updates:
            step.reads += self._source(step, here(tensor), updates=True)
        inputs = tuple(self.newest[here(tensor)[:3]] for tensor in (*op.reads, *op.updates))
        need(inputs == self.reference[op_index, k], "wrong input", step.index)
        step.run = ("ran", self.device, op_index, k)
        value = made(step.run, inputs)
        scratch = op.workspace_bytes
        for tensor in op.writes:
            copy = here(tensor)
            if copy in self.resident and not first:
                scratch += self.program.tensors[tensor].size_bytes
                continue
            if first:
                read_members = [t for t in op.reads if self.group(self.device, t) and
                                self.group(self.device, t) == self.group(self.device, tensor)]  # fmt: skip
                root = self.root.get(here(read_members[0])[:3]) if read_members else None
                self.newest[copy[:3]] = (value, tensor)
                self.root[copy[:3]] = root if root is not None else value
                step.makes.append((copy[:3], tensor))
            self._write(step, copy, tensor)
            self.resident[copy] = (value, tensor)
        for tensor in op.updates:
            self._update(step, here(tensor), tensor, value)
        self._scratch(step, scratch)

    def _update(self, step: Step, copy: Copy, tensor: int, value: object) -> None:
        """An update, and what it does to the views of the same value (5.4)."""
        old = self.root.get(copy[:3])
        group = self.group(self.device, tensor)
        for instance, root in list(self.root.items()):
            if group and instance != copy[:3] and root == old and self.group(instance[0], instance[1]) == group \
                    and instance[2] == copy[2]:  # fmt: skip
                view = (*instance, *copy[3:])
                if self.resident.get(view) == self.newest[instance]:
                    self.resident[view] = (value, tensor)
                    step.writes.append((view, tensor))
                self.newest[instance] = self.root[instance] = (value, tensor)
                step.makes.append((instance, tensor))
        self.newest[copy[:3]] = self.root[copy[:3]] = (value, tensor)
        step.makes.append((copy[:3], tensor))
        self._write(step, copy, tensor)
        self.resident[copy] = (value, tensor)

    def _finish(self) -> None:
        need(len(self._ran) == len(self.turns), "op missing", "end")
        need(all(lend < 0 for lend, _, _ in self._loans.values()), "loan left", "end")
        wanted = {(self.device, p.tensor, 0, m, PLAIN, 0, 1)
                  for p in self.schedule.initial[self.device] for m in p.memories}  # fmt: skip
        for copy in wanted:
            need(self.resident.get(copy) == self.newest[copy[:3]], "state not restored", copy)
        for copy in set(self.resident) - wanted:
            kept = copy[0] == self.device and copy[1] in self.program.inputs and copy[3:] == (self.host, PLAIN, 0, 1)
            need(kept, "left over", copy)


def made(run: tuple[object, ...], inputs: tuple[object, ...]) -> object:
    """Hash value of what an op makes of its inputs."""
    return hash((run, inputs))


def reference_inputs(problem: Problem, device: int, order: str) -> dict[tuple[int, int], tuple[object, ...]]:
    """(op, micro-batch) -> values of its reads and updates when the step runs op by op without moving anything."""
    workload = problem.workload
    program = workload.program(device)
    values: dict[tuple[int, int], object] = {}
    roots: dict[tuple[int, int], object] = {}
    for tensor, spec in enumerate(program.tensors):
        if spec.lifetime is Lifetime.STATE or tensor in program.inputs:
            for k in range(workload.micro_batches if spec.lifetime is Lifetime.MICRO_BATCH else 1):
                values[tensor, k] = start = ("start", device, tensor, k)
                roots[tensor, k] = ("start", device, spec.alias_group, k) if spec.alias_group else start
    result = {}
    for op_index, k in workload.sequence(device, order):
        op = program.ops[op_index]

        def key(tensor: int, op_index=op_index, k=k) -> tuple[int, int]:
            return tensor, workload.instance(device, tensor, op_index, k)

        def group(tensor: int) -> str:
            return program.tensors[tensor].alias_group

        inputs = tuple(values[key(tensor)] for tensor in (*op.reads, *op.updates))
        result[op_index, k] = inputs
        value = made(("ran", device, op_index, k), inputs)
        for tensor in op.writes:
            viewed = [roots[key(t)] for t in op.reads if group(t) and group(t) == group(tensor)]
            values[key(tensor)] = (value, tensor)
            roots[key(tensor)] = viewed[0] if viewed else value
        for tensor in op.updates:
            old = roots[key(tensor)]
            for other in list(values):
                if group(tensor) and group(other[0]) == group(tensor) and other[1] == key(tensor)[1] \
                        and roots[other] == old:  # fmt: skip
                    values[other] = roots[other] = (value, tensor)
            values[key(tensor)] = roots[key(tensor)] = (value, tensor)
    return result
