"""Coordination between devices: when each starts, and who may use a shared link."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tmojax.errors import InputError
from tmojax.problem import Kind, LinkPolicy, LinkPolicyKind, Machine, Problem, Schedule
from tmojax.relax.decode import DeviceList, blank_rows, wait_row
from tmojax.relax.loans import Loan, with_loans


@dataclass(frozen=True, eq=False)
class Timetable:
    """When copies are to begin; only their order counts. For every device (keys, start_s), both (copy,): the names of
    the copies (`tmojax.relax.turns.copy_keys`), ascending, and seconds."""

    copies: tuple[tuple[NDArray[np.int64], NDArray[np.float64]], ...]

    @staticmethod
    def of(copies: Iterable[tuple[NDArray[np.int64], NDArray[np.float64]]]) -> Timetable:
        """From (keys, start_s) of every device, in any order."""
        ordered = [(keys, start_s, np.argsort(keys)) for keys, start_s in copies]
        return Timetable(tuple((keys[order], start_s[order]) for keys, start_s, order in ordered))


@dataclass(frozen=True)
class Coordination:
    """start_share: for every device, how far the first device has come when it starts, in micro-batches of compute
    (0: at once). policy: for every link that several devices share. device_rank: first to last, for `priority`, and
    within a turn. turns, timetable: of policy `order`, see `tmojax.relax.turns`."""

    start_share: tuple[float, ...]
    policy: LinkPolicyKind = LinkPolicyKind.FAIR
    device_rank: tuple[int, ...] = ()
    slots: int = 1
    turns: int = 0
    timetable: Timetable | None = None


def together(problem: Problem, policy: LinkPolicyKind = LinkPolicyKind.FAIR) -> Coordination:
    """Everybody starts at once, under one policy."""
    count = problem.workload.device_count
    return Coordination((0.0,) * count, policy, tuple(range(count)) if policy is LinkPolicyKind.PRIORITY else ())


def staggered(problem: Problem, share: float, policy: LinkPolicyKind = LinkPolicyKind.FCFS) -> Coordination:
    """Device g starts `share` * g / G micro-batches after the first: with share 1 they spread evenly over a period."""
    count = problem.workload.device_count
    return Coordination(tuple(share * g / count for g in range(count)), policy)


def host_links(machine: Machine, device: int) -> set[int]:
    """Links that the copies of a device to and from its host memory use."""
    spec = machine.devices[device]
    return set(machine.route(spec.memory, spec.host_memory).links) | set(
        machine.route(spec.host_memory, spec.memory).links
    )


def shared_links(machine: Machine) -> list[int]:
    """Links that the host copies of at least two devices use, in index order."""
    users = [host_links(machine, device) for device, spec in enumerate(machine.devices) if spec.kind == "gpu"]
    return [link for link in range(len(machine.links)) if sum(link in used for used in users) > 1]


def link_policies(machine: Machine, coordination: Coordination) -> tuple[LinkPolicy, ...]:
    """One policy per link: the coordination's on shared links, fair on the others. Orders are still empty: they depend
    on lists (`tmojax.relax.turns.policies_of`)."""
    shared = set(shared_links(machine))
    chosen = LinkPolicy(coordination.policy, coordination.slots, coordination.device_rank)
    return tuple(chosen if link in shared else LinkPolicy() for link in range(len(machine.links)))


def assemble(problem: Problem, lists: Sequence[DeviceList], coordination: Coordination) -> Schedule:
    """Join the lists of all devices into one schedule.

    The first device signals when it has done the share of compute after which another one starts; that one's compute
    waits for it. What lists have in the memory of others is lent to them. Raises InputError when a share exceeds what
    the first device computes.
    """
    leader, built = lists[0], [item.rows for item in lists]
    if coordination.start_share[0] != 0:
        raise InputError(
            f"start_share[0]: {coordination.start_share[0]} must be 0; the others start relative to device 0"
        )
    micro_batch_s = float(sum(op.duration_s for op in problem.workload.program(0).ops if not op.step_op))
    places: list[tuple[int, int]] = []
    for device, share in enumerate(coordination.start_share):
        if share <= 0:
            continue
        run = int(np.searchsorted(leader.progress_s, share * micro_batch_s))
        if run >= len(leader.compute_row):
            raise InputError(
                f"start_share[{device}]: {share} micro-batches is more than the first device computes in a step"
            )
        places.append((int(leader.compute_row[run]), device))
        built[device] = np.concatenate([wait_row(device), built[device]])
    if places:
        built[0] = _with_signals(built[0], places)
    loans = [Loan(d, item.lender, item.borrowed_bytes) for d, item in enumerate(lists) if item.borrowed_bytes]
    if loans:
        built = with_loans(problem, built, loans)
    return Schedule(tuple(built), tuple(item.initial for item in lists), link_policies(problem.machine, coordination))


def _with_signals(rows: np.ndarray, places: list[tuple[int, int]]) -> np.ndarray:
    """Insert, behind each compute row, a signal of the event (number = device) that waits for it."""
    places = sorted(places)
    signals = blank_rows(len(places))
    signals["kind"] = Kind.SIGNAL
    signals["event"] = [device for _, device in places]
    signals["after"] = [row + count for count, (row, _) in enumerate(places)]
    # Several signals behind one row stand in a line; each names the compute row, which earlier signals moved on.
    for index in range(1, len(places)):
        if places[index][0] == places[index - 1][0]:
            signals["after"][index] = signals["after"][index - 1]
    return np.insert(rows, [row + 1 for row, _ in places], signals)
