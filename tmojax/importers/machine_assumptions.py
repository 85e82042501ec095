"""What a machine description takes for granted, as sentences that name the option that sets it."""

from __future__ import annotations

from collections.abc import Iterator

from tmojax.importers.machine_toml import MachineFile, SocketLink, Way

# Used where a description gives none: the order of a kernel launch, of the set-up of a DMA copy, of an event wait.
ASSUMED_OVERHEADS_S = {"launch": 5e-6, "transfer_setup": 10e-6, "handover": 10e-6}


def list_assumptions(spec: MachineFile, path: str) -> list[str]:
    """One sentence for everything in `spec` that is not marked as measured; `path` is where the description stands."""
    return [*_of_ways(spec, path), *_of_hosts(spec, path), *_of_the_rest(spec, path)]


def _of_ways(spec: MachineFile, path: str) -> Iterator[str]:
    ways: dict[str, Way | SocketLink] = {f"gpus.{name}": group for name, group in spec.gpus.items()}
    ways |= {f"uplinks.{name}": uplink for name, uplink in spec.uplinks.items()}
    ways |= {f"hosts.{name}.fabric": host.fabric for name, host in spec.hosts.items() if host.fabric}
    ways |= {f"socket_links.{name}": link for name, link in spec.socket_links.items()}
    for where, way in ways.items():
        if not way.measured:
            if isinstance(way, SocketLink):
                out = back = way.rate
            else:
                out, back = way.out_bytes_per_s, way.in_bytes_per_s
            rates = f"{_rate(out)} each way" if out == back else f"{_rate(out)} to the host, {_rate(back)} from it"
            yield f"{where}: {rates}, not measured; set {path}.{where}.rate"
        if not way.duplex_measured:
            duplex = (
                _rate(way.duplex) + " both ways together" if isinstance(way.duplex, float) else way.duplex or "full"
            )
            yield f"{where}: duplex {duplex}, not measured; set {path}.{where}.duplex"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.4g} GB/s"


def _of_hosts(spec: MachineFile, path: str) -> Iterator[str]:
    for name, host in spec.hosts.items():
        where = f"{path}.hosts.{name}"
        if not host.measured:
            yield f"hosts.{name}: {host.capacity / 1e9:.4g} GB, not measured; set {where}.capacity"
        if host.reserve is None:
            yield f"hosts.{name}: nothing kept back for data loading; set {where}.reserve"
        if host.fabric is None:
            yield f"hosts.{name}: no limit of its own (root complex, memory); set {where}.fabric.rate"


def _of_the_rest(spec: MachineFile, path: str) -> Iterator[str]:
    if spec.peer is None:
        yield f"GPUs: no peer access, copies between them go through the host; set {path}.peer.kind"
    elif not spec.peer.measured:
        yield f"GPUs: peer access by {spec.peer.kind}, not measured; set {path}.peer"
    for name, drive in spec.nvme.items():
        if not drive.measured:
            yield f"nvme.{name}: rates not measured; set {path}.nvme.{name}.read and write"
    for name, assumed_s in ASSUMED_OVERHEADS_S.items():
        given_s = getattr(spec.overheads, name)
        if given_s is None or not spec.overheads.measured:
            time_s = assumed_s if given_s is None else given_s
            yield f"{name}: {time_s * 1e6:.4g} us, not measured; set {path}.overheads.{name}"
    if spec.interference is None:
        yield f"copies, compute and collectives do not slow each other down; set {path}.interference"
    elif not spec.interference.measured:
        yield f"interference factors are not measured; set {path}.interference"
