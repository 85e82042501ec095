"""The copies of one list: which are resident, in which version, in how many bytes (semantics 3.7, 5.2, 5.4, 6)."""

from __future__ import annotations

import numpy as np

from tmojax.check.copies import CopyTable
from tmojax.check.ledger import Ledger
from tmojax.check.order import ListOrder
from tmojax.check.rules import START, Findings, Rule
from tmojax.check.shared import SharedLog
from tmojax.check.static import Static
from tmojax.problem.schedule import PLAIN

UNWRITTEN = -2  # newest version of an instance that nothing has written yet
LOST = -1  # content of a copy whose storage an alias has overwritten
INITIAL = 0  # version of inputs and STATE at the start
_NAMED = 5  # copies in one message


class Residency:
    """State of one list at a position. Copies and instances are the small integers of `CopyTable`.

    `content`: resident copy -> version. `newest`: instance of an own tensor -> its newest version. `borrowed`: private
    memory of another device -> (instruction, allocates, bytes of this list there afterwards). `looked_at`: how many
    copies were compared to find slices, or whether a current copy is left.
    """

    def __init__(
        self, static: Static, device: int, rows: np.ndarray, order: ListOrder, shared: SharedLog, findings: Findings
    ) -> None:
        self.static, self.device, self.rows, self.order = static, device, rows, order
        self.table = static.devices[device]
        self.copies = CopyTable(static, self.table)
        self.ledger = Ledger(static, device)
        self.content: dict[int, int] = {}
        self.newest = [UNWRITTEN] * self.copies.own_instances
        self.borrowed: dict[int, list[tuple[int, bool, int]]] = {}
        self.looked_at = 0
        self.shared = shared
        self._findings = findings
        self._root: dict[int, int] = {}  # aliased instance -> version of which its newest value is a view
        self._members: dict[int, set[int]] = {}  # storage of an alias group -> resident copies in it
        self._released: set[int] = set()
        self._gone: dict[int, int] = {}  # instance -> release of its last current copy

    # --- reports -----------------------------------------------------------------------------------------------

    def report(self, rule: Rule, index: int, message: str, memory: int = -1, bytes_over: int = 0) -> None:
        name = self.static.memory_name(memory) if memory >= 0 else ""
        self._findings.add(rule, self.device, index, f"{self.describe(index)}: {message}", name, bytes_over)

    def describe(self, index: int) -> str:
        if index == START:
            return f"{self.static.device_name(self.device)} at the start"
        if index >= len(self.rows):
            return f"{self.static.device_name(self.device)} at the end"
        return self.static.describe(self.device, index, self.rows[index])

    def name(self, copy: int) -> str:
        return self.static.copy_name(self.copies.key(copy), self.device)

    def item_name(self, item: int) -> str:
        """A ledger item in words: a copy, or the scratch of an instruction."""
        if item >= 0:
            return self.static.copy_name(self.copies.key(item), self.device, with_memory=False)
        return f"scratch of {self.describe(-1 - item)}"

    # --- allocation --------------------------------------------------------------------------------------------

    def place(self, copy: int, version: int) -> None:
        """A copy that is there at the start."""
        instance = self.copies.instance[copy]
        self.newest[instance] = version
        if self.table.group[instance // self.table.micro_batches]:
            self._root[instance] = version
        self.allocate(START, copy)
        self.content[copy] = version
        self.shared.write(self, START, copy, version)

    def needs_storage(self, copy: int) -> bool:
        """Does this copy, which is not resident, need an allocation? Not if an alias holds its storage (5.4)."""
        return not (self.copies.aliased[copy] and self._members.get(self.copies.storage[copy]))

    def allocate(self, index: int, copy: int) -> None:
        """Enter the bytes of a copy that becomes resident; a storage is allocated with the first copy in it (5.4)."""
        memory, storage = self.copies.memory[copy], self.copies.storage[copy]
        size_bytes = self.copies.size_bytes[copy]
        if self.copies.aliased[copy]:
            members = self._members.setdefault(storage, set())
            members.add(copy)
            if len(members) > 1:
                return
        self.ledger.allocate(index, memory, storage, size_bytes)
        if memory != self.table.memory and self.static.is_private(memory):
            used = self.ledger.used_bytes[memory]
            self.borrowed.setdefault(memory, []).append((index, True, used))

    def _free(self, index: int, copy: int) -> None:
        memory, storage = self.copies.memory[copy], self.copies.storage[copy]
        if self.copies.aliased[copy]:
            members = self._members[storage]
            members.discard(copy)
            if members:
                return
        self.ledger.free(index, memory, storage, self.copies.size_bytes[copy])
        if memory != self.table.memory and self.static.is_private(memory):
            self.borrowed.setdefault(memory, []).append((index, False, self.ledger.used_bytes[memory]))

    def release(self, index: int, node: int, copy: int) -> None:
        if copy not in self.content:
            if copy in self._released:
                why = f"{self.name(copy)} was already released"
                self.report(Rule.DOUBLE_RELEASE, index, why, self.copies.memory[copy])
            else:
                other = self.shared.made_elsewhere(self.copies.key(copy), self.device)
                why = "was made by another list, which must release it" if other else "was never made by this list"
                self.report(Rule.RELEASE_FOREIGN, index, f"{self.name(copy)} {why}", self.copies.memory[copy])
            return
        self._released.add(copy)
        self.order.release(self.copies.storage[copy], self.copies.memory[copy], node)
        version = self.content.pop(copy)
        self._free(index, copy)
        self.shared.release(self, index, copy)
        instance = self.copies.instance[copy]
        if instance >= self.copies.own_instances or version != self.newest[instance] or self._covered(instance):
            return
        if self.table.is_state[instance // self.table.micro_batches] and not self.shared.involves(self, instance):
            self._report_last(index, instance, "is STATE")
        else:
            self._gone[instance] = index

    def _covered(self, instance: int) -> bool:
        """Is there a current copy of an instance: whole, or all of its slices?"""
        newest, slices = self.newest[instance], {}
        for copy in self.copies.of_instance(instance):
            self.looked_at += 1
            if self.content.get(copy) == newest:
                *_, part, parts = self.copies.key(copy)
                if parts == 1:
                    return True
                slices.setdefault(parts, set()).add(part)
        return any(len(found) == parts for parts, found in slices.items())

    # --- writing -----------------------------------------------------------------------------------------------

    def copied(self, index: int, node: int, lane: int, copy: int, version: int) -> None:
        """A transfer, encode or decode stores `version` in a resident copy."""
        self.content[copy] = version
        self.order.write(self.copies.storage[copy], node, lane)
        self.shared.write(self, index, copy, version)
        if self.copies.aliased[copy]:
            self._overwrite_storage(copy)
            for member in sorted(self._members[self.copies.storage[copy]] - {copy}):  # written as well (4.3)
                self.shared.write(self, index, member, self.content.get(member, LOST))

    def produced(
        self, index: int, node: int, stream: int, copy: int, version: int, first: bool, reads: list[int]
    ) -> None:
        """An op wrote a resident copy. `reads`: instances that the op read."""
        if first:
            self.newest[copy] = version
            self.shared.change(self, index, copy, version)
            if self.copies.aliased[copy]:
                self._root[copy] = self._view_root(copy, version, reads)
        self._gone.pop(copy, None)
        self.copied(index, node, stream, copy, version)

    def _view_root(self, copy: int, version: int, reads: list[int]) -> int:
        """An op that reads a member of the group makes a view of it; any other one makes new content (5.4)."""
        micro_batches = self.table.micro_batches
        group = self.table.group[copy // micro_batches]
        for instance in reads:
            if self.table.group[instance // micro_batches] == group:
                return self._root.get(instance, version)
        return version

    def _overwrite_storage(self, copy: int) -> None:
        """Other tensors in the storage that are not views of the same value lose their content (5.4)."""
        instance = self.copies.instance
        root = self._root.get(instance[copy])
        for member in self._members.get(self.copies.storage[copy], ()):
            if member != copy and self._root.get(instance[member]) != root:
                self.content[member] = LOST

    def updated(self, index: int, node: int, stream: int, copy: int, version: int) -> None:
        """An update gives a tensor, and all views of it, a new version; copies elsewhere keep the old one."""
        micro_batches = self.table.micro_batches
        group, old_root = self.table.group[copy // micro_batches], self._root.get(copy)
        for tensor in self.table.members.get(group, ()):
            view = tensor * micro_batches + copy % micro_batches
            if view != copy and self.newest[view] != UNWRITTEN and self._root.get(view) == old_root:
                if self.content.get(view) == self.newest[view]:
                    self.content[view] = version
                self.newest[view] = self._root[view] = version
                self.shared.change(self, index, view, version)
        if group:
            self._root[copy] = version
        self.newest[copy] = version
        self._gone.pop(copy, None)
        self.shared.change(self, index, copy, version)
        if copy in self.content:
            self.copied(index, node, stream, copy, version)

    # --- reading -----------------------------------------------------------------------------------------------

    def read(self, index: int, node: int, lane: int, copy: int) -> int:
        """Read a copy, from slices or from the whole where it is not there itself (3.7). Returns the version read.

        After a violation the expected version is returned, so that one mistake is not reported over and over.
        """
        instance = self.copies.instance[copy]
        own = instance < self.copies.own_instances
        expected = self.newest[instance] if own else None
        sources = self._sources(copy)
        if not sources:
            version = None if expected == UNWRITTEN else self.shared.read_elsewhere(self, index, copy, expected)
            if version is None:
                self._report_missing(index, copy, instance)
                return INITIAL if expected is None else expected
            return version
        for source in sources:
            self.order.read(self.copies.storage[source], node, lane)
            found = self.content[source]
            if not own:
                self.shared.read_own(self, index, source, found)
            elif found != expected:
                self._report_stale(index, source, found)
        return self.content[sources[0]] if expected is None else expected

    def read_for_update(self, index: int, node: int, stream: int, copy: int) -> int:
        """An op that updates needs the copy itself, made by this list; slices will not do (3.7, 6.4)."""
        version = self.content.get(copy)
        if version is None:
            if self.newest[copy] != UNWRITTEN and self.shared.made_elsewhere(self.copies.key(copy), self.device):
                self.report(Rule.WRITE_FOREIGN, index, f"updates {self.name(copy)}, which another list made")
            else:
                self._report_missing(index, copy, copy)
        else:
            self.order.read(self.copies.storage[copy], node, stream)
            if version != self.newest[copy]:
                self._report_stale(index, copy, version)
        return self.newest[copy]

    def _sources(self, copy: int) -> list[int]:
        """The resident copies that together hold what a read of `copy` needs; empty when there are none."""
        if copy in self.content:
            return [copy]
        owner, tensor, k, memory, form, _, parts = self.copies.key(copy)
        if form != PLAIN:
            return []
        if parts != 1:
            whole = self.copies.find((owner, tensor, k, memory, form, 0, 1))
            return [whole] if whole is not None and whole in self.content else []
        slices: dict[int, list[int]] = {}
        named = self.copies.of_instance(self.copies.instance[copy])
        self.looked_at += len(named)
        for other in named:
            _, _, _, place, other_form, _, count = self.copies.key(other)
            if count != 1 and place == memory and other_form == PLAIN and other in self.content:
                slices.setdefault(count, []).append(other)
        complete = [count for count, found in slices.items() if len(found) == count]
        return slices[min(complete)] if complete else []

    def _report_missing(self, index: int, copy: int, instance: int) -> None:
        key = self.copies.key(copy)
        resident = [other for other in self.copies.of_instance(instance) if other in self.content]
        here = [self.copies.key(other) for other in resident]
        self.looked_at += len(here)
        encoded = key[4] == PLAIN and any(other[3] == key[3] and other[4] != PLAIN for other in here)
        names = ", ".join(self.name(other) for other in resident[:_NAMED])
        names += f" and {len(resident) - _NAMED} more" if len(resident) > _NAMED else ""
        where = f"there is {names}" if resident else "no copy of it is resident"
        rule = Rule.NOT_DECODED if encoded else Rule.DATA_NOT_THERE
        self.report(rule, index, f"needs {self.name(copy)}, which is not resident; {where}", key[3])
        self._report_gone(index, instance)

    def _report_stale(self, index: int, copy: int, version: int) -> None:
        why = "was overwritten by a tensor in the same storage" if version == LOST else "holds an old version"
        self.report(Rule.STALE_VERSION, index, f"reads {self.name(copy)}, which {why}", self.copies.memory[copy])
        self._report_gone(index, self.copies.instance[copy])

    def _report_gone(self, index: int, instance: int) -> None:
        release = self._gone.pop(instance, None)
        if release is not None:
            self._report_last(release, instance, f"is read by #{index}")

    def _report_last(self, release: int, instance: int, why: str) -> None:
        name = self.static.instance_name(self.device, *divmod(instance, self.table.micro_batches))
        self.report(Rule.LAST_CURRENT_COPY, release, f"frees the last current copy of {name}, which {why}")

    # --- the end of the list -----------------------------------------------------------------------------------

    def finish(self, wanted: dict[int, tuple[int, ...]]) -> None:
        """STATE must be where it was at the start, current, and nothing else may be left (6.5)."""
        end = len(self.rows)
        expected = set()
        for tensor, memories in wanted.items():
            for memory in memories:
                copy = self.copies.number(self.device, tensor, 0, memory, PLAIN, 0, 1)
                expected.add(copy)
                found = self.content.get(copy)
                if found != self.newest[self.copies.instance[copy]]:
                    why = "is not resident" if found is None else "holds an old version"
                    self.report(Rule.STATE_NOT_RESTORED, end, f"STATE copy {self.name(copy)} {why}", memory)
        for copy in self.content:
            owner, tensor, _, memory, form, _, parts = self.copies.key(copy)
            kept = owner == self.device and memory == self.table.host_memory and form == PLAIN and parts == 1
            if copy not in expected and not (kept and tensor in self.table.inputs):
                self.report(Rule.LEAK, end, f"{self.name(copy)} is left ({self.copies.size_bytes[copy]} bytes)", memory)
