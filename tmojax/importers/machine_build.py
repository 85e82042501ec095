"""A machine description (`machine_toml`) compiled to links, engines and routes of a `Machine`.

Every direction is a link; a duplex limit is one more link that the routes of both directions contain; whatever GPUs
share appears in all their routes.
"""

from __future__ import annotations

import math
import os
from collections import deque
from pathlib import Path
from typing import Any

from tmojax.errors import InputError
from tmojax.importers.jax_roofline import find_gpu
from tmojax.importers.machine_assumptions import ASSUMED_OVERHEADS_S, list_assumptions
from tmojax.importers.machine_toml import GpuGroup, MachineFile, Way, parse_machine, read_toml, resolve_presets
from tmojax.problem import (
    Codec,
    Device,
    Interference,
    Link,
    Machine,
    Memory,
    MemoryKind,
    Overheads,
    Route,
    validate_machine,
)

MAX_GPUS = 128  # routes grow with the square


def load_machine(
    source: str | os.PathLike[str] | dict[str, Any], folder: Path | None = None, path: str = "machine"
) -> Machine:
    """A machine from a preset's name, a file that ends in .toml, or a parsed description (which may name a preset).

    Paths inside a description are relative to `folder`. Raises InputError naming `path` and the field.
    """
    if isinstance(source, dict):
        document = source
    elif os.fspath(source).endswith(".toml"):
        file = Path(source)
        document, folder = read_toml(file), file.parent
    else:
        document = {"preset": os.fspath(source)}
    return build_machine(parse_machine(resolve_presets(document, folder or Path(), path), path), path)


def build_machine(spec: MachineFile, path: str = "machine") -> Machine:
    """Compile a description. Raises InputError (unknown parent or GPU model, circles, unconnected hosts)."""
    return _Builder(spec, path).build()


