from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tmojax.errors import InputError
from tmojax.importers import machine_toml
from tmojax.importers.machine_build import load_machine
from tmojax.importers.machine_toml import preset_names, read_toml
from tmojax.problem import CollectiveKind, Machine, MemoryKind, validate_machine

GIB = 2**30
SMALL = {
    "name": "small",
    "gpus": {"a": {"count": 2, "memory": "1 GB", "under": "switch", "rate": "10 GB/s"}},
    "uplinks": {"switch": {"under": "host", "rate": "12 GB/s"}},
    "hosts": {"host": {"capacity": "8 GB"}},
}

DRIVE = {"under": "switch", "capacity": "1 GB", "read": "1 GB/s", "write": "1 GB/s"}


def with_change(path: str, value: object) -> dict:
    """SMALL with the value at a dotted path replaced."""
    *parents, last = path.split(".")
    change: dict = {last: value}
    for part in reversed(parents):
        change = {part: change}
    return machine_toml.merge(SMALL, change)


def host_routes(machine: Machine, direction: str) -> list[tuple[int, ...]]:
    """Links of every GPU's way to ("D2H") or from ("H2D") its own host memory."""
    pairs = [(device.memory, device.host_memory) for device in machine.devices]
    return [machine.route(*(pair if direction == "D2H" else pair[::-1])).links for pair in pairs]


def fair_rates(machine: Machine, routes: list[tuple[int, ...]]) -> list[float]:
    """Max-min fair rates in bytes/s of transfers that all run at once: raise all, freeze those on a full link."""
    rates = [0.0] * len(routes)
    active = set(range(len(routes)))
    left = {link: machine.links[link].bandwidth_bytes_per_s for route in routes for link in route}
    while active:
        users = {link: sum(link in routes[i] for i in active) for link in left}
        step = min(left[link] / count for link, count in users.items() if count)
        for i in active:
            rates[i] += step
        left = {link: capacity - step * users[link] for link, capacity in left.items()}
        full = {link for link, capacity in left.items() if users[link] and capacity <= 1e-6 * step}
        active = {i for i in active if not full & set(routes[i])}
    return rates


def link_names(machine: Machine, source: str, destination: str) -> list[str]:
    names = [memory.name for memory in machine.memories]
    return [machine.links[link].name for link in machine.route(names.index(source), names.index(destination)).links]


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_valid_and_complete(name):
    machine = load_machine(name)
    validate_machine(machine)
    assert machine.name == name
    assert all("; set machine." in sentence or "cross" in sentence for sentence in machine.assumptions)
    count = len(machine.memories)
    assert all(
        machine.has_route(a, b) for a in range(count) for b in range(count) if a != b and a < len(machine.devices)
    )
    for g, device in enumerate(machine.devices):
        out, back = machine.route(device.memory, device.host_memory), machine.route(device.host_memory, device.memory)
        assert [machine.engines[e] for e in out.engines] == [f"gpu{g}.copy_out"]
        assert [machine.engines[e] for e in back.engines] == [f"gpu{g}.copy_in"]
        for other in machine.devices:
            if other is not device:
                engines = machine.route(device.memory, other.memory).engines
                assert [machine.engines[e] for e in engines] == [f"{device.name}.copy_out", f"{other.name}.copy_in"]


@pytest.mark.parametrize(
    ("name", "alone", "together"),
    [
        ("rtxpro6000x8-two-roots", 55.0, 114.10),
        ("rtxpro6000x8-one-root", 55.0, 73.09),
        ("rtx4090x4-one-uplink", 25.0, 25.0),
        ("prototype-4gpu-12.5", 12.5, 12.5),
        ("dual-socket-v100x4", 12.15, 24.3),
        ("dgx1-v100x8", 12.0, 48.0),
        ("uneven-risers-x6", 11.8, 21.5),
    ],
)
def test_rates_from_the_host(name, alone, together):
    machine = load_machine(name)
    routes = host_routes(machine, "H2D")
    assert fair_rates(machine, routes[:1]) == pytest.approx([alone * 1e9])
    assert sum(fair_rates(machine, routes)) == pytest.approx(together * 1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "inwards", "outwards", "both"),
    [
        ("a100x8-pairs", (5.63, 5.71), (5.33, 5.52), (2.81, 2.84)),
        ("v100x8-shared-sockets", (2.87, 2.87), (3.0, 3.0), (1.45, 1.5)),
    ],
)
def test_eight_gpus_reach_what_was_measured(name, inwards, outwards, both):
    machine = load_machine(name)
    into, out = host_routes(machine, "H2D"), host_routes(machine, "D2H")
    for routes, (low, high) in ((into, inwards), (out, outwards), (into + out, both)):
        for rate in fair_rates(machine, routes):
            assert low * GIB * 0.999 <= rate <= high * GIB * 1.001


