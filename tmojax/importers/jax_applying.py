"""How an equation of a flat step is applied to arrays: its primitive, and what it sees of its operands.

The importer plans with sizes alone; this is what execution needs beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tmojax.jax_setup  # noqa: F401

# Applies one primitive to arrays; returns its outputs.
Apply = Callable[..., Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Seen:
    """A storage as an equation sees it: the producer's array after `views`, first to last (reshapes and the like)."""

    storage: int
    views: tuple[Apply, ...] = ()


@dataclass(frozen=True, slots=True)
class Number:
    """An operand that is a literal of the jaxpr."""

    value: Any


def _bind(primitive: Any, params: dict[str, Any], context: Any, *operands: Any) -> Sequence[Any]:
    with context.manager:
        outputs = primitive.bind(*operands, **primitive.get_bind_params(params))
    return outputs if primitive.multiple_results else (outputs,)


def apply_of(eqn: Any) -> Apply:
    """The primitive of a jaxpr's equation, to be applied to arrays for all of its operands."""
    return partial(_bind, eqn.primitive, eqn.params, eqn.ctx)


def take_row(index: int, stacked: Any) -> Sequence[Any]:
    """One turn's slice of what a scan goes through."""
    return (jax.lax.index_in_dim(stacked, index, keepdims=False),)


def stack_pieces(*pieces: Any) -> Sequence[Any]:
    """The results of a scan's turns as one array."""
    return (jnp.stack(pieces),)


def literal(atom: Any) -> np.ndarray:
    """The value of a literal, in its dtype."""
    return np.asarray(atom.val, atom.aval.dtype)
