"""Device memory in the CP-SAT model: an interval for every stay of a store, one cumulative constraint for all."""

from __future__ import annotations

import math
from typing import Any

from tmojax.ilp.cp_sat_device import Again, DevicePart
from tmojax.ilp.cp_sat_links import IN, OUT
from tmojax.ilp.cp_sat_step import Store, StoreKind
from tmojax.ilp.cp_sat_times import Segment, segments


class DeviceMemory:
    """ends[store]: the gaps in which it may leave, and the ends of the segments around them. known[store]: segments of
    the start, by the gap before them."""

    def __init__(self, part: DevicePart) -> None:
        self.part, self.joint = part, part.joint
        self.cp, self.step, self.times = part.joint.cp, part.step, part.times
        self.ends: list[tuple[list[int], list[Any]]] = []
        self.known: list[dict[int, Segment]] = []
        self._used: list[tuple[Any, int]] = []
        self._workspace()
        self._outputs()
        for store in range(len(self.step.stores)):
            self._store(store)
        capacity = self.joint.model.capacity_bytes[part.number]
        unit = math.gcd(*(size for _, size in self._used)) if self._used else 1
        self.cp.add_cumulative(
            [interval for interval, _ in self._used], [size // unit for _, size in self._used], capacity // unit
        )

    def _use(self, interval: Any, size_bytes: int) -> None:
        if size_bytes:
            self._used.append((interval, size_bytes))

    def _workspace(self) -> None:
        computes = [run for run in self.step.runs if not run.collective]
        for run, interval in zip(computes, self.part.compute_intervals, strict=True):
            self._use(interval, run.workspace_bytes)
        for index, run in enumerate(self.step.runs):
            if run.collective and run.workspace_bytes:
                ticks = self.joint.model.network.exchanges[run.collective].ticks
                self._use(self.joint.fixed_size(self.part.run_start[index], ticks), run.workspace_bytes)
        for number, item in self.part.again.items():
            self._use(item.interval, self.step.runs[self.step.reruns[number].run].workspace_bytes)

    def _outputs(self) -> None:
        """Outputs that a rerun writes without need: scratch, or freed behind it."""
        part = self.part
        for number, item in part.again.items():
            outputs = self.step.reruns[number].outputs
            ticks = self.step.runs[self.step.reruns[number].run].ticks
            wanted = [part.restored[gap] for _, gap in outputs if gap in part.restored]
            self.cp.add_bool_or([*wanted, ~item.present])
            for store, gap in outputs:
                if (gap, IN) in part.copies:
                    self.cp.add_implication(item.present, ~part.copies[gap, IN].present)
                present = item.present
                if gap in part.restored and len(outputs) == 1:
                    continue
                if gap in part.restored:
                    hint = bool(self.times and item.hint is not None and gap not in self.times.again)
                    present = self.joint.boolean(hint)
                    self.cp.add_bool_or([present, ~item.present, part.restored[gap]])
                self._use(self.joint.fixed_size(item.start, ticks, present), self.step.stores[store].size_bytes)

    def _store(self, store: int) -> None:
        """Residency: one interval, and one more behind every gap from which the store comes back.

        `ends[i]` is when the segment ends that covers the uses between gap i - 1 and gap i; where the store stays in
        gap i, that is no earlier than the end of the next.
        """
        joint, cp, part, spec = self.joint, self.cp, self.part, self.step.stores[store]
        own = [gap for gap in spec.gaps if not self.step.gaps[gap].seam and not self.step.gaps[gap].always]
        gaps = [gap for gap in own if gap in part.back]
        readers = [number for number in spec.readers if number in part.again]
        known: dict[int, Segment] = {}
        if self.times:
            known = {item.gap: item for item in segments(joint.model, part.number, self.times, store)}
        self.known.append(dict(known))
        rest = part.rests.get(store)
        if rest is not None and spec.touches:
            self._resting(spec, rest, known)
        if spec.kind is StoreKind.STATE:
            born, first_hint = 0, (0 if -1 in known else None)
        elif spec.kind is StoreKind.MADE:
            born, first_hint = part.run_start[spec.touches[0]], known[-1].start if known else None
        else:
            source = part.copies[spec.gaps[0], IN]
            born, first_hint = source.start, source.hint
            if self.times:
                known[-1] = known.pop(spec.gaps[0])
        ends = self._ends(spec, gaps, readers, known, rest)
        self.ends.append((gaps, ends))
        here = None if rest is None else ~rest
        self._use(joint.between(born, ends[0], self._length(known.get(-1), first_hint), here), spec.size_bytes)
        for place, gap in enumerate(gaps, start=1):
            for literal, start, ready in part.back[gap]:
                cp.add(start >= ends[place - 1]).only_enforce_if(literal)
                cp.add(ends[place] >= ready).only_enforce_if(literal)
                segment = known.get(gap)
                again = self.times is not None and gap in self.times.again
                chosen = segment is not None and self._is_rerun(gap, literal) == again
                hint = self._length(segment, segment.start) if segment is not None and chosen else None
                self._use(joint.between(start, ends[place], hint, literal), spec.size_bytes)
        for number in readers:
            self._reader(number, part.again[number], gaps, ends)

    def _length(self, segment: Segment | None, start: int | None) -> int | None:
        if segment is None or start is None:
            return None
        return (self.joint.horizon if segment.end < 0 else segment.end) - start

    def _ends(self, spec: Store, gaps: list[int], readers: list[int], known: dict[int, Segment], rest: Any) -> list:
        joint, cp, part = self.joint, self.cp, self.part
        ends: list[Any] = []
        for place in range(len(gaps) + 1):
            first = self.step.gaps[gaps[place - 1]].after if place else -1
            final = self.step.gaps[gaps[place]].before if place < len(gaps) else len(self.step.runs)
            last = [run for run in spec.touches if first <= run <= final]
            if place == len(gaps) and spec.kind is StoreKind.STATE:
                ends.append(joint.horizon)
            elif not gaps and not readers:
                ends.append(part.run_end[spec.touches[-1]])
            else:
                covering = next((gaps[i - 1] for i in range(place, 0, -1) if gaps[i - 1] in known), -1)
                segment = known.get(covering)
                hint = joint.horizon if segment is None or segment.end < 0 else segment.end
                ends.append(joint.integer(0, joint.horizon, hint))
                if last:
                    cp.add(ends[-1] >= part.run_end[last[-1]])
        for place, gap in enumerate(gaps):
            out = part.copies.get((gap, OUT))
            if out is not None:
                cp.add(ends[place] >= out.end).only_enforce_if(out.present)
            stays = [~literal for literal, _, _ in part.back[gap]] + ([] if rest is None else [~rest])
            cp.add(ends[place] >= ends[place + 1]).only_enforce_if(stays)
        return ends

    def _resting(self, spec: Store, rest: Any, known: dict[int, Segment]) -> None:
        """From the copy in to the last use or the copy out."""
        joint, cp, part = self.joint, self.cp, self.part
        source, out = part.copies[spec.gaps[0], IN], part.copies.get((spec.gaps[-1], OUT))
        segment = known.pop(spec.gaps[0], None)
        end = joint.integer(0, joint.horizon, segment.end if segment else None)
        cp.add(end >= part.run_end[spec.touches[-1]]).only_enforce_if(rest)
        if out is not None:
            cp.add(end >= out.end).only_enforce_if(rest)
        hint = segment.end - segment.start if segment else None
        self._use(joint.between(source.start, end, hint, rest), spec.size_bytes)

    def _reader(self, number: int, item: Again, gaps: list[int], ends: list[Any]) -> None:
        """A rerun reads an input in one of its segments."""
        options = []
        hinted = self._hinted_place(gaps, number)
        for place in range(len(gaps) + 1):
            backs = self.part.back[gaps[place - 1]] if place else [(None, None, None)]
            for literal, _, ready in backs:
                again = literal is not None and self._is_rerun(gaps[place - 1], literal)
                here = self.joint.boolean(hinted == (place, again))
                options.append(here)
                self.cp.add(ends[place] >= item.end).only_enforce_if(here)
                if literal is not None:
                    self.cp.add_implication(here, literal)
                    self.cp.add(item.start >= ready).only_enforce_if(here)
        self.cp.add_bool_or([*options, ~item.present])

    def _is_rerun(self, gap: int, literal: Any) -> bool:
        return literal is self.part.restored.get(gap)

    def _hinted_place(self, gaps: list[int], number: int) -> tuple[int, bool] | None:
        """(segment, whether a rerun made it) in which the start has rerun `number` read the store."""
        if self.times is None or number not in self.times.reruns:
            return None
        model, device = self.joint.model, self.part.number
        begin, found = self.times.reruns[number], (0, False)
        for place, gap in enumerate(gaps, start=1):
            if gap in self.times.into:
                ready = model.copy_end(device, gap, IN, self.times.into[gap])
            elif gap in self.times.again:
                rerun = model.rerun_of_gap[device][gap]
                ready = model.rerun_end(device, rerun, self.times.reruns[rerun])
            else:
                continue
            if ready <= begin:
                found = (place, gap in self.times.again)
        return found
