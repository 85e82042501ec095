"""An instruction list prepared for execution: what each instruction waits for, allocates and frees.

Follows docs/semantics.md for whole copies. Times play no part: every wait is for something that another instruction of
the schedule does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tmojax.errors import InputError
from tmojax.problem import (
    COMMUNICATION_STREAM,
    COMPUTE_STREAM,
    FIRST_ENGINE_STREAM,
    PLAIN,
    Kind,
    Lifetime,
    Problem,
    Schedule,
)

Copy = tuple[int, int, int, int, int]  # owner, tensor, instance, memory, form

TRANSFERS = (Kind.OFFLOAD, Kind.PREFETCH)
EXECUTIONS = (Kind.COMPUTE, Kind.COLLECTIVE)
RECODINGS = (Kind.ENCODE, Kind.DECODE)
_ON_COMPUTE = (Kind.COMPUTE, *RECODINGS)


@dataclass(slots=True)
class Node:
    """One instruction that runs on a stream.

    `streams`: those of its list, the first is where a worker meets it. `reads`, `writes`, `updates`: copies; a
    transfer, encode or decode reads one and writes one. `kept` [writes]: the write becomes a copy, else it is scratch.
    `creates`: writes that were not resident. `after_start`: instructions whose arrays it uses, which must have been
    started; `after_end`: instructions that must be complete. `allocates`: memories in which it allocates (semantics
    5.1).
    """

    index: int
    kind: Kind
    streams: tuple[int, ...]
    op: int = -1
    micro_batch: int = -1
    event: int = -1
    again: bool = False
    reads: tuple[Copy, ...] = ()
    writes: tuple[Copy, ...] = ()
    updates: tuple[Copy, ...] = ()
    kept: tuple[bool, ...] = ()
    creates: tuple[Copy, ...] = ()
    after_start: tuple[int, ...] = ()
    after_end: tuple[int, ...] = ()
    allocates: tuple[int, ...] = ()


@dataclass(slots=True)
class Change:
    """A release, retire, lend or reclaim at a position of the list, in one memory.

    `copy`: what is released (None otherwise); `instruction`: whose workspace is retired (-1 otherwise); `loan_bytes`:
    positive for a lend, negative for a reclaim. It takes effect when the instructions of `after_end` are complete.
    """

    position: int
    memory: int
    copy: Copy | None = None
    instruction: int = -1
    loan_bytes: int = 0
    after_end: tuple[int, ...] = ()


@dataclass(eq=False)
class PreparedList:
    """One device's list. `changes` [memory]: in list order; `planned_bytes` [memory]: {allocating position: bytes}.

    `initial`: copies at the start. `signals`: event -> (device, instruction).
    """

    device: int
    nodes: dict[int, Node] = field(default_factory=dict)
    changes: list[list[Change]] = field(default_factory=list)
    change_of: dict[int, Change] = field(default_factory=dict)
    planned_bytes: list[dict[int, int]] = field(default_factory=list)
    initial: tuple[Copy, ...] = ()
    signals: dict[int, tuple[int, int]] = field(default_factory=dict)

    def workers(self) -> dict[int, list[Node]]:
        """Nodes by first stream, each in list order."""
        found: dict[int, list[Node]] = {}
        for node in self.nodes.values():
            found.setdefault(node.streams[0], []).append(node)
        return found


def prepare_list(problem: Problem, schedule: Schedule, device: int) -> PreparedList:
    """Prepare one list of a valid schedule. Raises InputError for what the runtime cannot do."""
    return _Preparing(problem, schedule, device).run()


class _Preparing:
    def __init__(self, problem: Problem, schedule: Schedule, device: int) -> None:
        self.problem, self.machine, self.device = problem, problem.machine, device
        self.program = problem.workload.program(device)
        self.rows = schedule.lists[device]
        self.placements = schedule.initial[device]
        self.memory = self.machine.devices[device].memory
        self.host = self.machine.devices[device].host_memory
        count = len(self.machine.memories)
        self.used = [0] * count
        self.done = PreparedList(device, {}, [[] for _ in range(count)], {}, [{} for _ in range(count)])
        self.resident: set[Copy] = set()
        self.last_write: dict[Copy, int] = {}
        self.accesses: dict[Copy, list[int]] = {}
        self.last_on: dict[int, int] = {}
        self.ran: set[tuple[int, int]] = set()
        self.waits: list[int] = []

    def run(self) -> PreparedList:
        initial = [(self.device, p.tensor, 0, memory, PLAIN) for p in self.placements for memory in p.memories]
        for tensor in self.program.inputs:
            for instance in range(self.instances(tensor)):
                initial.append((self.device, tensor, instance, self.host, PLAIN))
        for copy in initial:
            self.resident.add(copy)
            self.used[copy[3]] += self.bytes_of(copy)
        for memory, used in enumerate(self.used):
            self.done.planned_bytes[memory][-1] = used
        self.done.initial = tuple(initial)
        columns = {name: self.rows[name].tolist() for name in self.rows.dtype.names or ()}
        retired = {columns["after"][i] for i, kind in enumerate(columns["kind"]) if kind == Kind.RETIRE}
        self.scratch: dict[int, int] = {}
        self.loans: dict[int, tuple[int, int]] = {}
        for index in range(len(self.rows)):
            row = {name: values[index] for name, values in columns.items()}
            self.visit(index, Kind(row["kind"]), row)
            if index in self.scratch and index not in retired:
                self.change(Change(index, self.memory, instruction=index, after_end=(index,)), self.scratch.pop(index))
        return self.done

    def visit(self, index: int, kind: Kind, row: dict[str, int]) -> None:
        if kind in EXECUTIONS:
            self.execute(index, kind, row)
        elif kind in TRANSFERS:
            self.transfer(index, kind, row)
        elif kind is Kind.RELEASE:
            copy = self.copy(index, row, row["memory"], row["form"])
            self.resident.discard(copy)
            accesses = tuple(self.accesses.pop(copy, ()))
            self.last_write.pop(copy, None)
            self.change(Change(index, copy[3], copy, after_end=accesses), self.bytes_of(copy))
        elif kind is Kind.RETIRE:
            after = row["after"]
            change = Change(index, self.memory, instruction=after, after_end=(after,))
            self.change(change, self.scratch.pop(after, 0))
        elif kind is Kind.SIGNAL:
            self.done.signals[row["event"]] = (self.device, row["after"])
        elif kind is Kind.WAIT:
            self.add(Node(index, kind, (row["stream"],), event=row["event"]))
            self.waits.append(index)
        elif kind is Kind.LEND:
            self.loans[row["event"]] = (row["size_bytes"], len(self.waits))
            self.change(Change(index, self.memory, loan_bytes=row["size_bytes"]), -row["size_bytes"])
            self.done.planned_bytes[self.memory][index] = self.used[self.memory]
        elif kind is Kind.RECLAIM:
            size, first = self.loans.pop(row["event"])
            change = Change(index, self.memory, loan_bytes=-size, after_end=tuple(self.waits[first:]))
            self.change(change, size)
        else:
            self.recode(index, kind, row)

    # --- instructions on streams -------------------------------------------------------------------------------

    def execute(self, index: int, kind: Kind, row: dict[str, int]) -> None:
        op_index, micro_batch = row["op"], row["micro_batch"]
        op = self.program.ops[op_index]

        def own(tensors: tuple[int, ...]) -> tuple[Copy, ...]:
            instance = self.problem.workload.instance
            return tuple(
                (self.device, t, instance(self.device, t, op_index, micro_batch), self.memory, PLAIN) for t in tensors
            )

        reads, writes, updates = own(op.reads), own(op.writes), own(op.updates)
        again = (op_index, micro_batch) in self.ran
        self.ran.add((op_index, micro_batch))
        creates = tuple(copy for copy in writes if copy not in self.resident)
        kept = tuple(not again or copy in creates for copy in writes)
        scratch = op.workspace_bytes + sum(
            self.bytes_of(copy) for copy, keep in zip(writes, kept, strict=True) if not keep
        )
        stream = COMPUTE_STREAM if kind is Kind.COMPUTE else COMMUNICATION_STREAM
        # An op always waits for room, a collective that allocates nothing does not.
        allocates = (self.memory,) if kind is Kind.COMPUTE or creates or scratch else ()
        node = Node(
            index, kind, (stream,), op_index, micro_batch, again=again, reads=reads, writes=writes, updates=updates,
            kept=kept, creates=creates, allocates=allocates,
        )  # fmt: skip
        self.allocate(index, creates, scratch)
        changed = [*updates, *(copy for copy, keep in zip(writes, kept, strict=True) if keep)]
        self.add(node, (*reads, *updates), changed)

    def transfer(self, index: int, kind: Kind, row: dict[str, int]) -> None:
        source, target = (self.copy(index, row, row[memory], row["form"]) for memory in ("memory", "to_memory"))
        engines = self.machine.route(row["memory"], row["to_memory"]).engines
        if not engines:
            raise InputError(
                f"{self.where(index)}: the route holds no copy engine; give it one in `routes` of the machine"
            )
        creates = () if target in self.resident else (target,)
        node = Node(
            index, kind, tuple(FIRST_ENGINE_STREAM + engine for engine in engines), reads=(source,), writes=(target,),
            kept=(True,), creates=creates, allocates=(row["to_memory"],) if creates else (),
        )  # fmt: skip
        self.allocate(index, creates, 0)
        self.add(node, (source,), [target])

    def recode(self, index: int, kind: Kind, row: dict[str, int]) -> None:
        plain, encoded = (self.copy(index, row, row["memory"], form) for form in (PLAIN, row["form"]))
        source, target = (plain, encoded) if kind is Kind.ENCODE else (encoded, plain)
        creates = () if target in self.resident else (target,)
        node = Node(
            index, kind, (COMPUTE_STREAM,), reads=(source,), writes=(target,), kept=(True,), creates=creates,
            allocates=(self.memory,),
        )  # fmt: skip
        size = self.problem.workload.program(plain[0]).tensors[plain[1]].size_bytes
        self.allocate(index, creates, self.machine.codecs[row["form"]].workspace_bytes(size))
        self.add(node, (source,), [target])

    def add(self, node: Node, reads: tuple[Copy, ...] = (), changes: list[Copy] | None = None) -> None:
        """Order a node behind its hazards and behind what other workers do on its streams (semantics 4)."""
        start: set[int] = set()
        end: set[int] = set()
        for copy in reads:
            writer = self.last_write.get(copy, -1)
            if writer >= 0:
                (start if node.kind in _ON_COMPUTE else end).add(writer)
            self.accesses.setdefault(copy, []).append(node.index)
        for copy in changes or ():
            earlier = {i for i in self.accesses.get(copy, ()) if i != node.index}
            if node.kind is Kind.COMPUTE and copy in node.updates:
                # One after another on one stream: JAX keeps that order itself, also for what is donated.
                start |= {i for i in earlier if self.done.nodes[i].kind is Kind.COMPUTE}
                earlier -= start
            end |= earlier
            self.last_write[copy] = node.index
            self.accesses.setdefault(copy, []).append(node.index)
        for stream in node.streams:
            before = self.last_on.get(stream, -1)
            if before >= 0 and self.done.nodes[before].streams[0] != node.streams[0]:
                end.add(before)
            self.last_on[stream] = node.index
        node.after_start, node.after_end = tuple(sorted(start - end)), tuple(sorted(end))
        self.done.nodes[node.index] = node

    # --- memory ------------------------------------------------------------------------------------------------

    def allocate(self, index: int, creates: tuple[Copy, ...], scratch_bytes: int) -> None:
        for copy in creates:
            self.resident.add(copy)
            self.used[copy[3]] += self.bytes_of(copy)
            self.done.planned_bytes[copy[3]][index] = self.used[copy[3]]
        if scratch_bytes:
            self.scratch[index] = scratch_bytes
            self.used[self.memory] += scratch_bytes
        if self.rows["kind"][index] in (*EXECUTIONS, *RECODINGS):
            self.done.planned_bytes[self.memory][index] = self.used[self.memory]

    def change(self, change: Change, freed_bytes: int) -> None:
        self.used[change.memory] -= freed_bytes
        self.done.changes[change.memory].append(change)
        if change.instruction != change.position:  # an unwritten retire is no instruction
            self.done.change_of[change.position] = change

    def bytes_of(self, copy: Copy) -> int:
        size = self.problem.workload.program(copy[0]).tensors[copy[1]].size_bytes
        if copy[4] != PLAIN:
            size = self.machine.codecs[copy[4]].encoded_bytes(size)
        memory = self.machine.memories[copy[3]]
        if memory.kind == "host" and memory.pinned_power_of_two and size:
            return 1 << (size - 1).bit_length()
        return size

    def instances(self, tensor: int) -> int:
        per_micro_batch = self.program.tensors[tensor].lifetime is Lifetime.MICRO_BATCH
        return self.problem.workload.micro_batches if per_micro_batch else 1

    def copy(self, index: int, row: dict[str, int], memory: int, form: int) -> Copy:
        owner = self.device if row["owner"] == -1 else row["owner"]
        spec = self.problem.workload.program(owner).tensors[row["tensor"]]
        if row["parts"] != 1:
            raise InputError(
                f"{self.where(index)}: moves slice {row['part']} of {row['parts']} of {spec.name!r}, and the runtime "
                f"moves whole tensors only, because JAX would copy a slice once more in device memory, which no plan "
                f"counts; plan without slices (action 'shard')"
            )
        if spec.alias_group:
            raise InputError(
                f"{self.where(index)}: {spec.name!r} shares its storage (aliased, group {spec.alias_group!r}), so it "
                f"cannot be moved or freed alone; import the step without that alias"
            )
        return owner, row["tensor"], row["micro_batch"], memory, form

    def where(self, index: int) -> str:
        return f"{self.machine.devices[self.device].name} #{index}"
