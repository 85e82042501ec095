"""Between lists: collectives, events, shared memories, shared copies (semantics 3.3, 3.5, 4.3, 5.3)."""

from __future__ import annotations

from dataclasses import dataclass, field

from tmojax.check.graph import Clocks, Graph
from tmojax.check.rules import START, WHOLE, Findings, Rule
from tmojax.check.shared import FIRST_UNKNOWN, Access, AccessKind, SharedLog
from tmojax.check.static import Static
from tmojax.check.walk import ListWalk


def fuse_collectives(static: Static, walks: list[ListWalk], graph: Graph, findings: Findings) -> None:
    """Make one node of each collective. Entries match by collective, micro-batch and count (3.3)."""
    workload = static.problem.workload
    for walk in walks:
        for (name, _), entries in walk.entries.items():
            if walk.device not in workload.collective(name).devices:
                walk.state.report(Rule.COLLECTIVE_MISMATCH, entries[0], f"this device has no part in collective {name}")
            runs: dict[int, int] = {}
            for index in entries:
                op = int(walk.rows["op"][index])
                if op in runs:
                    walk.state.report(Rule.COLLECTIVE_MISMATCH, index, f"enters {name} again (first at #{runs[op]})")
                runs.setdefault(op, index)
    for collective in workload.collectives:
        for k in range(static.micro_batches):
            entered = {device: walks[device].entries.get((collective.name, k), []) for device in collective.devices}
            count = max(len(entries) for entries in entered.values())
            for device, entries in entered.items():
                if len(entries) < count:
                    findings.add(
                        Rule.COLLECTIVE_MISMATCH, device, len(walks[device].rows),
                        f"{static.device_name(device)}: enters collective {collective.name} of micro-batch {k} "
                        f"{len(entries)} time(s) where others enter it {count} time(s)",
                    )  # fmt: skip
            for turn in range(count):
                graph.fuse([graph.first[device] + e[turn] for device, e in entered.items() if turn < len(e)])


def connect_events(walks: list[ListWalk], graph: Graph) -> None:
    """Edges from signals to waits."""
    fired: dict[int, tuple[ListWalk, int]] = {}
    for walk in walks:
        for event, index in walk.signals:
            if event in fired:
                other, first = fired[event]
                by = other.state.describe(first)
                walk.state.report(Rule.EVENT, index, f"event {event} is already signalled by {by}")
            else:
                fired[event] = (walk, index)
    for walk in walks:
        for event, index in walk.waits:
            if event not in fired:
                walk.state.report(Rule.EVENT, index, f"event {event} is never signalled")
            else:
                other, signal = fired[event]
                graph.edge(graph.first[other.device] + signal, graph.first[walk.device] + index)


# --- copies that several lists use -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _CopyState:
    maker: int = -1
    version: int = 0
    changed_by: Access | None = None  # the last write or release
    readers: list[Access] = field(default_factory=list)


