"""Segments: ops that run as one compiled program, with the memory that the compiler needs for it.

Segments with the same computation share one traced function, so that the layers of a network compile once per device.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.sharding import SingleDeviceSharding

from tmojax.execute.functions import StepFunctions

Array = Any
Instance = tuple[int, int]  # (tensor, micro-batch instance)


@dataclass(frozen=True)
class Run:
    """One op of one micro-batch in a segment. `dropped`: tensors whose new value nobody takes, because it is there.

    `again`: it ran before, so its results are not wanted.
    """

    op: int
    micro_batch: int
    dropped: tuple[int, ...] = ()
    again: bool = False


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
class _Operands:
    """Inputs, updates, writes and results of a segment, as in `Compiled`; `pattern`: which of its runs touch what."""

    inputs: tuple[Instance, ...]
    updates: tuple[Instance, ...]
    writes: tuple[Instance, ...]
    results: tuple[tuple[int, int], ...]
    pattern: Hashable


@dataclass(frozen=True, eq=False)
class _Traced:
    closed: Any
    donated: tuple[int, ...]
    made: tuple[int, int]  # outputs before and behind those that are new arrays of the step

    @cached_property
    def key(self) -> str:
        """Equal for equal computations; of the constants, what they hold."""
        held = hashlib.sha256()
        for constant in self.closed.consts:
            is_key = jnp.issubdtype(constant.dtype, jax.dtypes.prng_key)
            held.update(np.asarray(jax.random.key_data(constant) if is_key else constant).tobytes())
        return f"{self.donated} {held.hexdigest()} {self.closed.jaxpr}"


class SegmentCompiler:
    """Compiles segments of one program for any device; keeps what it compiled."""

    def __init__(self, functions: StepFunctions, instance_of: Any) -> None:
        """`instance_of(tensor, op, micro_batch)`: instance number, as in `Workload.instance`."""
        self._functions, self._instance_of = functions, instance_of
        self._traced: dict[Hashable, _Traced] = {}
        self._jitted: dict[str, Any] = {}
        self._executables: dict[tuple[str, Any], Any] = {}
        self._workspace_bytes: dict[str, int] = {}

    def compile(self, runs: Sequence[Run], kept: Set[Instance] | None, device: Any) -> Compiled:
        """Compile ops that run one after another on `device`, without anything between them.

        `kept`: those of the written instances that the segment returns; None for all.
        """
        operands = self._operands(runs, kept)
        traced = self._trace(runs, operands)
        with _quiet():
            executable = self._executable(traced, device)
        return Compiled(
            executable, operands.inputs, operands.updates, operands.writes, operands.results,
            self._workspace_bytes[traced.key],
        )  # fmt: skip

    def workspace_bytes(self, runs: Sequence[Run], kept: Set[Instance] | None, device: Any) -> int:
        """`Compiled.workspace_bytes`, compiled for `device` unless it is known from another one."""
        traced = self._trace(runs, self._operands(runs, kept))
        if traced.key not in self._workspace_bytes:
            with _quiet():
                self._executable(traced, device)
        return self._workspace_bytes[traced.key]

    def compile_ahead(self, wanted: Iterable[tuple[Sequence[Run], Set[Instance] | None, Any]]) -> None:
        """Compile (runs, kept, device) ahead, in threads: XLA compiles a program anew for every device."""
        missing = {}
        for runs, kept, device in wanted:
            traced = self._trace(runs, self._operands(runs, kept))
            if (traced.key, device) not in self._executables:
                self._jit(traced)
                missing[traced.key, device] = traced, device
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool, _quiet():
            list(pool.map(lambda one: self._executable(*one), missing.values()))

    def distinct(self, segments: Iterable[tuple[Sequence[Run], Set[Instance] | None]]) -> int:
        """How many different computations some segments (runs, kept) are: so many programs are compiled per device."""
        return len({self._trace(runs, self._operands(runs, kept)).key for runs, kept in segments})

    def _operands(self, runs: Sequence[Run], kept: Set[Instance] | None) -> _Operands:
        place: dict[Instance, int] = {}  # in the order in which they are touched first
        inputs: dict[Instance, None] = {}
        updates: dict[Instance, None] = {}
        writes: dict[Instance, None] = {}
        results: list[tuple[int, int]] = []
        pattern: list[Hashable] = []
        for run in runs:
            function = self._functions.functions[run.op]
            touched = [self._at(run, tensor) for tensor in (*function.reads, *function.updates)]
            inputs.update(dict.fromkeys(i for i in touched if i not in writes))
            updates.update(dict.fromkeys(i for i in touched[len(function.reads) :] if i not in writes))
            written = [self._at(run, tensor) for tensor in function.writes if tensor not in run.dropped]
            writes.update(dict.fromkeys(written))
            results += [(run.micro_batch, p) for p in function.results if not run.again]
            pattern.append((run.op, run.dropped, run.again))
            pattern += [place.setdefault(instance, len(place)) for instance in (*touched, *written)]
        returned = tuple(instance for instance in writes if kept is None or instance in kept)
        pattern.append(tuple(place[instance] for instance in returned))
        return _Operands(tuple(inputs), tuple(updates), returned, tuple(results), tuple(pattern))

    def _trace(self, runs: Sequence[Run], operands: _Operands) -> _Traced:
        if operands.pattern in self._traced:
            return self._traced[operands.pattern]
        functions = [self._functions.functions[run.op] for run in runs]

        def segment(*arrays: Array) -> tuple[Array, ...]:
            values = dict(zip(operands.inputs, arrays, strict=True))
            found: list[Array] = []
            for run, function in zip(runs, functions, strict=True):
                here = {t: values[self._at(run, t)] for t in (*function.reads, *function.updates)}
                new, made, returned = self._functions.apply(function, here)
                values.update(zip((self._at(run, t) for t in function.updates), new, strict=True))
                for tensor, array in zip(function.writes, made, strict=True):
                    if tensor not in run.dropped:
                        values[self._at(run, tensor)] = array
                found += [] if run.again else returned
            return (*(values[i] for i in operands.updates), *(values[i] for i in operands.writes), *found)

        shapes = [self._functions.shapes[tensor] for tensor, _ in operands.inputs]
        closed = jax.make_jaxpr(segment)(*shapes)
        updates = set(operands.updates)
        donated = tuple(place for place, instance in enumerate(operands.inputs) if instance in updates)
        traced = _Traced(closed, donated, (len(updates), len(operands.results)))
        self._traced[operands.pattern] = traced
        return traced

    def _at(self, run: Run, tensor: int) -> Instance:
        return tensor, self._instance_of(tensor, run.op, run.micro_batch)

    def _jit(self, traced: _Traced) -> Any:
        if traced.key not in self._jitted:
            self._jitted[traced.key] = jax.jit(
                jex_core.jaxpr_as_fun(traced.closed), donate_argnums=traced.donated, keep_unused=True
            )
        return self._jitted[traced.key]

    def _executable(self, traced: _Traced, device: Any) -> Any:
        key = traced.key, device
        if key not in self._executables:
            sharding = SingleDeviceSharding(device)
            shapes = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in traced.closed.in_avals]
            executable = self._jit(traced).lower(*shapes).compile()
            before, behind = traced.made
            made = traced.closed.out_avals[before : len(traced.closed.out_avals) - behind]
            self._workspace_bytes[traced.key] = workspace_bytes(executable, sum(map(array_bytes, made)))
            self._executables[key] = executable
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
