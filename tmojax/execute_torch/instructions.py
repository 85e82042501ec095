"""A device's list, prepared for the hooks of one rank: what they can do in it, and the bytes that it counts."""

from __future__ import annotations

from dataclasses import dataclass

from tmojax.check.acceptance import checked_schedule
from tmojax.errors import InputError
from tmojax.importers.torch_importer import ImportedTorchStep
from tmojax.problem import PLAIN, Kind, Lifetime, Phase, Problem, Schedule
from tmojax.problem.io import PlanFile


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `again`: a recomputation. `from_device`: of a transfer or release, whether it starts there.

    `planned_bytes`: what the list has in device memory at this position, workspace included.
    """

    kind: Kind
    op: int
    micro_batch: int
    tensor: int
    event: int
    after: int
    again: bool
    from_device: bool
    planned_bytes: int


@dataclass(frozen=True)
class RankList:
    """The list of one rank. `first_bytes`: in device memory at the start. `host_bytes`: its most on the host.

    `homes` {tensor of optimizer state: where it is between steps, as (on the device, on the host)}.
    `repeated`: forward ops that are recomputed, as (op, micro-batch). `for_others`: events that other ranks wait for;
    `from_others`: events of other ranks that this one waits for.
    """

    device: int
    instructions: tuple[Instruction, ...]
    first_bytes: int
    host_bytes: int
    homes: dict[int, tuple[bool, bool]]
    repeated: frozenset[tuple[int, int]]
    for_others: frozenset[int]
    from_others: frozenset[int]

    @property
    def planned_peak_bytes(self) -> int:
        return max((i.planned_bytes for i in self.instructions), default=self.first_bytes)


def schedule_for_hooks(imported: ImportedTorchStep, problem: Problem, plan: PlanFile | Schedule) -> Schedule:
    """The schedule of a plan that is valid for `problem`, which is of this step. Raises InputError otherwise."""
    schedule = checked_schedule(imported.workload, problem, plan)
    if schedule.order != "default":
        raise InputError(f"plan: it follows the op order {schedule.order!r}; hooks run the default order only")
    return schedule


def prepare_rank(
    imported: ImportedTorchStep, problem: Problem, schedule: Schedule, device: int, moves_state: bool = False
) -> RankList:
    """Prepare the list of one device of a checked schedule. `moves_state`: whether optimizer state may move.

    Raises InputError for what hooks cannot do.
    """
    return _Preparing(imported, problem, schedule, device, moves_state).run()


class _Preparing:
    def __init__(
        self, imported: ImportedTorchStep, problem: Problem, schedule: Schedule, device: int, moves_state: bool
    ) -> None:
        self.movable_state = frozenset(imported.optimizer_state) if moves_state else frozenset()
        self.imported, self.problem, self.schedule, self.device = imported, problem, schedule, device
        self.program = problem.workload.program(device)
        self.spec = problem.machine.devices[device]
        self.used = {self.spec.memory: 0, self.spec.host_memory: 0}
        self.most_host = 0
        self.resident: set[tuple[int, int, int]] = set()
        self.scratch: dict[int, int] = {}
        self.done: dict[tuple[int, int], int] = {}  # first executions, with their place among all
        self.repeated: set[tuple[int, int]] = set()

    def run(self) -> RankList:
        for placement in self.schedule.initial[self.device]:
            movable = placement.tensor in self.movable_state and set(placement.memories) <= set(self.used)
            if placement.memories != (self.spec.memory,) and not movable:
                self.fail_state(placement.tensor)
            for memory in placement.memories:
                self.allocate(placement.tensor, 0, memory)
        first = self.used[self.spec.memory]
        rows = self.schedule.lists[self.device]
        columns = {name: rows[name].tolist() for name in rows.dtype.names or ()}
        retired = {after for kind, after in zip(columns["kind"], columns["after"], strict=True) if kind == Kind.RETIRE}
        made = []
        for index in range(len(rows)):
            row = {name: column[index] for name, column in columns.items()}
            made.append(self.instruction(index, row))
            if index not in retired:
                self.used[self.spec.memory] -= self.scratch.pop(index, 0)
        homes = {
            p.tensor: (self.spec.memory in p.memories, self.spec.host_memory in p.memories)
            for p in self.schedule.initial[self.device] if p.tensor in self.movable_state
        }  # fmt: skip
        own = self.events(self.device, Kind.SIGNAL)
        waits = [self.events(device, Kind.WAIT) for device in range(len(self.schedule.lists))]
        others = frozenset().union(*waits[: self.device], *waits[self.device + 1 :])
        self.require_signals_first(made, own)
        return RankList(
            self.device, tuple(made), first, self.most_host, homes, frozenset(self.repeated), own & others,
            waits[self.device] - own,
        )  # fmt: skip

    def instruction(self, index: int, row: dict[str, int]) -> Instruction:
        kind, device_memory = Kind(row["kind"]), self.spec.memory
        again = False
        if kind in (Kind.ENCODE, Kind.DECODE, Kind.LEND, Kind.RECLAIM):
            raise InputError(f"{self.where(index)}: hooks have no {kind.name.lower()}; plan with offload and recompute")
        if kind in (Kind.COMPUTE, Kind.COLLECTIVE):
            again = self.execute(index, row["op"], row["micro_batch"])
        elif kind in (Kind.OFFLOAD, Kind.PREFETCH):
            self.transfer(index, row)
        elif kind is Kind.RELEASE:
            self.release(index, row)
        elif kind is Kind.RETIRE:
            self.used[device_memory] -= self.scratch.pop(row["after"], 0)
        return Instruction(
            kind, row["op"], row["micro_batch"], row["tensor"], row["event"], row["after"], again,
            row["memory"] == device_memory, self.used[device_memory],
        )  # fmt: skip

    def execute(self, index: int, op_index: int, micro_batch: int) -> bool:
        op, memory = self.program.ops[op_index], self.spec.memory
        again = (op_index, micro_batch) in self.done
        if again:
            self.repeated.add((op_index, micro_batch))
        else:
            self.done[op_index, micro_batch] = op_index
        scratch = op.workspace_bytes
        for tensor in op.writes:
            if (tensor, micro_batch, memory) in self.resident:
                scratch += self.program.tensors[tensor].size_bytes
            else:
                self.allocate(tensor, micro_batch, memory)
        if scratch:
            self.scratch[index] = scratch
            self.used[memory] += scratch
        return again

    def transfer(self, index: int, row: dict[str, int]) -> None:
        tensor = self.movable(index, row)
        if {row["memory"], row["to_memory"]} != {self.spec.memory, self.spec.host_memory}:
            raise InputError(
                f"{self.where(index)}: moves {tensor!r} to another memory than the device's own and its host's; a rank "
                f"reaches no other: plan without the action 'peer'"
            )
        if (row["tensor"], row["micro_batch"], row["to_memory"]) not in self.resident:
            self.allocate(row["tensor"], row["micro_batch"], row["to_memory"])

    def release(self, index: int, row: dict[str, int]) -> None:
        tensor, micro_batch, memory = row["tensor"], row["micro_batch"], row["memory"]
        name = self.movable(index, row, release=True)
        held = self.imported.held_to.get(tensor, -1)
        if memory == self.spec.memory and held >= 0 and (held, micro_batch) not in self.done:
            raise InputError(
                f"{self.where(index)}: frees {name!r} while the module's own code still holds it (until op "
                f"{self.program.ops[held].name!r}); plan with a planner that moves tensors between forward and backward"
            )
        self.resident.discard((tensor, micro_batch, memory))
        self.used[memory] -= self.program.tensors[tensor].size_bytes

    def movable(self, index: int, row: dict[str, int], release: bool = False) -> str:
        """Name of the tensor that an instruction moves. Raises InputError if hooks cannot move it."""
        spec = self.program.tensors[row["tensor"]]
        if row["owner"] not in (-1, self.device) or row["form"] != PLAIN or row["parts"] != 1:
            raise InputError(
                f"{self.where(index)}: moves {spec.name!r} in slices, encoded or for another rank; hooks move whole "
                f"tensors of their own: plan with offload and recompute only"
            )
        if spec.lifetime is Lifetime.STATE:
            if row["tensor"] not in self.movable_state:
                self.fail_state(row["tensor"])
            return spec.name
        if spec.alias_group:
            raise InputError(
                f"{self.where(index)}: {spec.name!r} shares its storage (alias group {spec.alias_group!r}), so it "
                f"cannot be moved alone; import_torch_step makes one tensor of each storage"
            )
        producer = self.program.producer[row["tensor"]]
        if not release and (producer < 0 or self.program.ops[producer].phase is not Phase.FORWARD):
            raise InputError(
                f"{self.where(index)}: moves {spec.name!r}, a gradient that autograd passes on; hooks can move saved "
                f"tensors only: use a planner that moves activations of forward (offload-all, ratio-sweep)"
            )
        return spec.name

    def fail_state(self, tensor: int) -> None:
        name = self.program.tensors[tensor].name
        if tensor in self.imported.optimizer_state:
            raise InputError(
                f"plan: it moves {name!r}, so the optimizer's step must be part of the planned one; give the optimizer "
                f"to PlannedTorchStep, and do not call its step()"
            )
        raise InputError(
            f"plan: it moves {name!r} away from the device, and PyTorch modules hold their parameters, gradients and "
            f"batch there; hooks can move saved tensors and optimizer state only: use a plan that leaves it there, as "
            f"planners do for the workload of import_torch_step, or move weights with the JAX runtime "
            f"(tmojax.execute.PlannedStep)"
        )

    def allocate(self, tensor: int, micro_batch: int, memory: int) -> None:
        self.resident.add((tensor, micro_batch, memory))
        self.used[memory] += self.program.tensors[tensor].size_bytes
        self.most_host = max(self.most_host, self.used[self.spec.host_memory])

    def events(self, device: int, kind: Kind) -> frozenset[int]:
        rows = self.schedule.lists[device]
        return frozenset(rows["event"][rows["kind"] == kind].tolist())

    def require_signals_first(self, instructions: list[Instruction], own: frozenset[int]) -> None:
        """Hooks go through the list once, so what an event of the list itself stands for must be before its wait."""
        after = {i.event: i.after for i in instructions if i.kind is Kind.SIGNAL}
        for index, one in enumerate(instructions):
            if one.kind is Kind.WAIT and one.event in own and after[one.event] > index:
                raise InputError(
                    f"{self.where(index)}: waits for instruction {after[one.event]} of its own list, which comes "
                    f"later; hooks go through a list in order"
                )

    def where(self, index: int) -> str:
        return f"{self.spec.name} #{index}"
