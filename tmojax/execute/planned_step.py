"""A training step that runs by a plan: real arrays in, real arrays out, memory and time as the plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import tmojax.jax_setup  # noqa: F401
from tmojax.check.acceptance import require_valid, schedule_of
from tmojax.errors import InputError
from tmojax.execute.compiled_step import CompiledStep
from tmojax.execute.functions import StepFunctions
from tmojax.execute.host_pool import HostPool, host_sharding
from tmojax.execute.ledger import MemoryCount
from tmojax.execute.lists import Copy, PreparedList, prepare_list
from tmojax.execute.step_run import Prepared, StepRun
from tmojax.problem import Lifetime, Problem, Schedule
from tmojax.problem.io import PlanFile
from tmojax.problem.machine import MemoryKind

Array = Any


@dataclass(frozen=True, eq=False)
class StepResult:
    """What one step gives besides the new state.

    `values` [device][micro-batch]: the step's other results, in order (for a training step: the loss). `memory`
    [device][memory of the machine]: counted and planned bytes of the device's list. `gradients` [device]: by tensor
    name, as the optimizer saw them (empty unless asked for). `start_s`, `end_s` [device]: seconds of each instruction
    (NaN unless the step was measured).
    """

    values: list[list[list[np.ndarray]]]
    memory: tuple[tuple[MemoryCount, ...], ...]
    gradients: list[dict[str, np.ndarray]]
    start_s: list[np.ndarray]
    end_s: list[np.ndarray]

    @property
    def loss(self) -> float:
        """Mean of the first result over devices and micro-batches."""
        return float(np.mean([micro_batch[0] for device in self.values for micro_batch in device]))


class PlannedStep:
    """A compiled step that runs by a schedule.

    Make it, `load` the state, call `step` as often as wanted. The state lives where the schedule's `initial` says.
    """

    def __init__(self, compiled: CompiledStep, problem: Problem, plan: PlanFile | Schedule) -> None:
        """Prepare a plan of `problem`, whose workload is `compiled.workload`.

        Raises InputError for a plan of another problem or step, a plan that the checker rejects, one that does not
        count the workspace that the compiled ops need, and what the runtime cannot move.
        """
        schedule = schedule_of(problem, plan)
        compiled.require_same(problem.workload)
        self._problem, self._schedule = problem, schedule
        self._devices, self._functions = compiled.devices, compiled.functions
        require_valid(problem, schedule)
        self._lists = tuple(prepare_list(problem, schedule, d) for d in range(len(self._devices)))
        self._places = self._place_memories()
        self._pools = tuple(HostPool(self._devices[one.device], host_peak_bytes(problem, one)) for one in self._lists)
        self._prepared = Prepared(
            problem=problem,
            schedule=schedule,
            lists=self._lists,
            array_bytes=compiled.array_bytes,
            segments=compiled.segments,
            reductions=compiled.reductions,
            pools=self._pools,
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
                    self._table[device, placement.tensor, 0, memory] = self._store(
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
            leaves.append(np.array(self._table[device, tensor, 0, where[tensor]]) if tensor in where else position)
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
                    self._table[device, tensor, micro_batch, host] = self._pools[device].load(value)

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
        for memory, place in zip(self._problem.machine.memories, places, strict=True):
            if memory.kind is MemoryKind.NVME and place is None and self._uses(memory.name):
                raise InputError(f"memory {memory.name!r}: the runtime has no NVMe tier; plan without it")
        return tuple(places)

    def _uses(self, name: str) -> bool:
        index = [memory.name for memory in self._problem.machine.memories].index(name)
        return any(len(one.planned_bytes[index]) > 1 or one.planned_bytes[index].get(-1) for one in self._lists)

    def _store(self, device: int, memory: int, value: Array) -> Array:
        place = self._places[memory]
        if place is None:
            return self._pools[device].load(np.asarray(value))
        # A copy, because what is given may share its buffer with arrays of the caller, and steps donate it.
        return jnp.copy(jax.device_put(value, place))

    def _drop(self, key: Copy) -> None:
        array = self._table.pop(key)
        if self._places[key[3]] is None:
            self._pools[key[0]].give_back(array)
        else:
            array.delete()


def host_peak_bytes(problem: Problem, one: PreparedList) -> int:
    """Most bytes that a list plans to have in host memories."""
    total = 0
    for memory, planned in zip(problem.machine.memories, one.planned_bytes, strict=True):
        if memory.kind is not MemoryKind.DEVICE:
            total += max(planned.values(), default=0)
    return total


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
