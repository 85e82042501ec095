"""From a schedule to the blocks of every device memory. Lifetimes follow from the lists alone (semantics 5.2)."""

from __future__ import annotations

from tmojax.arena.block import Block
from tmojax.errors import InputError
from tmojax.problem.machine import MemoryKind
from tmojax.problem.problem import Problem
from tmojax.problem.schedule import PLAIN, Kind, Schedule, part_bytes
from tmojax.problem.workload import Lifetime, Tensor

START = -1  # position of what is there before the first instruction

# (owner, alias group or tensor, micro-batch, memory, form, part, parts): copies with the same key share bytes (5.4).
_Storage = tuple[int, object, int, int, int, int, int]


def blocks_of(problem: Problem, schedule: Schedule) -> dict[str, list[Block]]:
    """The blocks of every list in every device memory; positions are those of the list, `START` before the first.

    Keys are names of memories. Where a list is not the only user of a memory (a loan from another device, a memory of
    several devices) its blocks stand alone under `memory (device)`: lists have no common positions, and the semantics
    charge each with its own maximum (5.3). A loan is one block of the lender.

    Needs a schedule that `tmojax.check` accepts; capacities do not matter. Raises InputError where allocations and
    releases do not pair.
    """
    machine = problem.machine
    owners: dict[int, list[int]] = {}
    for index, device in enumerate(machine.devices):
        owners.setdefault(device.memory, []).append(index)
    found: dict[str, list[Block]] = {}
    for device, spec in enumerate(machine.devices):
        blocks: dict[int, list[Block]] = {}
        if machine.memories[spec.memory].kind is MemoryKind.DEVICE:
            blocks[spec.memory] = []
        _ListBlocks(problem, schedule, device, blocks).walk()
        for memory, those in sorted(blocks.items()):
            name = machine.memories[memory].name
            found[name if owners.get(memory) == [device] else f"{name} ({spec.name})"] = those
    return found


