"""Ops of a traced step as functions of arrays.

An op computes the storages that its kernels write, from the tensors that it reads; what is between is computed inside.
A tensor that is updated in place always has the shape of the argument that it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.importers.jax_applying import Number, Seen
from tmojax.importers.jax_traced import TracedStep
from tmojax.problem import Op, Program

Array = Any


@dataclass(frozen=True, eq=False)
class OpFunction:
    """One op as a function.

    `reads` and `updates` are tensors of the program: the operands, in this order, the latter donated. The outputs are
    the new values of `updates`, then those of `writes`, then copies of `results`: positions among the results of the
    traced step that the caller gets (the loss). `equations` of the graph are applied in order.
    """

    op: int
    reads: tuple[int, ...]
    updates: tuple[int, ...]
    writes: tuple[int, ...]
    results: tuple[int, ...]
    equations: tuple[int, ...]
    read_storages: Mapping[int, tuple[int, ...]]
    update_storages: tuple[int, ...]
    write_storages: tuple[int, ...]


class StepFunctions:
    """All ops of one program of a traced step, and the shapes of its tensors."""

    def __init__(self, traced: TracedStep, program: Program) -> None:
        self.traced, self.program, self.graph = traced, program, traced.graph
        same_names(traced, program)
        self.index_of = {tensor.name: index for index, tensor in enumerate(program.tensors)}
        self.tensor_of = {storage: self.tensor(name) for storage, name in traced.tensor_of.items()}
        self.argument_of: dict[int, int] = {}  # tensor -> position among the arguments
        self._arguments = set(self.graph.arguments)
        for position, storage in enumerate(self.graph.arguments):
            if storage in self.tensor_of:
                self.argument_of[self.tensor_of[storage]] = position
        self.shapes = self._shapes()
        self._check_results()
        self.functions = {i: self._function(i, op) for i, op in enumerate(program.ops) if not op.collective}

    def tensor(self, name: str) -> int:
        """Index of a tensor of the traced step. Raises InputError if the program lacks it."""
        if name not in self.index_of:
            raise InputError(
                f"tensor {name!r} of the traced step is not in program {self.program.name!r}; plan the workload that "
                f"was imported together with this step"
            )
        return self.index_of[name]

    # --- what there is -----------------------------------------------------------------------------------------

    def constants(self) -> dict[int, Array]:
        """Values of the tensors that the step closes over, by tensor."""
        return {self.tensor_of[s]: self.graph.values[s] for s in self.graph.constants if s in self.tensor_of}

    @property
    def free_results(self) -> tuple[int, ...]:
        """Positions among the results that replace no argument: what the step returns besides the new state."""
        replacing = {argument.result for argument in self.traced.arguments}
        return tuple(p for p in range(len(self.graph.results)) if p not in replacing)

    def as_gradient(self, tensor: int, value: Array) -> Array:
        """A gradient in the shape of its weight; it is kept as its producer makes it (transposed, say)."""
        for view in self.traced.gradient_views.get(self.program.tensors[tensor].name, ()):
            (value,) = view(jnp.asarray(value))
        return value

    def _shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of every tensor; one that is replaced in place has the shape of the argument."""
        storage_of: dict[int, int] = {}
        for storage, tensor in self.tensor_of.items():
            if tensor not in storage_of or storage in self._arguments:
                storage_of[tensor] = storage
        made = [self.graph.storages[storage_of[tensor]] for tensor in range(len(self.program.tensors))]
        return [jax.ShapeDtypeStruct(storage.shape, storage.array_dtype) for storage in made]

    def _check_results(self) -> None:
        """Every new value of the state must be one that an op computes, or the old one; other results are computed."""
        for position in self.free_results:
            if self.graph.storages[self.graph.results[position]].producer < 0:
                raise InputError(
                    f"step: result {position} is an argument or a constant; return only what the step computes beside "
                    f"the new state"
                )
        for position, argument in enumerate(self.traced.arguments):
            if argument.result < 0:
                continue
            storage, result = self.graph.arguments[position], self.graph.results[argument.result]
            if result != storage and self.graph.storages[result].producer < 0:
                raise InputError(
                    f"step: the new value of {argument.name!r} is another argument or a constant, so the two would "
                    f"share one buffer (aliased); compute it, for example by `+ 0`"
                )

    # --- ops ---------------------------------------------------------------------------------------------------

    def _function(self, index: int, op: Op) -> OpFunction:
        computed = self.traced.op_writes[op.name]
        wanted = set(computed)
        operands = self.traced.op_reads[op.name] - wanted
        equations: list[int] = []
        read: dict[int, set[int]] = {}
        seen: set[int] = set()
        stack = sorted(wanted)
        while stack:
            storage = stack.pop()
            if storage in seen:
                continue
            seen.add(storage)
            producer = self.graph.storages[storage].producer
            if storage in operands:
                read.setdefault(self.tensor_of[storage], set()).add(storage)
                self._check_shape(storage)
            elif producer >= 0:
                equations.append(producer)
                stack.extend(self.graph.equations[producer].inputs)
            elif storage not in self.graph.values:
                raise InputError(f"op {op.name!r} needs an argument of the step that it does not read")
        storage_of = {self.tensor(n): s for s, names in self.traced.updated.items() if s in wanted for n in names}
        resets = {self.tensor(name) for name in self.traced.resets[op.name]}
        update_storages = tuple(-1 if t in resets else storage_of[t] for t in op.updates)
        by_tensor = {self.tensor_of[s]: s for s in computed if s in self.tensor_of}
        free = set(self.free_results)
        return OpFunction(
            op=index,
            reads=op.reads,
            updates=op.updates,
            writes=op.writes,
            results=tuple(p for p, s in enumerate(self.graph.results) if p in free and s in wanted),
            equations=tuple(sorted(set(equations))),
            read_storages={tensor: tuple(sorted(found)) for tensor, found in read.items()},
            update_storages=update_storages,
            write_storages=tuple(by_tensor[t] for t in op.writes),
        )

    def apply(self, function: OpFunction, operands: Mapping[int, Array]) -> tuple[list[Array], ...]:
        """Run an op on arrays (or tracers): new values of its updates, of its writes, and its results."""
        values: dict[int, Array] = {}
        for tensor, storages in function.read_storages.items():
            values.update(dict.fromkeys(storages, operands[tensor]))
        for index in function.equations:
            equation = self.graph.equations[index]
            outputs = equation.apply(*(self._operand(values, operand) for operand in equation.operands))
            for storage, output in zip(equation.outputs, outputs, strict=True):
                values.setdefault(storage, output)
        updates = [
            jnp.zeros_like(operands[tensor]) if storage < 0 else self._result(values, tensor)
            for tensor, storage in zip(function.updates, function.update_storages, strict=True)
        ]
        writes = [values[storage] for storage in function.write_storages]
        results = [_view(values[self.graph.results[p]], self.graph.seen_results[p]) for p in function.results]
        return updates, writes, results

    def _operand(self, values: dict[int, Array], operand: Seen | Number) -> Array:
        if isinstance(operand, Number):
            return operand.value
        if operand.storage not in values:
            values[operand.storage] = self.graph.values[operand.storage]
        return _view(values[operand.storage], operand)

    def _result(self, values: dict[int, Array], tensor: int) -> Array:
        """The new value of an argument, in the argument's shape."""
        seen = self.graph.seen_results[self.traced.arguments[self.argument_of[tensor]].result]
        return _view(values[seen.storage], seen)

    def _check_shape(self, storage: int) -> None:
        """A new value that is read again must be in the argument's shape as it is made."""
        for name in self.traced.updated.get(storage, ()):
            result = self.traced.arguments[self.argument_of[self.tensor(name)]].result
            if self.graph.seen_results[result].views:
                raise InputError(
                    f"step: the new value of {name!r} is used again in another shape than the one that is returned; "
                    f"return it in the shape in which it is used"
                )


def _view(array: Array, seen: Seen) -> Array:
    for view in seen.views:
        (array,) = view(array)
    return array


def same_names(traced: TracedStep, program: Program) -> None:
    """Raises InputError for an op of the traced step that the program lacks, and the reverse."""
    ours = {op.name for op in program.ops if not op.collective}
    missing = sorted(traced.op_writes.keys() ^ ours)
    if missing:
        where = "the traced step" if missing[0] in ours else f"program {program.name!r}"
        raise InputError(
            f"op {missing[0]!r} is not in {where} ({len(missing)} such names); plan the workload that was imported "
            f"together with this step"
        )
