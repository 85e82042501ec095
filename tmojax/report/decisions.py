"""What a schedule does with every tensor, read from its lists, with the figures behind it; equal layers are merged."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tmojax.problem import PLAIN, Kind, Lifetime, Problem, Schedule
from tmojax.problem.step_view import StepView, view_step
from tmojax.report.wording import ranges
from tmojax.units import format_seconds

KEEP, RECOMPUTE, OFFLOAD, PEER, COMPRESS, HOST = (
    "keep", "recompute", "offload", "offload to peer", "compress", "lives in host memory"
)  # fmt: skip
# In the order in which sentences and tables name them.
ACTIONS = (RECOMPUTE, OFFLOAD, PEER, COMPRESS, HOST, KEEP)


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """The same decision on the same tensor of several layers.

    `name`: the tensor with `*` for the number of the layer. `layers`: their labels, or the tensor's name where there is
    one only. `count`: tensors that the row stands for, per device and micro-batch. `size_bytes`: of one of them.
    `share`: fraction of the micro-batches in which it is so. `devices`: names of the devices that do it.
    """

    name: str
    layers: str
    count: int
    size_bytes: int
    action: str
    share: float
    devices: str
    reason: str

    @property
    def total_bytes(self) -> int:
        return self.count * self.size_bytes


def read_actions(problem: Problem, schedule: Schedule, device: int) -> dict[int, dict[str, int]]:
    """For every tensor of a device that leaves its memory, is made again, or stays so that others can be made again:
    action -> number of its instances."""
    program, workload = problem.workload.program(device), problem.workload
    own = problem.machine.devices[device].memory
    gpu_memories = {spec.memory for spec in problem.machine.devices if spec.kind == "gpu"}
    resident: set[tuple[int, int]] = set()
    ran: set[tuple[int, int]] = set()
    done: dict[tuple[int, int], set[str]] = {}
    read_again: set[tuple[int, int]] = set()
    inputs = set(program.inputs)
    rows = schedule.lists[device]
    columns = [rows[name].tolist() for name in
               ("kind", "op", "micro_batch", "owner", "tensor", "form", "memory", "to_memory")]  # fmt: skip
    for kind, op, micro_batch, owner, tensor, form, memory, to_memory in zip(*columns, strict=True):
        if kind in (Kind.COMPUTE, Kind.COLLECTIVE):
            if (op, micro_batch) in ran:
                read_again.update(
                    (tensor, workload.instance(device, tensor, op, micro_batch))
                    for tensor in program.ops[op].reads
                    if program.producer[tensor] != -1
                )
            for written in program.ops[op].writes:
                copy = (written, workload.instance(device, written, op, micro_batch))
                if copy not in resident and (op, micro_batch) in ran:
                    done.setdefault(copy, set()).add(RECOMPUTE)
                resident.add(copy)
            ran.add((op, micro_batch))
        elif owner not in (-1, device):
            continue
        elif kind == Kind.RELEASE and memory == own:
            resident.discard((tensor, micro_batch))
        elif kind in (Kind.OFFLOAD, Kind.PREFETCH) and to_memory == own:
            if tensor not in inputs and program.tensors[tensor].lifetime is not Lifetime.STATE:
                action = PEER if memory in gpu_memories else OFFLOAD
                done.setdefault((tensor, micro_batch), set()).add(action)
            resident.add((tensor, micro_batch))
        if kind == Kind.ENCODE or (kind in (Kind.OFFLOAD, Kind.PREFETCH) and form != PLAIN):
            done.setdefault((tensor, micro_batch), set()).add(COMPRESS)
    for copy in read_again - done.keys():
        done[copy] = {KEEP}
    actions: dict[int, dict[str, int]] = {}
    for (tensor, _), words in done.items():
        action = " + ".join(word for word in ACTIONS if word in words)
        counts = actions.setdefault(tensor, {})
        counts[action] = counts.get(action, 0) + 1
    for placement in schedule.initial[device]:
        if own not in placement.memories:
            actions[placement.tensor] = {HOST: 1}
    return actions


def count_actions(problem: Problem, schedule: Schedule, device: int = 0) -> dict[str, int]:
    """How many tensors of a device take each action in most of their micro-batches; `keep` counts the tensors that
    backward waits for and that stay. What lives in host memory is counted under its own name."""
    counts: dict[str, int] = {}
    for row in _device_rows(problem, schedule, view_step(problem, device)):
        if row.share >= 0.5:
            counts[row.action] = counts.get(row.action, 0) + row.count
    return {action: counts[action] for action in sorted(counts, key=_rank)}


def read_decisions(problem: Problem, schedule: Schedule) -> list[DecisionRow]:
    """Decision rows of all devices, largest first; devices that decide alike share rows."""
    views: dict[int, StepView] = {}
    rows: dict[tuple, list[str]] = {}
    for device in range(problem.workload.device_count):
        role = problem.workload.device_program[device]
        view = views.setdefault(role, view_step(problem, device))
        for row in _device_rows(problem, schedule, view, device):
            key = (row.name, row.layers, row.count, row.size_bytes, row.action, row.share, row.reason)
            rows.setdefault(key, []).append(problem.machine.devices[device].name)
    everybody = problem.workload.device_count
    found = [
        DecisionRow(*key[:6], "all" if len(names) == everybody else ", ".join(names), key[6])
        for key, names in rows.items()
    ]
    return sorted(found, key=lambda row: (_rank(row.action), -row.total_bytes, row.name, row.layers))


def _rank(action: str) -> int:
    return ACTIONS.index(action.split(" + ")[0])


def _device_rows(
    problem: Problem, schedule: Schedule, view: StepView, device: int | None = None
) -> Iterable[DecisionRow]:
    device = view.device if device is None else device
    program = problem.workload.program(device)
    actions = read_actions(problem, schedule, device)
    instances = problem.workload.micro_batches
    place = {tensor: index for index, tensor in enumerate(view.tensor.tolist())}
    merged: dict[tuple, list[tuple[str, str, int]]] = {}
    for tensor, spec in enumerate(program.tensors):
        found = dict(actions.get(tensor, {}))
        total = 1 if spec.lifetime is not Lifetime.MICRO_BATCH else instances
        index = place.get(tensor)
        if index is not None and view.needed[index] and sum(found.values()) < total:
            found[KEEP] = found.get(KEEP, 0) + total - sum(found.values())
        producer = program.producer[tensor]
        layer = program.ops[producer].layer if producer != -1 else _layer_in_name(spec.name)
        pattern = _pattern(spec.name, layer)
        for action, count in found.items():
            key = (pattern, spec.size_bytes, action, count / total)
            merged.setdefault(key, []).append((layer, spec.name, tensor))
    figures = _Figures(problem, view, device)
    for (pattern, size, action, share), members in merged.items():
        layers = ranges([layer for layer, _, _ in members]) if pattern != members[0][1] else ""
        reason = figures.reason(action, [place.get(tensor) for _, _, tensor in members], size)
        yield DecisionRow(pattern, layers, len(members), size, action, share, "", reason)


def _layer_in_name(name: str) -> str:
    return next((part for part in name.split(".") if any(c.isdigit() for c in part)), "")


def _pattern(name: str, layer: str) -> str:
    """The name with `*` for the number of its layer, for example `h*.mlp.fc`."""
    if not any(c.isdigit() for c in layer):
        return name
    star = re.sub(r"\d+", "*", layer)
    return re.sub(rf"(?<![A-Za-z0-9_]){re.escape(layer)}(?![A-Za-z0-9_])", star, name)


class _Figures:
    """The figures of the problem that speak for or against an action."""

    def __init__(self, problem: Problem, view: StepView, device: int) -> None:
        machine = problem.machine
        spec = machine.devices[device]
        self._view = view
        self._second_per_byte = 0.0
        for route in (machine.route(spec.memory, spec.host_memory), machine.route(spec.host_memory, spec.memory)):
            for link in route.links:
                users = sum(
                    link in machine.route(d.memory, d.host_memory).links
                    or link in machine.route(d.host_memory, d.memory).links
                    for d in machine.devices
                    if d.kind == "gpu"
                )
                fair = users / machine.links[link].bandwidth_bytes_per_s
                self._second_per_byte = max(self._second_per_byte, fair)
        self._elapsed_s = [0.0, *view.slot_s.cumsum().tolist()]

    def reason(self, action: str, candidates: list[int | None], size_bytes: int) -> str:
        """One line of figures: of the first tensor of the row, its idle time, copy time and recomputation time."""
        copy_s = size_bytes * self._second_per_byte
        copy = f"a copy takes {format_seconds(copy_s)} each way when all GPUs copy"
        if action == HOST:
            return f"used once a step; {copy}"
        index = candidates[0]
        if index is None:
            return ""
        view = self._view
        idle_s = self._elapsed_s[view.idle_to[index]] - self._elapsed_s[view.idle_from[index] + 1]
        if idle_s <= 0 and action == KEEP:
            return "used again at once"
        again = f"its op takes {format_seconds(float(view.recompute_s[index]))} again"
        if not view.may_recompute[index]:
            again = "it cannot be recomputed"
        if RECOMPUTE in action:
            return f"{again}; {copy}"
        if action == KEEP:
            if 2 * copy_s > idle_s:
                return f"idle for {format_seconds(idle_s)} only; {copy}; {again}"
            return f"{again}; {copy}; there is room for it"
        return f"idle for {format_seconds(idle_s)}; {copy}; {again}"
