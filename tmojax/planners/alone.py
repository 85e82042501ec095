"""Planning without coordination: every GPU as if it were alone on the machine, then all together under fair sharing.

This is the ablation that says what coordination is worth. It works with every planner, because the planner is given
a problem of one GPU and the lists that it makes are given to all GPUs of that kind as they are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tmojax.planners.base import Planner, PlanResult, Status, Stopwatch
from tmojax.planners.workbench import Candidate, readdress
from tmojax.problem import LinkPolicy, Problem, Schedule, Workload
from tmojax.relax.coordinate import together
from tmojax.relax.decode import NEVER
from tmojax.simulate import simulate

# Behind the name of a planner: its plan with coordination, next to the one without.
COORDINATED = "+coordinated"


def alone_problem(problem: Problem, device: int) -> Problem:
    """What `device` sees when it plans alone: its program, its memory and its path without other users.

    Links keep their capacity. Collectives move nothing, since there is nobody to exchange with. Of a host memory the
    device may use the share that it has when all GPUs of that host take equal parts: being oblivious of contention does
    not make bytes. Memories, links and routes keep their numbers.
    """
    machine, workload = problem.machine, problem.workload
    spec = machine.devices[device]
    users = sum(other.host_memory == spec.host_memory for other in machine.devices)
    host = machine.memories[spec.host_memory]
    pinned = host.pinned_limit_bytes if host.pinned_limit_bytes < 0 else host.pinned_limit_bytes // users
    usable = (host.capacity_bytes - host.reserve_bytes) // users
    host = replace(host, capacity_bytes=usable + host.reserve_bytes, pinned_limit_bytes=pinned)
    memories = tuple(host if index == spec.host_memory else memory for index, memory in enumerate(machine.memories))
    program = workload.program(device)
    entered = {op.collective for op in program.ops if op.collective}
    collectives = tuple(replace(c, devices=(0,)) for c in workload.collectives if c.name in entered)
    return Problem(
        f"{problem.name}, {spec.name} alone",
        Workload(
            workload.name, (program,), (0,), workload.micro_batches, workload.duration_source, collectives
        ),
        replace(machine, memories=memories, devices=(spec,)),
        problem.actions,
    )  # fmt: skip


class Alone:
    """Plans of one problem in which no GPU knows of the others.

    Devices with the same program, capacity and path are planned once. What one planner finds for a GPU alone is a seed
    for those after it, as in a run with coordination.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        keys = [_kind_of(problem, device) for device in range(problem.workload.device_count)]
        self._first = tuple(keys.index(key) for key in keys)
        self._alone = {device: alone_problem(problem, device) for device in sorted(set(self._first))}
        self._seeds: dict[int, tuple[PlanResult, ...]] = {device: () for device in self._alone}

    def plan(self, planner: Planner, *, seed: int = 0) -> PlanResult:
        """Plan every kind of GPU alone; the lists start at once and share links fairly.

        `details["alone"]` has the details of every solo plan by device name, `details["alone_step_s"]` the times that
        they would take alone. Status: a plan that is optimal alone is only feasible here, and that there is none alone
        is no proof.
        """
        watch = Stopwatch()
        problem, names = self._problem, [device.name for device in self._problem.machine.devices]
        found: dict[int, PlanResult] = {}
        compile_s = 0.0
        for device, sub in self._alone.items():
            result = planner.plan(sub, seed=seed, seeds=self._seeds[device])
            compile_s += result.compile_s
            if result.schedule is None:
                status = Status.NOT_FOUND if result.status is Status.INFEASIBLE else result.status
                message = f"{names[device]} alone: {result.message or result.status}"
                return replace(result, status=status, message=message, plan_s=watch.read_s(), compile_s=compile_s)
            self._seeds[device] += (result,)
            found[device] = result
        schedule = self._join(found)
        step_s = simulate(problem, schedule).step_s
        limited = any(result.time_limited for result in found.values())
        return PlanResult(
            planner.name,
            Status.TIME_LIMIT if limited else Status.FEASIBLE,
            schedule,
            step_s,
            watch.read_s(),
            compile_s,
            time_limited=limited,
            candidate=self._candidate(found, schedule, step_s),
            details={
                "alone_step_s": {names[device]: result.step_s for device, result in found.items()},
                "alone": {names[device]: result.details for device, result in found.items()},
            },
        )

    def _join(self, found: dict[int, PlanResult]) -> Schedule:
        lists, initial = [], []
        schedules = [result.schedule for result in found.values() if result.schedule is not None]
        span = 1 + max(int(schedule.lists[0]["event"].max(initial=-1)) for schedule in schedules)
        for device, first in enumerate(self._first):
            solo = found[first].schedule
            assert solo is not None
            rows, placements = readdress(self._problem.machine, first, device, solo.lists[0], solo.initial[0])
            rows["owner"] = np.where(rows["owner"] >= 0, device, rows["owner"])
            rows["event"] = np.where(rows["event"] >= 0, rows["event"] + device * span, rows["event"])
            lists.append(rows)
            initial.append(placements)
        policies = (LinkPolicy(),) * len(self._problem.machine.links)
        return Schedule(tuple(lists), tuple(initial), policies)

    def _candidate(self, found: dict[int, PlanResult], schedule: Schedule, step_s: float) -> Candidate | None:
        """The decisions of all devices, where every solo plan has them, so that others can start from them."""
        solo = [found[first].candidate for first in self._first]
        if any(candidate is None for candidate in solo):
            return None
        decisions = tuple(candidate.decisions[0] for candidate in solo if candidate is not None)
        lookahead = tuple((candidate.lookahead_runs or (NEVER,))[0] for candidate in solo if candidate is not None)
        return Candidate(decisions, together(self._problem), schedule, step_s, lookahead)


def _kind_of(problem: Problem, device: int) -> tuple:
    """What decides how a device plans alone: program, capacity, host share, and the links of its host path."""
    machine = problem.machine
    spec, alone = machine.devices[device], alone_problem(problem, device)
    ways = ((spec.memory, spec.host_memory), (spec.host_memory, spec.memory))
    links = tuple(
        tuple((machine.links[link].bandwidth_bytes_per_s, machine.links[link].latency_s) for link in route.links)
        for route in (machine.route(*way) for way in ways if machine.has_route(*way))
    )
    host = alone.machine.memories[spec.host_memory]
    usable = (host.capacity_bytes - host.reserve_bytes, host.pinned_limit_bytes, host.pinned_power_of_two)
    return problem.workload.device_program[device], problem.capacity_bytes(device), usable, links