def test_half_duplex_shares_both_directions_and_full_does_not():
    for name, total in (("rtx4090x4-one-uplink", 50e9), ("rtx4090x4-one-uplink-half-duplex", 25e9)):
        machine = load_machine(name)
        assert sum(fair_rates(machine, host_routes(machine, "H2D") + host_routes(machine, "D2H"))) == pytest.approx(
            total
        )


def test_a100_loses_in_both_directions_together():
    machine = load_machine("a100x8-pairs")
    lane = next(link for link in machine.links if link.name == "gpu0.both_ways")
    assert lane.bandwidth_bytes_per_s == 36.5e9


def test_gh200_is_asymmetric():
    machine = load_machine("gh200")
    (into,), (out,) = (fair_rates(machine, host_routes(machine, way)) for way in ("H2D", "D2H"))
    assert 369e9 <= into <= 421e9
    assert 170e9 <= out <= 295e9
    assert machine.memories[0].capacity_bytes == 95 * GIB


def test_uneven_box_covers_the_measured_range():
    machine = load_machine("uneven-risers-x6")
    alone = [fair_rates(machine, [route])[0] for route in host_routes(machine, "H2D")]
    assert (min(alone), max(alone)) == (0.35e9, 11.8e9)


def test_other_socket_is_reached_over_the_socket_link():
    machine = load_machine("dual-socket-v100x4")
    assert link_names(machine, "gpu0", "socket1") == ["gpu0.to_host", "switch0.to_host", "qpi.socket0->socket1"]
    assert link_names(machine, "socket1", "gpu0") == ["qpi.socket1->socket0", "switch0.from_host", "gpu0.from_host"]
    assert link_names(machine, "gpu2", "socket1") == ["gpu2.to_host", "switch1.to_host"]
    far = machine.route(0, 5).links
    assert fair_rates(machine, [far]) == [3.78e9]


def test_without_peer_access_copies_go_out_and_in():
    machine = load_machine("rtx4090x4-one-uplink")
    assert link_names(machine, "gpu0", "gpu1") == [
        "gpu0.to_host",
        "switch.to_host",
        "switch.from_host",
        "gpu1.from_host",
    ]
    machine = load_machine("dual-socket-1080ti-x4")
    assert "qpi.socket0->socket1" in link_names(machine, "gpu0", "gpu3")
    # Gradient synchronisation of 369 M bf16 parameters on a shared path of 12.5 GB/s: 0.35 s.
    machine = load_machine("prototype-4gpu-12.5")
    loads = machine.collective_loads(CollectiveKind.ALL_REDUCE, (0, 1, 2, 3))
    path = next(i for i, link in enumerate(machine.links) if link.name == "path.to_host")
    assert loads[path] * 2 * 369e6 / 12.5e9 == pytest.approx(0.354, abs=0.001)


def test_staged_copies_count_twice_on_a_half_duplex_path():
    machine = load_machine("prototype-4gpu-12.5-half-duplex")
    assert fair_rates(machine, [machine.route(0, 1).links]) == [6.25e9]
    pairs = [machine.route(a, b).links for a in range(4) for b in range(4) if a != b]
    assert sum(fair_rates(machine, pairs)) == pytest.approx(6.25e9)
    assert sum("cross path.both_ways twice" in sentence for sentence in machine.assumptions) == 1


