"""The machine: memories, links, copy engines, devices, and the routes between memories.

One mechanism expresses every topology: a route is a list of links and copy engines, and whatever several routes share
(a GPU lane, a switch uplink, a root complex, host DRAM, the sum of both directions) is one link that all of them
contain. Each direction of a cable is its own link.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from tmojax.errors import InputError
from tmojax.problem.workload import CollectiveKind


class MemoryKind(StrEnum):
    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory. `reserve_bytes` is used by others (data loading, the framework) and not available to plans.

    `pinned_limit_bytes`: how much of a host memory may be pinned for copies (-1: all of it).
    `pinned_power_of_two`: every pinned block is rounded up to a power of two, as some frameworks do.
    """

    name: str
    kind: MemoryKind
    capacity_bytes: int
    reserve_bytes: int = 0
    pinned_limit_bytes: int = -1
    pinned_power_of_two: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection, or a limit that several routes share. Latency delays the first byte only."""

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Route:
    """The way from one memory to another: indices into `Machine.links` and `Machine.engines`."""

    source: int
    destination: int
    links: tuple[int, ...]
    engines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """Something that computes: a GPU, or the host when `kind` is "cpu".

    `memory` is where its ops find their tensors, `host_memory` the NUMA node that it offloads to by default.
    `model` names a row of the GPU table; it is information for importers and reports.
    """

    name: str
    kind: str
    memory: int
    host_memory: int
    model: str = ""


@dataclass(frozen=True, slots=True)
class Interference:
    """Factors (>= 1) by which a running activity takes longer while another one overlaps it on the same device.

    Slow-downs of one activity by several others multiply.
    """

    compute_during_copy_in: float = 1.0
    compute_during_copy_out: float = 1.0
    compute_during_collective: float = 1.0
    collective_during_compute: float = 1.0
    copy_during_compute: float = 1.0


@dataclass(frozen=True, slots=True)
class Overheads:
    """Fixed costs: of an op launch, of a transfer set-up (holds the copy engine), of a signal to another device."""

    launch_s: float = 0.0
    transfer_setup_s: float = 0.0
    handover_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Codec:
    """A compression: encoded size = ceil(size * numerator / denominator); rates are plain bytes per second.

    `workspace_numerator / denominator` of the plain size is scratch while encoding or decoding.
    """

    name: str
    numerator: int
    denominator: int
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    workspace_numerator: int = 0

    def encoded_bytes(self, size_bytes: int) -> int:
        return -(-size_bytes * self.numerator // self.denominator)

    def workspace_bytes(self, size_bytes: int) -> int:
        return -(-size_bytes * self.workspace_numerator // self.denominator)


@dataclass(frozen=True)
class Machine:
    """A machine; all cross references are indices. `assumptions` are sentences about what was not measured."""

    name: str
    memories: tuple[Memory, ...]
    links: tuple[Link, ...]
    engines: tuple[str, ...]
    routes: tuple[Route, ...]
    devices: tuple[Device, ...]
    overheads: Overheads = Overheads()
    interference: Interference = Interference()
    codecs: tuple[Codec, ...] = ()
    assumptions: tuple[str, ...] = ()

    @cached_property
    def _route_table(self) -> dict[tuple[int, int], Route]:
        return {(route.source, route.destination): route for route in self.routes}

    def route(self, source: int, destination: int) -> Route:
        """The route between two memories. Raises InputError when there is none."""
        try:
            return self._route_table[source, destination]
        except KeyError:
            names = [memory.name for memory in self.memories]
            raise InputError(
                f"machine {self.name!r} has no route from {names[source]!r} to {names[destination]!r}; "
                f"add one to `routes`"
            ) from None

    def has_route(self, source: int, destination: int) -> bool:
        return (source, destination) in self._route_table

    def codec(self, name: str) -> Codec:
        for codec in self.codecs:
            if codec.name == name:
                return codec
        raise InputError(f"machine {self.name!r} has no codec {name!r}; known: {[c.name for c in self.codecs]}")

    def collective_loads(self, kind: CollectiveKind, devices: tuple[int, ...]) -> dict[int, float]:
        """Bytes that cross each link per payload byte of a ring collective over `devices` in the given order.

        Every device sends to its successor over the device-to-device route: 2(n-1)/n of the payload for an
        all-reduce, (n-1)/n for all-gather and reduce-scatter, all of it (except for the last hop) for a broadcast.
        """
        count = len(devices)
        loads: dict[int, float] = {}
        if count < 2:
            return loads
        share = {
            CollectiveKind.ALL_REDUCE: 2 * (count - 1) / count,
            CollectiveKind.ALL_GATHER: (count - 1) / count,
            CollectiveKind.REDUCE_SCATTER: (count - 1) / count,
            CollectiveKind.BROADCAST: 1.0,
        }[kind]
        hops = list(zip(devices, (*devices[1:], devices[0]), strict=True))
        for source, destination in hops[:-1] if kind is CollectiveKind.BROADCAST else hops:
            route = self.route(self.devices[source].memory, self.devices[destination].memory)
            for link in route.links:
                loads[link] = loads.get(link, 0.0) + share
        return loads

    def collective_latency_s(self, kind: CollectiveKind, devices: tuple[int, ...]) -> float:
        """Latency before a ring collective's first byte counts: the steps of the ring times its slowest hop."""
        count = len(devices)
        if count < 2:
            return 0.0
        steps = 2 * (count - 1) if kind is CollectiveKind.ALL_REDUCE else count - 1
        slowest = max(
            sum(self.links[link].latency_s for link in self.route(self.devices[a].memory, self.devices[b].memory).links)
            for a, b in zip(devices, (*devices[1:], devices[0]), strict=True)
        )
        return steps * slowest


