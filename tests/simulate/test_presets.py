"""Machines as they are described (several levels of links, both directions limited, latencies, peers, sockets) against
the exact simulator in fractions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from building import op, problem_of, random_policies, schedule_of, tensor
from test_reference import assert_same_times

from tmojax.importers.machine_build import load_machine
from tmojax.importers.machine_toml import preset_names
from tmojax.problem import Collective, CollectiveKind, ListBuilder, Problem, Schedule


def random_traffic(preset: str, seed: int) -> tuple[Problem, Schedule]:
    """Outputs of ops leave for a host or a peer at once; some come back, some GPUs wait for others; an all-reduce."""
    rng = np.random.default_rng(seed)
    machine = load_machine(preset)
    devices = len(machine.devices)
    memories = tuple(replace(memory, capacity_bytes=2**50, reserve_bytes=0) for memory in machine.memories)
    machine = replace(machine, memories=memories)
    count = 3
    tensors = [tensor(f"a{i}", int(rng.integers(1, 2000)) * 1_000_000) for i in range(count)] + [tensor("g", 4_000_000)]
    ops = [op(f"f{i}", float(rng.integers(0, 40)) / 256, writes=[i]) for i in range(count)]
    ops.append(op("back", 1 / 64, writes=[count]))
    collectives = ()
    ring = [(a.memory, machine.devices[(d + 1) % devices].memory) for d, a in enumerate(machine.devices)]
    if devices > 1 and all(machine.has_route(*hop) for hop in ring):
        collectives = (Collective("sum", CollectiveKind.ALL_REDUCE, 500_000_000, tuple(range(devices))),)
        ops.append(op("sum", 0.0, updates=[count], step_op=True, collective="sum"))
    problem = problem_of(machine, [(tensors, ops)], collectives=collectives, device_program=[0] * devices)
    builders = []
    for device, spec in enumerate(machine.devices):
        builder = ListBuilder()
        for i in range(count):
            builder.compute(i, 0)
            there = [r.destination for r in machine.routes if r.source == spec.memory and r.destination != spec.memory]
            away = int(rng.choice(there)) if rng.random() < 0.5 else spec.host_memory
            last = builder.offload(i, 0, spec.memory, away)
            builder.release(i, 0, spec.memory)
            if rng.random() < 0.2:
                builder.signal(100 * device + i, last)
            earlier = [row for other in builders for row in other.build() if row["kind"] == 8]
            if earlier and rng.random() < 0.4:
                builder.wait(int(rng.choice([row["event"] for row in earlier])), int(rng.integers(0, 2)))
            if rng.random() < 0.6:
                builder.prefetch(i, 0, away, spec.memory)
        builder.compute(count, 0)
        if collectives:
            builder.collective(count + 1, 0)
        builders.append(builder)
    return problem, schedule_of(*builders)


def same_times(preset: str, seed: int) -> None:
    problem, schedule = random_traffic(preset, seed)
    rng = np.random.default_rng(seed + 1)
    policies = random_policies(problem, rng) if rng.random() < 0.5 else ()
    assert not assert_same_times(problem, schedule, policies, int(rng.integers(1, 3))).deadlocked


@pytest.mark.parametrize("preset", preset_names())
def test_same_times_as_the_reference_on_presets(preset):
    same_times(preset, 0)


@pytest.mark.long
@pytest.mark.parametrize("preset", preset_names())
def test_same_times_as_the_reference_on_presets_many(preset):
    for seed in range(1, 6):
        same_times(preset, seed)
