"""Flatten a jaxpr into equations over storages: inner jaxprs inlined, scans unrolled, dead code and pure views removed.

A *storage* is what one buffer would hold. Reshapes, transposes and other renamings give no new storage, because
compiled kernels read any layout; so storages are what can be materialised, moved or recomputed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from jax.extend import core as jex_core

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.problem.workload import Phase

# Same elements, same bytes: the output is the input's storage.
VIEWS = frozenset(
    "reshape squeeze expand_dims transpose copy copy_p stop_gradient optimization_barrier sharding_constraint name "
    "layout_constraint".split()
)
COLLECTIVES = frozenset("psum all_gather all_to_all ppermute reduce_scatter shard_map psum_invariant pmax pmin".split())
DATA_DEPENDENT = {
    "while": "a loop with an unknown trip count; use jax.lax.scan or a Python loop with a fixed length",
    "cond": "a branch chosen at run time; trace the branch that training takes",
}


@dataclass(slots=True)
class Storage:
    """Elements of one buffer. `producer` is an index of `Graph.equations`, or -1 for arguments and constants."""

    size_bytes: int
    elements: int
    dtype: str
    producer: int = -1
    given_name: str = ""
    constant: bool = False


@dataclass(slots=True)
class Equation:
    """One primitive on storages. `scope` is the cleaned name stack, outermost first; `shapes` are those of the avals."""

    primitive: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: dict[str, Any]
    input_shapes: tuple[tuple[int, ...], ...]
    output_shape: tuple[int, ...]
    input_dtype: str
    scope: tuple[str, ...]
    phase: Phase


@dataclass
class Graph:
    """A flat, dead-code-free step. `arguments` and `results` are storages in the order of the traced function."""

    storages: list[Storage]
    equations: list[Equation]
    arguments: list[int]
    results: list[int]
    traced_equations: int = 0
    tags: dict[str, int] = field(default_factory=dict)


_WRAPPER = re.compile(r"\b(?:jvp|transpose|vmap|jit|checkpoint|remat|rematted_computation|custom_jvp|custom_vjp)\(")
_NOISE = frozenset(("", "rematted_computation", "checkpoint", "remat", "shard_map"))


@lru_cache(maxsize=65536)
def _clean_scope(stack: str) -> tuple[tuple[str, ...], bool]:
    """Return the scope without transformation names, and whether the equation was transposed (backward)."""
    plain = _WRAPPER.sub("", stack).replace(")", "")
    parts = tuple(part for part in plain.split("/") if part not in _NOISE and "->" not in part)
    return parts, "transpose(" in stack


def _inner_jaxpr(params: dict[str, Any]) -> Any:
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in params:
            return params[key]
    return None


class _Flattener:
    """Walks jaxprs and appends equations; state of one `flatten` call."""

    def __init__(self, optimizer_scope: str | None):
        self.storages: list[Storage] = []
        self.equations: list[Equation] = []
        self.tags: dict[str, int] = {}
        self.stacked: dict[int, list[int]] = {}
        self.after_backward: set[int] = set()
        self.optimizer_scope = optimizer_scope
        self.traced = 0

    def storage(self, aval: Any, producer: int = -1, constant: bool = False) -> int:
        elements = math.prod(aval.shape)
        itemsize = getattr(aval.dtype, "itemsize", 4)
        self.storages.append(Storage(elements * itemsize, elements, str(aval.dtype), producer, "", constant))
        return len(self.storages) - 1

    def read(self, env: dict[Any, int], atom: Any) -> int:
        """Storage of an atom; literals are -1."""
        return -1 if isinstance(atom, jex_core.Literal) else self.materialised(env[atom])

    def materialised(self, storage: int) -> int:
        """A stack of scan results is only concatenated when something other than a matching scan uses it."""
        pieces = self.stacked.get(storage)
        if pieces is not None and self.storages[storage].producer == -1:
            self.storages[storage].producer = len(self.equations)
            shape = (self.storages[storage].elements,)
            last = (
                self.equations[self.storages[pieces[-1]].producer] if self.storages[pieces[-1]].producer >= 0 else None
            )
            self.emit(
                "concatenate", tuple(pieces), (storage,), {}, tuple((self.storages[p].elements,) for p in pieces), shape,
                self.storages[storage].dtype, last.scope if last else (), last.phase is Phase.BACKWARD if last else False,
            )  # fmt: skip
        return storage

    def emit(self, primitive, inputs, outputs, params, input_shapes, output_shape, dtype, scope, transposed) -> None:
        """Append an equation; its phase follows from transposition and from what it depends on."""
        depends = any(i in self.after_backward for i in inputs)
        if self.optimizer_scope is not None:
            optimizer = bool(scope) and scope[0] == self.optimizer_scope
        else:
            optimizer = depends and not transposed
        if optimizer:
            phase = Phase.OPTIMIZER
        elif transposed or depends:
            phase = Phase.BACKWARD
        else:
            phase = Phase.FORWARD
        if phase is not Phase.FORWARD:
            self.after_backward.update(outputs)
        self.equations.append(
            Equation(primitive, inputs, outputs, params, input_shapes, output_shape, dtype, scope, phase)
        )

    def run(self, jaxpr: Any, consts: Sequence[int], arguments: Sequence[int], stack: str) -> list[int]:
        """Inline one jaxpr on storages and return its result storages (-1 for literals)."""
        env: dict[Any, int] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))
        for eqn in jaxpr.eqns:
            self.traced += 1
            own = str(eqn.source_info.name_stack)
            full = f"{stack}/{own}" if stack and own else stack or own
            self.equation(env, eqn, full)
        return [-1 if isinstance(v, jex_core.Literal) else env[v] for v in jaxpr.outvars]

    def equation(self, env: dict[Any, int], eqn: Any, stack: str) -> None:
        name = eqn.primitive.name
        if name in DATA_DEPENDENT:
            raise InputError(f"jaxpr: primitive {name!r} at {stack or 'top level'!r} is {DATA_DEPENDENT[name]}")
        if name in COLLECTIVES:
            raise InputError(
                f"jaxpr: primitive {name!r} at {stack or 'top level'!r} communicates between devices; trace the step of one "
                f"device, the importer adds the gradient synchronisation itself"
            )
        if name == "scan":
            self.scan(env, eqn, stack)
            return
        inner = _inner_jaxpr(eqn.params)
        if inner is not None and name != "pallas_call":
            closed = hasattr(inner, "consts")
            consts = (
                [self.storage(c.aval if hasattr(c, "aval") else c, constant=True) for c in inner.consts]
                if closed
                else []
            )
            outputs = self.run(
                inner.jaxpr if closed else inner, consts, [self.read_raw(env, v) for v in eqn.invars], stack
            )
            for var, out in zip(eqn.outvars, outputs, strict=True):
                env[var] = out
            return
        scope, transposed = _clean_scope(stack)
        inputs = tuple(self.read(env, v) for v in eqn.invars)
        if self.is_view(eqn, name) and all(i >= 0 for i in inputs):
            for var, source in zip(eqn.outvars, inputs, strict=True):
                env[var] = source
            if name == "name":
                label = eqn.params["name"]
                if label.startswith(TAG):
                    self.tags[label[len(TAG) :]] = inputs[0]
                else:
                    self.storages[inputs[0]].given_name = label
            return
        index = len(self.equations)
        outputs = tuple(self.storage(v.aval, index) for v in eqn.outvars)
        for var, out in zip(eqn.outvars, outputs, strict=True):
            env[var] = out
        shapes = tuple(tuple(getattr(v.aval, "shape", ())) for v in eqn.invars)
        dtype = str(eqn.invars[0].aval.dtype) if eqn.invars else str(eqn.outvars[0].aval.dtype)
        self.emit(
            name, tuple(i for i in inputs if i >= 0), outputs, eqn.params, shapes, tuple(eqn.outvars[0].aval.shape), dtype,
            scope, transposed,
        )  # fmt: skip

    def read_raw(self, env: dict[Any, int], atom: Any) -> int:
        """Storage of an atom without concatenating stacks, for arguments of inner jaxprs."""
        if not isinstance(atom, jex_core.Literal):
            return env[atom]
        return self.storage(atom.aval, constant=True)

    @staticmethod
    def is_view(eqn: Any, name: str) -> bool:
        if name in VIEWS:
            return True
        # Also sums over dimensions of size 1, which is how JAX transposes a broadcast.
        if name in ("broadcast_in_dim", "reduce_sum", "reduce_max", "reduce_min", "reduce_prod"):
            return math.prod(eqn.invars[0].aval.shape) == math.prod(eqn.outvars[0].aval.shape)
        return name == "convert_element_type" and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype

    def scan(self, env: dict[Any, int], eqn: Any, stack: str) -> None:
        """Unroll a scan. Slice i of a stack that another scan of the same length made is that scan's own result i."""
        params = eqn.params
        closed, length = params["jaxpr"], params["length"]
        const_count, carry_count = params["num_consts"], params["num_carry"]
        given = [self.read_raw(env, v) for v in eqn.invars]
        fixed, carry, sliced = (
            given[:const_count],
            given[const_count : const_count + carry_count],
            eqn.invars[const_count + carry_count :],
        )
        stacks = given[const_count + carry_count :]
        inner_consts = [self.storage(c.aval if hasattr(c, "aval") else c, constant=True) for c in closed.consts]
        results: list[list[int]] = [[0] * length for _ in eqn.outvars[carry_count:]]
        for turn in range(length):
            index = length - 1 - turn if params["reverse"] else turn
            own = f"{stack}/scan[{index}]" if stack else f"scan[{index}]"
            rows = [self.row(s, v.aval, index, length, own) for s, v in zip(stacks, sliced, strict=True)]
            outputs = self.run(closed.jaxpr, inner_consts, [*fixed, *carry, *rows], own)
            outputs = [
                self.storage(v.aval, constant=True) if o < 0 else o
                for o, v in zip(outputs, closed.jaxpr.outvars, strict=True)
            ]
            carry = outputs[:carry_count]
            for column, out in zip(results, outputs[carry_count:], strict=True):
                column[index] = out
        for var, out in zip(eqn.outvars[:carry_count], carry, strict=True):
            env[var] = out
        for var, column in zip(eqn.outvars[carry_count:], results, strict=True):
            stacked = self.storage(var.aval)
            self.stacked[stacked] = column
            env[var] = stacked

    def row(self, stack_storage: int, aval: Any, index: int, length: int, scope_stack: str) -> int:
        pieces = self.stacked.get(stack_storage)
        if pieces is not None and len(pieces) == length:
            return pieces[index]
        source = self.materialised(stack_storage)
        scope, transposed = _clean_scope(scope_stack)
        out = self.storage(_RowAval(aval.shape[1:], aval.dtype), len(self.equations))
        self.emit(
            "slice",
            (source,),
            (out,),
            {},
            (tuple(aval.shape),),
            tuple(aval.shape[1:]),
            str(aval.dtype),
            scope,
            transposed,
        )
        return out