def validate_machine(machine: Machine) -> None:
    """Check that a machine is well formed. Raises InputError naming the field, the value and the remedy."""
    for label, names in (
        ("memories", [m.name for m in machine.memories]),
        ("links", [link.name for link in machine.links]),
        ("engines", list(machine.engines)),
        ("devices", [d.name for d in machine.devices]),
        ("codecs", [c.name for c in machine.codecs]),
    ):
        if len(set(names)) != len(names) or "" in names:
            raise InputError(f"{label}: names must be unique and not empty, got {names}")
    if not machine.devices:
        raise InputError("devices: a machine needs at least one")
    for memory in machine.memories:
        if memory.capacity_bytes <= 0:
            raise InputError(f"memory {memory.name!r}: capacity_bytes {memory.capacity_bytes} must be positive")
        if not 0 <= memory.reserve_bytes <= memory.capacity_bytes:
            raise InputError(
                f"memory {memory.name!r}: reserve_bytes {memory.reserve_bytes} must be between 0 and the capacity "
                f"{memory.capacity_bytes}"
            )
        if memory.pinned_limit_bytes < -1:
            raise InputError(
                f"memory {memory.name!r}: pinned_limit_bytes {memory.pinned_limit_bytes} must be -1 or more"
            )
    for link in machine.links:
        if not 0 < link.bandwidth_bytes_per_s < float("inf"):
            raise InputError(
                f"link {link.name!r}: bandwidth_bytes_per_s {link.bandwidth_bytes_per_s} must be positive and finite"
            )
        if not 0 <= link.latency_s < float("inf"):
            raise InputError(f"link {link.name!r}: latency_s {link.latency_s} must be finite and not negative")
    seen: set[tuple[int, int]] = set()
    for route in machine.routes:
        where = f"route {route.source}->{route.destination}"
        for value, count, label in (
            *((m, len(machine.memories), "memory") for m in (route.source, route.destination)),
            *((link, len(machine.links), "link") for link in route.links),
            *((e, len(machine.engines), "engine") for e in route.engines),
        ):
            if not 0 <= value < count:
                raise InputError(f"{where}: there is no {label} {value}")
        if (
            not route.links
            or len(set(route.links)) != len(route.links)
            or len(set(route.engines)) != len(route.engines)
        ):
            raise InputError(f"{where}: links must be distinct and at least one, engines distinct")
        if (route.source, route.destination) in seen or route.source == route.destination:
            raise InputError(f"{where}: given twice, or from a memory to itself")
        seen.add((route.source, route.destination))
    for device in machine.devices:
        if device.kind not in ("gpu", "cpu"):
            raise InputError(f"device {device.name!r}: kind {device.kind!r} must be 'gpu' or 'cpu'")
        for memory in (device.memory, device.host_memory):
            if not 0 <= memory < len(machine.memories):
                raise InputError(f"device {device.name!r}: there is no memory {memory}")
        if machine.memories[device.host_memory].kind is not MemoryKind.HOST:
            raise InputError(f"device {device.name!r}: host_memory must be a memory of kind 'host'")
        if device.kind == "gpu":
            machine.route(device.memory, device.host_memory)
            machine.route(device.host_memory, device.memory)
    for name in ("compute_during_copy_in", "compute_during_copy_out", "compute_during_collective",
                 "collective_during_compute", "copy_during_compute"):  # fmt: skip
        value = getattr(machine.interference, name)
        if not 1 <= value < float("inf"):
            raise InputError(f"interference.{name}: {value} must be a finite factor of at least 1")
    for name in ("launch_s", "transfer_setup_s", "handover_s"):
        value = getattr(machine.overheads, name)
        if not 0 <= value < float("inf"):
            raise InputError(f"overheads.{name}: {value} must be finite and not negative")
    for codec in machine.codecs:
        if codec.numerator <= 0 or codec.denominator <= 0 or codec.workspace_numerator < 0:
            raise InputError(f"codec {codec.name!r}: numerator and denominator must be positive")
        if codec.encode_bytes_per_s <= 0 or codec.decode_bytes_per_s <= 0:
            raise InputError(f"codec {codec.name!r}: rates must be positive")
