"""What a schedule does with every tensor, read from its lists, with the figures behind it; equal layers are merged."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tmojax.problem import PLAIN, Action, Kind, Lifetime, Problem, Schedule
from tmojax.problem.in_order import in_order
from tmojax.problem.step_view import StepView, view_step
from tmojax.report.wording import ranges

KEEP, RECOMPUTE, OFFLOAD, PEER, COMPRESS = ("keep", "recompute", "offload", "offload to peer", "compress")
# Of persistent tensors: they rest in host memory from step to step, or on the device, from where they go and come back,
# or where they are encoded while nothing uses them.
HOST, AWAY, ENCODED = "in host memory", "away in between", "encoded in between"
# In the order in which sentences and tables name them.
ACTIONS = (RECOMPUTE, OFFLOAD, PEER, COMPRESS, HOST, AWAY, ENCODED, KEEP)


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """The same decision on the same tensor of several layers and devices.

    `name`: the tensor with `*` for the number of the layer; `layers`: those numbers, on any device. `fewest`, `most`:
    how many such tensors a device has, per micro-batch. `size_bytes`: of one of them. `share`: fraction of the
    micro-batches in which it is so, the mean. `devices`: names of those that do it. Figures of the first of the
    tensors, None where there is none: `idle_s`, compute time between its uses; `copy_s`, of one copy to or from the
    host when all GPUs copy; `again_s`, of its op.
    """

    name: str
    layers: str
    fewest: int
    most: int
    size_bytes: int
    action: str
    share: float
    devices: str
    idle_s: float | None
    copy_s: float | None
    again_s: float | None
    reason: str

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them on the device that has most."""
        return self.most * self.size_bytes


@dataclass(frozen=True, eq=False)
class _Reading:
    """How a device's step goes in the order of a schedule: the view of the problem that this order is, and of tensors
    of the schedule's problem the candidates there (of their first instance), and which are resting state."""

    view: StepView
    candidate: dict[int, int]
    resting: frozenset[int]


def _read_step(problem: Problem, order: str, device: int) -> _Reading:
    if not problem.workload.program(device).orders:
        view = view_step(problem, device)
        places = {tensor: index for index, tensor in enumerate(view.tensor.tolist())}
        return _Reading(view, places, frozenset(view.state_tensor[view.state_resting].tolist()))
    written = in_order(problem, order)
    view = view_step(written.problem, device)
    tensors, _ = written.original_tensors(device, view.tensor)
    candidate: dict[int, int] = {}
    for index, tensor in enumerate(tensors.tolist()):
        candidate.setdefault(tensor, index)
    resting, _ = written.original_tensors(device, view.state_tensor[view.state_resting])
    return _Reading(view, candidate, frozenset(resting.tolist()))


@dataclass(frozen=True, slots=True)
class _Member:
    """One tensor of one device that takes an action in `share` of its instances; `candidate` as in `_Reading`.
    `resting`: no micro-batch touches it, only the step's end."""

    layer: str
    candidate: int | None
    share: float
    resting: bool


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
            if tensor not in inputs:
                action = PEER if memory in gpu_memories else OFFLOAD
                if program.tensors[tensor].lifetime is Lifetime.STATE:
                    action = AWAY
                done.setdefault((tensor, micro_batch), set()).add(action)
            resident.add((tensor, micro_batch))
        if kind == Kind.ENCODE or (kind in (Kind.OFFLOAD, Kind.PREFETCH) and form != PLAIN):
            state = program.tensors[tensor].lifetime is Lifetime.STATE
            done.setdefault((tensor, micro_batch), set()).add(ENCODED if state else COMPRESS)
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
    reading = _read_step(problem, schedule.order, device)
    for (_, _, action), members in _device_members(problem, schedule, reading, device).items():
        counts[action] = counts.get(action, 0) + sum(member.share >= 0.5 for member in members)
    return {action: counts[action] for action in sorted(counts, key=action_rank) if counts[action]}


def read_decisions(problem: Problem, schedule: Schedule) -> list[DecisionRow]:
    """Decision rows, grouped by action, largest first."""
    readings: dict[int, _Reading] = {}
    found: dict[tuple[str, int, str], dict[int, list[_Member]]] = {}
    devices = problem.machine.devices
    for device in range(len(devices)):
        role = problem.workload.device_program[device]
        if role not in readings:
            readings[role] = _read_step(problem, schedule.order, device)
        for key, members in _device_members(problem, schedule, readings[role], device).items():
            found.setdefault(key, {})[device] = members
    rows = []
    for (name, size, action), of_device in found.items():
        first = min(of_device)
        figures = _Figures(problem, readings[problem.workload.device_program[first]].view, first)
        idle_s, copy_s, again_s = figures.of(of_device[first][0].candidate, size)
        everyone = [member for members in of_device.values() for member in members]
        numbers = [len(of_device.get(device, ())) for device in range(len(devices))]
        rows.append(
            DecisionRow(
                name=name,
                layers=ranges([member.layer for member in everyone]),
                fewest=min(numbers),
                most=max(numbers),
                size_bytes=size,
                action=action,
                share=sum(member.share for member in everyone) / len(everyone),
                devices="all" if min(numbers) else ranges([devices[device].name for device in of_device]),
                idle_s=idle_s,
                copy_s=copy_s,
                again_s=again_s,
                reason=_host_reason(everyone)
                if action_rank(action) in map(ACTIONS.index, (HOST, AWAY, ENCODED))
                else figures.reason(action, idle_s, copy_s, again_s),
            )
        )
    return sorted(rows, key=lambda row: (action_rank(row.action), -row.total_bytes, row.name))