@dataclass(frozen=True, slots=True)
class _RowAval:
    shape: tuple[int, ...]
    dtype: Any


# Prefix of `checkpoint_name` labels with which the importer marks gradients; it neither names nor materialises.
TAG = "tmojax.gradient:"


def flatten(closed_jaxpr: Any, optimizer_scope: str | None = None) -> Graph:
    """Flatten a closed jaxpr of a training step.

    Phases: an equation whose name stack holds `transpose(` is backward; with `optimizer_scope`, that scope alone is the
    optimizer; without it, whatever depends on backward equations and is not transposed itself is.
    Raises InputError for data-dependent control flow and for communication primitives, naming the primitive.
    """
    flat = _Flattener(optimizer_scope)
    consts = [flat.storage(var.aval, constant=True) for var in closed_jaxpr.jaxpr.constvars]
    arguments = [flat.storage(var.aval) for var in closed_jaxpr.jaxpr.invars]
    results = [
        flat.storage(atom.aval, constant=True) if out < 0 else flat.materialised(out)
        for out, atom in zip(
            flat.run(closed_jaxpr.jaxpr, consts, arguments, ""), closed_jaxpr.jaxpr.outvars, strict=True
        )
    ]
    graph = Graph(flat.storages, flat.equations, arguments, results, flat.traced, flat.tags)
    _remove_dead(graph)
    if optimizer_scope is None:
        _pull_into_optimizer(graph)
    return graph


def _remove_dead(graph: Graph) -> None:
    live = set(graph.results)
    kept: list[Equation] = []
    for equation in reversed(graph.equations):
        if live.intersection(equation.outputs):
            live.update(equation.inputs)
            kept.append(equation)
    kept.reverse()
    graph.equations = kept
    for index, equation in enumerate(kept):
        for out in equation.outputs:
            graph.storages[out].producer = index
    graph.tags = {name: storage for name, storage in graph.tags.items() if storage in live}


def _pull_into_optimizer(graph: Graph) -> None:
    """Give step counters and learning-rate schedules, which depend on no gradient, the phase of their only users."""
    elsewhere: set[int] = set()
    used: set[int] = set()
    for equation in reversed(graph.equations):
        if equation.phase is Phase.FORWARD and used.intersection(equation.outputs):
            if not elsewhere.intersection(equation.outputs):
                equation.phase = Phase.OPTIMIZER
        (used if equation.phase is Phase.OPTIMIZER else elsewhere).update(equation.inputs)
