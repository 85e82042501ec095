"""What the simulator needs of a problem, as arrays; computed once per problem and reused for every schedule."""

from __future__ import annotations

import weakref
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tmojax.problem import FIRST_ENGINE_STREAM, Lifetime, Problem


class ProgramTable:
    """One program. Slots number (tensor, instance); its storage is the slot of its alias group's representative."""

    def __init__(self, problem: Problem, program_index: int) -> None:
        workload = problem.workload
        program = workload.programs[program_index]
        micro_batches = workload.micro_batches
        tensors = program.tensors
        self.per_micro_batch = np.array([t.lifetime is Lifetime.MICRO_BATCH for t in tensors], np.bool_)
        self.size_bytes = np.array([t.size_bytes for t in tensors], np.int64)
        instances = np.where(self.per_micro_batch, micro_batches, 1)
        ends = np.cumsum(instances)
        self.slot_count = int(ends[-1]) if tensors else 0
        self.first_slot = (ends - instances).astype(np.int64)
        self.inputs = np.array(program.inputs, np.int64)

        # The representative of a group is a member with the most instances, so that every instance has a storage.
        representative = np.arange(len(tensors))
        groups: dict[str, list[int]] = {}
        for index, tensor in enumerate(tensors):
            if tensor.alias_group:
                groups.setdefault(tensor.alias_group, []).append(index)
        state = np.array([t.lifetime is Lifetime.STATE for t in tensors], np.bool_)
        for members in groups.values():
            representative[members] = max(members, key=lambda m: (instances[m], -m))
            state[members] = state[members].any()
        instance = np.arange(self.slot_count) - np.repeat(self.first_slot, instances)
        self.storage = np.repeat(self.first_slot[representative], instances) + instance
        self.persistent = np.repeat(state, instances)

        self.duration_s = np.array([op.duration_s for op in program.ops], np.float64)
        self.workspace_bytes = np.array([op.workspace_bytes for op in program.ops], np.int64)
        self.step_op = np.array([op.step_op for op in program.ops], np.bool_)
        collectives = {collective.name: index for index, collective in enumerate(workload.collectives)}
        self.collective = np.array([collectives.get(op.collective, -1) for op in program.ops], np.int32)
        touched = [group for op in program.ops for group in (op.reads, op.updates, op.writes)]
        lengths = np.array([len(group) for group in touched], np.int64).reshape(-1, 3)
        self.access_count = lengths.sum(axis=1)
        self.access_ptr = np.zeros((len(program.ops), 4), np.int64)
        self.access_ptr[:, 1:] = np.cumsum(lengths, axis=1)
        self.access_ptr += (np.cumsum(self.access_count) - self.access_count)[:, None]
        self.access_tensor = np.array([tensor for group in touched for tensor in group], np.int64)
        self._copies: dict[int, tuple[NDArray[np.int64], NDArray[np.bool_]]] = {}

    def copies(self, columns: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Store and persistence of every key `slot * columns + column`."""
        if columns not in self._copies:
            store = (self.storage[:, None] * columns + np.arange(columns)).ravel()
            self._copies[columns] = (store, np.repeat(self.persistent, columns))
        return self._copies[columns]


class MachineTable:
    """The machine's routes and the workload's collectives as flow classes: route r is class r, collective c is class
    `routes + c`. Bytes of a collective are counted on its most loaded link (semantics 8.4).
    """

    def __init__(self, problem: Problem) -> None:
        machine, workload = problem.machine, problem.workload
        memories = len(machine.memories)
        self.routes = len(machine.routes)
        self.route_of = np.full((memories, memories), -1, np.int32)
        links: list[list[tuple[int, float]]] = []
        for index, route in enumerate(machine.routes):
            self.route_of[route.source, route.destination] = index
            links.append([(link, 1.0) for link in route.links])
        latency = [sum(machine.links[link].latency_s for link in route.links) for route in machine.routes]
        self.collective_load: list[float] = []
        for collective in workload.collectives:
            loads = machine.collective_loads(collective.kind, collective.devices)
            largest = max(loads.values(), default=0.0)
            links.append([(link, load / largest) for link, load in sorted(loads.items())])
            self.collective_load.append(largest)
            latency.append(machine.collective_latency_s(collective.kind, collective.devices))
        overheads = machine.overheads
        setup = [overheads.transfer_setup_s] * self.routes + [overheads.launch_s] * len(workload.collectives)
        self.setup_s = np.array(setup, np.float64) + np.array(latency, np.float64)
        self.collective_bytes = np.array([c.size_bytes for c in workload.collectives], np.int64)
        self.link_ptr = _pointers([len(entries) for entries in links])
        self.link = np.array([link for entries in links for link, _ in entries], np.int64)
        self.coefficient = np.array([share for entries in links for _, share in entries], np.float64)
        engines = [list(route.engines) for route in machine.routes] + [[] for _ in workload.collectives]
        self.engine_ptr = _pointers([len(entries) for entries in engines])
        self.engine = np.array([engine for entries in engines for engine in entries], np.int64)
        self.first_stream = np.array(
            [FIRST_ENGINE_STREAM + route.engines[0] if route.engines else -1 for route in machine.routes], np.int64
        )
        none = [-1] * len(workload.collectives)
        self.source = np.array([route.source for route in machine.routes] + none, np.int32)
        self.destination = np.array([route.destination for route in machine.routes] + none, np.int32)
        members = [()] * self.routes + [collective.devices for collective in workload.collectives]
        self.member_ptr = _pointers([len(entries) for entries in members])
        self.member = np.array([device for entries in members for device in entries], np.int32)
        self.device_memory = np.array([device.memory for device in machine.devices], np.int32)
        self.bandwidth = np.array([link.bandwidth_bytes_per_s for link in machine.links], np.float64)
        factors = machine.interference
        self.interference = np.array(
            [
                factors.compute_during_copy_in,
                factors.compute_during_copy_out,
                factors.compute_during_collective,
                factors.collective_during_compute,
                factors.copy_during_compute,
            ],
            np.float64,
        )

    @cached_property
    def classes_of_link(self) -> list[NDArray[np.int64]]:
        """Per link, the routes that contain it."""
        owner = np.repeat(np.arange(self.link_ptr.size - 1), np.diff(self.link_ptr))
        return [owner[(self.link == link) & (owner < self.routes)] for link in range(self.bandwidth.size)]


def _pointers(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


class ProblemTable:
    """All tables of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.programs = [ProgramTable(problem, index) for index in range(len(problem.workload.programs))]
        self.machine = MachineTable(problem)
        self.micro_batches = problem.workload.micro_batches

    def program(self, problem: Problem, device: int) -> ProgramTable:
        return self.programs[problem.workload.device_program[device]]


_known: dict[int, tuple[weakref.ref[Problem], ProblemTable]] = {}


def table_of(problem: Problem) -> ProblemTable:
    """The tables of a problem, kept as long as the problem lives: local search lowers thousands of schedules of one."""
    entry = _known.get(id(problem))
    if entry is not None and entry[0]() is problem:
        return entry[1]
    key = id(problem)
    table = ProblemTable(problem)
    _known[key] = (weakref.ref(problem, lambda _: _known.pop(key, None)), table)
    return table
