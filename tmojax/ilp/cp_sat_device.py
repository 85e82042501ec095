"""The part of the CP-SAT model that belongs to one device: runs, copies, reruns (memory: `cp_sat_memory`)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tmojax.ilp.cp_sat_links import IN, OUT
from tmojax.ilp.cp_sat_step import Gap
from tmojax.ilp.cp_sat_times import device_end

if TYPE_CHECKING:
    from tmojax.ilp.cp_sat_model import CpModel


@dataclass(frozen=True)
class Copy:
    """An optional copy out of or into device memory. hint: its start there, None where it does not take place."""

    device: int
    way: int
    start: Any
    ticks: int
    present: Any
    interval: Any
    fixed: bool
    hint: int | None

    @property
    def end(self) -> Any:
        return self.start + self.ticks


@dataclass(frozen=True)
class Again:
    """An optional rerun."""

    start: Any
    end: Any
    present: Any
    interval: Any
    fixed: bool
    hint: int | None


class DevicePart:
    """copies[gap, way] and again[rerun]: what can take place. back[gap]: literal that the store comes back in the gap,
    when it starts to and when it is there. restored[gap]: literal that a rerun does it. rests[store]: literal that a
    store rests on the host. clean_copies: gaps whose copy out may have been made for an earlier gap.

    Where the model is of a part of the problem, what is fixed and does not take place is left out.
    """

    def __init__(self, joint: CpModel, number: int) -> None:
        self.joint, self.number = joint, number
        self.step = joint.model.steps[number]
        self.times = joint.start[number] if joint.start else None
        self.copies: dict[tuple[int, int], Copy] = {}
        self.again: dict[int, Again] = {}
        self.restored: dict[int, Any] = {}
        self.back: dict[int, list[tuple[Any, Any, Any]]] = {}
        self.rests: dict[int, Any] = {}
        self.clean_copies: set[int] = set()
        self.run_start: list[Any] = []
        self.run_end: list[Any] = []
        self.compute_intervals: list[Any] = []
        self._runs()
        self._reruns()
        self._gaps()

    def last_end(self) -> Any:
        """End of the device's last op or collective."""
        last = self.joint.integer(0, self.joint.horizon, self.hinted_end())
        for end in self._stream_ends:
            self.joint.cp.add(last >= end)
        return last

    def hinted_end(self) -> int | None:
        if self.times is None:
            return None
        return device_end(self.joint.model, self.number, self.times)

    def earliest(self, run: int) -> int:
        """Ticks of compute up to the end of `run` (-1: none)."""
        return sum(item.ticks for item in self.step.runs[: run + 1])

    def left(self, run: int) -> int:
        """Ticks of compute from the start of `run` on."""
        return sum(item.ticks for item in self.step.runs[run:])

    def _runs(self) -> None:
        """First executions in order on the compute stream, collectives in order on theirs."""
        joint, runs, cp = self.joint, self.step.runs, self.joint.cp
        left, done, previous_compute = sum(run.ticks for run in runs), 0, -1
        self.next_compute = [len(runs)] * len(runs)
        streams: dict[bool, int] = {}
        for index, run in enumerate(runs):
            hint = self.times.runs[index] if self.times else None
            if run.collective:
                item = joint.exchanged(run.collective, run.micro_batch, hint)
                start, end = item.start, item.start + item.ticks
                if previous_compute >= 0:
                    cp.add(start >= self.run_start[previous_compute])
            else:
                start = joint.integer(done, joint.horizon - left, hint)
                end = start + run.ticks
                self.compute_intervals.append(joint.fixed_size(start, run.ticks))
                done, left = done + run.ticks, left - run.ticks
                for earlier in range(previous_compute + 1, index):
                    self.next_compute[earlier] = index
                    if runs[earlier].allocates:
                        cp.add(start >= self.run_start[earlier])
                if previous_compute >= 0:
                    self.next_compute[previous_compute] = index
                previous_compute = index
            stream = bool(run.collective)
            if stream in streams:
                cp.add(start >= self.run_end[streams[stream]])
            streams[stream] = index
            self.run_start.append(start)
            self.run_end.append(end)
        self._stream_ends = [self.run_end[index] for index in streams.values()]
        for end in self._stream_ends:
            cp.add(joint.makespan >= end)
        for store in self.step.stores:
            for before, after in pairwise(store.touches):
                if runs[before].collective or runs[after].collective:
                    cp.add(self.run_start[after] >= self.run_end[before])

    def _reruns(self) -> None:
        joint, cp = self.joint, self.joint.cp
        for number, rerun in enumerate(self.step.reruns):
            hint = self.times.reruns.get(number) if self.times else None
            fixed = not any(gap >= 0 and joint.is_free(self.number, gap) for _, gap in rerun.outputs)
            if fixed and hint is None:
                continue
            present = joint.boolean(hint is not None, fixed)
            ticks = self.step.runs[rerun.run].ticks
            start = joint.integer(0, joint.horizon - ticks, hint)
            cp.add(start >= self.run_end[rerun.run]).only_enforce_if(present)
            if rerun.until < len(self.step.runs):
                cp.add(start + ticks <= self.run_start[rerun.until]).only_enforce_if(present)
            interval = joint.fixed_size(start, ticks, present)
            self.again[number] = Again(start, start + ticks, present, interval, fixed, hint)
        if self.again:
            cp.add_no_overlap(self.compute_intervals + [item.interval for item in self.again.values()])
        if joint.free is not None:
            self._reruns_in_order()

    def _reruns_in_order(self) -> None:
        assert self.times is not None
        line = [
            (self.times.runs[index], self.run_start[index], self.run_end[index], False)
            for index, run in enumerate(self.step.runs)
            if not run.collective
        ]
        for item in self.again.values():
            if item.fixed and item.hint is not None:
                line.append((item.hint, item.start, item.end, True))
        line.sort(key=lambda entry: entry[0])
        for (_, _, end, first), (_, start, _, second) in pairwise(line):
            if first or second:
                self.joint.cp.add(start >= end)

    def _gaps(self) -> None:
        """What happens in every gap. Keeping is the absence of everything else."""
        for store, spec in enumerate(self.step.stores):
            if spec.may_rest:
                hint = bool(self.times and store in self.times.resting)
                fixed = not any(self.joint.is_free(self.number, gap) for gap in spec.gaps) and bool(spec.gaps)
                if hint or not fixed:
                    self.rests[store] = self.joint.boolean(hint, fixed)
        earlier: dict[tuple[int, int], list[Any]] = {}
        for index, gap in enumerate(self.step.gaps):
            if gap.always:
                self._into(index, gap, None)
            elif gap.seam:
                rest = self.rests.get(gap.store)
                if rest is not None and gap.before < 0:
                    self._into(index, gap, rest)
                elif rest is not None and not gap.clean:
                    self._out(index, gap, rest)
            else:
                self._choices(index, gap, earlier.setdefault((gap.store, gap.content), []))

    def _choices(self, index: int, gap: Gap, before: list[Any]) -> None:
        """Copies or a rerun; `before`: literals that the same content was away in earlier gaps."""
        cp, times = self.joint.cp, self.times
        fixed = not self.joint.is_free(self.number, index)
        away, again = bool(times and index in times.into), bool(times and index in times.again)
        choices = []
        if gap.copies and (away or not fixed):
            literal = self.joint.boolean(away, fixed)
            choices.append(literal)
            self._into(index, gap, literal)
            self._out(index, gap, self._first_of(index, literal, before))
            before.append(literal)
            if gap.store in self.rests:
                cp.add_implication(literal, ~self.rests[gap.store])
        if gap.reruns and (again or not fixed):
            literal = self.joint.boolean(again, fixed)
            choices.append(literal)
            self.restored[index] = literal
            item = self.again[self.joint.model.rerun_of_gap[self.number][index]]
            cp.add_implication(literal, item.present)
            self._comes_back(index, gap, literal, item.start, item.end)
        if len(choices) > 1:
            cp.add_at_most_one(choices)

    def _first_of(self, index: int, away: Any, before: list[Any]) -> Any:
        """Literal that the content goes out in this gap: it is away, and was not in an earlier gap."""
        if not before:
            return away
        cp = self.joint.cp
        self.clean_copies.add(index)
        first = self.joint.boolean(bool(self.times and index in self.times.out))
        cp.add_bool_or([first, ~away, *before])
        cp.add_implication(first, away)
        for other in before:
            cp.add_implication(first, ~other)
        return first

    def _copy(self, index: int, way: int, present: Any) -> Copy:
        joint = self.joint
        taken = (self.times.out if way == OUT else self.times.into) if self.times else {}
        size = self.step.stores[self.step.gaps[index].store].size_bytes
        ticks = joint.model.network.copy_ticks(self.number, way, size)
        start = joint.integer(0, joint.horizon - ticks, taken.get(index))
        interval = joint.fixed_size(start, ticks, present)
        fixed = not joint.is_free(self.number, index)
        literal = 1 if present is None else present
        copy = Copy(self.number, way, start, ticks, literal, interval, fixed, taken.get(index))
        self.copies[index, way] = copy
        return copy

    def _out(self, index: int, gap: Gap, present: Any) -> None:
        copy = self._copy(index, OUT, present)
        if gap.written >= 0:
            self.joint.cp.add(copy.start >= self.run_end[gap.written]).only_enforce_if(present)
        self.joint.cp.add(self.joint.makespan >= copy.end).only_enforce_if(present)

    def _into(self, index: int, gap: Gap, present: Any) -> None:
        copy = self._copy(index, IN, present)
        self._comes_back(index, gap, present, copy.start, copy.end)

    def _comes_back(self, index: int, gap: Gap, literal: Any, start: Any, ready: Any) -> None:
        self.back.setdefault(index, []).append((literal, start, ready))
        if gap.needed:
            self._if(literal, self.run_start[gap.after] >= ready)
            following = self.next_compute[gap.after]
            if self.step.runs[gap.after].collective and following < len(self.step.runs):
                # The list has the collective before the next op, so what it reads must be allocated by then.
                self._if(literal, self.run_start[following] >= start + 1)

    def _if(self, literal: Any, constraint: Any) -> None:
        made = self.joint.cp.add(constraint)
        if literal is not None:
            made.only_enforce_if(literal)

    def host_terms(self) -> list[tuple[Any, int]]:
        """(literal, bytes) of everything that can be in host memory."""
        size = self.joint.model.host_bytes
        terms = [(copy.present, size(self.number, self.step.gaps[gap].store))
                 for (gap, way), copy in self.copies.items()
                 if way == OUT and not self.step.gaps[gap].seam]  # fmt: skip
        terms += [(1, size(self.number, gap.store)) for gap in self.step.gaps if gap.always]
        return terms + [(literal, size(self.number, store)) for store, literal in self.rests.items()]