def test_nvlink_ring_and_nvswitch():
    machine = load_machine("dgx1-v100x8")
    for a in range(8):
        (name,) = link_names(machine, f"gpu{a}", f"gpu{(a + 1) % 8}")
        assert name == f"nvlink.gpu{a}->gpu{(a + 1) % 8}"
    assert link_names(machine, "gpu0", "gpu4")[0] == "gpu0.to_host"
    lanes = [
        sum(link.bandwidth_bytes_per_s for link in machine.links if link.name.startswith(f"nvlink.gpu{a}-"))
        for a in range(8)
    ]
    assert lanes == [150e9] * 8  # six links of 25 GB/s
    machine = load_machine("a100x8-pairs")
    assert link_names(machine, "gpu0", "gpu7") == ["gpu0.nvswitch.out", "gpu7.nvswitch.in"]


def test_peer_access_over_pcie_turns_round_at_the_lowest_shared_switch():
    machine = load_machine("rtxpro6000x8-one-root")
    assert link_names(machine, "gpu0", "gpu3") == ["gpu0.to_host", "gpu3.from_host"]
    assert link_names(machine, "gpu0", "gpu4") == [
        "gpu0.to_host",
        "switch0.to_host",
        "switch1.from_host",
        "gpu4.from_host",
    ]


def test_three_shared_levels_and_a_host_fabric():
    document = machine_toml.merge(
        SMALL,
        {
            "uplinks": {"switch": {"under": "root"}, "root": {"under": "host", "rate": "11 GB/s", "duplex": "15 GB/s"}},
            "hosts": {"host": {"fabric": {"rate": "9 GB/s", "latency": "1 us"}}},
        },
    )
    machine = load_machine(document)
    assert link_names(machine, "gpu1", "host") == [
        "gpu1.to_host", "switch.to_host", "root.to_host", "root.both_ways", "host.fabric.to_host",
    ]  # fmt: skip
    assert next(link for link in machine.links if link.name == "host.fabric.to_host").latency_s == 1e-6


def test_nvme_codecs_overheads_and_limits():
    document = machine_toml.merge(
        SMALL,
        {
            "gpus": {"a": {"reserve": "100 MB"}},
            "hosts": {"host": {"reserve": "1 GB", "pinned_limit": "4 GB", "pinned_power_of_two": True}},
            "nvme": {"drive": {"under": "host", "capacity": "1 TB", "read": "7 GB/s", "write": "5 GB/s"}},
            "overheads": {"launch": "3 us"},
            "interference": {"compute_during_copy_in": 1.1},
            "codecs": {"fp8": {"ratio": "1/2", "encode": "400 GB/s", "decode": "500 GB/s", "workspace": "1/3"}},
        },
    )
    machine = load_machine(document)
    assert [memory.kind for memory in machine.memories] == [MemoryKind.DEVICE] * 2 + [MemoryKind.HOST, MemoryKind.NVME]
    assert machine.memories[0].reserve_bytes == 100 * 10**6
    host = machine.memories[2]
    assert (host.reserve_bytes, host.pinned_limit_bytes, host.pinned_power_of_two) == (10**9, 4 * 10**9, True)
    assert link_names(machine, "gpu0", "drive") == ["gpu0.to_host", "switch.to_host", "drive.write"]
    assert link_names(machine, "drive", "host") == ["drive.read"]
    assert (machine.overheads.launch_s, machine.overheads.transfer_setup_s) == (3e-6, 10e-6)
    assert machine.interference.compute_during_copy_in == 1.1
    (codec,) = machine.codecs
    assert (codec.encoded_bytes(100), codec.workspace_bytes(300)) == (50, 100)


def test_measured_values_are_not_listed_as_assumptions():
    assumed = load_machine(SMALL).assumptions
    assert "uplinks.switch: 12 GB/s each way, not measured; set machine.uplinks.switch.rate" in assumed
    measured = load_machine(with_change("uplinks.switch.measured", "by me")).assumptions
    assert set(assumed) - set(measured) == {
        "uplinks.switch: 12 GB/s each way, not measured; set machine.uplinks.switch.rate"
    }


def test_preset_with_changes():
    machine = load_machine({"preset": "rtx4090x4-one-uplink", "gpus": {"rtx4090": {"count": 2, "memory": "20 GiB"}}})
    assert machine.name == "rtx4090x4-one-uplink, changed"
    assert [device.name for device in machine.devices] == ["gpu0", "gpu1"]
    assert machine.memories[0].capacity_bytes == 20 * GIB


