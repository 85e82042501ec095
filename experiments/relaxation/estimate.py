"""Estimators of the step time of plans: the relaxed model, a crude figure that it has to beat, and a replay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import periodic
from fixed_lists import Plan

from tmojax.planners.workbench import Workbench
from tmojax.relax.coordinate import host_links
from tmojax.relax.decode import DoesNotFit


def crude(bench: Workbench, plans: Sequence[Plan]) -> dict[str, Any]:
    """The largest of every GPU's compute and all bytes over each link, as if everything overlapped."""
    machine, begin = bench.problem.machine, time.perf_counter()
    step_s = []
    for decisions, _ in plans:
        lists = bench.lists(decisions)
        assert not isinstance(lists, DoesNotFit)
        load = np.zeros(len(machine.links))
        compute_s = 0.0
        for device, found in enumerate(lists):
            spec = machine.devices[device]
            ways = ((spec.memory, spec.host_memory), (spec.host_memory, spec.memory))
            for way, moved in zip(ways, found.moved_bytes, strict=True):
                load[list(machine.route(*way).links)] += moved
            program = bench.problem.workload.program(device)
            again = found.rows["op"][found.rows["op"] >= 0]
            compute_s = max(compute_s, float(np.array([op.duration_s for op in program.ops])[again].sum()))
        rates = np.array([link.bandwidth_bytes_per_s for link in machine.links])
        used = sorted(set().union(*(host_links(machine, device) for device in range(bench.device_count))))
        step_s.append(max(compute_s, float((load / rates)[used].max())))
    return {"step_s": step_s, "run_s": time.perf_counter() - begin}


def replay(bench: Workbench, plans: Sequence[Plan]) -> dict[str, Any]:
    """`replay_schedules` of tmojax.relax: the decoded lists replayed event by event in JAX. It relaxes nothing."""
    from tmojax.relax.replayed import replay_schedules

    schedules = []
    for decisions, coordination in plans:
        prepared = bench.prepare(decisions, coordination)
        assert not isinstance(prepared, DoesNotFit)
        schedules.append(prepared[0])
    found = replay_schedules(bench.problem, schedules)
    return {"step_s": found.step_s, "compile_s": found.compile_s, "run_s": found.run_s}


ESTIMATORS: dict[str, Callable[[Workbench, Sequence[Plan]], dict[str, Any]]] = {
    "crude": crude,
    "relaxed": periodic.estimate,
    "replay": replay,
}