class _ListBlocks:
    """Walks one list. `_there`: storage -> (position of its allocation, tensors whose copies are resident in it)."""

    def __init__(self, problem: Problem, schedule: Schedule, device: int, blocks: dict[int, list[Block]]) -> None:
        self._problem, self._device, self._blocks = problem, device, blocks
        self._program = problem.workload.program(device)
        self._memory = problem.machine.devices[device].memory
        self._in_device = [memory.kind is MemoryKind.DEVICE for memory in problem.machine.memories]
        rows = schedule.lists[device]
        self._columns = {name: rows[name].tolist() for name in rows.dtype.names or ()}
        self._initial = schedule.initial[device]
        self._end = len(rows)
        self._retired_at = {
            after: index
            for index, (kind, after) in enumerate(zip(self._columns["kind"], self._columns["after"], strict=True))
            if kind == Kind.RETIRE
        }
        self._there: dict[_Storage, tuple[int, set[int]]] = {}
        self._left: dict[_Storage, int] = {}  # storage of the start -> position of its first release
        self._loans: dict[int, tuple[int, int]] = {}  # loan -> (position, bytes)
        self._ran: set[tuple[int, int]] = set()
        self._members: dict[int, dict[object, list[Tensor]]] = {}  # owner -> alias group or tensor -> its tensors

    def walk(self) -> None:
        for placement in self._initial:
            for memory in placement.memories:
                self._allocate(START, self._device, placement.tensor, 0, memory, PLAIN, 0, 1)
        kinds = self._columns["kind"]
        for index in range(self._end):
            kind = kinds[index]
            if kind in (Kind.COMPUTE, Kind.COLLECTIVE):
                self._execute(index)
            elif kind in (Kind.OFFLOAD, Kind.PREFETCH):
                self._allocate(index, *self._named(index, self._columns["to_memory"][index]))
            elif kind in (Kind.ENCODE, Kind.DECODE):
                self._recode(index, kind)
            elif kind == Kind.RELEASE:
                self._release(index, *self._named(index, self._columns["memory"][index]))
            elif kind == Kind.LEND:
                self._loans[self._columns["event"][index]] = (index, self._columns["size_bytes"][index])
            elif kind == Kind.RECLAIM:
                self._reclaim(index)
        self._finish()

    def _named(self, index: int, memory: int) -> tuple[int, int, int, int, int, int, int]:
        columns = self._columns
        owner = columns["owner"][index]
        return (
            self._device if owner == -1 else owner, columns["tensor"][index], columns["micro_batch"][index],
            memory, columns["form"][index], columns["part"][index], columns["parts"][index],
        )  # fmt: skip

    def _execute(self, index: int) -> None:
        op_index, k = self._columns["op"][index], self._columns["micro_batch"][index]
        op = self._program.ops[op_index]
        again = (op_index, k) in self._ran
        self._ran.add((op_index, k))
        self._scratch(index, "workspace", op.workspace_bytes)
        for tensor in op.writes:
            instance = self._problem.workload.instance(self._device, tensor, op_index, k)
            resident = self._allocate(index, self._device, tensor, instance, self._memory, PLAIN, 0, 1)
            if again and resident:  # what is resident at a recomputation is not touched (3.2)
                spec = self._program.tensors[tensor]
                self._scratch(index, f"second {spec.name}", spec.size_bytes)

    def _recode(self, index: int, kind: int) -> None:
        owner, tensor, k, memory, form, part, parts = self._named(index, self._columns["memory"][index])
        target = form if kind == Kind.ENCODE else PLAIN
        self._allocate(index, owner, tensor, k, memory, target, part, parts)
        plain_bytes = part_bytes(self._problem.workload.program(owner).tensors[tensor].size_bytes, part, parts)
        self._scratch(index, "workspace", self._problem.machine.codecs[form].workspace_bytes(plain_bytes))

    def _scratch(self, index: int, what: str, size_bytes: int) -> None:
        self._add(self._memory, what, size_bytes, index, self._retired_at.get(index, index + 1))

    def _reclaim(self, index: int) -> None:
        number = self._columns["event"][index]
        if number not in self._loans:
            raise InputError(f"{self._where(index)}: loan {number} is not out; {_REMEDY}")
        start, size_bytes = self._loans.pop(number)
        self._add(self._memory, f"loan {number}", size_bytes, start, index)

    def _storage(self, owner: int, tensor: int, k: int, memory: int, form: int, part: int, parts: int) -> _Storage:
        group = self._problem.workload.program(owner).tensors[tensor].alias_group
        return (owner, group or tensor, k, memory, form, part, parts)

    def _allocate(self, index: int, owner: int, tensor: int, k: int, memory: int, *part: int) -> bool:
        """Make a copy resident; says whether it was already. Bytes come with the first copy in a storage."""
        if not self._in_device[memory]:
            return False
        _, members = self._there.setdefault(self._storage(owner, tensor, k, memory, *part), (index, set()))
        resident = tensor in members
        members.add(tensor)
        return resident

    def _release(self, index: int, owner: int, tensor: int, k: int, memory: int, *part: int) -> None:
        if not self._in_device[memory]:
            return
        storage = self._storage(owner, tensor, k, memory, *part)
        start, members = self._there.get(storage, (START, set()))
        if tensor not in members:
            name = self._problem.workload.program(owner).tensors[tensor].name
            raise InputError(f"{self._where(index)}: releases {name!r}, which is not resident there; {_REMEDY}")
        members.remove(tensor)
        if members:
            return
        del self._there[storage]
        if start == START:
            self._left[storage] = index
        else:
            self._add_storage(storage, start, index)

    def _finish(self) -> None:
        """State is where it was when the next step begins: before its release and after its return it is one block."""
        for storage, (start, _) in self._there.items():
            if start != START and storage in self._left:
                self._add_storage(storage, START, self._end, ((self._left.pop(storage), start),))
            else:
                self._add_storage(storage, start, self._end)
        for storage, upper in self._left.items():
            self._add_storage(storage, START, upper)
        for number, (start, size_bytes) in self._loans.items():
            self._add(self._memory, f"loan {number}", size_bytes, start, self._end)

    def _add_storage(self, storage: _Storage, lower: int, upper: int, gaps: tuple[tuple[int, int], ...] = ()) -> None:
        owner, group, k, memory, form, part, parts = storage
        members = self._members_of(owner)[group]
        size_bytes = max(part_bytes(spec.size_bytes, part, parts) for spec in members)
        name = members[0].name
        if members[0].lifetime is Lifetime.MICRO_BATCH:
            name += f" of micro-batch {k}"
        if parts != 1:
            name += f" slice {part} of {parts}"
        if form != PLAIN:
            codec = self._problem.machine.codecs[form]
            size_bytes, name = codec.encoded_bytes(size_bytes), f"{name} as {codec.name}"
        if owner != self._device:
            name += f" of {self._problem.machine.devices[owner].name}"
        self._add(memory, name, size_bytes, lower, upper, gaps)

    def _members_of(self, owner: int) -> dict[object, list[Tensor]]:
        if owner not in self._members:
            groups = self._members[owner] = {}
            for index, tensor in enumerate(self._problem.workload.program(owner).tensors):
                groups.setdefault(tensor.alias_group or index, []).append(tensor)
        return self._members[owner]

    def _add(self, memory: int, name: str, size_bytes: int, lower: int, upper: int,
             gaps: tuple[tuple[int, int], ...] = ()) -> None:  # fmt: skip
        if size_bytes:
            there = self._blocks.setdefault(memory, [])
            there.append(Block(f"{name} from #{lower}" if lower != START else name, size_bytes, lower, upper, gaps))

    def _where(self, index: int) -> str:
        return f"{self._problem.machine.devices[self._device].name} #{index}"


_REMEDY = "run tmojax.check on the schedule and mend it first"