def test_presets_may_be_files(tmp_path):
    (tmp_path / "base.toml").write_text('preset = "gh200"\nname = "mine"')
    (tmp_path / "top.toml").write_text('preset = "base.toml"\n[gpus.gh200]\ncount = 3')
    assert len(load_machine(tmp_path / "top.toml").devices) == 3
    (tmp_path / "circle.toml").write_text('preset = "circle.toml"')
    with pytest.raises(InputError, match="leads back to itself"):
        load_machine(tmp_path / "circle.toml")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("gpu", 1, r"machine.gpu: unknown key; did you mean 'gpus'\? known: assumptions, codecs"),
        ("gpus.a.cuont", 4, r"machine.gpus.a.cuont: unknown key; did you mean 'count'\?"),
        ("gpus.a.count", 0, "machine.gpus.a.count: input should be greater than or equal to 1, got 0"),
        ("gpus.a.count", True, "machine.gpus.a.count: input should be a valid integer, got True"),
        ("gpus.a.memory", 24, "machine.gpus.a.memory: 24 is not a quantity with a unit; write for example '24 GiB'"),
        ("gpus.a.memory", "24 GB/s", "machine.gpus.a.memory: unknown unit 'GB/s'"),
        ("gpus.a.memory", "0 GB", "'gpu0': capacity_bytes 0 must be positive"),
        ("gpus.a.reserve", "2 GB", "reserve_bytes 2000000000 must be between 0 and the capacity"),
        ("gpus.a.model", "RTX-9999", "machine.gpus.a.model: 'RTX-9999' is unknown; choose one of"),
        ("gpus.a.under", "nowhere", "machine.gpus.a.under: 'nowhere' is not an uplink or host; known: switch, host"),
        ("gpus.a.count", 129, "less than or equal to 128"),
        ("gpus.a.to_host", "1 GB/s", "machine.gpus.a: give either rate, or to_host and from_host"),
        ("uplinks.switch.rate", "25 GB", "machine.uplinks.switch.rate: unknown unit 'GB'"),
        ("uplinks.switch.rate", "0 GB/s", "machine.uplinks.switch: rates must be positive"),
        ("uplinks.switch.rate", "-5 GB/s", "is not a quantity"),
        ("uplinks.switch.duplex", "both", "machine.uplinks.switch.duplex: use 'full', 'half' or the total"),
        ("uplinks.switch.duplex", "11 GB/s", "machine.uplinks.switch: duplex: both directions together must reach"),
        ("uplinks.switch.under", "switch", "machine.uplinks.switch.under: goes round in a circle"),
        ("uplinks.host", {"under": "switch", "rate": "1 GB/s"}, "machine.uplinks.host: a host has the same name"),
        ("uplinks.gpu1", {"under": "host", "rate": "1 GB/s"}, "'gpu1' is the name of a GPU"),
        ("hosts.other", {"capacity": "1 GB"}, "machine.socket_links: 'host' and 'other' are not joined"),
        ("socket_links.x", {"between": ["host", "b"], "rate": "1 GB/s"}, "socket_links.x.between: 'b' is not"),
        ("hosts.host.capacity", "8 parsecs", "machine.hosts.host.capacity: unknown unit 'parsecs'"),
        ("peer", {"kind": "nvswitch"}, "machine.peer: give rate with kind 'nvswitch'"),
        ("peer", {"kind": "telepathy"}, "machine.peer.kind: input should be .*got 'telepathy'"),
        ("peer", {"kind": "host", "nvlinks": [{"gpus": [0, 2], "rate": "1 GB/s"}]}, r"nvlinks.0.gpus: \[0, 2\]"),
        ("nvme.d", DRIVE, "machine.nvme.d.under: 'switch' is not a host"),
        ("interference", {"copy_during_compute": 0.5}, "interference.copy_during_compute: input should be greater"),
        ("interference", {"copy_during_compute": float("nan")}, "machine.interference.copy_during_compute"),
        ("codecs.c", {"ratio": "1/0", "encode": "1 GB/s", "decode": "1 GB/s"}, "codecs.c.ratio: '1/0' is not a ratio"),
        ("codecs.c", {"ratio": "0", "encode": "1 GB/s", "decode": "1 GB/s"}, "codec 'c': numerator and denominator"),
        ("overheads.launch", 5, "machine.overheads.launch: 5 is not a quantity with a unit; write for example '5 us'"),
        ("preset", "rtx5090", "machine.preset: there is no preset 'rtx5090'; presets: a100x8-pairs"),
        ("preset", 5, "machine.preset: 5 is not a name"),
    ],
)  # fmt: skip
def test_mistakes_are_named(path, value, message):
    with pytest.raises(InputError, match=message):
        load_machine(with_change(path, value))


