"""The step of all devices as one CP-SAT model: intervals in time, optional ones for copies and reruns.

Memory is a cumulative constraint of every device over time. A solution becomes lists by writing its instructions in
the order of their starts, each release at its effect and before what starts at that moment. Then rule 5.1 of
docs/semantics.md (an allocation waits for all releases before it in the list) holds back nothing that the solution has
not held back, and the bytes at an allocating position are those of its moment: the two forms of the memory limit are
the same, without slack.

Times are whole ticks, durations rounded up. Bytes are exact (divided by their common divisor).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tmojax.ilp.cp_sat_cuts import add_cuts
from tmojax.ilp.cp_sat_device import Copy, DevicePart
from tmojax.ilp.cp_sat_links import WHOLE, Limit, LinkLimit
from tmojax.ilp.cp_sat_memory import DeviceMemory
from tmojax.ilp.cp_sat_times import DeviceTimes, Model, step_ticks


@dataclass(frozen=True)
class Exchanged:
    """Start variable and interval of one collective, on all its devices."""

    start: Any
    interval: Any
    ticks: int


class CpModel:
    """Variables and constraints.

    start: a solution, given as a hint; its end is then the horizon. free: the (device, gap) that may be decided anew,
    everything else keeps its place in the order of the start (None: all are free).
    """

    def __init__(self, model: Model, horizon: int, start: tuple[DeviceTimes, ...] | None = None,
                 free: frozenset[tuple[int, int]] | None = None) -> None:  # fmt: skip
        from ortools.sat.python import cp_model

        self.model, self.start, self.free = model, start, free
        self.horizon = step_ticks(model, start) if start else horizon
        self.cp: Any = cp_model.CpModel()
        self.intervals = 0
        self._exchanges: dict[tuple[str, int], Exchanged] = {}
        self.makespan = self.integer(0, self.horizon, self.horizon if start else None)
        self.devices = [DevicePart(self, device) for device in range(len(model.steps))]
        self.memories = [DeviceMemory(device) for device in self.devices]
        self._engines()
        for limit in model.network.limits:
            self._link(limit)
        self._host_memory()
        if free is None:
            add_cuts(self)
            self.cp.minimize(self.makespan)
        else:
            # A part of the problem seldom moves the last end of all; the devices' own ends show what it has gained.
            ends = [device.last_end() for device in self.devices]
            self.cp.minimize(self.makespan * len(ends) + sum(ends))

    def integer(self, low: int, high: int, hint: int | None = None) -> Any:
        """A variable of low..high."""
        variable = self.cp.new_int_var(low, max(low, high), "")
        if self.start is not None:
            self.cp.add_hint(variable, low if hint is None else hint)
        return variable

    def boolean(self, hint: bool | None, fixed: bool = False) -> Any:
        """A literal; `fixed`: it has the value of the hint."""
        variable = self.cp.new_bool_var("")
        if self.start is not None:
            self.cp.add_hint(variable, bool(hint))
            if fixed:
                self.cp.add(variable == int(bool(hint)))
        return variable

    def fixed_size(self, start: Any, size: int, present: Any = None) -> Any:
        """An interval of constant size, optional with a literal."""
        self.intervals += 1
        if present is None:
            return self.cp.new_fixed_size_interval_var(start, size, "")
        return self.cp.new_optional_fixed_size_interval_var(start, size, present, "")

    def between(self, start: Any, end: Any, hint: int | None, present: Any = None) -> Any:
        """An interval from `start` to `end`, whose size is a variable."""
        self.intervals += 1
        size = self.integer(0, self.horizon, hint)
        if present is None:
            return self.cp.new_interval_var(start, size, end, "")
        return self.cp.new_optional_interval_var(start, size, end, present, "")

    def exchanged(self, collective: str, micro_batch: int, hint: int | None) -> Exchanged:
        """The collective's variables, made at its first device."""
        key = collective, micro_batch
        if key not in self._exchanges:
            ticks = self.model.network.exchanges[collective].ticks
            start = self.integer(0, self.horizon - ticks, hint)
            self._exchanges[key] = Exchanged(start, self.fixed_size(start, ticks), ticks)
        return self._exchanges[key]

    def is_free(self, device: int, gap: int) -> bool:
        return self.free is None or (device, gap) in self.free

    def in_order(self, copies: list[Copy], *, on_link: bool) -> None:
        """Those that are fixed and present in the start follow each other as there; a set-up holds no link."""
        if self.free is None:
            return
        line = []
        for copy in copies:
            if copy.fixed and copy.hint is not None:
                lead = self.model.network.paths[copy.device][copy.way].setup_ticks if on_link else 0
                line.append((copy.hint + lead, copy.device, copy.start + lead, copy.end))
        line.sort(key=lambda entry: entry[:2])
        for (_, _, _, end), (_, _, start, _) in pairwise(line):
            self.cp.add(start >= end)

    def _copies(self) -> list[Copy]:
        return [copy for device in self.devices for copy in device.copies.values()]

    def _engines(self) -> None:
        """One copy at a time on each copy engine."""
        users: dict[int, list[Copy]] = {}
        for copy in self._copies():
            for engine in self.model.network.paths[copy.device][copy.way].engines:
                users.setdefault(engine, []).append(copy)
        for copies in users.values():
            self.cp.add_no_overlap([copy.interval for copy in copies])
            self.in_order(copies, on_link=False)

    def _link(self, limit: LinkLimit) -> None:
        """Turns or shares of a link that is not free; a collective has such a link for itself."""
        network = self.model.network
        copies = [copy for copy in self._copies() if (copy.device, copy.way) in limit.share]
        demands = [limit.share[copy.device, copy.way] for copy in copies]
        # Copies of one device in one direction take turns on their engine anyway.
        if limit.kind is Limit.SLOTS and len(limit.share) > 1:
            turns = [self._flow(copy) for copy in copies]
            if limit.slots == 1:
                self.cp.add_no_overlap(turns)
                self.in_order(copies, on_link=True)
            else:
                self.cp.add_cumulative(turns, [1] * len(turns), limit.slots)
        exchanges = [item for (name, _), item in self._exchanges.items() if limit.link in network.exchanges[name].links]
        if limit.kind is Limit.SLOTS and not exchanges:
            return
        most = WHOLE
        if limit.kind is Limit.SLOTS:
            most, demands = max(1, len(copies)), [1] * len(copies)
        wide = [self._prolonged(copy.start, copy.ticks, copy.interval, copy.present) for copy in copies]
        wide += [self._prolonged(item.start, item.ticks, item.interval) for item in exchanges]
        self.cp.add_cumulative(wide, demands + [most] * len(exchanges), most)

    def _flow(self, copy: Copy) -> Any:
        setup = self.model.network.paths[copy.device][copy.way].setup_ticks
        if setup == 0:
            return copy.interval
        return self.fixed_size(copy.start + setup, copy.ticks - setup, copy.present)

    def _prolonged(self, start: Any, ticks: int, interval: Any, present: Any = None) -> Any:
        """With the hand-over to another device that waits for its end."""
        handover = self.model.network.handover_ticks
        return interval if handover == 0 else self.fixed_size(start, ticks + handover, present)

    def _host_memory(self) -> None:
        """All that copies leave in a host memory, counted as if it were there at once, where that could be too
        much."""
        for memory, limit in self.model.host_limit_bytes.items():
            terms = []
            for device in self.devices:
                if self.model.host_memory[device.number] == memory:
                    terms += device.host_terms()
            if sum(size for _, size in terms) > limit:
                self.cp.add(sum(literal * size for literal, size in terms) <= limit)
