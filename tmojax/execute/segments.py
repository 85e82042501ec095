"""Segments: ops that run as one compiled program, with the memory that the compiler needs for it.

Segments with the same computation share one traced function, so that the layers of a network compile once per device.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.sharding import SingleDeviceSharding

from tmojax.execute.functions import StepFunctions

Array = Any
Instance = tuple[int, int]  # (tensor, micro-batch instance)


@dataclass(frozen=True)
class Run:
    """One op of one micro-batch in a segment."""

    op: int
    micro_batch: int


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled segment on one device.

    Call it with arrays for `inputs`; of these, `updates` are donated. It returns the new values of `updates`, then of
    `writes`, then `results`: (micro-batch, position among the results of the traced step).
    `workspace_bytes`: everything that the compiler allocates beyond its operands and `writes`: temporaries, updates
    that it could not make in place, results.
    """

    executable: Any
    inputs: tuple[Instance, ...]
    updates: tuple[Instance, ...]
    writes: tuple[Instance, ...]
    results: tuple[tuple[int, int], ...]
    workspace_bytes: int


@dataclass(frozen=True, eq=False)
class _Traced:
    closed: Any
    donated: tuple[int, ...]
    inputs: tuple[Instance, ...]
    updates: tuple[Instance, ...]
    writes: tuple[Instance, ...]
    results: tuple[tuple[int, int], ...]

    @cached_property
    def key(self) -> str:
        return f"{self.donated} {self.closed.jaxpr}"


class SegmentCompiler:
    """Compiles segments of one program for any device; keeps what it compiled."""

    def __init__(self, functions: StepFunctions, instance_of: Any) -> None:
        """`instance_of(tensor, op, micro_batch)`: instance number, as in `Workload.instance`."""
        self._functions, self._instance_of = functions, instance_of
        self._traced: dict[tuple[Run, ...], _Traced] = {}
        self._jitted: dict[str, Any] = {}
        self._executables: dict[tuple[str, Any], tuple[Any, int]] = {}

    def compile(self, runs: Sequence[Run], device: Any) -> Compiled:
        """Compile ops that run one after another on `device`, without anything between them."""
        traced = self._trace(tuple(runs))
        with _quiet():
            executable, workspace_bytes = self._executable(traced, device)
        return Compiled(executable, traced.inputs, traced.updates, traced.writes, traced.results, workspace_bytes)

    def compile_op(self, op: int, micro_batch: int, device: Any) -> Compiled:
        """Compile one op; other micro-batches of it differ in nothing but the instances."""
        run = Run(op, micro_batch)
        compiled = self.compile((Run(op, 0),), device)

        def here(instances: tuple[Instance, ...]) -> tuple[Instance, ...]:
            return tuple(self._at(run, tensor) for tensor, _ in instances)

        return Compiled(
            compiled.executable, here(compiled.inputs), here(compiled.updates), here(compiled.writes),
            tuple((micro_batch, position) for _, position in compiled.results), compiled.workspace_bytes,
        )  # fmt: skip

    def compile_ops(self, ops: Sequence[int], devices: Sequence[Any]) -> None:
        """Compile ops for all of `devices` ahead, in threads: XLA compiles a program anew for every device."""
        wanted = {}
        for op in ops:
            traced = self._trace((Run(op, 0),))
            self._jit(traced)
            wanted.update({(traced.key, device): (traced, device) for device in devices})
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool, _quiet():
            list(pool.map(lambda one: self._executable(*one), wanted.values()))

    def distinct(self, ops: Sequence[int]) -> int:
        """How many different computations some ops are: as many programs are compiled per device."""
        return len({self._trace((Run(op, 0),)).key for op in ops})

    def _trace(self, runs: tuple[Run, ...]) -> _Traced:
        if runs in self._traced:
            return self._traced[runs]
        inputs: dict[Instance, None] = {}
        updates: dict[Instance, None] = {}
        writes: dict[Instance, None] = {}
        results: list[tuple[int, int]] = []
        functions = [self._functions.functions[run.op] for run in runs]
        for run, function in zip(runs, functions, strict=True):
            touched = [self._at(run, tensor) for tensor in (*function.reads, *function.updates)]
            inputs.update(dict.fromkeys(i for i in touched if i not in writes))
            updated = [self._at(run, tensor) for tensor in function.updates]
            updates.update(dict.fromkeys(i for i in updated if i not in writes))
            writes.update(dict.fromkeys(self._at(run, tensor) for tensor in function.writes))
            results += [(run.micro_batch, position) for position in function.results]

        def segment(*arrays: Array) -> tuple[Array, ...]:
            values = dict(zip(inputs, arrays, strict=True))
            found: list[Array] = []
            for run, function in zip(runs, functions, strict=True):
                operands = {t: values[self._at(run, t)] for t in (*function.reads, *function.updates)}
                new, made, returned = self._functions.apply(function, operands)
                values.update(zip((self._at(run, t) for t in function.updates), new, strict=True))
                values.update(zip((self._at(run, t) for t in function.writes), made, strict=True))
                found += returned
            return (*(values[i] for i in updates), *(values[i] for i in writes), *found)

        shapes = [self._functions.shapes[tensor] for tensor, _ in inputs]
        closed = jax.make_jaxpr(segment)(*shapes)
        donated = tuple(place for place, instance in enumerate(inputs) if instance in updates)
        traced = _Traced(closed, donated, tuple(inputs), tuple(updates), tuple(writes), tuple(results))
        self._traced[runs] = traced
        return traced

    def _at(self, run: Run, tensor: int) -> Instance:
        return tensor, self._instance_of(tensor, run.op, run.micro_batch)

    def _jit(self, traced: _Traced) -> Any:
        if traced.key not in self._jitted:
            self._jitted[traced.key] = jax.jit(
                jex_core.jaxpr_as_fun(traced.closed), donate_argnums=traced.donated, keep_unused=True
            )
        return self._jitted[traced.key]

    def _executable(self, traced: _Traced, device: Any) -> tuple[Any, int]:
        key = traced.key, device
        if key not in self._executables:
            sharding = SingleDeviceSharding(device)
            shapes = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in traced.closed.in_avals]
            executable = self._jit(traced).lower(*shapes).compile()
            made = traced.closed.out_avals[len(traced.updates) : len(traced.updates) + len(traced.writes)]
            self._executables[key] = executable, workspace_bytes(executable, sum(map(array_bytes, made)))
        return self._executables[key]


@contextmanager
def _quiet() -> Iterator[None]:
    """An update that cannot be made in place is counted as workspace, so JAX need not warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield


def array_bytes(shape: Any) -> int:
    """Bytes of an array of a shape and dtype; random keys count as what they hold."""
    count = 1
    for length in shape.shape:
        count *= length
    return count * shape.dtype.itemsize


def workspace_bytes(executable: Any, writes_bytes: int) -> int:
    """What a compiled program allocates besides its operands and `writes_bytes` of outputs that are not donated."""
    memory: Any = executable.memory_analysis()
    extra = memory.output_size_in_bytes - memory.alias_size_in_bytes - writes_bytes
    return int(memory.temp_size_in_bytes + max(extra, 0))
