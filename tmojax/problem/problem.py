"""A problem: a workload on a machine, and the actions that a planner may use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from tmojax.errors import InputError
from tmojax.problem.machine import Machine, validate_machine
from tmojax.problem.workload import Lifetime, Workload, validate_workload


class Action(StrEnum):
    """What may be done with an idle tensor besides keeping it (which is always allowed)."""

    OFFLOAD = "offload"
    PEER = "peer"
    SHARD = "shard"
    RECOMPUTE = "recompute"
    COMPRESS = "compress"


@dataclass(frozen=True)
class Problem:
    """What every planner, bound, simulation and check refers to. `actions` is what planners may use."""

    name: str
    workload: Workload
    machine: Machine
    actions: frozenset[Action]

    def capacity_bytes(self, device: int) -> int:
        """Bytes that plans may use in the memory of a device: capacity less reserve."""
        memory = self.machine.memories[self.machine.devices[device].memory]
        return memory.capacity_bytes - memory.reserve_bytes

    def with_device_capacity(self, capacity_bytes: int) -> Problem:
        """The same problem with every device memory set to `capacity_bytes` (plus its reserve)."""
        device_memories = {device.memory for device in self.machine.devices if device.kind == "gpu"}
        memories = tuple(
            replace(memory, capacity_bytes=capacity_bytes + memory.reserve_bytes)
            if index in device_memories
            else memory
            for index, memory in enumerate(self.machine.memories)
        )
        return replace(self, machine=replace(self.machine, memories=memories))


def validate_problem(problem: Problem) -> None:
    """Check workload, machine and how they fit together. Raises InputError."""
    validate_workload(problem.workload)
    validate_machine(problem.machine)
    gpus, devices = len(problem.machine.devices), problem.workload.device_count
    if gpus != devices:
        raise InputError(
            f"the workload runs on {devices} device(s) and machine {problem.machine.name!r} has {gpus}; "
            f"set the same number in both"
        )


def keep_all_footprint_bytes(workload: Workload, device: int, order: str = "default") -> int:
    """Peak device bytes when nothing leaves: weights, gradients, optimizer state, activations and workspace.

    Every tensor is allocated where it is first touched and freed after its last use; STATE stays.
    (Design: "Footprint".) Alias groups count once, with the size of their largest member.
    """
    program = workload.program(device)
    last_use: dict[tuple[object, int], int] = {}
    size: dict[tuple[object, int], int] = {}
    sequence = workload.sequence(device, order)

    def storage(tensor: int, instance: int) -> tuple[object, int]:
        spec = program.tensors[tensor]
        key = (spec.alias_group or tensor, instance)
        size[key] = max(size.get(key, 0), spec.size_bytes)
        return key

    for position, (op_index, micro_batch) in enumerate(sequence):
        op = program.ops[op_index]
        for tensor in (*op.reads, *op.writes, *op.updates):
            last_use[storage(tensor, workload.instance(device, tensor, op_index, micro_batch))] = position
    state = {storage(t, 0) for t, spec in enumerate(program.tensors) if spec.lifetime is Lifetime.STATE}
    frees: dict[int, list[tuple[object, int]]] = {}
    for key, position in last_use.items():
        if key not in state:
            frees.setdefault(position, []).append(key)
    live = set(state)
    live_bytes = sum(size[key] for key in state)
    peak = live_bytes
    for position, (op_index, micro_batch) in enumerate(sequence):
        op = program.ops[op_index]
        for tensor in (*op.reads, *op.writes, *op.updates):
            key = storage(tensor, workload.instance(device, tensor, op_index, micro_batch))
            if key not in live:
                live.add(key)
                live_bytes += size[key]
        peak = max(peak, live_bytes + op.workspace_bytes)
        for key in frees.get(position, ()):
            live.discard(key)
            live_bytes -= size[key]
    return peak


def largest_op_bytes(workload: Workload, device: int) -> tuple[int, int]:
    """(op, bytes) of the op that needs most device memory on its own: what it reads, writes, updates, and its
    workspace.

    No schedule fits in less, so this is the exact lower limit of a device's capacity.
    """
    program = workload.program(device)
    best = (-1, -1)
    for index, op in enumerate(program.ops):
        storages: dict[object, int] = {}
        for tensor in (*op.reads, *op.writes, *op.updates):
            spec = program.tensors[tensor]
            key = spec.alias_group or tensor
            storages[key] = max(storages.get(key, 0), spec.size_bytes)
        needed = sum(storages.values()) + op.workspace_bytes
        if needed > best[1]:
            best = (index, needed)
    return best
