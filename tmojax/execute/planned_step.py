"""A training step that runs by a plan: real arrays in, real arrays out, memory and time as the plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import tmojax.jax_setup  # noqa: F401
from tmojax.check.acceptance import require_valid, schedule_of
from tmojax.errors import InputError
from tmojax.execute.codecs import Recoding, Recodings
from tmojax.execute.compiled_step import CompiledStep
from tmojax.execute.file_store import FileCopy, FileStore
from tmojax.execute.functions import StepFunctions
from tmojax.execute.host_pool import HostPool, host_sharding
from tmojax.execute.joined import Segments, joined_segments, single_segments
from tmojax.execute.ledger import MemoryCount
from tmojax.execute.lists import RECODINGS, Copy, PreparedList, prepare_list
from tmojax.execute.step_run import Prepared, StepRun
from tmojax.problem import PLAIN, Lifetime, Problem, Schedule
from tmojax.problem.io import PlanFile
from tmojax.problem.machine import MemoryKind

Array = Any


@dataclass(frozen=True, eq=False)
class StepResult:
    """What one step gives besides the new state.

    `values` [device][micro-batch]: the step's other results, in order (for a training step: the loss). `memory`
    [device][memory of the machine]: counted and planned bytes of the device's list. `gradients` [device]: by tensor
    name, as the optimizer saw them (empty unless asked for). `start_s`, `end_s` [device]: seconds of each instruction
    (NaN unless the step was measured); the time of a segment of several ops is divided by their planned durations.
    `segments` [device]: what was dispatched.
    """

    values: list[list[list[np.ndarray]]]
    memory: tuple[tuple[MemoryCount, ...], ...]
    gradients: list[dict[str, np.ndarray]]
    start_s: list[np.ndarray]
    end_s: list[np.ndarray]
    segments: Segments

    @property
    def loss(self) -> float:
        """Mean of the first result over devices and micro-batches."""
        return float(np.mean([micro_batch[0] for device in self.values for micro_batch in device]))


class PlannedStep:
    """A compiled step that runs by a schedule.

    Make it, `load` the state, call `step` as often as wanted. The state lives where the schedule's `initial` says.
    `segments` [device]: the programs that are dispatched, in list order.
    """

    def __init__(
        self,
        compiled: CompiledStep,
        problem: Problem,
        plan: PlanFile | Schedule,
        *,
        segments: str = "joined",
        nvme_folder: str | Path | None = None,
    ) -> None:
        """Prepare a plan of `problem`, whose workload is `compiled.workload`.

        `segments`: "joined" makes one program of the ops between two transfer points, as far as the planned bytes
        allow; "ops" runs every op as a program of its own, so that all plans give the same bits.
        `nvme_folder`: a folder on the drive, for plans that use the machine's NVMe memory.

        Raises InputError for a plan of another problem or step, a plan that the checker rejects, one that does not
        count the workspace that the compiled ops need, and what the runtime cannot move.
        """
        schedule = schedule_of(problem, plan)
        compiled.require_same(problem.workload)
        self._problem, self._schedule = problem, schedule
        self._devices, self._functions = compiled.devices, compiled.functions
        require_valid(problem, schedule)
        self._lists = tuple(prepare_list(problem, schedule, d) for d in range(len(self._devices)))
        if segments not in ("joined", "ops"):
            raise InputError(f'segments: {segments!r} must be "joined" or "ops"')
        joined = segments == "joined"
        self.segments: Segments = (
            joined_segments(compiled, problem, self._lists) if joined else single_segments(compiled, self._lists)
        )
        self._places = self._place_memories()
        self._pools = tuple(HostPool(self._devices[one.device], host_peak_bytes(problem, one)) for one in self._lists)
        self._stores = tuple(self._stores_of(one, nvme_folder) for one in self._lists)
        self._codecs = Recodings(problem.machine.codecs, self._devices)
        self._recodings = tuple(self._recodings_of(one) for one in self._lists)
        self._prepared = Prepared(
            problem=problem,
            schedule=schedule,
            lists=self._lists,
            array_bytes=compiled.array_bytes,
            segments=self.segments,
            reductions=compiled.reductions,
            recodings=self._recodings,
            encoded_bytes=self._encoded_bytes(),
            stores=self._stores,
            place_of=self._places,
        )
        self._table: dict[Copy, Array] = {}

    # --- state -------------------------------------------------------------------------------------------------

    def load(self, *state: Any) -> None:
        """Copy the state to where the plan wants it, on every device the same.

        `state`: for `import_train_step` (parameters, optimizer state); gradient accumulators start at zero. For
        `import_step` the state. Raises InputError for another structure, shapes, and arrays that are deleted.
        """
        for key in list(self._table):
            self._drop(key)
        for device, functions in enumerate(self._functions):
            values = _state_values(functions, state)
            for placement in self._schedule.initial[device]:
                for memory in placement.memories:
                    self._table[device, placement.tensor, 0, memory, PLAIN] = self._store(
                        device, memory, values[placement.tensor]
                    )

    def state(self, device: int = 0) -> tuple[Any, ...]:
        """The state as NumPy arrays, in the structure in which it was loaded (accumulators included)."""
        functions = self._functions[device]
        where = {p.tensor: p.memories[0] for p in self._schedule.initial[device]}
        traced = functions.traced
        leaves = []
        for position, storage in enumerate(traced.graph.arguments[: traced.state_tree.num_leaves]):
            tensor = functions.tensor_of.get(storage, -1)
            leaves.append(
                _copied(self._table[device, tensor, 0, where[tensor], PLAIN]) if tensor in where else position
            )
        return jax.tree.unflatten(traced.state_tree, leaves)

    @property
    def host_buffers(self) -> tuple[tuple[int, int], ...]:
        """Per device: host buffers allocated so far, and copies that went into a buffer from before."""
        return tuple((pool.allocated, pool.reused) for pool in self._pools)

    # --- steps -------------------------------------------------------------------------------------------------

    def step(self, batches: Sequence[Sequence[Any]], *, measure: bool = False, gradients: bool = False) -> StepResult:
        """Run one step. `batches` [device][micro-batch]: trees as the step was traced with.

        `measure`: time every instruction; each stream then waits for its own work, so that times are exact and what
        overlaps on one stream no longer does. `gradients`: return them, which waits at every op of the optimizer.
        """
        if not self._table:
            raise InputError("state: nothing is loaded; call `load` before the first step")
        self._load_batches(batches)
        run = StepRun(self._prepared, self._table, measure, gradients)
        try:
            outcome = run.run()
        except BaseException:
            self._table.clear()  # half a step leaves no state worth keeping
            raise
        functions = self._functions[0]
        for key in [key for key in self._table if not self._is_state(key)]:
            self._drop(key)  # inputs that the plan left in host memory
        count = self._problem.workload.micro_batches
        free = functions.free_results
        values = [
            [[outcome.results[d, k, p] for p in free if (d, k, p) in outcome.results] for k in range(count)]
            for d in range(len(self._devices))
        ]
        noted: list[dict[str, np.ndarray]] = [{} for _ in self._devices]
        for (device, tensor), value in outcome.gradients.items():
            name = self._problem.workload.program(device).tensors[tensor].name
            noted[device][name] = np.asarray(self._functions[device].as_gradient(tensor, value))
        return StepResult(
            values=values,
            memory=tuple(ledger.counts() for ledger in run.ledgers),
            gradients=noted,
            start_s=outcome.start_s,
            end_s=outcome.end_s,
            segments=self.segments,
        )

    def _load_batches(self, batches: Sequence[Sequence[Any]]) -> None:
        count = self._problem.workload.micro_batches
        if len(batches) != len(self._devices) or any(len(own) != count for own in batches):
            raise InputError(
                f"batches: expected {len(self._devices)} device(s) with {count} micro-batch(es) each, got "
                f"{[len(own) for own in batches]}"
            )
        for device, functions in enumerate(self._functions):
            host = self._problem.machine.devices[device].host_memory
            traced = functions.traced
            first = traced.state_tree.num_leaves
            for micro_batch, batch in enumerate(batches[device]):
                leaves = _leaves(batch, traced.batch_tree, f"batches[{device}][{micro_batch}]")
                for position, leaf in enumerate(leaves, first):
                    tensor = functions.tensor_of.get(traced.graph.arguments[position], -1)
                    if tensor < 0:
                        continue  # the step does not read it
                    name = traced.arguments[position].name
                    value = _value(leaf, functions.shapes[tensor], f"batches[{device}][{micro_batch}]: {name}")
                    self._table[device, tensor, micro_batch, host, PLAIN] = self._pools[device].load(value)

    def _is_state(self, key: Copy) -> bool:
        return self._problem.workload.program(key[0]).tensors[key[1]].lifetime is Lifetime.STATE

    # --- memories ----------------------------------------------------------------------------------------------

    def _place_memories(self) -> tuple[Any, ...]:
        places: list[Any] = [None] * len(self._problem.machine.memories)
        for spec, device in zip(self._problem.machine.devices, self._devices, strict=True):
            if spec.kind != "gpu":
                raise InputError(
                    f"device {spec.name!r}: kind {spec.kind!r} has no runtime; plan for devices of kind 'gpu'"
                )
            places[spec.memory] = SingleDeviceSharding(device)
            host_sharding(device)
        return tuple(places)

    def _stores_of(self, one: PreparedList, folder: str | Path | None) -> tuple[HostPool | FileStore | None, ...]:
        stores: list[HostPool | FileStore | None] = []
        for index, memory in enumerate(self._problem.machine.memories):
            if memory.kind is MemoryKind.HOST:
                stores.append(self._pools[one.device])
            elif memory.kind is MemoryKind.NVME and max(one.planned_bytes[index].values()) > 0:
                if folder is None or not Path(folder).is_dir():
                    raise InputError(
                        f"nvme_folder: {str(folder)!r} is no folder, and the plan uses memory {memory.name!r}; give a "
                        f"folder on that drive"
                    )
                stores.append(FileStore(folder))
            else:
                stores.append(None)
        return tuple(stores)

    def _store(self, device: int, memory: int, value: Array) -> Array:
        store = self._stores[device][memory]
        if store is not None:
            return store.load(np.asarray(value))
        # A copy, because what is given may share its buffer with arrays of the caller, and steps donate it.
        return jnp.copy(jax.device_put(value, self._places[memory]))

    def _drop(self, key: Copy) -> None:
        array = self._table.pop(key)
        store = self._stores[key[0]][key[3]]
        if store is not None:
            store.give_back(array)
        else:
            array.delete()

    # --- codecs ------------------------------------------------------------------------------------------------

    def _recodings_of(self, one: PreparedList) -> dict[int, Recoding]:
        found = {}
        for node in one.nodes.values():
            if node.kind in RECODINGS:
                (plain,) = (copy for copy in (*node.reads, *node.writes) if copy[4] == PLAIN)
                (form,) = (copy[4] for copy in (*node.reads, *node.writes) if copy[4] != PLAIN)
                functions = self._functions[plain[0]]
                where = f"{self._problem.machine.devices[one.device].name} #{node.index}: "
                where += f"{node.kind.name.lower()} of {functions.program.tensors[plain[1]].name!r}"
                found[node.index] = self._codecs.of(form, one.device, functions.shapes[plain[1]], where)
        return found

    def _encoded_bytes(self) -> dict[tuple[int, int, int], int]:
        return {
            (copy[0], copy[1], copy[4]): own[node.index].encoded_bytes
            for one, own in zip(self._lists, self._recodings, strict=True)
            for node in one.nodes.values() if node.index in own
            for copy in (*node.reads, *node.writes) if copy[4] != PLAIN
        }  # fmt: skip


def host_peak_bytes(problem: Problem, one: PreparedList) -> int:
    """Most bytes that a list plans to have in host memories."""
    total = 0
    for memory, planned in zip(problem.machine.memories, one.planned_bytes, strict=True):
        if memory.kind is MemoryKind.HOST:
            total += max(planned.values(), default=0)
    return total


def _copied(array: Array | FileCopy) -> np.ndarray:
    return array.read() if isinstance(array, FileCopy) else np.array(array)


def _leaves(tree: Any, expected: Any, where: str) -> list[Any]:
    leaves, structure = jax.tree.flatten(tree)
    if structure != expected:
        raise InputError(f"{where}: has structure {structure}, the step was traced with {expected}")
    return leaves


def _value(leaf: Any, shape: jax.ShapeDtypeStruct, where: str) -> np.ndarray:
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise InputError(f"{where}: the array is deleted, it was probably donated to an earlier step; give a live one")
    value = np.asarray(leaf)
    if value.shape != shape.shape or value.dtype != shape.dtype:
        raise InputError(
            f"{where}: is {value.dtype}{list(value.shape)}, the step was traced with {shape.dtype}{list(shape.shape)}"
        )
    return value


def _state_values(functions: StepFunctions, state: tuple[Any, ...]) -> dict[int, Array]:
    """Value of every STATE tensor; trees that are not given (gradient accumulators) start at zero."""
    traced = functions.traced
    trees = jax.tree_util.treedef_children(traced.state_tree)
    if not 1 <= len(state) <= len(trees) or (len(state) < len(trees) and len(trees) != 3):
        raise InputError(f"state: expected {len(trees)} tree(s), got {len(state)}")
    values: dict[int, Array] = dict(functions.constants())
    position = 0
    for place, tree in enumerate(trees):
        given = _leaves(state[place], tree, f"state[{place}]") if place < len(state) else None
        for number in range(tree.num_leaves):
            tensor = functions.tensor_of.get(traced.graph.arguments[position], -1)
            if tensor >= 0:
                shape, name = functions.shapes[tensor], traced.arguments[position].name
                values[tensor] = (
                    np.zeros(shape.shape, shape.dtype) if given is None else _value(given[number], shape, name)
                )
            position += 1
    return values
