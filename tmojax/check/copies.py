"""Numbers for the copies that one list touches, with their exact sizes and shared storage."""

from __future__ import annotations

from tmojax.check.static import DeviceTable, Static
from tmojax.problem.schedule import PLAIN, part_bytes


class CopyTable:
    """Copies of one list as small integers.

    The plain whole copy of instance `i` of an own tensor in the device's own memory has the number `i`: the walk of an
    op needs no lookup. All other copies get the next free number when they are first named. Instances of tensors that
    other devices own are numbered from `own_instances` on. Copies of one alias group, instance, memory, form and part
    share a storage: the number of the first of them that was named (semantics 5.4).
    """

    def __init__(self, static: Static, table: DeviceTable) -> None:
        self._static = static
        self._table = table
        count = table.micro_batches
        dense = len(table.sizes) * count
        self.own_instances = dense
        self.size_bytes: list[int] = []  # of the storage, as charged in the copy's memory
        self.storage: list[int] = []
        self.aliased: list[bool] = []
        self.instance: list[int] = list(range(dense))
        self.memory: list[int] = [table.memory] * dense
        self._keys: list[tuple[int, ...] | None] = [None] * dense
        self._numbers: dict[tuple[int, ...], int] = {}
        self._foreign: dict[tuple[int, int, int], int] = {}
        self._others: dict[int, list[int]] = {}  # instance -> its copies other than the dense one
        self._storages: dict[tuple[object, ...], int] = {}
        for tensor in range(len(table.sizes)):
            for k in range(count):
                key = (table.device, tensor, k, table.memory, PLAIN, 0, 1)
                self.storage.append(self._storage_of(key, tensor * count + k))
                self.aliased.append(bool(table.group[tensor]))
                self.size_bytes.append(self._storage_bytes(key))

    def number(self, owner: int, tensor: int, micro_batch: int, memory: int, form: int, part: int, parts: int) -> int:
        """The number of a copy, a new one if it was never named."""
        if owner == self._table.device and memory == self._table.memory and form == PLAIN and parts == 1:
            return tensor * self._table.micro_batches + micro_batch
        key = (owner, tensor, micro_batch, memory, form, part, parts)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.storage)
            self.storage.append(self._storage_of(key, number))
            self.aliased.append(bool(self._static.devices[owner].group[tensor]))
            self.size_bytes.append(self._storage_bytes(key))
            self.memory.append(memory)
            self._keys.append(key)
            if owner == self._table.device:
                instance = tensor * self._table.micro_batches + micro_batch
            else:
                triple = (owner, tensor, micro_batch)
                instance = self._foreign.setdefault(triple, self.own_instances + len(self._foreign))
            self.instance.append(instance)
            self._others.setdefault(instance, []).append(number)
        return number

    def find(self, key: tuple[int, ...]) -> int | None:
        """The number of a copy that was named before, or None."""
        owner, tensor, micro_batch, memory, form, _, parts = key
        if owner == self._table.device and memory == self._table.memory and form == PLAIN and parts == 1:
            return tensor * self._table.micro_batches + micro_batch
        return self._numbers.get(key)

    def key(self, number: int) -> tuple[int, ...]:
        """(owner, tensor, micro-batch, memory, form, part, parts) of a copy."""
        key = self._keys[number]
        if key is None:
            tensor, micro_batch = divmod(number, self._table.micro_batches)
            key = (self._table.device, tensor, micro_batch, self._table.memory, PLAIN, 0, 1)
        return key

    def of_instance(self, instance: int) -> list[int]:
        """All copies of an instance that were named so far."""
        others = self._others.get(instance, [])
        return [instance, *others] if instance < self.own_instances else others

    def plain_bytes(self, number: int) -> int:
        """Bytes of the tensor part that a copy holds, unencoded."""
        owner, tensor, _, _, _, part, parts = self.key(number)
        return part_bytes(self._static.devices[owner].sizes[tensor], part, parts)

    def _storage_of(self, key: tuple[int, ...], number: int) -> int:
        owner, tensor, *place = key
        group = self._static.devices[owner].group[tensor]
        return self._storages.setdefault((owner, group, *place), number) if group else number

    def _storage_bytes(self, key: tuple[int, ...]) -> int:
        owner, tensor, _, memory, form, part, parts = key
        table = self._static.devices[owner]
        members = table.members[table.group[tensor]] if table.group[tensor] else [tensor]
        size = max(part_bytes(table.sizes[member], part, parts) for member in members)
        if form != PLAIN:
            size = self._static.machine.codecs[form].encoded_bytes(size)
        return self._static.charged_bytes(memory, size)
