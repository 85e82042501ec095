"""Decisions in, simulated schedules out: what every planner here works on.

Devices that run the same program with the same capacity and launch overhead form one class and share views and decoded
lists, so a decision is decoded once however many devices take it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tmojax.problem import Kind, LinkPolicyKind, Machine, Placement, Problem, Schedule
from tmojax.problem.step_view import StepView, view_step
from tmojax.relax.coordinate import Coordination, assemble, host_links, shared_links
from tmojax.relax.decisions import DeviceDecision
from tmojax.relax.decode import NEVER, DeviceList, DoesNotFit, decode
from tmojax.relax.host_memory import host_limit_bytes, host_peak_bytes
from tmojax.relax.loans import check_lenders
from tmojax.relax.turns import policies_of
from tmojax.simulate import Prepared, prepare


@dataclass(frozen=True, eq=False)
class Candidate:
    """A complete plan before it is checked: decisions of all devices, how they are coordinated, and its simulated
    time."""

    decisions: tuple[DeviceDecision, ...]
    coordination: Coordination
    schedule: Schedule
    step_s: float
    lookahead_runs: tuple[int, ...] = ()


def readdress(
    machine: Machine, source: int, target: int, rows: np.ndarray, initial: tuple[Placement, ...]
) -> tuple[np.ndarray, tuple[Placement, ...]]:
    """The list [N] and placements of device `source` for device `target`: its own memory and its own host instead."""
    here, there = machine.devices[source], machine.devices[target]
    to = {here.memory: there.memory, here.host_memory: there.host_memory}
    table = np.arange(-1, len(machine.memories))
    for old, new in to.items():
        table[old + 1] = new
    moved = rows.copy()
    for name in ("memory", "to_memory"):
        moved[name] = table[moved[name] + 1]
    return moved, tuple(Placement(p.tensor, tuple([to.get(m, m) for m in p.memories])) for p in initial)


def _runs(schedule: Schedule, coordination: Coordination) -> bool:
    """Whether a schedule may be valid. With an explicit order it is not where lists share copy engines, as those of a
    borrower and its lender do: a copy may take an engine and then wait for one that waits for that engine."""
    if coordination.policy is not LinkPolicyKind.ORDER:
        return True
    return not any((rows["kind"] == Kind.LEND).any() for rows in schedule.lists)


class Workbench:
    """Views, decode and simulation of one problem, with caches. Deterministic."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.simulations = 0
        devices = range(problem.workload.device_count)
        keys = [(problem.workload.device_program[d], problem.capacity_bytes(d)) for d in devices]
        self.device_class = tuple(keys.index(key) for key in keys)  # each device's first equal device
        self._views = {d: view_step(problem, d) for d in sorted(set(self.device_class))}
        self._decoded: dict[tuple, DeviceList | DoesNotFit] = {}
        self._moved: dict[tuple, DeviceList] = {}

    def view(self, device: int) -> StepView:
        return self._views[self.device_class[device]]

    @property
    def device_count(self) -> int:
        return len(self.device_class)

    def slots(self) -> int:
        """How many transfers of one device each fill the narrowest shared link: what an exclusive policy may admit."""
        links = self.problem.machine.links
        shared = shared_links(self.problem.machine)
        if not shared:
            return 1
        lane = max(
            min(links[link].bandwidth_bytes_per_s for link in host_links(self.problem.machine, device))
            for device in range(self.device_count)
        )
        widest = max(links[link].bandwidth_bytes_per_s for link in shared)
        return max(1, math.ceil(widest / lane))

    def decode(self, device: int, decision: DeviceDecision, lookahead_runs: int = NEVER,
               release_at_once: bool = False, lent_bytes: int = 0) -> DeviceList | DoesNotFit:  # fmt: skip
        """The list of one device, decoded once per class and addressed to the device's own memories. `lent_bytes` of
        its memory are others'."""
        # Lenders differ within a class, and a borrower's list names the lender's memory.
        first = device if decision.borrows else self.device_class[device]
        key = (first, *decision.key, lookahead_runs, release_at_once, lent_bytes)
        if key not in self._decoded:
            if len(self._decoded) > 256:
                self._decoded.clear()
                self._moved.clear()
            capacity = self.problem.capacity_bytes(first) - lent_bytes
            self._decoded[key] = decode(
                self.problem, self.view(first), decision, capacity_bytes=capacity,
                lookahead_runs=lookahead_runs, release_at_once=release_at_once, device=first,
            )  # fmt: skip
        found = self._decoded[key]
        if isinstance(found, DoesNotFit) or first == device:
            return found
        if (device, *key) not in self._moved:
            self._moved[device, *key] = self._readdress(found, first, device)
        return self._moved[device, *key]

    def _readdress(self, found: DeviceList, first: int, device: int) -> DeviceList:
        rows, initial = readdress(self.problem.machine, first, device, found.rows, found.initial)
        host_bytes = host_peak_bytes(self.problem, device, rows, initial)
        return replace(found, rows=rows, initial=initial, host_peak_bytes=host_bytes)

    def lists(self, decisions: tuple[DeviceDecision, ...], lookahead_runs: tuple[int, ...] = (),
              release_at_once: bool = False) -> list[DeviceList] | DoesNotFit:  # fmt: skip
        """The lists of all devices, or what does not fit: one of them in its memory, or all of them in a host's."""
        lookahead = lookahead_runs or (NEVER,) * self.device_count
        check_lenders(decisions)
        built: dict[int, DeviceList] = {}
        lent = [0] * self.device_count
        # Borrowers first: what they use is missing in the memory of their lenders.
        for device in sorted(range(self.device_count), key=lambda d: not decisions[d].borrows):
            found = self.decode(device, decisions[device], lookahead[device], release_at_once, lent[device])
            if isinstance(found, DoesNotFit):
                return found
            if found.borrowed_bytes:
                lent[found.lender] += found.borrowed_bytes
            built[device] = found
        lists = [built[device] for device in range(self.device_count)]
        return self.over_host_limit(lists) or lists

    def over_host_limit(self, built: list[DeviceList]) -> DoesNotFit | None:
        """What does not fit where all lists together hold more in a host memory than it may have."""
        machine = self.problem.machine
        for host in sorted({spec.host_memory for spec in machine.devices}):
            taken = {d: item.host_peak_bytes for d, item in enumerate(built) if machine.devices[d].host_memory == host}
            over = sum(taken.values()) - host_limit_bytes(machine, host)
            if over > 0:
                return DoesNotFit(max(taken, key=taken.__getitem__), -1, -1, over, host)
        return None

    def prepare(
        self,
        decisions: tuple[DeviceDecision, ...],
        coordination: Coordination,
        lookahead_runs: tuple[int, ...] = (),
        release_at_once: bool = False,
    ) -> tuple[Schedule, Prepared] | DoesNotFit:
        """Decode, assemble and lower for the simulator."""
        built = self.lists(decisions, lookahead_runs, release_at_once)
        if isinstance(built, DoesNotFit):
            return built
        schedule = assemble(self.problem, built, coordination)
        schedule = replace(schedule, link_policies=policies_of(self.problem, schedule, coordination))
        return schedule, prepare(self.problem, schedule)

    def evaluate(
        self,
        decisions: tuple[DeviceDecision, ...],
        coordination: Coordination,
        lookahead_runs: tuple[int, ...] = (),
        release_at_once: bool = False,
    ) -> Candidate | DoesNotFit:
        """Decode, assemble and simulate."""
        prepared = self.prepare(decisions, coordination, lookahead_runs, release_at_once)
        if isinstance(prepared, DoesNotFit):
            return prepared
        schedule, ready = prepared
        self.simulations += 1
        step_s = ready.run().step_s if _runs(schedule, coordination) else math.inf
        return Candidate(decisions, coordination, schedule, step_s, lookahead_runs)

    def with_policies(self, decisions, start_share: tuple[float, ...],
                      policies: tuple[LinkPolicyKind, ...], lookahead_runs=()) -> Candidate | DoesNotFit:  # fmt: skip
        """The best of several link policies for given starts."""
        rank = tuple(range(self.device_count))
        options = [
            Coordination(start_share, kind, rank if kind is LinkPolicyKind.PRIORITY else (), self.slots())
            for kind in policies
        ]
        return self.best_of(decisions, options, lookahead_runs)

    def best_of(
        self,
        decisions: tuple[DeviceDecision, ...],
        options: Sequence[Coordination],
        lookahead_runs: tuple[int, ...] = (),
    ) -> Candidate | DoesNotFit:
        """The fastest of several coordinations with the same starts, the first of equals."""
        found = self.each_of(decisions, options, lookahead_runs)
        return found if isinstance(found, DoesNotFit) else min(found, key=lambda candidate: candidate.step_s)

    def each_of(
        self,
        decisions: tuple[DeviceDecision, ...],
        options: Sequence[Coordination],
        lookahead_runs: tuple[int, ...] = (),
    ) -> list[Candidate] | DoesNotFit:
        """Candidates of several coordinations with the same starts; the lists are lowered once.

        One that deadlocks takes infinitely long.
        """
        prepared = self.prepare(decisions, options[0], lookahead_runs)
        if isinstance(prepared, DoesNotFit):
            return prepared
        schedule, ready = prepared
        found = []
        for option in options:
            chosen = policies_of(self.problem, schedule, option)
            self.simulations += 1
            step_s = ready.run(link_policies=chosen).step_s if _runs(schedule, option) else math.inf
            found.append(Candidate(decisions, option, replace(schedule, link_policies=chosen), step_s, lookahead_runs))
        return found
