"""What every device does when: the instructions of a simulated schedule that take time, by category, with labels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from tmojax.problem import PLAIN, Kind, Phase, Problem, Schedule, part_bytes
from tmojax.simulate import Simulation


class Category(StrEnum):
    """What an instruction is for. The values are the words of legends and traces."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    RECOMPUTE = "recompute"
    CODEC = "compress"
    COLLECTIVE = "collective"
    COPY_OUT = "copy out"
    COPY_IN = "copy in"


CATEGORIES = tuple(Category)
COMPUTE_CATEGORIES = (
    Category.FORWARD,
    Category.BACKWARD,
    Category.OPTIMIZER,
    Category.RECOMPUTE,
    Category.CODEC,
)
_PHASE_CATEGORY = {
    Phase.FORWARD: Category.FORWARD,
    Phase.BACKWARD: Category.BACKWARD,
    Phase.OPTIMIZER: Category.OPTIMIZER,
    Phase.COLLECTIVE: Category.COLLECTIVE,
}
_PHASE_WORD = {Phase.FORWARD: "fwd", Phase.BACKWARD: "bwd", Phase.OPTIMIZER: "opt", Phase.COLLECTIVE: "comm"}


@dataclass(frozen=True, eq=False)
class DeviceActivity:
    """Instructions of one device that take time, in list order; shapes [N].

    `instruction`: index in the list. `category`: index into CATEGORIES. `size_bytes`: what a copy moves, else 0.
    """

    device: int
    instruction: np.ndarray
    category: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    size_bytes: np.ndarray

    def of(self, *categories: Category) -> np.ndarray:
        """Mask [N] of the given categories."""
        return np.isin(self.category, [CATEGORIES.index(category) for category in categories])


def copy_bytes(problem: Problem, owner: int, tensor: int, form: int, part: int, parts: int) -> int:
    """Bytes of a copy (docs/semantics.md, section 1): a slice of the tensor, encoded if it has a form."""
    size = part_bytes(problem.workload.program(owner).tensors[tensor].size_bytes, part, parts)
    return size if form == PLAIN else problem.machine.codecs[form].encoded_bytes(size)


def read_activity(problem: Problem, schedule: Schedule, simulation: Simulation) -> tuple[DeviceActivity, ...]:
    """Activities of every device, with the simulated times in seconds."""
    return tuple(_read_device(problem, schedule, simulation, device) for device in range(len(schedule.lists)))


def _read_device(problem: Problem, schedule: Schedule, simulation: Simulation, device: int) -> DeviceActivity:
    rows, program = schedule.lists[device], problem.workload.program(device)
    memory = problem.machine.devices[device].memory
    phase_category = [CATEGORIES.index(_PHASE_CATEGORY[op.phase]) for op in program.ops]
    recompute, codec = CATEGORIES.index(Category.RECOMPUTE), CATEGORIES.index(Category.CODEC)
    copy_out, copy_in = CATEGORIES.index(Category.COPY_OUT), CATEGORIES.index(Category.COPY_IN)
    collective = CATEGORIES.index(Category.COLLECTIVE)
    columns = [rows[name].tolist() for name in
               ("kind", "op", "micro_batch", "owner", "tensor", "form", "part", "parts", "memory")]  # fmt: skip
    ran: set[tuple[int, int]] = set()
    found: list[tuple[int, int, int]] = []
    for index, (kind, op, micro_batch, owner, tensor, form, part, parts, source) in enumerate(
        zip(*columns, strict=True)
    ):
        if kind == Kind.COMPUTE:
            found.append((index, recompute if (op, micro_batch) in ran else phase_category[op], 0))
            ran.add((op, micro_batch))
        elif kind == Kind.COLLECTIVE:
            found.append((index, collective, 0))
        elif kind in (Kind.OFFLOAD, Kind.PREFETCH):
            size = copy_bytes(problem, device if owner == -1 else owner, tensor, form, part, parts)
            found.append((index, copy_out if source == memory else copy_in, size))
        elif kind in (Kind.ENCODE, Kind.DECODE):
            found.append((index, codec, 0))
    table = np.array(found, np.int64).reshape(len(found), 3)
    instruction = table[:, 0]
    return DeviceActivity(
        device=device,
        instruction=instruction,
        category=table[:, 1],
        start_s=np.asarray(simulation.start_s[device])[instruction],
        end_s=np.asarray(simulation.end_s[device])[instruction],
        size_bytes=table[:, 2],
    )


def op_label(problem: Problem, device: int, op_index: int, micro_batch: int, again: bool = False) -> str:
    """A readable name of one run of an op, for example `fwd h3.mlp.fc #2`; `again` marks a recomputation."""
    op = problem.workload.program(device).ops[op_index]
    word = "recompute" if again else _PHASE_WORD[op.phase]
    name = op.name
    for prefix in (_PHASE_WORD[op.phase], str(op.phase)):
        for separator in (" ", "/", ".", ":"):
            name = name.removeprefix(prefix + separator)
    return f"{word} {name}" if op.step_op else f"{word} {name} #{micro_batch}"


def tensor_label(problem: Problem, owner: int, tensor: int, micro_batch: int) -> str:
    """A readable name of one tensor instance, for example `h3.mlp.gelu #2`."""
    spec = problem.workload.program(owner).tensors[tensor]
    return f"{spec.name} #{micro_batch}" if spec.lifetime == "micro_batch" else spec.name


def activity_label(problem: Problem, schedule: Schedule, activity: DeviceActivity, position: int) -> str:
    """A readable name of the activity at `position` of `activity`."""
    row = schedule.lists[activity.device][activity.instruction[position]]
    category = CATEGORIES[activity.category[position]]
    if row["op"] >= 0:
        again = category is Category.RECOMPUTE
        return op_label(problem, activity.device, int(row["op"]), int(row["micro_batch"]), again)
    owner = activity.device if row["owner"] == -1 else int(row["owner"])
    name = tensor_label(problem, owner, int(row["tensor"]), int(row["micro_batch"]))
    if row["parts"] > 1:
        name += f" [{row['part'] + 1}/{row['parts']}]"
    if row["kind"] in (Kind.ENCODE, Kind.DECODE):
        return f"{Kind(row['kind']).name.lower()} {name}"
    return f"{'out' if category is Category.COPY_OUT else 'in'} {name}"


def engine_rows(problem: Problem) -> dict[int, tuple[int, str]]:
    """Engines that belong to one device: engine -> (device, "copy out", "copy in" or "copy").

    An engine belongs to the device whose memory is an end of all routes that hold it.
    """
    machine = problem.machine
    device_of = {device.memory: index for index, device in enumerate(machine.devices) if device.kind == "gpu"}
    owned: dict[int, tuple[int, str]] = {}
    for engine in range(len(machine.engines)):
        routes = [route for route in machine.routes if engine in route.engines]
        ends = [{route.source, route.destination} & device_of.keys() for route in routes]
        common = set.intersection(*ends) if ends else set()
        if len(common) != 1:
            continue
        memory = common.pop()
        outward = {route.source == memory for route in routes}
        direction = "copy" if len(outward) == 2 else "copy out" if outward == {True} else "copy in"
        owned[engine] = (device_of[memory], direction)
    return owned
