"""Accesses to copies that several lists use. Found here list by list, judged in `between` once all lists are walked."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from tmojax.check.rules import START
from tmojax.check.static import TRANSFERS, Static
from tmojax.problem.schedule import PLAIN, Kind, Schedule

if TYPE_CHECKING:
    from tmojax.check.residency import Residency

FIRST_UNKNOWN = -10  # versions at or below it stand for what a read of another list's copy found


class AccessKind(Enum):
    WRITE = "write"
    READ = "read"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Access:
    """One access of a list to a copy of a shared instance.

    `version`: what a write stores, or what a read must find (None: whatever is current then). `unknown`: number that
    stands for what the read finds (0: none).
    """

    key: tuple[int, ...]
    device: int
    instruction: int
    kind: AccessKind
    version: int | None = None
    unknown: int = 0


@dataclass(frozen=True, slots=True)
class CurrencyCheck:
    """A list read its own copy of another device's tensor; `version` may be unknown so far."""

    device: int
    instruction: int
    triple: tuple[int, int, int]
    version: int


class SharedLog:
    """Instances that a list names although another device owns them, and everything done to their copies.

    Without such an instance (the usual case) `active` is false and nothing is recorded: every list then touches only
    copies of its own tensors.
    """

    def __init__(self, static: Static, schedule: Schedule) -> None:
        self.accesses: list[Access] = []
        self.checks: list[CurrencyCheck] = []
        self.changes: dict[tuple[int, int, int], list[tuple[int, int]]] = {}  # instance -> (instruction, version)
        self._unknown = FIRST_UNKNOWN
        self._instances: set[tuple[int, int, int]] = set()
        copies = [*TRANSFERS, int(Kind.RELEASE), int(Kind.ENCODE), int(Kind.DECODE)]
        for device, rows in enumerate(schedule.lists):
            foreign = np.isin(rows["kind"], copies) & (rows["owner"] != -1) & (rows["owner"] != device)
            for row in rows[foreign]:
                self._instances.add((int(row["owner"]), int(row["tensor"]), int(row["micro_batch"])))
        self.active = bool(self._instances)
        self._makers: dict[tuple[int, ...], set[int]] = {}
        if self.active:
            self._find_makers(static, schedule, copies)

    def _find_makers(self, static: Static, schedule: Schedule, copies: list[int]) -> None:
        for device, rows in enumerate(schedule.lists):
            for row in rows[np.isin(rows["kind"], copies)]:
                owner, kind = int(row["owner"]), int(row["kind"])
                triple = (device if owner == -1 else owner, int(row["tensor"]), int(row["micro_batch"]))
                if triple not in self._instances or kind == Kind.RELEASE:
                    continue
                memory = int(row["to_memory"] if kind in TRANSFERS else row["memory"])
                form = PLAIN if kind == Kind.DECODE else int(row["form"])
                self._makers.setdefault((*triple, memory, form, int(row["part"]), int(row["parts"])), set()).add(device)
        for owner, tensor, k in self._instances:
            table = static.devices[owner]
            memories = {table.memory}
            if tensor in table.program.inputs:
                memories.add(table.host_memory)
            for placement in schedule.initial[owner]:
                if placement.tensor == tensor:
                    memories.update(placement.memories)
            for memory in memories:
                self._makers.setdefault((owner, tensor, k, memory, PLAIN, 0, 1), set()).add(owner)

    def made_elsewhere(self, key: tuple[int, ...], device: int) -> bool:
        """Does another list make this copy at some place?"""
        return bool(self._makers.get(key, set()) - {device})

    def involves(self, state: Residency, instance: int) -> bool:
        """Does another list touch copies of this own instance?"""
        return self.active and (state.device, *divmod(instance, state.table.micro_batches)) in self._instances

    def write(self, state: Residency, index: int, copy: int, version: int) -> None:
        self._record(state, index, copy, AccessKind.WRITE, version)

    def release(self, state: Residency, index: int, copy: int) -> None:
        self._record(state, index, copy, AccessKind.RELEASE, None)

    def _record(self, state: Residency, index: int, copy: int, kind: AccessKind, version: int | None) -> None:
        if self.active:
            key = state.copies.key(copy)
            if key[:3] in self._instances:
                self.accesses.append(Access(key, state.device, index, kind, version))

    def change(self, state: Residency, index: int, instance: int, version: int) -> None:
        """The owner's list gave an instance a new version."""
        if self.active:
            triple = (state.device, *divmod(instance, state.table.micro_batches))
            if triple in self._instances:
                self.changes.setdefault(triple, [(START, 0)]).append((index, version))

    def read_own(self, state: Residency, index: int, copy: int, version: int) -> None:
        """A list read a copy that it made of another device's tensor."""
        owner, tensor, k, *_ = state.copies.key(copy)
        self.checks.append(CurrencyCheck(state.device, index, (owner, tensor, k), version))

    def read_elsewhere(self, state: Residency, index: int, copy: int, expected: int | None) -> int | None:
        """Read a copy that another list makes. Returns its version, or a placeholder for it; None: nobody makes it."""
        key = state.copies.key(copy)
        if not self.active or not self.made_elsewhere(key, state.device):
            return None
        unknown = 0
        if expected is None:
            self._unknown -= 1
            unknown = self._unknown
        self.accesses.append(Access(key, state.device, index, AccessKind.READ, expected, unknown))
        return unknown if expected is None else expected
