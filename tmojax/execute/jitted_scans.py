"""Scans inside a traced loss: their names, and the loss again with other bodies.

A `jax.checkpoint` policy around a scan would fetch what all layers offloaded before the first of them needs it;
around the body it fetches layer by layer. Models are written without that in mind, so the jaxpr is rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex_core
from jax.extend import source_info_util

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.importers.jax_applying import apply_of

Loss = Callable[[Any, Any], jax.Array]
Body = Callable[[Any, Any], Any]
INLINED = ("jit", "pjit", "closed_call")


class ScanEquation:
    """A scan equation: `jaxpr` is its body, `carries` the number of arrays that one turn hands to the next."""

    def __init__(self, equation: Any) -> None:
        self.params = equation.params
        self.body = equation.params["jaxpr"]
        if "ft_in" in self.params:  # JAX 0.12 and later
            constants, carried, _ = self.params["ft_in"].unpack()
            self.constants, self.carries = len(constants), len(carried)
        else:
            self.constants, self.carries = self.params["num_consts"], self.params["num_carry"]

    @property
    def jaxpr(self) -> Any:
        return self.body.jaxpr


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs in the parameters of an equation."""
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "jaxpr"):
                yield item.jaxpr
            elif hasattr(item, "eqns"):
                yield item


def names_of(jaxpr: Any) -> dict[str, int]:
    """Names given by `checkpoint_name` in a jaxpr and all inside it, with how often."""
    found: dict[str, int] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            name = equation.params["name"]
            found[name] = found.get(name, 0) + 1
        for inner in inner_jaxprs(equation):
            for name, count in names_of(inner).items():
                found[name] = found.get(name, 0) + count
    return found


def scans_of(jaxpr: Any) -> list[ScanEquation]:
    """The outermost scans of a jaxpr."""
    found: list[ScanEquation] = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            found.append(ScanEquation(equation))
        else:
            found += [scan for inner in inner_jaxprs(equation) for scan in scans_of(inner)]
    return found


def input_names(scan: ScanEquation) -> list[str]:
    """Names of the floating-point arrays that the turns hand on, given where the body begins.

    Raises InputError where one has no name, or is also used without it: a scan would keep it on the device.
    """
    names = []
    for var in scan.jaxpr.invars[scan.constants : scan.constants + scan.carries]:
        if not jnp.issubdtype(var.aval.dtype, jnp.floating):
            continue
        users = [equation for equation in scan.jaxpr.eqns if var in equation.invars]
        if [equation.primitive.name for equation in users] != ["name"] or var in scan.jaxpr.outvars:
            raise InputError(
                "scan: its body uses what it gets from the layer before without a checkpoint_name; wrap the loss in "
                "named_scan_inputs before it is imported"
            )
        names.append(users[0].params["name"])
    return names


def with_bodies(loss: Loss, change: Callable[[ScanEquation, int, Body], Body]) -> Loss:
    """`loss` with the body of its n-th outermost scan replaced by `change(scan, n, body)`.

    Raises InputError (when traced) for a scan inside of an equation that cannot be taken apart.
    """

    def changed(params: Any, batch: Any) -> jax.Array:
        closed = jax.make_jaxpr(loss)(params, batch)
        leaves = jax.tree.leaves((params, batch))
        return _Rewriter(change).run(closed.jaxpr, closed.consts, leaves)[0]

    return changed


