"""Flatten a jaxpr into equations over storages: inner jaxprs inlined, scans unrolled, dead code and pure views removed.

A *storage* is what one buffer would hold. Reshapes, transposes and other renamings give no new storage, because
compiled kernels read any layout; so storages are what can be materialised, moved or recomputed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from jax.extend import core as jex_core

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.importers.jax_applying import Apply, Number, Seen, apply_of, literal, stack_pieces, take_row
from tmojax.problem.workload import Phase

# Prefix of `checkpoint_name` labels with which the importer marks gradients; it neither names nor materialises.
TAG = "tmojax.gradient:"

# Same elements, same bytes: the output is the input's storage. Convolutions read reversed kernels as they are.
VIEWS = frozenset(
    "reshape squeeze expand_dims transpose rev copy copy_p stop_gradient optimization_barrier sharding_constraint name "
    "layout_constraint".split()
)
# Views when the number of elements stays: also sums over dimensions of size 1, which is how JAX transposes a broadcast.
MAYBE_VIEWS = frozenset("broadcast_in_dim reduce_sum reduce_max reduce_min reduce_prod".split())
CALLS = frozenset(
    "jit pjit closed_call core_call xla_call checkpoint remat remat2 custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr".split()
)
COMMUNICATION = frozenset(
    "psum psum2 psum_invariant pmax pmin all_gather all_to_all ppermute reduce_scatter shard_map xla_pmap".split()
)
DATA_DEPENDENT = {
    "while": "a loop with an unknown trip count; use jax.lax.scan or a Python loop of fixed length",
    "cond": "a branch chosen at run time; trace the branch that training takes",
}


@dataclass(slots=True)
class Storage:
    """Elements of one buffer. `producer` is an index of `Graph.equations`, or -1 for arguments and constants.

    `shape` and `array_dtype` are those of the array that the producer makes; `dtype` and `size_bytes` may be larger
    than that, where compiled kernels keep a wider value.
    """

    size_bytes: int
    elements: int
    dtype: str
    producer: int = -1
    given_name: str = ""
    shape: tuple[int, ...] = ()
    array_dtype: Any = None


@dataclass(slots=True)
class Equation:
    """One primitive on storages. `scope` is the cleaned name stack, outermost first; `input_dtype` that of input 0.

    `literals` are the operands that are numbers; they are not among `inputs`. `apply` computes the outputs from arrays
    for all `operands`.
    """

    primitive: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    output_shape: tuple[int, ...]
    input_dtype: str
    scope: tuple[str, ...]
    transposed: bool
    apply: Apply
    operands: tuple[Seen | Number, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    literals: tuple[Any, ...] = ()
    phase: Phase = Phase.FORWARD


@dataclass
class Graph:
    """A flat, dead-code-free step. `arguments` and `results` are storages in the order of the traced function.

    `constants` are arrays that the step closes over; `tags` maps names given with `TAG` to storages. `values` are the
    arrays and numbers of storages that are neither arguments nor computed; `seen_results` and `seen_tags` are results
    and tags as arrays.
    """

    storages: list[Storage]
    equations: list[Equation]
    arguments: list[int]
    results: list[int]
    constants: list[int]
    traced_equations: int
    tags: dict[str, int]
    values: dict[int, Any] = field(default_factory=dict)
    seen_results: list[Seen] = field(default_factory=list)
    seen_tags: dict[str, Seen] = field(default_factory=dict)

    def remove_dead(self) -> None:
        """Drop equations that no result needs and renumber producers."""
        live = set(self.results)
        kept: list[Equation] = []
        for equation in reversed(self.equations):
            if not live.isdisjoint(equation.outputs):
                live.update(equation.inputs)
                kept.append(equation)
        kept.reverse()
        self.equations = kept
        for index, equation in enumerate(kept):
            for out in equation.outputs:
                self.storages[out].producer = index
        self.tags = {name: storage for name, storage in self.tags.items() if storage in live}


@dataclass(frozen=True, slots=True)
class _Array:
    """Shape and dtype, where JAX would have an abstract value."""

    shape: tuple[int, ...]
    dtype: Any


_WRAPPER = re.compile(r"\b(?:jvp|transpose|vmap|jit|checkpoint|remat|rematted_computation|custom_jvp|custom_vjp)\(")
_NOISE = frozenset(("", "rematted_computation", "checkpoint", "remat"))


@lru_cache(maxsize=65536)
def _clean_scope(stack: str) -> tuple[tuple[str, ...], bool]:
    """Return the scope without transformation names, and whether the equation was transposed (backward)."""
    plain = _WRAPPER.sub("", stack).replace(")", "")
    parts = [part for part in plain.split("/") if part not in _NOISE and "->" not in part]
    # A rematerialised block names its scope both outside and inside.
    distinct = tuple(part for i, part in enumerate(parts) if i == 0 or part != parts[i - 1])
    return distinct, "transpose(" in stack


def _number(value: Any) -> float | None:
    """A literal as a Python number, None for keys and other values that are none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _is_view(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name in MAYBE_VIEWS:
        return math.prod(eqn.invars[0].aval.shape) == math.prod(eqn.outvars[0].aval.shape)
    if name == "convert_element_type":
        return eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    return name in VIEWS


class _Flattener:
    """Walks jaxprs and appends equations; the state of one `flatten` call."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.equations: list[Equation] = []
        self.constants: list[int] = []
        self.values: dict[int, Any] = {}
        self.tags: dict[str, Seen] = {}
        # Results of scans: one storage per turn. They are concatenated only if something else than a scan needs it.
        self.stacks: dict[int, list[Seen]] = {}
        self.traced = 0

    def storage(self, aval: Any, producer: int = -1) -> int:
        elements = math.prod(aval.shape)
        itemsize = getattr(aval.dtype, "itemsize", 4)
        self.storages.append(
            Storage(
                elements * itemsize, elements, str(aval.dtype), producer, shape=tuple(aval.shape),
                array_dtype=aval.dtype,
            )
        )  # fmt: skip
        return len(self.storages) - 1

    def constant(self, value: Any) -> Seen:
        """Storage of an array that the step closes over."""
        storage = self.storage(getattr(value, "aval", value))
        self.values[storage] = value
        if self.storages[storage].elements > 1:
            self.constants.append(storage)
        return Seen(storage)

    def append(self, equation: Equation) -> None:
        for out in equation.outputs:
            self.storages[out].producer = len(self.equations)
        self.equations.append(equation)

    def run(self, jaxpr: Any, consts: Sequence[Seen], arguments: Sequence[Seen], stack: str) -> list[Seen]:
        """Inline one jaxpr on storages and return its result storages."""
        env: dict[Any, Seen] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))
        for eqn in jaxpr.eqns:
            self.traced += 1
            own = str(eqn.source_info.name_stack)
            self.visit(env, eqn, f"{stack}/{own}" if stack and own else stack or own)
        return [self.lookup(env, atom) for atom in jaxpr.outvars]

    def lookup(self, env: dict[Any, Seen], atom: Any) -> Seen:
        """Storage of an atom; a literal gets a new one, because inner jaxprs and results need something to name."""
        if not isinstance(atom, jex_core.Literal):
            return env[atom]
        storage = self.storage(atom.aval)
        self.values[storage] = literal(atom)
        return Seen(storage)

    def visit(self, env: dict[Any, Seen], eqn: Any, stack: str) -> None:
        name = eqn.primitive.name
        where = f"primitive {name!r} at {stack or 'top level'!r}"
        if name in DATA_DEPENDENT:
            raise InputError(f"jaxpr: {where} is {DATA_DEPENDENT[name]}")
        if name in COMMUNICATION:
            raise InputError(
                f"jaxpr: {where} communicates between devices; trace the step of one device, the importer adds the "
                f"gradient synchronisation itself"
            )
        if name == "scan":
            outputs = self.scan(env, eqn, stack)
        elif name in CALLS:
            outputs = self.call(env, eqn, stack)
        elif _is_view(eqn) and not any(isinstance(atom, jex_core.Literal) for atom in eqn.invars):
            outputs = self.view(env, eqn)
        else:
            outputs = self.compute(env, eqn, stack)
        for var, out in zip(eqn.outvars, outputs, strict=True):
            env[var] = out

    def call(self, env: dict[Any, Seen], eqn: Any, stack: str) -> list[Seen]:
        inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)
        arguments = [self.lookup(env, atom) for atom in eqn.invars]
        if not hasattr(inner, "consts"):
            return self.run(inner, (), arguments, stack)
        return self.run(inner.jaxpr, [self.constant(value) for value in inner.consts], arguments, stack)

    def view(self, env: dict[Any, Seen], eqn: Any) -> list[Seen]:
        sources = [self.whole(env[atom]) for atom in eqn.invars]
        if eqn.primitive.name == "name":
            label = eqn.params["name"]
            if label.startswith(TAG):
                self.tags[label[len(TAG) :]] = sources[0]
            else:
                self.storages[sources[0].storage].given_name = label
        same = all(a.aval.shape == b.aval.shape for a, b in zip(eqn.invars, eqn.outvars, strict=False))
        if same and eqn.primitive.name not in ("transpose", "rev"):
            return sources[: len(eqn.outvars)]
        return [Seen(sources[0].storage, (*sources[0].views, apply_of(eqn)))]

    def compute(self, env: dict[Any, Seen], eqn: Any, stack: str) -> list[Seen]:
        scope, transposed = _clean_scope(stack)
        atoms = eqn.invars
        operands = tuple(
            Number(literal(atom)) if isinstance(atom, jex_core.Literal)
            else self.whole(env[atom])
            for atom in atoms
        )  # fmt: skip
        outputs = [self.storage(var.aval) for var in eqn.outvars]
        self.append(
            Equation(
                primitive=eqn.primitive.name,
                inputs=tuple(operand.storage for operand in operands if isinstance(operand, Seen)),
                outputs=tuple(outputs),
                input_shapes=tuple(tuple(getattr(atom.aval, "shape", ())) for atom in atoms),
                output_shape=tuple(eqn.outvars[0].aval.shape) if eqn.outvars else (),
                input_dtype=str(atoms[0].aval.dtype) if atoms else "",
                scope=scope,
                transposed=transposed,
                apply=apply_of(eqn),
                operands=operands,
                params=eqn.params,
                literals=tuple(_number(atom.val) for atom in atoms if isinstance(atom, jex_core.Literal)),
            )
        )
        return [Seen(out) for out in outputs]

    def scan(self, env: dict[Any, Seen], eqn: Any, stack: str) -> list[Seen]:
        """Unroll a scan. Slice i of a stack that another scan of the same length made is that scan's own result i."""
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        if "ft_in" in eqn.params:  # JAX 0.12 and later
            constants, carried, _ = eqn.params["ft_in"].unpack()
            first_carry, first_row = len(constants), len(constants) + len(carried)
        else:
            first_carry = eqn.params["num_consts"]
            first_row = first_carry + eqn.params["num_carry"]
        given = [self.lookup(env, atom) for atom in eqn.invars]
        carry = given[first_carry:first_row]
        stacked = list(zip(given[first_row:], (atom.aval for atom in eqn.invars[first_row:]), strict=True))
        consts = [self.constant(value) for value in body.consts]
        results: list[list[Seen]] = [[Seen(-1)] * length for _ in eqn.outvars[len(carry) :]]
        for turn in range(length):
            index = length - 1 - turn if eqn.params["reverse"] else turn
            inner_stack = f"{stack}/scan[{index}]" if stack else f"scan[{index}]"
            rows = [self.row(storage, aval, index, inner_stack) for storage, aval in stacked]
            outputs = self.run(body.jaxpr, consts, [*given[:first_carry], *carry, *rows], inner_stack)
            carry = outputs[: len(carry)]
            for column, out in zip(results, outputs[len(carry) :], strict=True):
                column[index] = out
        stacks = [self.storage(var.aval) for var in eqn.outvars[len(carry) :]]
        self.stacks.update(zip(stacks, results, strict=True))
        return [*carry, *map(Seen, stacks)]

    def row(self, stacked: Seen, aval: Any, index: int, stack: str) -> Seen:
        pieces = self.stacks.get(stacked.storage)
        if pieces is not None and not stacked.views:
            return pieces[index]
        stacked = self.whole(stacked)
        scope, transposed = _clean_scope(stack)
        out = self.storage(_Array(aval.shape[1:], aval.dtype))
        shapes = (tuple(aval.shape),)
        self.append(
            Equation(
                "slice", (stacked.storage,), (out,), shapes, tuple(aval.shape[1:]), str(aval.dtype), scope, transposed,
                partial(take_row, index), (stacked,),
            )
        )  # fmt: skip
        return Seen(out)

    def whole(self, seen: Seen) -> Seen:
        """The storage itself; a stack of scan results is concatenated when it is needed as one array."""
        storage = seen.storage
        pieces = self.stacks.get(storage)
        if pieces is None or self.storages[storage].producer >= 0:
            return seen
        sources = tuple(piece.storage for piece in pieces)
        shapes = tuple((self.storages[source].elements,) for source in sources)
        last = self.storages[sources[-1]].producer
        scope, transposed = (self.equations[last].scope, self.equations[last].transposed) if last >= 0 else ((), False)
        whole = self.storages[storage]
        self.append(
            Equation(
                "concatenate", sources, (storage,), shapes, (whole.elements,), whole.dtype, scope, transposed,
                stack_pieces, tuple(pieces),
            )
        )  # fmt: skip
        return seen


def flatten(closed_jaxpr: Any, optimizer_scope: str | None = None) -> Graph:
    """Flatten a closed jaxpr of a training step.

    Phases: an equation whose name stack holds `transpose(`, or that depends on one, is backward. With `optimizer_scope`
    the equations in that scope are the optimizer; without it, those that depend on backward equations and are not
    transposed themselves are, together with counters and schedules that only they use.
    Raises InputError for data-dependent control flow and for communication primitives, naming the primitive.
    """
    flat = _Flattener()
    jaxpr = closed_jaxpr.jaxpr
    constants = [flat.constant(value) for value in closed_jaxpr.consts]
    arguments = [flat.storage(var.aval) for var in jaxpr.invars]
    seen = [flat.whole(result) for result in flat.run(jaxpr, constants, [*map(Seen, arguments)], "")]
    results = [result.storage for result in seen]
    tags = {name: tag.storage for name, tag in flat.tags.items()}
    graph = Graph(
        flat.storages, flat.equations, arguments, results, flat.constants, flat.traced, tags, flat.values, seen,
        flat.tags,
    )  # fmt: skip
    graph.remove_dead()
    _assign_phases(graph, optimizer_scope)
    return graph


def _assign_phases(graph: Graph, optimizer_scope: str | None) -> None:
    after_backward: set[int] = set()
    for equation in graph.equations:
        depends = not after_backward.isdisjoint(equation.inputs)
        if optimizer_scope is None:
            is_optimizer = depends and not equation.transposed
        else:
            is_optimizer = equation.scope[:1] == (optimizer_scope,)
        if is_optimizer:
            equation.phase = Phase.OPTIMIZER
        elif equation.transposed or depends:
            equation.phase = Phase.BACKWARD
        if equation.phase is not Phase.FORWARD:
            after_backward.update(equation.outputs)
    if optimizer_scope is not None:
        return
    # Step counters and learning-rate schedules depend on no gradient; they go where their only users are.
    used_by_optimizer: set[int] = set()
    used_elsewhere: set[int] = set()
    for equation in reversed(graph.equations):
        wanted = not used_by_optimizer.isdisjoint(equation.outputs) and used_elsewhere.isdisjoint(equation.outputs)
        if equation.phase is Phase.FORWARD and wanted:
            equation.phase = Phase.OPTIMIZER
        (used_by_optimizer if equation.phase is Phase.OPTIMIZER else used_elsewhere).update(equation.inputs)
