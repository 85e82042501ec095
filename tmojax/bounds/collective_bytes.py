"""Bytes that collectives send over a link: in a step, and after a moment of its last micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.bounds.device_classes import own_links
from tmojax.bounds.gaps import Gaps
from tmojax.problem import Problem


def collective_bytes(problem: Problem, link: int) -> float:
    """Bytes of all collectives of a step over a link."""
    workload, machine = problem.workload, problem.machine
    total = 0.0
    for collective in workload.collectives:
        ops = workload.program(collective.devices[0]).ops
        runs = sum((1 if op.step_op else workload.micro_batches) for op in ops if op.collective == collective.name)
        load = machine.collective_loads(collective.kind, collective.devices).get(link, 0.0)
        total += runs * collective.size_bytes * load
    return total


@dataclass(frozen=True)
class OwnLink:
    """What the links say that every device of a class has for itself and its collectives. leaves, enters: what of its
    copies crosses; bandwidth_bytes_per_s: the most, and collective_bytes: the mean, of the devices; links: one of each
    device."""

    leaves: bool
    enters: bool
    bandwidth_bytes_per_s: float
    collective_bytes: float
    links: tuple[int, ...]


def links_with_collectives(problem: Problem, devices: tuple[int, ...]) -> list[OwnLink]:
    """Of every direction, the links of `devices` that their collectives keep busy longest, where each has one."""
    found, links = [], problem.machine.links
    each = [own_links(problem, device) for device in devices]
    busy_bytes = {link: collective_bytes(problem, link) for own in each for way in own.values() for link in way}
    for way in each[0]:
        chosen = [
            max(own[way], key=lambda link: (busy_bytes[link] / links[link].bandwidth_bytes_per_s, -link), default=-1)
            for own in each
        ]
        if -1 in chosen or not all(busy_bytes[link] for link in chosen):
            continue
        fastest = max(links[link].bandwidth_bytes_per_s for link in chosen)
        mean_bytes = sum(busy_bytes[link] for link in chosen) / len(chosen)
        found.append(OwnLink(*way, fastest, mean_bytes, tuple(chosen)))
    return found


def collective_bytes_after(
    problem: Problem, link: int, devices: tuple[int, ...], gaps: Gaps, moment_slots: np.ndarray
) -> np.ndarray:
    """[J + 1] bytes over a link of the collectives of the last micro-batch that cannot begin before a moment on any of
    `devices`, which run one program: they wait for what a later slot writes. The last entry, for the end, is 0."""
    workload, machine = problem.workload, problem.machine
    place = {int(op): slot for slot, op in enumerate(gaps.slot_op)}
    changed: dict[int, int] = {}
    total = np.zeros(len(moment_slots) + 1)
    for index, op in enumerate(workload.program(devices[0]).ops):
        if index in place:
            changed.update(dict.fromkeys((*op.writes, *op.updates), place[index]))
        if not op.collective:
            continue
        collective = workload.collective(op.collective)
        waits_for = max((changed.get(tensor, -1) for tensor in (*op.reads, *op.updates)), default=-1)
        if set(devices) <= set(collective.devices):
            load = machine.collective_loads(collective.kind, collective.devices).get(link, 0.0)
            total[:-1][moment_slots <= waits_for] += collective.size_bytes * load
    return total
