"""The columns of a class of devices in the program of a step, and the rows that limit the step time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tmojax.bounds.block import Block, Units
from tmojax.bounds.critical_path import CriticalPath
from tmojax.bounds.device_classes import DeviceClass
from tmojax.bounds.gaps import Gaps, Host
from tmojax.bounds.highs import INFINITY, LinearModel


@dataclass(frozen=True, eq=False)
class ClassColumns:
    """One class of devices. name: of its first device. blocks: (how many micro-batches, columns), the last one with the
    step ops; moved_out, moved_in: columns of all bytes of a step, one per way of `spec.out_links` (`in_links`); late:
    column of the bytes of late state that go out after its last change without being away before the end of the step
    (-1: none)."""

    name: str
    spec: DeviceClass
    path: CriticalPath
    blocks: tuple[tuple[int, Block], ...]
    moved_out: np.ndarray
    moved_in: np.ndarray
    late: int

    @property
    def gaps(self) -> Gaps:
        """Of the last micro-batch."""
        return self.blocks[-1][1].gaps

    def first_starts_s(self) -> np.ndarray:
        """[J] least seconds from the start of the step to each moment of the first block."""
        moments = self.blocks[0][1].moments
        before = self.path.before_end if len(self.blocks) == 1 else self.path.before[0]
        return before[moments.slots] + moments.from_slot_s

    def last_starts_s(self) -> np.ndarray:
        """[J] the same of the last block."""
        moments = self.blocks[-1][1].moments
        return self.path.before_end[moments.slots] + moments.from_slot_s

    def rests_s(self) -> np.ndarray:
        """[J + 1] least seconds from each moment of the last block, and from its end, to the end of the step."""
        moments = self.blocks[-1][1].moments
        return np.append(self.path.after_end[moments.slots] - moments.from_slot_s, self.path.after_last_s)

    @property
    def members(self) -> int:
        return len(self.spec.devices)

    def crosses(self, link: int) -> tuple[bool, bool]:
        """Whether all that goes out of, and all that comes into, the memory of a member crosses a link."""
        leaves, enters, _ = self.spec.crosses.get(link, (False, False, 0))
        return leaves, enters

    def sharing(self, link: int) -> int:
        """Of how many members this holds for one link."""
        return self.spec.crosses[link][2] if link in self.spec.crosses else 0

    def first_byte_s(self, block: Block, leaves: bool, enters: bool) -> float:
        """Seconds of compute from the start of a micro-batch before which nothing that `block` counts crosses a
        link that it crosses in the directions named."""
        gaps = block.gaps
        usable, ends = block.moved >= 0, np.cumsum(gaps.slot_s)
        first = float(ends[-1])
        if leaves and (pays := usable & (gaps.host == Host.COPY_OUT)).any():
            first = min(first, float(ends[gaps.made[pays]].min()))
        if enters and (inner := usable & (gaps.end < len(gaps.slot_op))).any():
            # What moves as a whole may be back before its gap begins, but not before it was made.
            since = np.where(gaps.host[inner] == Host.COPY_OUT, gaps.made[inner], gaps.start[inner])
            first = min(first, float(np.where(since >= 0, ends[since], 0.0).min()))
        if enters and len(block.resting.into):
            first = 0.0
        return first


@dataclass(frozen=True, eq=False)
class StepRows:
    """The model, its column of the step time, and the rows that limit it: what each is called, and the coefficient of
    the step."""

    model: LinearModel
    unit: Units
    step: int
    named: dict[int, tuple[str, float]] = field(default_factory=dict)

    def add(self, label: str, step: float, least: float, terms: list[tuple]) -> None:
        """step * T + terms >= least."""
        row = self.model.add_row(least, INFINITY, (self.step, step), *terms)
        self.named[row] = (label, step)