class SharedCopies:
    """Plays the accesses to shared copies in one order that the schedule allows, and demands that there is no other."""

    def __init__(
        self, static: Static, walks: list[ListWalk], graph: Graph, clocks: Clocks, order: list[int], log: SharedLog
    ) -> None:
        self._static, self._walks, self._graph, self._clocks, self._log = static, walks, graph, clocks, log
        self._place = {node: place for place, node in enumerate(order)}
        self._states: dict[tuple[int, ...], _CopyState] = {}
        self._values: dict[int, int] = {}  # placeholder -> version

    def check(self) -> None:
        for access in sorted(self._log.accesses, key=self._when):
            state = self._states.setdefault(access.key, _CopyState())
            if access.kind is AccessKind.READ:
                self._read(access, state)
            else:
                self._change(access, state)
        for check in self._log.checks:
            self._check_current(check.device, check.instruction, check.triple, self._value(check.version))

    def _when(self, access: Access) -> int:
        return -1 if access.instruction == START else self._place[self._node(access.device, access.instruction)]

    def _node(self, device: int, instruction: int) -> int:
        return self._graph.representative(self._graph.first[device] + instruction)

    def _ordered(self, before: Access, after: Access) -> bool:
        if before.device == after.device or before.instruction == START:
            return True
        if after.instruction == START:
            return False
        return self._clocks.ordered(
            self._graph.first[before.device] + before.instruction, self._graph.first[after.device] + after.instruction
        )

    def _value(self, version: int) -> int:
        return self._values.get(version, version) if version <= FIRST_UNKNOWN else version

    def _report(self, rule: Rule, access: Access, message: str, other: Access | None = None) -> None:
        name = self._static.copy_name(access.key, access.device)
        by = f" ({self._walks[other.device].state.describe(other.instruction)})" if other else ""
        self._walks[access.device].state.report(rule, access.instruction, f"{name} {message}{by}", access.key[3])

    def _change(self, access: Access, state: _CopyState) -> None:
        if state.maker not in (-1, access.device):
            # The release that follows such a write is no further mistake.
            if access.kind is AccessKind.WRITE:
                self._report(Rule.WRITE_FOREIGN, access, "is written, and another list made it", state.changed_by)
            return
        before = state.changed_by
        if before and not self._ordered(before, access):
            self._report(Rule.CROSS_LIST_RACE, access, "is not ordered after an earlier access", before)
        for reader in state.readers:
            if not self._ordered(reader, access):
                self._report(Rule.CROSS_LIST_RACE, access, "may still be read by another list", reader)
        state.readers.clear()
        state.changed_by = access
        if access.kind is AccessKind.WRITE:
            state.maker = access.device
            state.version = self._value(access.version or 0)
        else:
            state.maker = -1

    def _read(self, access: Access, state: _CopyState) -> None:
        if state.maker == -1:
            if state.changed_by:
                self._report(Rule.DATA_NOT_THERE, access, "was released before", state.changed_by)
            else:
                self._report(Rule.USE_BEFORE_ARRIVAL, access, "is read before another list makes it")
            return
        if state.changed_by and not self._ordered(state.changed_by, access):
            self._report(Rule.USE_BEFORE_ARRIVAL, access, "is not surely there when it is read", state.changed_by)
        state.readers.append(access)
        if access.unknown:
            self._values[access.unknown] = state.version
            self._check_current(access.device, access.instruction, access.key[:3], state.version)
        elif access.version != state.version:
            self._report(Rule.STALE_VERSION, access, "holds an old version", state.changed_by)

    def _check_current(self, device: int, instruction: int, triple: tuple[int, ...], version: int) -> None:
        """A list read `version` of another device's tensor: the owner must not have replaced it by then."""
        owner, tensor, k = triple
        changes = self._log.changes.get((owner, tensor, k), [(START, 0)])
        places = [place for place, (_, made) in enumerate(changes) if made == version]
        name = self._static.instance_name(owner, tensor, k)
        state = self._walks[device].state
        if not places:
            if version > FIRST_UNKNOWN:
                state.report(Rule.STALE_VERSION, instruction, f"reads an undefined version of {name}")
        elif places[-1] + 1 < len(changes):
            replaced = changes[places[-1] + 1][0]
            if not self._clocks.ordered(self._graph.first[device] + instruction, self._graph.first[owner] + replaced):
                by = self._walks[owner].state.describe(replaced)
                state.report(Rule.STALE_VERSION, instruction, f"may read {name} after it was replaced by {by}")


def check_shared_memories(static: Static, walks: list[ListWalk], findings: Findings) -> list[int]:
    """A memory that several lists use is charged with the sum of each list's maximum (5.3). Returns all peaks."""
    peaks = []
    for memory, spec in enumerate(static.machine.memories):
        if static.is_private(memory):
            peaks.append(walks[static.owners[memory][0]].state.ledger.peak_bytes[memory])
            continue
        maxima = [walk.state.ledger.peak_bytes[memory] for walk in walks]
        peak = sum(maxima)
        peaks.append(peak)
        available = static.available_bytes(memory)
        limits = [(Rule.CAPACITY if spec.kind == "device" else Rule.HOST_CAPACITY, "capacity less reserve", available)]
        if spec.pinned_limit_bytes >= 0:
            limits.append((Rule.PINNED_CAPACITY, "pinned limit", spec.pinned_limit_bytes))
        for rule, label, limit in limits:
            if peak > limit:
                shares = ", ".join(f"{static.device_name(w.device)} {m}" for w, m in zip(walks, maxima, strict=True))
                findings.add(
                    rule, WHOLE, START,
                    f"{spec.name}: the maxima of the lists add up to {peak} bytes, {peak - limit} over the {label} "
                    f"{limit} ({shares}); largest: {_largest(walks, memory)}",
                    spec.name, peak - limit,
                )  # fmt: skip
    return peaks


def _largest(walks: list[ListWalk], memory: int) -> str:
    """The largest items at the peak of the list that uses most of a shared memory."""
    walk = max(walks, key=lambda walk: walk.state.ledger.peak_bytes[memory])
    position = walk.state.ledger.peak_position[memory]
    items = walk.state.ledger.largest(memory, [position])[position]
    return ", ".join(f"{walk.state.item_name(item)} {size_bytes}" for item, size_bytes in items)
