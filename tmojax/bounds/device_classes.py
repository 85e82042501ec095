"""Devices that may share one set of LP columns: the mean of the columns of its members satisfies every row used here.

Members run the same program with the same capacity; their copy routes cross the same shared links, and alone
they are equally fast. A shared link then carries the mean times the number of members, and no member moves more than
its own rates allow.
"""

from __future__ import annotations

from dataclasses import dataclass

from tmojax.problem import Action, MemoryKind, Problem, Route


@dataclass(frozen=True)
class DeviceClass:
    """Members are device indices. out_links, in_links: for every distinct way out of (into) the device's memory, the
    links that it shares with other devices. out_bytes_per_s and in_bytes_per_s: the most that a member moves when
    nobody else moves anything; joint_bytes_per_s: the same for both directions together (inf: they share no link).
    """

    devices: tuple[int, ...]
    capacity_bytes: int
    out_links: tuple[tuple[int, ...], ...]
    in_links: tuple[tuple[int, ...], ...]
    out_bytes_per_s: float
    in_bytes_per_s: float
    joint_bytes_per_s: float


def gpus(problem: Problem) -> list[int]:
    """Devices with a memory of their own; what computes on the host itself needs no copies."""
    return [d for d, spec in enumerate(problem.machine.devices) if spec.kind == "gpu"]


def copy_routes(problem: Problem, device: int) -> tuple[list[Route], list[Route]]:
    """(out, in): all routes between the memory of a device and memories that its tensors may be copied to: those that
    are no device's, and with the action `peer` those of other devices."""
    machine = problem.machine
    own = machine.devices[device].memory
    device_memories = {d.memory for d in machine.devices if d.kind == "gpu"}
    peers = Action.PEER in problem.actions

    def is_open(memory: int) -> bool:
        return peers or (machine.memories[memory].kind is not MemoryKind.DEVICE and memory not in device_memories)

    return (
        [r for r in machine.routes if r.source == own and is_open(r.destination)],
        [r for r in machine.routes if r.destination == own and is_open(r.source)],
    )


def shared_links(problem: Problem) -> frozenset[int]:
    """Links that copy routes of several devices contain."""
    users: dict[int, set[int]] = {}
    for device in gpus(problem):
        for routes in copy_routes(problem, device):
            for route in routes:
                for link in route.links:
                    users.setdefault(link, set()).add(device)
    return frozenset(link for link, devices in users.items() if len(devices) > 1)


def own_links(problem: Problem, device: int) -> dict[tuple[bool, bool], set[int]]:
    """Links that no other device copies over: (whether all that goes out of the memory of the device, and whether all
    that comes in, crosses them) -> links."""
    routes = copy_routes(problem, device)
    shared = shared_links(problem)
    out, into = (set.intersection(*(set(r.links) for r in way)) - shared if way else set() for way in routes)
    return {(True, False): out - into, (False, True): into - out, (True, True): out & into}


def device_classes(problem: Problem, *, apart: bool = False) -> list[DeviceClass]:
    """GPUs in groups that one set of columns can stand for, in order of their first member; `apart`: each in one of
    its own."""
    shared = shared_links(problem)
    members: dict[tuple, list[int]] = {}
    for device in gpus(problem):
        ways = [tuple(sorted({tuple(sorted(shared.intersection(route.links))) for route in routes}))
                for routes in copy_routes(problem, device)]  # fmt: skip
        key = (problem.workload.device_program[device], problem.capacity_bytes(device), *ways, *_rates(problem, device))
        members.setdefault((*key, device) if apart else key, []).append(device)
    return [DeviceClass(tuple(devices), *key[1:7]) for key, devices in members.items()]


def _rates(problem: Problem, device: int) -> tuple[float, float, float]:
    """(out, in, joint) bytes per second of a device that has everything for itself."""
    machine = problem.machine

    def slowest(route: Route) -> float:
        return min(machine.links[link].bandwidth_bytes_per_s for link in route.links)

    def together(routes: list[Route]) -> float:
        if not routes:
            return 0.0
        one_at_a_time = set.intersection(*(set(r.engines) for r in routes))
        common = set.intersection(*(set(r.links) for r in routes))
        rate = max(map(slowest, routes)) if one_at_a_time else sum(map(slowest, routes))
        return min([rate, *(machine.links[link].bandwidth_bytes_per_s for link in common)])

    out_routes, in_routes = copy_routes(problem, device)
    both = [*out_routes, *in_routes]
    common = set.intersection(*(set(r.links) for r in both)) if out_routes and in_routes else set()
    joint = min((machine.links[link].bandwidth_bytes_per_s for link in common), default=float("inf"))
    return together(out_routes), together(in_routes), joint
