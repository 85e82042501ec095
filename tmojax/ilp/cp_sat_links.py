"""Copies and collectives at fixed rates: how long each takes, and which of them a link carries at the same time.

A copy always runs at the full rate of the narrowest link of its route, a collective at the full rate of the link that
it loads most. That is what max-min fair sharing gives as long as the shares of a link add up to one at most, so the
model keeps them there. Three kinds of link: *free* (everything that can run at once fits), *slots* (all copies need
the same number of turns: an `order` policy keeps it), *shares* (copies of different rates: waits keep it).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tmojax.problem import Problem

OUT, IN = 0, 1
WHOLE = 1_000_000  # of a link's capacity, in the shares of copies
ROUNDING = 1e-9


class Limit(StrEnum):
    SLOTS = "slots"
    SHARES = "shares"


@dataclass(frozen=True)
class Path:
    """One direction between a device and its host memory. setup_ticks: before the links are taken."""

    links: tuple[int, ...]
    engines: tuple[int, ...]
    bytes_per_s: float
    setup_ticks: int


@dataclass(frozen=True)
class Exchange:
    """A collective of one step: duration in ticks, launch and latency included, and the links that it loads."""

    name: str
    devices: tuple[int, ...]
    ticks: int
    links: frozenset[int]


@dataclass(frozen=True)
class LinkLimit:
    """A link that is not free. slots: copies at once. share: of the link's capacity in `WHOLE`-ths for each (device,
    direction) that uses it."""

    link: int
    kind: Limit
    slots: int
    share: dict[tuple[int, int], int]


@dataclass(frozen=True)
class Network:
    """paths[device][direction]; exchanges by name; limits of links that are not free; hand-over between devices."""

    tick_s: float
    paths: tuple[tuple[Path, Path], ...]
    exchanges: dict[str, Exchange]
    limits: tuple[LinkLimit, ...]
    handover_ticks: int

    def copy_ticks(self, device: int, direction: int, size_bytes: int) -> int:
        """Ticks for which a copy holds its engine, set-up included."""
        path = self.paths[device][direction]
        return path.setup_ticks + ticks_of(size_bytes / path.bytes_per_s, self.tick_s)


def ticks_of(seconds: float, tick_s: float) -> int:
    """Rounded up, to 1 at least; what float arithmetic leaves over is not rounded up."""
    return max(1, -int(-(seconds / tick_s - 1e-6) // 1))


def network_of(problem: Problem, tick_s: float) -> Network:
    """Paths, collectives and limits of `problem` in ticks of `tick_s` seconds."""
    machine = problem.machine
    paths = []
    for device in machine.devices:
        pair = []
        for ends in ((device.memory, device.host_memory), (device.host_memory, device.memory)):
            route = machine.route(*ends)
            lead_s = machine.overheads.transfer_setup_s + sum(machine.links[link].latency_s for link in route.links)
            pair.append(
                Path(
                    route.links,
                    route.engines,
                    min(machine.links[link].bandwidth_bytes_per_s for link in route.links),
                    ticks_of(lead_s, tick_s) if lead_s > 0 else 0,
                )
            )
        paths.append((pair[OUT], pair[IN]))
    exchanges, pressure = {}, dict.fromkeys(range(len(machine.links)), 0.0)
    for spec in problem.workload.collectives:
        loads = machine.collective_loads(spec.kind, spec.devices)
        lead_s = machine.overheads.launch_s + machine.collective_latency_s(spec.kind, spec.devices)
        flow_s = max(
            (spec.size_bytes * load / machine.links[link].bandwidth_bytes_per_s for link, load in loads.items()),
            default=0.0,
        )
        used = frozenset(link for link, load in loads.items() if load > 0 and spec.size_bytes > 0)
        exchanges[spec.name] = Exchange(spec.name, spec.devices, ticks_of(lead_s + flow_s, tick_s), used)
        for link in used:
            pressure[link] = WHOLE  # a collective and a copy never share a link that copies use
    limits = []
    for link, spec in enumerate(machine.links):
        rates = {
            (device, way): pair[way].bytes_per_s / spec.bandwidth_bytes_per_s
            for device, pair in enumerate(paths)
            for way in (OUT, IN)
            if link in pair[way].links
        }
        if not rates or sum(rates.values()) + pressure[link] <= 1 + ROUNDING:
            continue
        fewest, most = (int(1 / rate + ROUNDING) for rate in (max(rates.values()), min(rates.values())))
        share = {key: min(WHOLE, int(-(-(rate * WHOLE - 1e-3) // 1))) for key, rate in rates.items()}
        if fewest == most:
            limits.append(LinkLimit(link, Limit.SLOTS, fewest, share))
        else:
            limits.append(LinkLimit(link, Limit.SHARES, 0, share))
    handover_s = machine.overheads.handover_s
    handover = ticks_of(handover_s, tick_s) if handover_s > 0 else 0
    return Network(tick_s, tuple(paths), exchanges, tuple(limits), handover)
