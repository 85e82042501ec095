"""A solution of the constraint model: when everything starts, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from tmojax.ilp.cp_sat_links import IN, OUT, Network, network_of, ticks_of
from tmojax.ilp.cp_sat_step import DeviceStep, StoreKind, device_step
from tmojax.problem import Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.host_memory import host_limit_bytes


@dataclass
class DeviceTimes:
    """Starts in ticks. runs: of every run. reruns, out, into: of those reruns and copies that take place, by index of
    the rerun or the gap. again: gaps that a rerun ends. resting: stores that rest on the host across the seam."""

    runs: list[int]
    reruns: dict[int, int] = field(default_factory=dict)
    out: dict[int, int] = field(default_factory=dict)
    into: dict[int, int] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)
    resting: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Segment:
    """A store is in device memory from `start` to `end` (ticks, half-open; end -1: it stays). gap: the one that it
    follows (-1: none)."""

    start: int
    end: int
    gap: int


@dataclass(frozen=True)
class Model:
    """What is modelled: the devices' steps and the network in ticks. capacity_bytes: of the devices' memories.
    host_memory: of each device; host_limit_bytes: of each of them, for all devices together."""

    problem: Problem
    steps: tuple[DeviceStep, ...]
    network: Network
    capacity_bytes: tuple[int, ...]
    host_memory: tuple[int, ...]
    host_limit_bytes: dict[int, int]

    def host_bytes(self, device: int, store: int) -> int:
        """What a store takes in host memory."""
        size = self.steps[device].stores[store].size_bytes
        power = self.problem.machine.memories[self.host_memory[device]].pinned_power_of_two
        return 1 << (size - 1).bit_length() if power and size else size

    def items(self) -> int:
        """Intervals of the model at most: runs, copies, reruns of all devices."""
        return sum(step.items() for step in self.steps)

    def run_end(self, device: int, run: int, start: int) -> int:
        spec = self.steps[device].runs[run]
        ticks = self.network.exchanges[spec.collective].ticks if spec.collective else spec.ticks
        return start + ticks

    def copy_end(self, device: int, gap: int, direction: int, start: int) -> int:
        step = self.steps[device]
        size = step.stores[step.gaps[gap].store].size_bytes
        return start + self.network.copy_ticks(device, direction, size)

    def rerun_end(self, device: int, rerun: int, start: int) -> int:
        step = self.steps[device]
        return start + step.runs[step.reruns[rerun].run].ticks

    @cached_property
    def rerun_of_gap(self) -> tuple[dict[int, int], ...]:
        """Per device: gap -> the rerun that can end it."""
        return tuple(
            {gap: number for number, rerun in enumerate(step.reruns) for _, gap in rerun.outputs if gap >= 0}
            for step in self.steps
        )


def model_of(problem: Problem, views: tuple[StepView, ...], tick_s: float) -> Model:
    """The model of `problem` in ticks of `tick_s` seconds; `views[d]`: of device d or an equal one."""
    machine = problem.machine
    hosts = tuple(device.host_memory for device in machine.devices)

    def ticks(seconds: float) -> int:
        return ticks_of(seconds, tick_s)

    return Model(
        problem,
        tuple(device_step(problem, view, device, ticks) for device, view in enumerate(views)),
        network_of(problem, tick_s),
        tuple(problem.capacity_bytes(device) for device in range(len(views))),
        hosts,
        {host: host_limit_bytes(machine, host) for host in hosts},
    )


def segments(model: Model, device: int, times: DeviceTimes, store: int) -> list[Segment]:
    """Where a store is resident."""
    step = model.steps[device]
    spec = step.stores[store]
    back = [(gap, times.into[gap], model.copy_end(device, gap, IN, times.into[gap]))
            for gap in spec.gaps if gap in times.into]  # fmt: skip
    for gap in spec.gaps:
        if gap in times.again:
            number = model.rerun_of_gap[device][gap]
            start = times.reruns[number]
            back.append((gap, start, model.rerun_end(device, number, start)))
    back.sort(key=lambda item: item[1])
    starts = [(gap, start, ready) for gap, start, ready in back]
    if spec.kind is StoreKind.STATE:
        if store not in times.resting:
            starts.insert(0, (-1, 0, 0))
        elif not spec.touches:
            return []
    elif spec.kind is StoreKind.MADE:
        born = spec.touches[0]
        starts.insert(0, (-1, times.runs[born], model.run_end(device, born, times.runs[born])))
    ends = [ready for _, _, ready in starts]
    for run in spec.touches:
        end = model.run_end(device, run, times.runs[run])
        which = max((i for i, (gap, _, _) in enumerate(starts) if gap < 0 or step.gaps[gap].after <= run))
        ends[which] = max(ends[which], end)
    for number in spec.readers:
        if number in times.reruns:
            begin = times.reruns[number]
            which = max(i for i, (_, _, ready) in enumerate(starts) if ready <= begin)
            ends[which] = max(ends[which], model.rerun_end(device, number, begin))
    for gap in spec.gaps:
        if gap in times.out:
            begin = times.out[gap]
            which = max(i for i, (_, _, ready) in enumerate(starts) if ready <= begin)
            ends[which] = max(ends[which], model.copy_end(device, gap, OUT, begin))
    stays = spec.kind is StoreKind.STATE and store not in times.resting
    found = [Segment(start, end, gap) for (gap, start, _), end in zip(starts, ends, strict=True)]
    if stays:
        found[-1] = Segment(found[-1].start, -1, found[-1].gap)
    return found


def device_end(model: Model, device: int, times: DeviceTimes) -> int:
    """End of the last op or collective of a device."""
    return max(model.run_end(device, run, start) for run, start in enumerate(times.runs))


def step_ticks(model: Model, times: tuple[DeviceTimes, ...]) -> int:
    """The last end of anything."""
    latest = 0
    for device, mine in enumerate(times):
        latest = max(latest, device_end(model, device, mine))
        latest = max([latest, *(model.copy_end(device, gap, OUT, start) for gap, start in mine.out.items())])
    return latest
