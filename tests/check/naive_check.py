"""A naive second opinion about plans of one GPU: runs the list on symbolic values and adds up all bytes.

It shares nothing with the checker. A copy is a tuple, its content the expression that computed it, so a stale or
missing copy shows as a wrong value. Memory is a sum over everything that is there, done again at every instruction.
"""

from __future__ import annotations

from tmojax.problem import PLAIN, Kind, Lifetime, Problem, Schedule, part_bytes


class Wrong(Exception):
    pass


def naive_peaks(problem: Problem, schedule: Schedule) -> dict[str, int]:
    """Peak bytes per memory of a valid plan for one GPU without aliases. Raises Wrong if the plan is not valid."""
    run = _Run(problem, schedule)
    for index in range(len(run.rows)):
        run.step(index)
    run.end()
    for memory, spec in enumerate(problem.machine.memories):
        _need(run.peak[memory] <= spec.capacity_bytes - spec.reserve_bytes, f"{spec.name} is full")
    return {spec.name: run.peak[memory] for memory, spec in enumerate(problem.machine.memories)}


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise Wrong(message)


class _Run:
    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem, self.machine = problem, problem.machine
        self.program = problem.workload.program(0)
        self.last = problem.workload.micro_batches - 1
        self.rows = schedule.lists[0]
        self.turns = problem.workload.sequence(0, schedule.order)
        self.host, self.gpu = self.machine.devices[0].host_memory, self.machine.devices[0].memory
        self.there: dict[tuple[int, ...], object] = {}  # (tensor, k, memory, form, part, parts) -> value
        self.truth: dict[tuple[int, int], object] = {}  # (tensor, k) -> newest value
        self.ran: dict[tuple[int, int], tuple[object, ...]] = {}
        self.scratch: dict[int, int] = {}
        self.retires = {int(row["after"]): i for i, row in enumerate(self.rows) if row["kind"] == Kind.RETIRE}
        self.peak = [0] * len(self.machine.memories)
        self.state = {placement.tensor: placement.memories for placement in schedule.initial[0]}
        for tensor in self.program.inputs:
            spec = self.program.tensors[tensor]
            for k in range(self.last + 1 if spec.lifetime is Lifetime.MICRO_BATCH else 1):
                self.place(tensor, k, self.host)
        for tensor, memories in self.state.items():
            for memory in memories:
                self.place(tensor, 0, memory)
        self.measure()

    def place(self, tensor: int, k: int, memory: int) -> None:
        self.truth[tensor, k] = ("start", tensor, k)
        self.there[tensor, k, memory, PLAIN, 0, 1] = ("start", tensor, k)

    def measure(self) -> None:
        for memory in range(len(self.peak)):
            used = sum(self.size(copy) for copy in self.there if copy[2] == memory)
            used += sum(self.scratch.values()) if memory == self.gpu else 0
            self.peak[memory] = max(self.peak[memory], used)

    def size(self, copy: tuple[int, ...]) -> int:
        tensor, _, _, form, part, parts = copy
        size = part_bytes(self.program.tensors[tensor].size_bytes, part, parts)
        return size if form == PLAIN else self.machine.codecs[form].encoded_bytes(size)

    def instance(self, tensor: int, op: int, k: int) -> int:
        return self.problem.workload.instance(0, tensor, op, k)

    def read(self, copy: tuple[int, ...], pieces: bool = True) -> object:
        tensor, k, memory, form, _, parts = copy
        found = [copy]
        if copy not in self.there and pieces and form == PLAIN:
            if parts > 1:
                found = [(tensor, k, memory, form, 0, 1)]
            else:
                cuts = {c[5] for c in self.there if c[:4] == copy[:4]}
                whole = [n for n in sorted(cuts) if all((*copy[:4], i, n) in self.there for i in range(n))]
                found = [(*copy[:4], i, whole[0]) for i in range(whole[0])] if whole else found
        for piece in found:
            _need(piece in self.there, f"{piece} is not there")
            _need(self.there[piece] == self.truth.get((tensor, k)), f"{piece} is old")
        return self.truth[tensor, k]

    def step(self, index: int) -> None:
        row = self.rows[index]
        kind = Kind(int(row["kind"]))
        if kind in (Kind.COMPUTE, Kind.COLLECTIVE):
            self.compute(index, int(row["op"]), int(row["micro_batch"]))
        elif kind is Kind.RETIRE:
            after = int(row["after"])
            _need(0 <= after < index and self.retires[after] == index, "no such workspace")
            ok = (Kind.COMPUTE, Kind.COLLECTIVE, Kind.ENCODE, Kind.DECODE)
            _need(int(self.rows[after]["kind"]) in ok, "no workspace")
            del self.scratch[after]
        elif kind not in (Kind.SIGNAL, Kind.WAIT):
            copy = tuple(int(row[f]) for f in ("tensor", "micro_batch", "memory", "form", "part", "parts"))
            plain = (*copy[:3], PLAIN, *copy[4:])
            if kind is Kind.RELEASE:
                _need(copy in self.there, "released and not there")
                del self.there[copy]
                left = [c for c, value in self.there.items() if c[:2] == copy[:2] and value == self.truth[copy[:2]]]
                if copy[0] in self.state:
                    cuts = {(c[5], c[4]) for c in left}
                    _need(any(all((n, i) in cuts for i in range(n)) for n, _ in cuts), "the last state")
            elif kind in (Kind.OFFLOAD, Kind.PREFETCH):
                _need(self.machine.has_route(copy[2], int(row["to_memory"])), "no route")
                self.there[(*copy[:2], int(row["to_memory"]), *copy[3:])] = self.read(copy)
            else:
                source, target = (plain, copy) if kind is Kind.ENCODE else (copy, plain)
                codec = self.machine.codecs[copy[3]]
                self.there[target] = self.read(source)
                self.scratch[index] = codec.workspace_bytes(self.size(plain))
        self.measure()
        if index not in self.retires:
            self.scratch.pop(index, None)

    def compute(self, index: int, number: int, k: int) -> None:
        op = self.program.ops[number]
        values = tuple(
            self.read((tensor, self.instance(tensor, number, k), self.gpu, PLAIN, 0, 1), pieces=tensor in op.reads)
            for tensor in (*op.reads, *op.updates)
        )
        first = (number, k) not in self.ran
        self.scratch[index] = op.workspace_bytes
        if first:
            _need(bool(self.turns) and self.turns.pop(0) == (number, k), "not its turn")
            self.ran[number, k] = values
        else:
            _need(op.recomputable, "may not run again")
            _need(self.ran[number, k] == values, "other inputs than before")
        for tensor in (*op.writes, *op.updates):
            copy = (tensor, self.instance(tensor, number, k), self.gpu, PLAIN, 0, 1)
            value = (op.name, k, tensor, values)
            if not first and copy in self.there:
                self.scratch[index] += self.program.tensors[tensor].size_bytes
                continue
            self.there[copy] = value
            if first:
                self.truth[copy[:2]] = value

    def end(self) -> None:
        _need(not self.turns, "an op is missing")
        wanted = {(tensor, 0, memory, PLAIN, 0, 1) for tensor, memories in self.state.items() for memory in memories}
        for copy in wanted:
            _need(self.there.get(copy) == self.truth[copy[:2]], "state is not back")
        for copy in set(self.there) - wanted:
            _need(copy[0] in self.program.inputs and copy[2:] == (self.host, PLAIN, 0, 1), f"{copy} is left")
