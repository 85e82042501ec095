"""Who crosses which link when, and at what rate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.errors import InputError
from tmojax.problem import Kind, Problem, Schedule
from tmojax.report.activity import DeviceActivity
from tmojax.simulate import Simulation


@dataclass(frozen=True, slots=True)
class Crossing:
    """One transfer on one link: activity `position` of `device`, from first to last byte, and its bytes on the link."""

    device: int
    position: int
    start_s: float
    end_s: float
    size_bytes: int


@dataclass(frozen=True, eq=False)
class LinkRate:
    """Bytes per second that cross a link: `bytes_per_s` [E] holds from `time_s` [E] to the next entry."""

    link: int
    time_s: np.ndarray
    bytes_per_s: np.ndarray


def shared_links(problem: Problem) -> tuple[int, ...]:
    """Links that several devices use: no device is an end of all routes over them. All links where none is shared."""
    machine = problem.machine
    memories = {device.memory for device in machine.devices}
    ends: dict[int, set[int]] = {}
    for route in machine.routes:
        for link in route.links:
            own = {route.source, route.destination} & memories
            ends[link] = ends[link] & own if link in ends else own
    shared = tuple(link for link in sorted(ends) if not ends[link])
    return shared or tuple(sorted(ends))


def crossings(
    problem: Problem,
    schedule: Schedule,
    simulation: Simulation,
    activities: tuple[DeviceActivity, ...],
    link: int,
) -> list[Crossing]:
    """Transfers and collectives on a link, by start; a collective counts once, with its bytes on this link."""
    found: list[Crossing] = []
    machine, workload = problem.machine, problem.workload
    loads = {c.name: machine.collective_loads(c.kind, c.devices).get(link, 0.0) for c in workload.collectives}
    over_link = {(route.source, route.destination): link in route.links for route in machine.routes}
    for activity in activities:
        rows = schedule.lists[activity.device][activity.instruction]
        first_byte = np.asarray(simulation.transfer_start_s[activity.device])[activity.instruction]
        moving = np.isin(rows["kind"], (Kind.OFFLOAD, Kind.PREFETCH, Kind.COLLECTIVE))
        for position in np.flatnonzero(moving).tolist():
            row = rows[position]
            size = int(activity.size_bytes[position])
            if row["kind"] == Kind.COLLECTIVE:
                collective = workload.collective(workload.program(activity.device).ops[row["op"]].collective)
                if activity.device != min(collective.devices):
                    continue
                size = round(loads[collective.name] * collective.size_bytes)
            elif not over_link[int(row["memory"]), int(row["to_memory"])]:
                continue
            if size:
                found.append(
                    Crossing(
                        activity.device, position, float(first_byte[position]), float(activity.end_s[position]), size
                    )
                )
    return sorted(found, key=lambda crossing: (crossing.start_s, crossing.end_s, crossing.device, crossing.position))


def read_link_rates(problem: Problem, simulation: Simulation) -> tuple[LinkRate, ...]:
    """The rates that a recorded simulation saw, for every link of the machine, in its order.

    Raises InputError for a simulation without record.
    """
    if simulation.segments is None:
        raise InputError("simulation.segments: None; simulate with record=True to see rates of links")
    return tuple(LinkRate(link, *simulation.segments[link]) for link in range(len(problem.machine.links)))
