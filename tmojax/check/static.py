"""What the checker looks up again and again: tables of programs and devices, and readable names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tmojax.problem.machine import MemoryKind
from tmojax.problem.problem import Problem
from tmojax.problem.schedule import COMMUNICATION_STREAM, COMPUTE_STREAM, FIRST_ENGINE_STREAM, PLAIN, Kind
from tmojax.problem.workload import Lifetime

TRANSFERS = (int(Kind.OFFLOAD), int(Kind.PREFETCH))
EXECUTIONS = (int(Kind.COMPUTE), int(Kind.COLLECTIVE))
HAS_WORKSPACE = (*EXECUTIONS, int(Kind.ENCODE), int(Kind.DECODE))


@dataclass(frozen=True, slots=True)
class OpTable:
    """An op with its tensors as (first instance number, 1 if the instance is that of the micro-batch else 0)."""

    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    updates: tuple[tuple[int, int], ...]
    workspace_bytes: int
    recomputable: bool
    step_op: bool


class ProgramTable:
    """One program, shared by the devices that run it. Instance `k` of tensor `t` has the number `t * K + k`."""

    def __init__(self, problem: Problem, program_index: int) -> None:
        self.program = program = problem.workload.programs[program_index]
        self.micro_batches = problem.workload.micro_batches
        self.sizes = [tensor.size_bytes for tensor in program.tensors]
        self.per_micro_batch = [int(tensor.lifetime is Lifetime.MICRO_BATCH) for tensor in program.tensors]
        self.is_state = [tensor.lifetime is Lifetime.STATE for tensor in program.tensors]
        self.inputs = frozenset(program.inputs)
        self.members: dict[str, list[int]] = {}
        for index, tensor in enumerate(program.tensors):
            if tensor.alias_group:
                self.members.setdefault(tensor.alias_group, []).append(index)
        self.group = [tensor.alias_group for tensor in program.tensors]

    @cached_property
    def ops(self) -> list[OpTable]:
        """Only the detailed walk needs them."""
        return [
            OpTable(
                self._instances(op.reads),
                self._instances(op.writes),
                self._instances(op.updates),
                op.workspace_bytes,
                op.recomputable,
                op.step_op,
            )
            for op in self.program.ops
        ]

    def _instances(self, tensors: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        return tuple((tensor * self.micro_batches, self.per_micro_batch[tensor]) for tensor in tensors)


class DeviceTable:
    """One device and its program."""

    def __init__(self, problem: Problem, device: int, shared: ProgramTable) -> None:
        spec = problem.machine.devices[device]
        self.device = device
        self.memory = spec.memory
        self.host_memory = spec.host_memory
        self.shared = shared
        self.program = shared.program
        self.micro_batches = shared.micro_batches
        self.sizes = shared.sizes
        self.per_micro_batch = shared.per_micro_batch
        self.is_state = shared.is_state
        self.inputs = shared.inputs
        self.group = shared.group
        self.members = shared.members

    @property
    def ops(self) -> list[OpTable]:
        return self.shared.ops

    def instance_count(self, tensor: int) -> int:
        return self.micro_batches if self.per_micro_batch[tensor] else 1


class Static:
    """Everything that does not change while a schedule is checked."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.machine = problem.machine
        self.micro_batches = problem.workload.micro_batches
        programs = [ProgramTable(problem, index) for index in range(len(problem.workload.programs))]
        self.devices = [
            DeviceTable(problem, device, programs[program])
            for device, program in enumerate(problem.workload.device_program)
        ]
        self._sequences: dict[tuple[int, str], list[tuple[int, int]]] = {}
        self.owners: dict[int, list[int]] = {}
        for index, device in enumerate(problem.machine.devices):
            self.owners.setdefault(device.memory, []).append(index)

    def sequence(self, device: int, order: str) -> list[tuple[int, int]]:
        """`Workload.sequence`, once per program. Raises InputError."""
        key = (self.problem.workload.device_program[device], order)
        if key not in self._sequences:
            self._sequences[key] = self.problem.workload.sequence(device, order)
        return self._sequences[key]

    def is_private(self, memory: int) -> bool:
        """A device memory with one owner, bounded at every position. Others are shared, charged with sums of maxima."""
        return self.machine.memories[memory].kind is MemoryKind.DEVICE and len(self.owners.get(memory, ())) == 1

    def available_bytes(self, memory: int) -> int:
        spec = self.machine.memories[memory]
        return spec.capacity_bytes - spec.reserve_bytes

    def charged_bytes(self, memory: int, size_bytes: int) -> int:
        """What a block costs in a memory: pinned host blocks may be rounded up to a power of two."""
        spec = self.machine.memories[memory]
        if spec.kind is MemoryKind.HOST and spec.pinned_power_of_two and size_bytes > 0:
            return 1 << (size_bytes - 1).bit_length()
        return size_bytes

    # --- names -------------------------------------------------------------------------------------------------

    def memory_name(self, memory: int) -> str:
        return self.machine.memories[memory].name

    def device_name(self, device: int) -> str:
        return self.machine.devices[device].name

    def instance_name(self, owner: int, tensor: int, micro_batch: int) -> str:
        table = self.devices[owner]
        name = table.program.tensors[tensor].name
        return f"{name} (micro-batch {micro_batch})" if table.per_micro_batch[tensor] else name

    def copy_name(self, key: tuple[int, ...], device: int, with_memory: bool = True) -> str:
        owner, tensor, micro_batch, memory, form, part, parts = key
        words = [self.instance_name(owner, tensor, micro_batch)]
        if owner != device:
            words.append(f"of {self.device_name(owner)}")
        if form != PLAIN:
            words.append(f"encoded as {self.machine.codecs[form].name}")
        if parts != 1:
            words.append(f"slice {part} of {parts}")
        if with_memory:
            words.append(f"in {self.memory_name(memory)}")
        return " ".join(words)

    def stream_name(self, stream: int) -> str:
        if stream == COMPUTE_STREAM:
            return "compute stream"
        if stream == COMMUNICATION_STREAM:
            return "communication stream"
        return f"engine {self.machine.engines[stream - FIRST_ENGINE_STREAM]}"

    def describe(self, device: int, index: int, row: np.void) -> str:
        """One instruction in words, for example `gpu1 #17: offload h3.mlp.fc (micro-batch 2) gpu1 -> host0`."""
        return f"{self.device_name(device)} #{index}: {self._action(device, row)}"

    def _action(self, device: int, row: np.void) -> str:
        kind = Kind(int(row["kind"]))
        word = kind.name.lower()
        if kind in EXECUTIONS:
            op = self.devices[device].program.ops[row["op"]]
            return f"{word} {op.name}" if op.step_op else f"{word} {op.name} (micro-batch {row['micro_batch']})"
        if kind is Kind.RETIRE:
            return f"{word} workspace of #{row['after']}"
        if kind is Kind.SIGNAL:
            return f"{word} event {row['event']} after #{row['after']}"
        if kind is Kind.WAIT:
            return f"{word} for event {row['event']} on {self.stream_name(row['stream'])}"
        if kind is Kind.LEND:
            return f"{word} {row['size_bytes']} bytes to {self.device_name(row['to_device'])} (loan {row['event']})"
        if kind is Kind.RECLAIM:
            return f"{word} loan {row['event']}"
        key = copy_key(device, row)
        if int(row["kind"]) in TRANSFERS:
            name = self.copy_name(key, device, with_memory=False)
            return f"{word} {name} {self.memory_name(row['memory'])} -> {self.memory_name(row['to_memory'])}"
        return f"{word} {self.copy_name(key, device)}"


def copy_key(device: int, row: np.void) -> tuple[int, ...]:
    """(owner, tensor, micro-batch, memory, form, part, parts) that an instruction names, with the owner filled in."""
    owner = int(row["owner"])
    return (device if owner == -1 else owner, int(row["tensor"]), int(row["micro_batch"]), int(row["memory"]),
            int(row["form"]), int(row["part"]), int(row["parts"]))  # fmt: skip