class _Builder:
    def __init__(self, spec: MachineFile, path: str) -> None:
        self.spec, self.path = spec, path
        self.links: list[Link] = []
        self.link_by_name: dict[str, int] = {}
        self.assumptions: list[str] = list(spec.assumptions)
        self.hosts = list(spec.hosts)
        # (links towards the host, links from it) of each uplink, each host's fabric, each GPU's lanes.
        self.ways: dict[str, tuple[list[int], list[int]]] = {}
        self.duplex_links: set[int] = set()
        self.staged: dict[int, int] = {}

    def build(self) -> Machine:
        spec = self.spec
        if shared := sorted(spec.uplinks.keys() & spec.hosts.keys()):
            raise InputError(f"{self.path}.uplinks.{shared[0]}: a host has the same name; choose another")
        groups = [(f"gpus.{name}", group) for name, group in spec.gpus.items() for _ in range(group.count)]
        if len(groups) > MAX_GPUS:
            raise InputError(f"{self.path}.gpus: {len(groups)} GPUs; at most {MAX_GPUS} are supported")
        gpus = [f"gpu{index}" for index in range(len(groups))]
        if taken := sorted({*spec.uplinks, *spec.hosts, *spec.nvme} & {*gpus}):
            raise InputError(f"{self.path}: {taken[0]!r} is the name of a GPU; choose another name")
        chains = [self._chain(group.under, where) for where, group in groups]
        for name, (_, group) in zip(gpus, groups, strict=True):
            self.ways[name] = self._way(name, group)
        for name, uplink in spec.uplinks.items():
            self._chain(name, f"uplinks.{name}")
            self.ways[name] = self._way(name, uplink)
        for name, host in spec.hosts.items():
            self.ways[name] = self._way(f"{name}.fabric", host.fabric) if host.fabric else ([], [])
        sockets = self._socket_paths()
        memories = [self._gpu_memory(name, where, group) for name, (where, group) in zip(gpus, groups, strict=True)]
        memories += [
            Memory(
                name, MemoryKind.HOST, host.capacity, host.reserve or 0,
                -1 if host.pinned_limit is None else host.pinned_limit, host.pinned_power_of_two,
            )
            for name, host in spec.hosts.items()
        ]  # fmt: skip
        engines = [f"{name}.{way}" for name in gpus for way in ("copy_out", "copy_in")]
        routes: list[Route] = []
        to_host: dict[tuple[int, str], list[int]] = {}
        from_host: dict[tuple[int, str], list[int]] = {}
        for g, (name, chain) in enumerate(zip(gpus, chains, strict=True)):
            for index, host in enumerate(self.hosts):
                hops, back = sockets[chain[-1], host], sockets[host, chain[-1]]
                far_out, far_in = ([], []) if host == chain[-1] else self.ways[host]
                to_host[g, host] = [*self._along(name, chain, 0), *hops, *far_out]
                from_host[g, host] = [*far_in, *back, *self._along(name, chain, 1)]
                memory = len(gpus) + index
                routes.append(Route(g, memory, tuple(to_host[g, host]), (2 * g,)))
                routes.append(Route(memory, g, tuple(from_host[g, host]), (2 * g + 1,)))
        for g in range(len(gpus)):
            for other in range(len(gpus)):
                if g != other:
                    links = self._peer_links(g, other, gpus, chains, to_host, from_host)
                    routes.append(Route(g, other, tuple(links), (2 * g, 2 * other + 1)))
        for name, drive in spec.nvme.items():
            if drive.under not in self.hosts:
                raise InputError(
                    f"{self.path}.nvme.{name}.under: {drive.under!r} is not a host: {', '.join(self.hosts)}"
                )
            memory, host = len(memories), len(gpus) + self.hosts.index(drive.under)
            memories.append(Memory(name, MemoryKind.NVME, drive.capacity))
            write, read = self._link(f"{name}.write", drive.write), self._link(f"{name}.read", drive.read)
            engine = len(engines)
            engines += [f"{name}.write", f"{name}.read"]
            routes += [Route(host, memory, (write,), (engine,)), Route(memory, host, (read,), (engine + 1,))]
            for g in range(len(gpus)):
                out, back = to_host[g, drive.under], from_host[g, drive.under]
                routes.append(Route(g, memory, (*out, write), (2 * g, engine)))
                routes.append(Route(memory, g, (read, *back), (engine + 1, 2 * g + 1)))
        self.assumptions += list_assumptions(spec, self.path)
        machine = Machine(
            spec.name,
            tuple(memories),
            tuple(self.links),
            tuple(engines),
            tuple(routes),
            tuple(
                Device(name, "gpu", g, len(gpus) + self.hosts.index(chain[-1]), group.model)
                for g, (name, (_, group), chain) in enumerate(zip(gpus, groups, chains, strict=True))
            ),
            self._overheads(),
            Interference(**spec.interference.model_dump(exclude={"measured"})) if spec.interference else Interference(),
            self._codecs(),
            tuple(self.assumptions),
        )
        try:
            validate_machine(machine)
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None
        return machine

    def _link(self, name: str, rate_bytes_per_s: float, latency_s: float = 0.0) -> int:
        """Index of the link of this name; it is made with the first route that needs it."""
        if name not in self.link_by_name:
            self.link_by_name[name] = len(self.links)
            self.links.append(Link(name, rate_bytes_per_s, latency_s))
        return self.link_by_name[name]

    def _way(self, name: str, way: Way) -> tuple[list[int], list[int]]:
        out = self._link(f"{name}.to_host", way.out_bytes_per_s, way.latency)
        back = self._link(f"{name}.from_host", way.in_bytes_per_s, way.latency)
        both = self._duplex(name, way.duplex, max(way.out_bytes_per_s, way.in_bytes_per_s))
        return [out, *both], [back, *both]

    def _duplex(self, name: str, duplex: str | float | None, one_way_bytes_per_s: float) -> list[int]:
        if duplex in (None, "full"):
            return []
        both = self._link(f"{name}.both_ways", one_way_bytes_per_s if duplex == "half" else float(duplex))  # type: ignore[arg-type]
        self.duplex_links.add(both)
        return [both]

    def _chain(self, under: str, where: str) -> list[str]:
        """Uplinks from `under` upwards, ending with the host."""
        chain: list[str] = []
        while under not in self.hosts:
            if under not in self.spec.uplinks:
                known = ", ".join((*self.spec.uplinks, *self.hosts))
                raise InputError(f"{self.path}.{where}.under: {under!r} is not an uplink or host; known: {known}")
            if under in chain:
                raise InputError(f"{self.path}.uplinks.{under}.under: goes round in a circle: {' -> '.join(chain)}")
            chain.append(under)
            where, under = f"uplinks.{under}", self.spec.uplinks[under].under
        return [*chain, under]

    def _along(self, gpu: str, chain: list[str], direction: int) -> list[int]:
        """Links of a GPU's way to its host (direction 0) or from it (1)."""
        parts = [self.ways[name][direction] for name in (gpu, *chain)]
        return [link for part in (parts if direction == 0 else reversed(parts)) for link in part]

    def _socket_paths(self) -> dict[tuple[str, str], list[int]]:
        """Links between each ordered pair of hosts, over the fewest socket links."""
        hops: dict[str, list[tuple[str, list[int]]]] = {host: [] for host in self.hosts}
        for name, link in self.spec.socket_links.items():
            a, b = link.between
            for end in link.between:
                if end not in self.hosts:
                    raise InputError(
                        f"{self.path}.socket_links.{name}.between: {end!r} is not a host: {', '.join(self.hosts)}"
                    )
            both = self._duplex(name, link.duplex, link.rate)
            hops[a].append((b, [self._link(f"{name}.{a}->{b}", link.rate, link.latency), *both]))
            hops[b].append((a, [self._link(f"{name}.{b}->{a}", link.rate, link.latency), *both]))
        paths: dict[tuple[str, str], list[int]] = {}
        for start in self.hosts:
            paths[start, start] = []
            queue = deque([start])
            while queue:
                here = queue.popleft()
                for there, links in hops[here]:
                    if (start, there) not in paths:
                        paths[start, there] = [*paths[start, here], *links]
                        queue.append(there)
            if missing := [host for host in self.hosts if (start, host) not in paths]:
                raise InputError(f"{self.path}.socket_links: {start!r} and {missing[0]!r} are not joined; add a link")
        return paths

    def _peer_links(
        self,
        g: int,
        other: int,
        gpus: list[str],
        chains: list[list[str]],
        to_host: dict[tuple[int, str], list[int]],
        from_host: dict[tuple[int, str], list[int]],
    ) -> list[int]:
        peer = self.spec.peer
        for number, nvlink in enumerate(peer.nvlinks if peer else ()):
            if len(set(nvlink.gpus)) != 2 or not all(0 <= end < len(gpus) for end in nvlink.gpus):
                where = f"{self.path}.peer.nvlinks.{number}.gpus"
                raise InputError(f"{where}: {nvlink.gpus} are not two different GPUs of 0..{len(gpus) - 1}")
            if {g, other} == set(nvlink.gpus):
                return [self._link(f"nvlink.{gpus[g]}->{gpus[other]}", nvlink.rate, peer.latency if peer else 0.0)]
        if peer and peer.rate is not None:
            return [
                self._link(f"{gpus[g]}.nvswitch.out", peer.rate, peer.latency),
                self._link(f"{gpus[other]}.nvswitch.in", peer.rate),
            ]
        if peer and peer.kind == "pcie":
            common = set(chains[g]) & set(chains[other])
            if common:
                down = [name for name in chains[g] if name not in common], [n for n in chains[other] if n not in common]
                return [*self._along(gpus[g], down[0], 0), *self._along(gpus[other], down[1], 1)]
        # Staged in the source's host memory: out over all its links, then in over all of the destination's.
        out, back = to_host[g, chains[g][-1]], from_host[other, chains[g][-1]]
        twice = [link for link in out if link in back and link in self.duplex_links]
        return [*dict.fromkeys((*out, *back)), *(self._staged(link) for link in twice)]

    def _staged(self, link: int) -> int:
        """A staged copy crosses a both-ways limit twice, but a route contains a link once: one more link caps it."""
        if link not in self.staged:
            limit = self.links[link]
            self.staged[link] = self._link(f"{limit.name}.staged", limit.bandwidth_bytes_per_s / 2)
            self.assumptions.append(
                f"copies from GPU to GPU cross {limit.name} twice: together they get at most half of it, but count "
                f"once against other copies there"
            )
        return self.staged[link]

    def _gpu_memory(self, name: str, where: str, group: GpuGroup) -> Memory:
        capacity = group.memory
        try:
            table_bytes = find_gpu(group.model).memory_bytes if group.model else None
        except InputError as error:
            raise InputError(f"{self.path}.{where}.model: {str(error).removeprefix('gpu: ')}") from None
        if capacity is None:
            if table_bytes is None:
                raise InputError(f"{self.path}.{where}.memory: is missing; give it, or a model of the GPU table")
            capacity = table_bytes
        return Memory(name, MemoryKind.DEVICE, capacity, group.reserve)

    def _overheads(self) -> Overheads:
        given = self.spec.overheads
        times = {}
        for name, assumed_s in ASSUMED_OVERHEADS_S.items():
            value = getattr(given, name)
            times[f"{name}_s"] = assumed_s if value is None else value
        return Overheads(**times)

    def _codecs(self) -> tuple[Codec, ...]:
        result = []
        for name, codec in self.spec.codecs.items():
            denominator = math.lcm(codec.ratio.denominator, codec.workspace.denominator)
            result.append(
                Codec(
                    name,
                    int(codec.ratio * denominator),
                    denominator,
                    codec.encode,
                    codec.decode,
                    int(codec.workspace * denominator),
                )
            )
        return tuple(result)
