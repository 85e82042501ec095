"""Explicit orders of the copies on shared links: in turns of the devices, or as a timetable says.

First come, first served and priority only choose among transfers that wait, and a device that sets up its next copy
loses its place; in an explicit order the link waits for it. Orders are derived from the lists, so that they change with
the decisions. A schedule deadlocks where its lists do not allow the order; the simulator then says inf.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tmojax.problem import Kind, LinkPolicy, LinkPolicyKind, Phase, Problem, Schedule
from tmojax.relax.coordinate import Coordination, Timetable, link_policies, shared_links
from tmojax.simulate import Simulation


@dataclass(frozen=True)
class _Copies:
    """The copies of one list. rows: (copy,) in list order. ways: (copy, 2), memories that each is from and to. place:
    (copy,), when each one's turn is."""

    rows: NDArray[np.int64]
    ways: NDArray[np.int64]
    place: NDArray[np.float64]


def policies_of(problem: Problem, schedule: Schedule, coordination: Coordination) -> tuple[LinkPolicy, ...]:
    """One policy per link for the lists of `schedule`, which `coordination` has assembled.

    Policy ORDER: by time in `coordination.timetable`; without one in turns. A turn is what one device copies in a
    forward or a backward of a micro-batch, or, with `turns` = n, in the nth part of a micro-batch of compute (starts
    that are later count). Devices take turns in the order of `device_rank`, or of their numbers.
    """
    policies = link_policies(problem.machine, coordination)
    if coordination.policy is not LinkPolicyKind.ORDER:
        return policies
    devices = range(problem.workload.device_count)
    table = coordination.timetable
    copies = [
        _in_turns(problem, device, schedule.lists[device], coordination)
        if table is None
        else _by_time(schedule.lists[device], *table.copies[device])
        for device in devices
    ]
    rank = np.argsort(coordination.device_rank or devices)
    shared = set(shared_links(problem.machine))
    return tuple(
        LinkPolicy(LinkPolicyKind.ORDER, policy.slots, (), _sequence(problem, link, copies, rank))
        if link in shared
        else policy
        for link, policy in enumerate(policies)
    )


def timetable_of(schedule: Schedule, simulation: Simulation) -> Timetable:
    """When every copy of a simulated schedule began to move."""
    return Timetable.of(
        (copy_keys(rows), np.asarray(start_s)[_copy_rows(rows)])
        for rows, start_s in zip(schedule.lists, simulation.transfer_start_s, strict=True)
    )


def copy_keys(rows: np.ndarray) -> NDArray[np.int64]:
    """What a Timetable calls the copies of a list, in list order: a number made of the direction, the micro-batch, the
    tensor, and how many of the same came before."""
    places = _copy_rows(rows)
    batch, tensor = rows["micro_batch"][places].astype(np.int64), rows["tensor"][places]
    keys = ((rows["kind"][places] == Kind.PREFETCH).astype(np.int64) << 20 | batch) << 21 | tensor
    order = np.argsort(keys, kind="stable")
    new = np.ones(len(keys), bool)
    new[1:] = keys[order][1:] != keys[order][:-1]
    first = np.maximum.accumulate(np.where(new, np.arange(len(keys)), 0))
    occurrence = np.empty(len(keys), np.int64)
    occurrence[order] = np.arange(len(keys)) - first
    return keys << 20 | occurrence


def _sequence(problem: Problem, link: int, copies: list[_Copies], rank: NDArray) -> tuple[tuple[int, int], ...]:
    """(device, instruction) of every copy over a link: by place, device rank, and place in the list."""
    crosses = np.zeros((len(problem.machine.memories),) * 2, bool)
    for route in problem.machine.routes:
        crosses[route.source, route.destination] = link in route.links
    parts = []
    for device, item in enumerate(copies):
        used = crosses[item.ways[:, 0], item.ways[:, 1]]
        count = int(used.sum())
        parts.append((item.place[used], np.full(count, rank[device]), item.rows[used], np.full(count, device)))
    place, ranks, rows, devices = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((rows, ranks, place))
    return tuple(zip(devices[order].tolist(), rows[order].tolist(), strict=True))


def _copy_rows(rows: np.ndarray) -> NDArray[np.int64]:
    return np.flatnonzero((rows["kind"] == Kind.OFFLOAD) | (rows["kind"] == Kind.PREFETCH))


def _ways(rows: np.ndarray, places: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([rows["memory"][places], rows["to_memory"][places]], 1).astype(np.int64)


def _in_turns(problem: Problem, device: int, rows: np.ndarray, coordination: Coordination) -> _Copies:
    """The place of a copy is the number of the turn of the latest op at or before it.

    Turns never go back: a recomputation belongs to the backward that it is for.
    """
    ops = problem.workload.program(device).ops
    step_op = np.array([op.step_op for op in ops])
    if coordination.turns:
        duration_s = np.where(step_op, 0.0, [op.duration_s for op in ops])
        within = np.cumsum(duration_s) / max(float(duration_s.sum()), 1e-30)
    else:
        within = 0.5 * np.array([op.phase is not Phase.FORWARD for op in ops])
    computes = rows["kind"] == Kind.COMPUTE
    op = np.where(computes, rows["op"], 0)
    done = np.where(step_op[op], problem.workload.micro_batches, rows["micro_batch"] + within[op])
    progress = np.maximum.accumulate(np.where(computes, done, 0.0))
    if coordination.turns:
        late = coordination.start_share[device]
        progress = np.floor((progress + late) * coordination.turns + 1e-9)
    places = _copy_rows(rows)
    return _Copies(places, _ways(rows, places), progress[places])


def _by_time(rows: np.ndarray, known: NDArray[np.int64], start_s: NDArray[np.float64]) -> _Copies:
    """The place of a copy is its time in the table; of one that is not there, that of the copy before it in the list.

    Copies of one direction keep the order of their list, in which their engine runs them.
    """
    places, keys = _copy_rows(rows), copy_keys(rows)
    kinds = rows["kind"][places]
    place = np.zeros(len(places))
    if len(known) and len(places):
        found = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        there = known[found] == keys
        before = np.maximum.accumulate(np.where(there, np.arange(len(keys)), 0))
        place = np.where(there, start_s[found], 0.0)[before]
    for kind in (Kind.OFFLOAD, Kind.PREFETCH):
        place[kinds == kind] = np.maximum.accumulate(place[kinds == kind])
    return _Copies(places, _ways(rows, places), place)
