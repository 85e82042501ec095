"""Data inputs of a step: they come from the host one after the other where GPUs share a link (docs/bounds.md,
section 1, point 4)."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from tmojax.bounds.critical_path import CriticalPath
from tmojax.bounds.device_classes import copy_routes
from tmojax.problem import Action, Problem


def crossed_by_inputs(problem: Problem, device: int) -> frozenset[int]:
    """Links that every byte of an input of the device crosses on its way in; none where other actions than keeping,
    offloading and recomputing could bring it in another form or from a peer."""
    if problem.actions - {Action.OFFLOAD, Action.RECOMPUTE}:
        return frozenset()
    _, routes = copy_routes(problem, device)
    return frozenset.intersection(*(frozenset(route.links) for route in routes)) if routes else frozenset()


def last_input_s(problem: Problem, paths: list[CriticalPath], order: str = "default") -> float:
    """Seconds: of all devices whose inputs cross a link, one gets its own last, and the step goes on from there.

    paths: of every device, as of `critical_paths`. 0 where no inputs share a link.
    """
    wanted = [_wanted(problem, device, order) for device in range(problem.workload.device_count)]
    users: dict[int, list[int]] = defaultdict(list)
    for device, (_, size_bytes) in enumerate(wanted):
        if len(size_bytes):
            for link in crossed_by_inputs(problem, device):
                users[link].append(device)
    longest_s = 0.0
    for link, devices in users.items():
        rate = problem.machine.links[link].bandwidth_bytes_per_s
        after = [paths[d].after.ravel()[wanted[d][0]] for d in devices]
        for moment in range(max(len(left_s) for left_s in after)):
            at = [min(moment, len(left_s) - 1) for left_s in after]
            size = sum(int(wanted[d][1][i]) for d, i in zip(devices, at, strict=True))
            left_least_s = min(float(left_s[i]) for left_s, i in zip(after, at, strict=True))
            longest_s = max(longest_s, size / rate + left_least_s)
    return longest_s


def mean_first_input_s(problem: Problem, devices: tuple[int, ...], order: str = "default") -> float:
    """Seconds before the devices, which run one program, can start their first slot, on average."""
    slots, size_bytes = _wanted(problem, devices[0], order)
    if not len(slots) or slots[0] != 0:
        return 0.0
    crossed = [crossed_by_inputs(problem, device) for device in devices]
    links = problem.machine.links
    # The inputs of the k-th device in the order of arrival over a link come behind those of k - 1 others. Every other
    # device has a link of its own, or the same, of which this is true.
    return max((float(size_bytes[0]) * (sum(link in way for way in crossed) + 1) / 2 / links[link].bandwidth_bytes_per_s
                for link in crossed[0]), default=0.0)  # fmt: skip


def _wanted(problem: Problem, device: int, order: str) -> tuple[np.ndarray, np.ndarray]:
    """(slots, counted through all micro-batches, that are the first to read an input; bytes of inputs read up to
    there)."""
    workload, program = problem.workload, problem.workload.program(device)
    slot_op = [index for index, op in enumerate(program.ops) if not op.step_op and not op.collective]
    slot_of = {op: slot for slot, op in enumerate(slot_op)}
    inputs, seen = set(program.inputs), set()
    slots, total, size_bytes = [], 0, []
    for index, micro_batch in workload.sequence(device, order):
        fresh = {(t, workload.instance(device, t, index, micro_batch)) for t in program.ops[index].reads if t in inputs}
        fresh -= seen
        if not fresh or index not in slot_of:
            continue
        seen |= fresh
        total += sum(program.tensors[tensor].size_bytes for tensor, _ in fresh)
        slots.append(micro_batch * len(slot_op) + slot_of[index])
        size_bytes.append(total)
    return np.array(slots, np.int64), np.array(size_bytes, np.int64)
