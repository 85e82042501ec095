"""The walk of one list, instruction by instruction (semantics 3)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tmojax.check.graph import Graph
from tmojax.check.order import ListOrder
from tmojax.check.residency import INITIAL, Residency
from tmojax.check.rules import START, Findings, Rule, TooComplex
from tmojax.check.shared import SharedLog
from tmojax.check.static import HAS_WORKSPACE, TRANSFERS, Static
from tmojax.problem.schedule import COMMUNICATION_STREAM, COMPUTE_STREAM, FIRST_ENGINE_STREAM, PLAIN, Kind, Placement

# Comparisons of copies of one instance in a list: so many, and so many for each of its instructions.
MOST_LOOKS, LOOKS_EACH = 1_000_000, 100
_SIGNALLED = (*HAS_WORKSPACE, *TRANSFERS, Kind.WAIT, Kind.RELEASE, Kind.RETIRE, Kind.LEND)


@dataclass(frozen=True, slots=True)
class Loan:
    """`instruction`: the lend. `reclaim`: -1 if there is none."""

    instruction: int
    size_bytes: int
    to_device: int
    reclaim: int = -1


class ListWalk:
    """Walks a list and keeps what the later phases need: residency, loans, events, entries into collectives."""

    def __init__(
        self, static: Static, device: int, rows: np.ndarray, initial: tuple[Placement, ...], graph: Graph,
        shared: SharedLog, findings: Findings, sequence: list[tuple[int, int]],
    ) -> None:  # fmt: skip
        self.static, self.device, self.rows, self.graph = static, device, rows, graph
        self.table = static.devices[device]
        self.order = ListOrder(graph, device)
        self.state = Residency(static, device, rows, self.order, shared, findings)
        self.loans: dict[int, Loan] = {}
        self.signals: list[tuple[int, int]] = []  # (event, instruction)
        self.waits: list[tuple[int, int]] = []
        self.entries: dict[tuple[str, int], list[int]] = {}  # (collective, micro-batch) -> instructions that enter it
        self.initial_bytes: list[int] = []
        self._first_node = graph.first[device]
        self._columns = {name: rows[name].tolist() for name in rows.dtype.names or ()}
        self._placements = {placement.tensor: placement.memories for placement in initial}
        self._sequence = sequence
        self._next_first = 0
        self._executions: dict[int, int] = {}  # op * K + micro-batch -> version that its first execution made
        self._versions: dict[tuple[int, ...], int] = {}  # (op, micro-batch, versions of the inputs) -> version
        self._retired_by: dict[int, int] = {}
        self._held: dict[int, int] = {}  # instruction with a written retire -> bytes of its workspace

    def run(self) -> None:
        self._pair_retires()
        self._place_initial()
        handlers = {
            Kind.COMPUTE: self._compute, Kind.COLLECTIVE: self._collective, Kind.OFFLOAD: self._transfer,
            Kind.PREFETCH: self._transfer, Kind.RELEASE: self._release, Kind.ENCODE: self._encode,
            Kind.DECODE: self._decode, Kind.RETIRE: self._retire, Kind.SIGNAL: self._signal, Kind.WAIT: self._wait,
            Kind.LEND: self._lend, Kind.RECLAIM: self._reclaim,
        }  # fmt: skip
        by_number = [handlers[kind] for kind in sorted(handlers)]
        most_looks = MOST_LOOKS + LOOKS_EACH * len(self.rows)
        for index, kind in enumerate(self._columns["kind"]):
            by_number[kind](index, self._first_node + index)
            self.graph.check_size()
            if self.state.looked_at > most_looks:
                where = self.state.describe(index)
                raise TooComplex(f"{where}: copies of one instance were compared {most_looks} times; use fewer slices")
        self._finish()

    def _pair_retires(self) -> None:
        kinds = self._columns["kind"]
        for index in np.flatnonzero(self.rows["kind"] == Kind.RETIRE).tolist():
            after = self._columns["after"][index]
            if not 0 <= after < index or kinds[after] not in HAS_WORKSPACE:
                self.state.report(Rule.RETIRE, index, f"#{after} is not an earlier instruction that can have workspace")
            elif after in self._retired_by:
                self.state.report(Rule.RETIRE, index, f"#{after} is already retired by #{self._retired_by[after]}")
            else:
                self._retired_by[after] = index

    def _place_initial(self) -> None:
        table, state = self.table, self.state
        places = [(t, k, table.host_memory) for t in sorted(table.inputs) for k in range(table.instance_count(t))]
        places += [(t, 0, memory) for t, memories in self._placements.items() for memory in memories]
        for tensor, k, memory in places:
            state.place(state.copies.number(self.device, tensor, k, memory, PLAIN, 0, 1), INITIAL)
        for memory in range(len(self.static.machine.memories)):
            state.ledger.settle(START, memory)
        self.initial_bytes = list(state.ledger.used_bytes)

    def _finish(self) -> None:
        end = len(self.rows)
        while self._next_first < len(self._sequence):
            op, k = self._sequence[self._next_first]
            if op * self.table.micro_batches + k not in self._executions:
                name = self.table.program.ops[op].name
                self.state.report(Rule.MISSING_OP, end, f"{name} (micro-batch {k}) has not run")
            self._next_first += 1
        for number, loan in self.loans.items():
            if loan.reclaim < 0:
                message = f"loan {number} is not reclaimed ({loan.size_bytes} bytes)"
                self.state.report(Rule.LEAK, end, message, self.table.memory)
        self.state.finish(self._placements)

    # --- compute and collective --------------------------------------------------------------------------------

    def _compute(self, index: int, node: int) -> None:
        self._execute(index, node, COMPUTE_STREAM)

    def _collective(self, index: int, node: int) -> None:
        op, k = self._columns["op"][index], self._columns["micro_batch"][index]
        self.entries.setdefault((self.table.program.ops[op].collective, k), []).append(index)
        self._execute(index, node, COMMUNICATION_STREAM)

    def _execute(self, index: int, node: int, stream: int) -> None:
        op_index, k = self._columns["op"][index], self._columns["micro_batch"][index]
        state, order, op = self.state, self.order, self.table.ops[op_index]
        content, newest, storage = state.content, state.newest, state.copies.storage
        at = self.table.micro_batches - 1 if op.step_op else k  # a step op sees the last micro-batch
        order.issue(node, (stream,))
        run = op_index * self.table.micro_batches + k
        first = run not in self._executions
        if first:
            self._check_turn(index, op_index, k)
        elif stream == COMPUTE_STREAM and not op.recomputable:
            state.report(Rule.RECOMPUTE_IN_PLACE, index, "runs again, and the op is not recomputable")
        inputs = [op_index, k]
        reads = [base + at * moves for base, moves in op.reads]
        for copy in reads:  # the number of an instance is that of its plain whole copy in device memory
            version = content.get(copy)
            if version is None or version != newest[copy]:
                version = state.read(index, node, stream, copy)
            else:
                order.read(storage[copy], node, stream)
            inputs.append(version)
        updates = [base + at * moves for base, moves in op.updates]
        inputs += [state.read_for_update(index, node, stream, copy) for copy in updates]
        version = self._versions.setdefault(tuple(inputs), len(self._versions) + 1)
        if first:
            self._executions[run] = version
        elif self._executions[run] != version and op.recomputable:
            state.report(Rule.RECOMPUTE_VERSION, index, "reads other versions of its inputs than the first execution")
            version = self._executions[run]
        scratch_bytes, allocates = op.workspace_bytes, False
        for base, moves in op.writes:
            copy = base + at * moves
            if copy not in content:
                if not allocates and state.needs_storage(copy):
                    order.allocate(self.table.memory, node)
                    allocates = True
                state.allocate(index, copy)
            elif not first:  # what is resident at a recomputation is not touched (3.2)
                scratch_bytes += self.table.sizes[base // self.table.micro_batches]
                continue
            state.produced(index, node, stream, copy, version, first, reads)
        for copy in updates:
            state.updated(index, node, stream, copy, version)
        self._scratch(index, node, scratch_bytes, allocates)

    def _check_turn(self, index: int, op: int, k: int) -> None:
        """First executions follow the order of the workload; what has run already is passed over."""
        while self._next_first < len(self._sequence):
            expected, expected_k = self._sequence[self._next_first]
            if (expected, expected_k) == (op, k):
                self._next_first += 1
                return
            if expected * self.table.micro_batches + expected_k not in self._executions:
                name = self.table.program.ops[expected].name
                message = f"runs before {name} (micro-batch {expected_k}), whose turn it is"
                self.state.report(Rule.OP_ORDER, index, message)
                return
            self._next_first += 1

    def _scratch(self, index: int, node: int, size_bytes: int, allocates: bool) -> None:
        """Workspace of an instruction: from its start to its written retire, or directly behind it (3.4)."""
        ledger, memory = self.state.ledger, self.table.memory
        if size_bytes:
            if not allocates:
                self.order.allocate(memory, node)
                allocates = True
            ledger.allocate(index, memory, -1 - index, size_bytes)
        if allocates:
            ledger.settle(index, memory)
        if index in self._retired_by:
            self._held[index] = size_bytes
        elif size_bytes:
            ledger.free(index, memory, -1 - index, size_bytes)
            self.order.free(memory, node)

    def _retire(self, index: int, node: int) -> None:
        after = self._columns["after"][index]
        if self._retired_by.get(after) != index:
            return
        self.graph.edge(self._first_node + after, node)
        self.order.free(self.table.memory, node)
        self.state.ledger.free(index, self.table.memory, -1 - after, self._held[after])

    # --- copies ------------------------------------------------------------------------------------------------

    def _named(self, index: int, memory: int, form: int) -> int:
        columns = self._columns
        owner, parts = columns["owner"][index], columns["parts"][index]
        return self.state.copies.number(
            self.device if owner == -1 else owner, columns["tensor"][index], columns["micro_batch"][index],
            memory, form, columns["part"][index], parts,
        )  # fmt: skip

    def _transfer(self, index: int, node: int) -> None:
        source, target = self._columns["memory"][index], self._columns["to_memory"][index]
        form = self._columns["form"][index]
        streams: tuple[int, ...] = ()
        if self.static.machine.has_route(source, target):
            engines = self.static.machine.route(source, target).engines
            streams = tuple(FIRST_ENGINE_STREAM + engine for engine in engines)
        else:
            names = f"{self.static.memory_name(source)} to {self.static.memory_name(target)}"
            self.state.report(Rule.NO_ROUTE, index, f"the machine has no route from {names}", target)
        lane = self.order.issue(node, streams)
        self._copy(index, node, lane, self._named(index, source, form), self._named(index, target, form), 0)

    def _encode(self, index: int, node: int) -> None:
        self._recode(index, node, PLAIN, self._columns["form"][index])

    def _decode(self, index: int, node: int) -> None:
        self._recode(index, node, self._columns["form"][index], PLAIN)

    def _recode(self, index: int, node: int, from_form: int, to_form: int) -> None:
        memory = self._columns["memory"][index]
        source, target = self._named(index, memory, from_form), self._named(index, memory, to_form)
        codec = self.static.machine.codecs[self._columns["form"][index]]
        lane = self.order.issue(node, (COMPUTE_STREAM,))
        workspace_bytes = codec.workspace_bytes(self.state.copies.plain_bytes(source))
        self._copy(index, node, lane, source, target, workspace_bytes)

    def _copy(self, index: int, node: int, lane: int, source: int, target: int, workspace_bytes: int) -> None:
        state = self.state
        version = state.read(index, node, lane, source)
        memory = state.copies.memory[target]
        allocates = target not in state.content and state.needs_storage(target)
        if allocates:
            self.order.allocate(memory, node)
        if target not in state.content:
            state.allocate(index, target)
        state.copied(index, node, lane, target, version)
        if self._columns["kind"][index] in HAS_WORKSPACE:
            self._scratch(index, node, workspace_bytes, allocates)
        elif allocates:
            state.ledger.settle(index, memory)

    def _release(self, index: int, node: int) -> None:
        columns = self._columns
        self.state.release(index, node, self._named(index, columns["memory"][index], columns["form"][index]))

    # --- order between lists -----------------------------------------------------------------------------------

    def _signal(self, index: int, node: int) -> None:
        after, event = self._columns["after"][index], self._columns["event"][index]
        self.signals.append((event, index))
        if not 0 <= after < index or self._columns["kind"][after] not in _SIGNALLED:
            self.state.report(Rule.EVENT, index, f"#{after} is not an earlier instruction whose end can be signalled")
        else:
            self.graph.edge(self._first_node + after, node)

    def _wait(self, index: int, node: int) -> None:
        self.waits.append((self._columns["event"][index], index))
        self.order.issue(node, (self._columns["stream"][index],))
        self.order.waits.append(node)

    def _lend(self, index: int, node: int) -> None:
        number, size_bytes = self._columns["event"][index], self._columns["size_bytes"][index]
        if number in self.loans:
            self.state.report(Rule.LOAN, index, f"loan {number} was already made by #{self.loans[number].instruction}")
            return
        self.loans[number] = Loan(index, size_bytes, self._columns["to_device"][index])
        self.order.allocate(self.table.memory, node)
        self.state.ledger.allocate(index, self.table.memory, -1 - index, size_bytes)
        self.state.ledger.settle(index, self.table.memory)

    def _reclaim(self, index: int, node: int) -> None:
        number = self._columns["event"][index]
        loan = self.loans.get(number)
        if loan is None or loan.reclaim >= 0:
            self.state.report(Rule.LOAN, index, f"loan {number} is not out")
            return
        self.loans[number] = replace(loan, reclaim=index)
        self.order.reclaim(node, self._first_node + loan.instruction)
        self.order.free(self.table.memory, node)
        self.state.ledger.free(index, self.table.memory, -1 - loan.instruction, loan.size_bytes)