def action_rank(action: str) -> int:
    """Place of an action, or of the first of a combination such as `offload + compress`, in ACTIONS."""
    return ACTIONS.index(action.split(" + ")[0])


def _device_members(
    problem: Problem, schedule: Schedule, reading: _Reading, device: int
) -> dict[tuple[str, int, str], list[_Member]]:
    """(name with `*`, bytes, action) -> tensors of a device. Tensors of no bytes, and those that only live inside
    forward or backward and stay, are no decisions and left out."""
    program = problem.workload.program(device)
    actions = read_actions(problem, schedule, device)
    view = reading.view
    merged: dict[tuple[str, int, str], list[_Member]] = {}
    for tensor, spec in enumerate(program.tensors):
        found = dict(actions.get(tensor, {}))
        total = problem.workload.micro_batches if spec.lifetime is Lifetime.MICRO_BATCH else 1
        index = reading.candidate.get(tensor)
        waits = (
            index is not None and view.needed[index] and view.idle_from[index] < view.forward_end <= view.idle_to[index]
        )
        if waits and sum(found.values()) < total:
            found[KEEP] = found.get(KEEP, 0) + total - sum(found.values())
        pattern, layer = _pattern(spec.name)
        for action, count in found.items():
            if spec.size_bytes:
                merged.setdefault((pattern, spec.size_bytes, action), []).append(
                    _Member(layer, index, count / total, tensor in reading.resting)
                )
    return merged


def _pattern(name: str) -> tuple[str, str]:
    """The name with `*` for the number of its layer, and that number: (`h*.mlp.fc`, `3`). Without one, (name, "")."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        number = re.search(r"\d+", part)
        if number and not part.isdigit():
            parts[place] = part[: number.start()] + "*" + part[number.end() :]
            return ".".join(parts), number.group()
    return name, ""


def _host_reason(members: list[_Member]) -> str:
    return "used once a step" if all(member.resting for member in members) else "used by every micro-batch"


class _Figures:
    """The figures of a problem that speak for or against an action."""

    def __init__(self, problem: Problem, view: StepView, device: int) -> None:
        machine = problem.machine
        self._view, self._actions = view, problem.actions
        spec = machine.devices[device]
        hosts = [
            {*machine.route(d.memory, d.host_memory).links, *machine.route(d.host_memory, d.memory).links}
            for d in machine.devices
            if d.kind == "gpu"
        ]
        self._seconds_per_byte = max(
            sum(link in used for used in hosts) / machine.links[link].bandwidth_bytes_per_s
            for route in (machine.route(spec.memory, spec.host_memory), machine.route(spec.host_memory, spec.memory))
            for link in route.links
        )
        self._elapsed_s = [0.0, *view.slot_s.cumsum().tolist()]

    def of(self, candidate: int | None, size_bytes: int) -> tuple[float | None, float | None, float | None]:
        """(idle_s, copy_s, again_s) of a tensor; None where it has no such time, or the action is not allowed."""
        copy_s = size_bytes * self._seconds_per_byte if Action.OFFLOAD in self._actions else None
        if candidate is None:
            return None, copy_s, None
        view = self._view
        idle_s = self._elapsed_s[view.idle_to[candidate]] - self._elapsed_s[view.idle_from[candidate] + 1]
        may_again = view.may_recompute[candidate] and Action.RECOMPUTE in self._actions
        return max(idle_s, 0.0), copy_s, float(view.recompute_s[candidate]) if may_again else None

    def reason(self, action: str, idle_s: float | None, copy_s: float | None, again_s: float | None) -> str:
        """Why the action is plausible, in few words; the plan as a whole is judged by its time, not by this."""
        both_s = 2 * copy_s if copy_s is not None else None
        if RECOMPUTE in action:
            if copy_s is None or again_s is None or both_s is None:
                return "copies are not allowed"
            return "faster than its copies" if again_s < both_s else "slower than its copies, but needs no link"
        if action == KEEP:
            if not idle_s:
                return "used again at once"
            if both_s is not None and both_s > idle_s:
                return "idle for less than a copy out and back"
            return "there is room for it"
        fits = both_s is not None and idle_s is not None and both_s <= idle_s
        text = "its copies fit into its idle time" if fits else "its copies take longer than it is idle"
        if again_s is None:
            return text + ("; cannot be recomputed" if Action.RECOMPUTE in self._actions else "")
        return text + ("; faster than to recompute" if both_s is not None and both_s < again_s else "")