class _Rewriter:
    def __init__(self, change: Callable[[ScanEquation, int, Body], Body]) -> None:
        self.change, self.seen = change, 0

    def run(self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))

        def value(atom: Any) -> Any:
            return atom.val if isinstance(atom, jex_core.Literal) else values[atom]

        outer = source_info_util.current_name_stack()
        for equation in jaxpr.eqns:
            info = equation.source_info
            with source_info_util.user_context(info.traceback, name_stack=outer + info.name_stack):
                results = self.equation(equation, [value(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        if name == "scan":
            return self.scan(ScanEquation(equation), operands)
        if any(scans_of(inner) for inner in inner_jaxprs(equation)):
            if name not in INLINED:
                raise InputError(f"loss: it has a scan inside of {name!r}; leave that out, the plan decides instead")
            (inner,) = (item for item in equation.params.values() if hasattr(item, "jaxpr"))
            return self.run(inner.jaxpr, inner.consts, operands)
        return apply_of(equation)(*operands)

    def scan(self, scan: ScanEquation, operands: list[Any]) -> Sequence[Any]:
        constants, rest = operands[: scan.constants], operands[scan.constants :]
        whole = jex_core.jaxpr_as_fun(scan.body)

        def body(carry: Any, row: Any) -> Any:
            results = whole(*constants, *carry, *row)
            return results[: scan.carries], results[scan.carries :]

        number, self.seen = self.seen, self.seen + 1
        carry, rows = jax.lax.scan(
            self.change(scan, number, body), rest[: scan.carries], rest[scan.carries :],
            length=scan.params["length"], reverse=scan.params["reverse"], unroll=scan.params["unroll"],
        )  # fmt: skip
        return [*carry, *rows]


def named_scan_inputs(loss: Loss) -> Loss:
    """`loss` with names for what the layers of its scans hand on: `scan0.carry`, `scan0.carry1`, ...

    Only so can a plan send them to the host. Wrap the loss before it is imported; names that are there already stay.
    """

    def change(scan: ScanEquation, number: int, body: Body) -> Body:
        try:
            input_names(scan)
            return body
        except InputError:
            pass

        def named(carry: Any, row: Any) -> Any:
            label = f"scan{number}.carry"
            marked = [
                checkpoint_name(value, f"{label}{index or ''}") if jnp.issubdtype(value.dtype, jnp.floating) else value
                for index, value in enumerate(carry)
            ]
            return body(marked, row)

        return named

    return with_bodies(loss, change)


def scan_in_segments(body: Body, carry: Any, rows: Any, lengths: Sequence[int]) -> tuple[Any, Any]:
    """`jax.lax.scan(body, carry, rows)` as several scans of `lengths` layers, whose names are told apart.

    Name `x` becomes `x.segment0`, `x.segment1` and so on, so that a plan can decide otherwise for each segment.
    Raises InputError unless `lengths` are positive and add up to the number of rows.
    """
    total = jax.tree.leaves(rows)[0].shape[0]
    if min(lengths, default=0) < 1 or sum(lengths) != total:
        raise InputError(f"lengths: {tuple(lengths)} must be positive and add up to {total}, the number of layers")
    begin, outputs = 0, []
    for segment, length in enumerate(lengths):
        part = jax.tree.map(lambda x, b=begin, n=length: x[b : b + n], rows)
        closed, shapes = jax.make_jaxpr(body, return_shape=True)(carry, jax.tree.map(lambda x: x[0], part))
        call = jex_core.jaxpr_as_fun(closed.replace(jaxpr=_renamed(closed.jaxpr, f".segment{segment}")))
        structure = jax.tree.structure(shapes)

        def segment_body(c: Any, x: Any, call: Any = call, structure: Any = structure) -> Any:
            return jax.tree.unflatten(structure, call(*jax.tree.leaves((c, x))))

        carry, made = jax.lax.scan(segment_body, carry, part)
        outputs.append(made)
        begin += length
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def _renamed(jaxpr: Any, suffix: str) -> Any:
    def rename(item: Any) -> Any:
        if hasattr(item, "jaxpr"):
            return item.replace(jaxpr=_renamed(item.jaxpr, suffix))
        return _renamed(item, suffix) if hasattr(item, "eqns") else item

    equations = []
    for equation in jaxpr.eqns:
        params = {
            key: tuple(map(rename, item)) if isinstance(item, tuple) else rename(item)
            for key, item in equation.params.items()
        }
        if equation.primitive.name == "name":
            params["name"] = equation.params["name"] + suffix
        equations.append(equation.replace(params=params))
    return jaxpr.replace(eqns=equations)
