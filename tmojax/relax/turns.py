"""Copies in turns: one device after the other on every shared link, as explicit orders."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tmojax.problem import Kind, LinkPolicy, LinkPolicyKind, Phase, Problem, Schedule
from tmojax.relax.coordinate import shared_links


def in_turns(problem: Problem, schedule: Schedule, slots: int) -> Schedule:
    """`schedule` with an explicit order on every shared link: what device 0 copies in forward of a micro-batch, then
    device 1, and so on, then backward in the same way. `slots` transfers of an order may run at once.

    First come, first served and priority only choose among transfers that wait, and a device that sets up its next
    copy loses its place; here the link waits for it. The schedule deadlocks where lists do not allow that order.
    """
    shared = set(shared_links(problem.machine))
    turns = [_turns(problem, device, rows) for device, rows in enumerate(schedule.lists)]
    policies = tuple(
        LinkPolicy(LinkPolicyKind.ORDER, slots, (), _sequence(problem, schedule, link, turns))
        if link in shared
        else old
        for link, old in enumerate(schedule.link_policies)
    )
    return replace(schedule, link_policies=policies)


def _sequence(
    problem: Problem, schedule: Schedule, link: int, turns: list[list[tuple[int, int]]]
) -> tuple[tuple[int, int], ...]:
    """(device, instruction) of every host copy over a link: by turn, device, and place in the list."""
    machine = problem.machine
    places: list[tuple[tuple[int, int], int, int]] = []
    for device, rows in enumerate(schedule.lists):
        spec = machine.devices[device]
        ways = ((Kind.OFFLOAD, spec.memory, spec.host_memory), (Kind.PREFETCH, spec.host_memory, spec.memory))
        routes = [(kind, machine.route(*way)) for kind, *way in ways if machine.has_route(*way)]
        kinds = [kind for kind, route in routes if link in route.links]
        places += [(turns[device][row], device, row) for row in np.flatnonzero(np.isin(rows["kind"], kinds)).tolist()]
    return tuple((device, row) for _, device, row in sorted(places))


def _turns(problem: Problem, device: int, rows: np.ndarray) -> list[tuple[int, int]]:
    """(micro-batch, 0 forward or 1 backward) of the latest run of an op at or before every row of a list.

    Turns never go back: a recomputation belongs to the backward that it is for.
    """
    ops = problem.workload.program(device).ops
    now, found = (0, 0), []
    for kind, op, batch in zip(rows["kind"].tolist(), rows["op"].tolist(), rows["micro_batch"].tolist(), strict=True):
        if kind == Kind.COMPUTE:
            step = (problem.workload.micro_batches, 0) if ops[op].step_op else None
            now = max(now, step or (batch, int(ops[op].phase is not Phase.FORWARD)))
        found.append(now)
    return found
