"""Small machines: GPUs that share one path to the host, each with or without a lane of its own."""

from tmojax.problem import Device, Link, Machine, Memory, MemoryKind, Overheads, Route


def shared_path(
    gpus: int, capacity_bytes: int, bandwidth_bytes_per_s: float, *, duplex: bool = True, lane_bytes_per_s: float = 0.0,
    launch_s: float = 0.0, peers: bool = False,
) -> Machine:  # fmt: skip
    """Memory 0 is the host, memory g + 1 that of GPU g. Links `out` and `in`, or `both` when half duplex."""
    memories = [Memory("host", MemoryKind.HOST, 2**50)]
    memories += [Memory(f"gpu{g}", MemoryKind.DEVICE, capacity_bytes) for g in range(gpus)]
    links = [Link(n, bandwidth_bytes_per_s) for n in (("out", "in") if duplex else ("both",))]
    engines: list[str] = []
    routes: list[Route] = []
    for g in range(gpus):
        for direction, name in enumerate(("out", "in")):
            way = [direction if duplex else 0]
            if lane_bytes_per_s:
                links.append(Link(f"lane{g}.{name}", lane_bytes_per_s))
                way.append(len(links) - 1)
            engines.append(f"gpu{g}.{name}")
            ends = (g + 1, 0) if direction == 0 else (0, g + 1)
            routes.append(Route(*ends, tuple(way), (len(engines) - 1,)))
    if peers:
        out, into = routes[0::2], routes[1::2]
        for a in range(gpus):
            for b in range(gpus):
                if a != b:
                    way = tuple(dict.fromkeys(out[a].links + into[b].links))
                    routes.append(Route(a + 1, b + 1, way, out[a].engines + into[b].engines))
    devices = tuple(Device(f"gpu{g}", "gpu", g + 1, 0) for g in range(gpus))
    return Machine("shared path", tuple(memories), tuple(links), tuple(engines), tuple(routes), devices,
                   Overheads(launch_s=launch_s))  # fmt: skip
