"""Devices that may share one set of LP columns: the mean of the columns of its members satisfies every row used here.

Members run the same program with the same capacity; their copy routes cross the same shared links, or links that are
alike, and alone they are equally fast. A shared link then carries the mean times the number of members that use it, and
no member moves more than its own rates allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tmojax.problem import Action, MemoryKind, Problem, Route


@dataclass(frozen=True)
class DeviceClass:
    """Members are device indices. out_links, in_links: for every distinct way out of (into) the device's memory, the
    links that it shares with other devices; where links of members are alike (docs/bounds.md, section 3, point 1), the
    first of them stands for all. users: (direction, way, link) -> how many members use this link in this way; crosses:
    link -> whether all that goes out, and all that comes in, crosses it, and of how many members this holds.
    out_bytes_per_s and in_bytes_per_s: the most that a member moves when
    nobody else moves anything; joint_bytes_per_s: the same for both directions together (inf: they share no link).
    """

    devices: tuple[int, ...]
    capacity_bytes: int
    out_links: tuple[tuple[int, ...], ...]
    in_links: tuple[tuple[int, ...], ...]
    out_bytes_per_s: float
    in_bytes_per_s: float
    joint_bytes_per_s: float
    users: Mapping[tuple[int, int, int], int]
    crosses: Mapping[int, tuple[bool, bool, int]]


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
    devices = gpus(problem)
    ways = {device: _ways(problem, device) for device in devices}
    own = {device: (device if apart else -1, problem.workload.device_program[device], problem.capacity_bytes(device),
                    *_rates(problem, device)) for device in devices}  # fmt: skip
    links = _link_facts(problem, sorted(shared_links(problem)))
    classes = _alike(ways, own, links)
    if classes is None:  # links that are alike cannot be told apart by the way that they belong to
        classes = _alike(ways, own, {link: (link, *facts) for link, facts in links.items()})
    assert classes is not None
    return classes


Ways = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]


def _ways(problem: Problem, device: int) -> Ways:
    """(out, in): the distinct sets of shared links of a device's routes."""
    shared = shared_links(problem)
    out, into = (
        tuple(sorted({tuple(sorted(shared.intersection(route.links))) for route in routes}))
        for routes in copy_routes(problem, device)
    )
    return out, into


def _link_facts(problem: Problem, links: list[int]) -> dict[int, tuple]:
    """What links that are alike have in common: bandwidth, and the load of every collective."""
    machine = problem.machine
    loads = [machine.collective_loads(kind, devices)
             for kind, devices in dict.fromkeys((c.kind, c.devices) for c in problem.workload.collectives)]  # fmt: skip
    return {link: (machine.links[link].bandwidth_bytes_per_s, *(load.get(link, 0.0) for load in loads))
            for link in links}  # fmt: skip


def _role(ways: Ways, link: int) -> tuple[bool, bool]:
    """Whether all that goes out of, and all that comes into, the memory of a device crosses the link."""
    out, into = ways
    return bool(out) and all(link in way for way in out), bool(into) and all(link in way for way in into)


def _alike(ways: dict[int, Ways], own: dict[int, tuple], links: dict[int, tuple]) -> list[DeviceClass] | None:
    """Classes of the coarsest partition of devices and links in which all devices of a class have the same own facts
    and use as many links of each kind in each way, and all links of a kind have the same facts and as many such users;
    None where this does not tell the ways of one device, or the roles of a link, apart."""
    device_kind: dict[int, int] = _numbered(own)
    link_kind: dict[int, int] = _numbered(links)

    def way_kind(way: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(link_kind[link] for link in way))

    while True:
        counts = len(set(device_kind.values())), len(set(link_kind.values()))
        new_devices = _numbered({
            d: (device_kind[d], *(tuple(sorted(map(way_kind, direction))) for direction in ways[d])) for d in ways
        })  # fmt: skip
        link_kind = _numbered({
            link: (link_kind[link], tuple(sorted(
                (device_kind[d], _role(ways[d], link), direction, way_kind(way))
                for d in ways for direction in (0, 1) for way in ways[d][direction] if link in way
            ))) for link in links
        })  # fmt: skip
        device_kind = new_devices
        if counts == (len(set(device_kind.values())), len(set(link_kind.values()))):
            break
    first = {kind: min(link for link in links if link_kind[link] == kind) for kind in link_kind.values()}
    members: dict[int, list[int]] = {}
    for device in ways:
        members.setdefault(device_kind[device], []).append(device)
    found = []
    for devices in members.values():
        users: dict[tuple[int, int, int], int] = {}
        crosses: dict[int, tuple[bool, bool, int]] = {}
        kinds = [sorted(map(way_kind, direction)) for direction in ways[devices[0]]]
        if any(len(set(direction)) < len(direction) for direction in kinds):
            return None
        for device in devices:
            for direction in (0, 1):
                for way in ways[device][direction]:
                    place = kinds[direction].index(way_kind(way))
                    for link in set(way) & set(first.values()):
                        users[direction, place, link] = users.get((direction, place, link), 0) + 1
            for link in first.values():
                role = _role(ways[device], link)
                if not any(role):
                    continue
                *known, count = crosses.get(link, (*role, 0))
                if tuple(known) != role:
                    return None
                crosses[link] = (*role, count + 1)
        out_links, in_links = (
            tuple(tuple(link for link, kind in sorted((first[kind], kind) for kind in set(way))) for way in direction)
            for direction in kinds
        )
        _, _, capacity_bytes, out_rate, in_rate, joint_rate = own[devices[0]]
        found.append(DeviceClass(tuple(devices), capacity_bytes, out_links, in_links, out_rate, in_rate, joint_rate,
                                 users, crosses))  # fmt: skip
    return found


def _numbered(facts: Mapping[int, tuple]) -> dict[int, int]:
    numbers: dict[tuple, int] = {}
    return {key: numbers.setdefault(fact, len(numbers)) for key, fact in facts.items()}


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
