"""Host memory: NUMA nodes, reserve, pinned limit, rounding, one copy per process. Each on both sides of its limit.

The machines are read from TOML descriptions, as users write them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_text import Plan
from small_plans import LAYER

from tmojax.check import CheckReport, Rule, check
from tmojax.importers.machine_build import load_machine
from tmojax.importers.machine_toml import preset_names
from tmojax.problem import Action, MemoryKind, Problem, Workload, validate_problem
from tmojax.problem.io import problem_from_json, problem_to_json

# x 100 bytes is an input, w 1000 bytes rests on the host, a 400 bytes is parked there.
SWAP = """
prefetch w {host} {gpu}
prefetch x {host} {gpu}
compute f1
offload a {gpu} {host}
release x {gpu}
compute f2
release a {gpu}
prefetch a {host} {gpu}
compute back
release a {gpu}
release a {host}
release b {gpu}
compute step
offload w {gpu} {host}
release w {gpu}
release g {gpu}
"""
NEEDED = 100 + 1000 + 400  # of one process
ROUNDED = 128 + 1024 + 512


def description(hosts: dict[str, dict], gpus: dict[str, int]) -> dict:
    """`gpus`: how many hang off which host."""
    return {
        "name": "box",
        "gpus": {
            f"of_{host}": {"count": count, "memory": "10 kB", "under": host, "rate": "1 GB/s", "measured": "test"}
            for host, count in gpus.items()
        },
        "hosts": {name: {"measured": "test", "reserve": "0 B"} | host for name, host in hosts.items()},
        "socket_links": {
            "link": {"between": list(hosts), "rate": "1 GB/s", "measured": "test"},
        } if len(hosts) > 1 else {},
    }  # fmt: skip


def checked(hosts: dict[str, dict], gpus: dict[str, int]) -> CheckReport:
    """Every GPU runs the swap with the host that it hangs off."""
    machine = load_machine(description(hosts, gpus))
    workload = Workload("layer", (LAYER,), (0,) * len(machine.devices), 1, "synthetic")
    problem = Problem("host", workload, machine, frozenset(Action))
    validate_problem(problem)
    assert problem_from_json(problem_to_json(problem)) == problem
    lists, initial = [], []
    for device in machine.devices:
        host, gpu = machine.memories[device.host_memory].name, machine.memories[device.memory].name
        lists.append(tuple(line.format(host=host, gpu=gpu) for line in SWAP.strip().splitlines()))
        initial.append({"w": (host,)})
    return check(problem, Plan(problem, tuple(lists), tuple(initial)).schedule())


def assert_limit(hosts: dict[str, dict], gpus: dict[str, int], rule: Rule, memory: str, bytes_over: int) -> None:
    report = checked(hosts, gpus)
    found = [(violation.rule, violation.memory, violation.bytes_over) for violation in report.violations]
    assert found == ([(rule, memory, bytes_over)] if bytes_over else []), report.text()


@pytest.mark.parametrize("short", [0, 1])
def test_capacity_less_reserve_for_data_loading(short):
    host = {"capacity": f"{NEEDED + 50} B", "reserve": f"{50 + short} B"}
    assert_limit({"host": host}, {"host": 1}, Rule.HOST_CAPACITY, "host", short)


@pytest.mark.parametrize("short", [0, 1])
def test_pinned_limit(short):
    host = {"capacity": "1 MB", "pinned_limit": f"{NEEDED - short} B"}
    assert_limit({"host": host}, {"host": 1}, Rule.PINNED_CAPACITY, "host", short)


@pytest.mark.parametrize("short", [0, 1])
def test_blocks_rounded_up_to_powers_of_two(short):
    host = {"capacity": f"{ROUNDED - short} B", "pinned_power_of_two": True}
    assert_limit({"host": host}, {"host": 1}, Rule.HOST_CAPACITY, "host", short)
    host = {"capacity": "1 MB", "pinned_limit": f"{ROUNDED - short} B", "pinned_power_of_two": True}
    assert_limit({"host": host}, {"host": 1}, Rule.PINNED_CAPACITY, "host", short)


@pytest.mark.parametrize("gpus", [2, 3, 8])
@pytest.mark.parametrize("short", [0, 1])
def test_every_process_has_its_own_copies(gpus, short):
    host = {"capacity": f"{gpus * NEEDED - short} B"}
    assert_limit({"host": host}, {"host": gpus}, Rule.HOST_CAPACITY, "host", short)


@pytest.mark.parametrize("short", [0, 1])
def test_every_numa_node_has_its_own_limit(short):
    """Three GPUs on one node, one on the other: neither node may use what the other has left."""
    nodes = {"near": {"capacity": f"{3 * NEEDED - short} B"}, "far": {"capacity": "1 MB"}}
    assert_limit(nodes, {"near": 3, "far": 1}, Rule.HOST_CAPACITY, "near", short)
    nodes = {"near": {"capacity": "1 MB"}, "far": {"capacity": "1 MB", "pinned_limit": f"{NEEDED - short} B"}}
    assert_limit(nodes, {"near": 3, "far": 1}, Rule.PINNED_CAPACITY, "far", short)


def test_every_preset_says_what_its_hosts_have():
    """One memory per socket; a part is kept for data loading, or the machine says that none is."""
    nodes = {}
    for name in preset_names():
        machine = load_machine(name)
        hosts = [memory for memory in machine.memories if memory.kind is MemoryKind.HOST]
        nodes[name] = len(hosts)
        for host in hosts:
            silent = host.reserve_bytes == 0 and not any("data loading" in text for text in machine.assumptions)
            assert not silent or name.startswith("prototype"), name
            assert host.capacity_bytes > 10**9
    assert nodes["dual-socket-v100x4"] == nodes["a100x8-pairs"] == 2 and nodes["rtx4090x4-one-uplink"] == 1


@pytest.mark.parametrize("name", ["dual-socket-v100x4", "rtx4090x4-one-uplink"])
@pytest.mark.parametrize("short", [0, 1])
def test_limits_of_presets(name, short):
    """The first host of a preset, filled to the last byte (and one more) by tensors of a size to suit."""
    machine = load_machine(name)
    host = machine.devices[0].host_memory
    users = [index for index, device in enumerate(machine.devices) if device.host_memory == host]
    spec = machine.memories[host]
    available = spec.capacity_bytes - spec.reserve_bytes
    share = available // len(users)
    memories = tuple(
        replace(m, capacity_bytes=4 * available) if m.kind is MemoryKind.DEVICE else m for m in machine.memories
    )
    first = replace(LAYER, tensors=tuple(replace(t, size_bytes=share if t.name == "x" else 0) for t in LAYER.tensors))
    rest = available - share * (len(users) - 1)
    last = replace(first, name="last", tensors=tuple(
        replace(t, size_bytes=rest + short if t.name == "x" else 0) for t in first.tensors))  # fmt: skip
    others = replace(first, name="others", tensors=tuple(replace(t, size_bytes=0) for t in first.tensors))
    program = [0 if index in users[:-1] else 1 if index in users else 2 for index in range(len(machine.devices))]
    workload = Workload("inputs", (first, last, others), tuple(program), 1, "synthetic")
    problem = Problem("preset", workload, replace(machine, memories=memories), frozenset(Action))
    lists, initial = [], []
    for device in machine.devices:
        names = [machine.memories[memory].name for memory in (device.host_memory, device.memory)]
        lists.append(tuple(line.format(host=names[0], gpu=names[1]) for line in SWAP.strip().splitlines()))
        initial.append({"w": (names[0],)})
    report = check(problem, Plan(problem, tuple(lists), tuple(initial)).schedule())
    assert [v.bytes_over for v in report.violations] == [short] * short, report.text()
    assert np.iinfo(np.int64).max > report.peak_bytes[spec.name] == available + short