def test_all_mistakes_are_reported_at_once():
    document = machine_toml.merge(SMALL, {"gpus": {"a": {"count": "two"}}, "hosts": {"host": {"capacity": 1}}, "x": 1})
    with pytest.raises(InputError) as caught:
        load_machine(document)
    assert len(str(caught.value).splitlines()) == 3


def test_a_group_without_memory_or_model_is_refused():
    document = {**SMALL, "gpus": {"a": {"count": 1, "under": "host", "rate": "1 GB/s"}}}
    with pytest.raises(InputError, match=r"machine.gpus.a.memory: is missing; give it, or a model of the GPU table"):
        load_machine(document)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"a = ", "not TOML"), (b"\xff", "not TOML"), (b"a = " + b"[" * 20_000, "nested too deeply|not TOML"),
     (b"#" * 1_000_001, "larger than 1000000 bytes")],
)  # fmt: skip
def test_unreadable_toml(tmp_path, data, message):
    path = tmp_path / "m.toml"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message):
        load_machine(path)
    with pytest.raises(InputError, match="no such file"):
        load_machine(tmp_path / "missing.toml")
    with pytest.raises(InputError, match="cannot be read"):
        read_toml(tmp_path)


rates = st.integers(1, 400).map(lambda number: f"{number / 10} GB/s")
duplex = st.sampled_from(["full", "half", "40 GB/s", "61.5 GB/s"])
ways = st.fixed_dictionaries({"rate": rates}, optional={"duplex": duplex})


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_random_trees_share_what_they_should(data):
    """Whatever the tree, a GPU's routes contain its own lanes and every uplink above it, and nothing else."""
    hosts = {f"h{i}": {"capacity": "1 GB"} for i in range(data.draw(st.integers(1, 3)))}
    sockets = {f"s{i}": {"between": ["h0", f"h{i}"], **data.draw(ways)} for i in range(1, len(hosts))}
    uplinks: dict = {}
    for i in range(data.draw(st.integers(0, 4))):
        uplinks[f"u{i}"] = {"under": data.draw(st.sampled_from([*hosts, *uplinks])), **data.draw(ways)}
    groups = {
        f"g{i}": {
            "count": data.draw(st.integers(1, 2)),
            "memory": "1 GB",
            "under": data.draw(st.sampled_from([*hosts, *uplinks])),
            **data.draw(ways),
        }
        for i in range(data.draw(st.integers(1, 3)))
    }
    peer = data.draw(st.sampled_from(["host", "pcie"]))
    machine = load_machine(
        {
            "name": "tree",
            "gpus": groups,
            "uplinks": uplinks,
            "hosts": hosts,
            "socket_links": sockets,
            "peer": {"kind": peer},
        }
    )
    flat = [group for group in groups.values() for _ in range(group["count"])]
    for device, group in zip(machine.devices, flat, strict=True):
        expected, under = [f"{device.name}.to_host"], group["under"]
        while under in uplinks:
            expected.append(f"{under}.to_host")
            under = uplinks[under]["under"]
        home = machine.memories[device.host_memory].name
        assert home == under
        names = link_names(machine, device.name, home)
        assert [name for name in names if not name.endswith("both_ways")] == expected
        back = link_names(machine, home, device.name)
        assert [name for name in back if not name.endswith("both_ways")] == [
            name.replace("to_host", "from_host") for name in reversed(expected)
        ]
    assert fair_rates(machine, [route.links for route in machine.routes])


def test_document_lists_every_preset():
    text = (Path(__file__).parents[2] / "docs" / "machines.md").read_text()
    assert all(f"`{name}`" in text for name in preset_names())
