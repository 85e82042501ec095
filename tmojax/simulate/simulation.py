"""What a simulation returns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tmojax.problem import Kind
from tmojax.simulate.kernel import WORK
from tmojax.simulate.lower import Lowered
from tmojax.simulate.tables import MachineTable

_NO_STREAM = np.zeros(len(Kind), np.bool_)
_NO_STREAM[[Kind.RELEASE, Kind.RETIRE, Kind.SIGNAL, Kind.LEND, Kind.RECLAIM]] = True

STUCK_SHOWN = 8


@dataclass(frozen=True, eq=False)
class Events:
    """Times per node of the lowered graph, as the event loop returns them; `segments`: rows (time, link, rate)."""

    start_s: NDArray[np.float64]
    flow_start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    busy_s: NDArray[np.float64]
    count: int
    segments: NDArray[np.float64] | None


class Simulation:
    """Times of a schedule, in seconds from its start.

    Per-device attributes are tuples with one array per device and one entry per instruction of its list (with several
    steps: step after step, `steps * n` entries). NaN stands where something did not happen.
    """

    def __init__(self, lowered: Lowered, machine: MachineTable, events: Events) -> None:
        self._lowered, self._machine, self._events = lowered, machine, events

    def __repr__(self) -> str:
        outcome = f"deadlocked at {self.deadlocked}" if self.deadlocked else f"step_s={self.step_s:.6g}"
        return f"Simulation({outcome}, {self.events} events)"

    def _per_device(self, values: NDArray) -> tuple[NDArray, ...]:
        lowered = self._lowered
        nodes = [lowered.nodes(device) for device in range(lowered.length.size)]
        if lowered.has_collectives:
            return tuple(values[lowered.effect[span]] for span in nodes)
        return tuple(values[span] for span in nodes)

    @cached_property
    def step_ends_s(self) -> NDArray[np.float64]:
        """Shape (steps,): the last effect of each step on any device; inf if something in it never happens."""
        lowered = self._lowered
        if lowered.steps == 1:
            ends = self._events.end_s
            latest = np.array([ends.max(initial=0.0)])
        else:
            latest = np.zeros(lowered.steps)
            for end_s in self.end_s:
                if end_s.size:
                    latest = np.maximum(latest, end_s.reshape(lowered.steps, -1).max(axis=1))
        return np.where(np.isnan(latest), np.inf, latest)

    @cached_property
    def step_s(self) -> float:
        """From the start to the last effect; with several steps, between the last two ends of a step; inf if the
        schedule deadlocks.
        """
        ends = self.step_ends_s
        if np.isinf(ends[-1]):
            return float("inf")
        return float(ends[-1] - ends[-2]) if ends.size > 1 else float(ends[-1])

    @cached_property
    def deadlocked(self) -> tuple[tuple[int, int], ...]:
        """(device, instruction) of the first instruction of each list that never takes effect, at most 8; empty if all
        do. With several steps the instruction counts on through the steps, as in `end_s`.
        """
        if not np.isinf(self.step_ends_s).any():
            return ()
        stuck = [(device, np.flatnonzero(np.isnan(end_s))) for device, end_s in enumerate(self.end_s)]
        return tuple((device, int(places[0])) for device, places in stuck if places.size)[:STUCK_SHOWN]

    @cached_property
    def start_s(self) -> tuple[NDArray[np.float64], ...]:
        """When an instruction takes its stream or engines; a collective, when the last device has entered it; a wait,
        its effect. NaN for instructions without a stream.
        """
        starts = self._per_device(self._events.start_s)
        for device, start_s in enumerate(starts):
            start_s[_NO_STREAM[self._lowered.instruction_kind[self._lowered.nodes(device)]]] = np.nan
        return starts

    @cached_property
    def end_s(self) -> tuple[NDArray[np.float64], ...]:
        """The effect of every instruction, of releases, signals and the like too."""
        return self._per_device(self._events.end_s)

    @cached_property
    def transfer_start_s(self) -> tuple[NDArray[np.float64], ...]:
        """When the bytes of a transfer or collective begin to cross its links."""
        return self._per_device(self._events.flow_start_s)

    @cached_property
    def moved_bytes(self) -> NDArray:
        """Shape (link,): bytes that crossed each link; int64, or float64 where the workload has collectives."""
        graph, machine = self._lowered.graph, self._machine
        moved = np.flatnonzero((graph.flow_class >= 0) & ~np.isnan(self._events.flow_start_s))
        per_class = np.zeros(machine.link_ptr.size - 1, np.int64)
        np.add.at(per_class, graph.flow_class[moved], self._lowered.flow_size_bytes[moved])
        owner = np.repeat(np.arange(per_class.size), np.diff(machine.link_ptr))
        if machine.routes == per_class.size:
            crossing = np.zeros(machine.bandwidth.size, np.int64)
            np.add.at(crossing, machine.link, per_class[owner])
            return crossing
        load = np.array([1.0] * machine.routes + machine.collective_load, np.float64)
        return np.bincount(
            machine.link, per_class[owner] * load[owner] * machine.coefficient, minlength=machine.bandwidth.size
        )

    @property
    def busy_s(self) -> NDArray[np.float64]:
        """Shape (link,): time with at least one transfer or collective on the link."""
        return self._events.busy_s

    @cached_property
    def compute_busy_s(self) -> NDArray[np.float64]:
        """Shape (device,): time in which the compute stream runs something, all steps together."""
        graph, events = self._lowered.graph, self._events
        work = np.flatnonzero((graph.kind == WORK) & ~np.isnan(events.end_s))
        busy_s = np.bincount(
            graph.device[work], weights=events.end_s[work] - events.start_s[work], minlength=self._lowered.length.size
        )
        return busy_s.astype(np.float64)

    @cached_property
    def stall_s(self) -> NDArray[np.float64]:
        """Shape (device,): time in which the compute stream has instructions left and runs none, all steps together."""
        last = np.zeros(self._lowered.length.size)
        for device, end_s in enumerate(self.end_s):
            on_compute = end_s[self._lowered.on_compute[self._lowered.nodes(device)]]
            last[device] = on_compute[~np.isnan(on_compute)].max(initial=0.0)
        return np.maximum(last - self.compute_busy_s, 0.0)

    @property
    def events(self) -> int:
        """Ends of ops, set-ups, hand-overs and flows that were simulated."""
        return self._events.count

    @cached_property
    def segments(self) -> tuple[tuple[NDArray[np.float64], NDArray[np.float64]], ...] | None:
        """Per link the piecewise constant rate as (times, bytes/s): each rate holds from its time to the next, 0 before
        the first. None unless recorded. A copy that compute slows down takes its links at the full rate (8.5).
        """
        rows = self._events.segments
        if rows is None:
            return None
        split = []
        for link in range(self._machine.bandwidth.size):
            times, _, rates = rows[rows[:, 1] == link].T
            last = np.diff(times, append=np.inf) > 0  # a transfer without bytes comes and goes at one moment
            times, rates = times[last], rates[last]
            new = np.diff(rates, prepend=0.0) != 0
            split.append((times[new], rates[new]))
        return tuple(split)
