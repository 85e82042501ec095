"""Stable, readable names for ops and tensors, and the layer that each belongs to, from JAX name scopes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tmojax.importers.jax_fusion import Kernel
from tmojax.problem.workload import Phase

Scope = tuple[str, ...]


def common_root(scopes: Iterable[Scope]) -> str:
    """Return the name that holds everything else (the model's own, such as `GPT2`), or the empty string.

    It is dropped from names, so that they read `h3.attn.scores` and not `GPT2.h3.attn.scores`.
    """
    roots = {scope[0] for scope in scopes if len(scope) > 1}
    return roots.pop() if len(roots) == 1 else ""


def strip_root(scope: Scope, root: str) -> Scope:
    return scope[1:] if root and scope and scope[0] == root else scope


def layer_label(parts: Sequence[str]) -> str:
    """Label of the block: the first part of a name that carries a number (`h3`, `layers.7`), else the first part."""
    for index, part in enumerate(parts):
        if any(character.isdigit() for character in part):
            return ".".join(parts[max(0, index - 1) : index + 1]) if part.isdigit() else part
    return parts[0] if parts else ""


def scopes_from_weights(kernels: list[Kernel], paths: dict[int, Scope], gradients: dict[int, Scope]) -> None:
    """Give the kernels of a model without name scopes (plain functions, flax nnx) scopes from parameter paths.

    `paths` and `gradients` map storages of weights and of their gradients to the path of the layer that holds the
    weight. A kernel that reads a weight or its copy, or makes its gradient, belongs to that layer; others belong where
    the kernel before them does. Nothing changes if any forward kernel has a scope.
    """
    if any(kernel.scope for kernel in kernels if kernel.phase is Phase.FORWARD):
        return
    layer_of = dict(paths)
    before: dict[Phase, Scope] = {}
    for kernel in kernels:
        if kernel.phase is Phase.OPTIMIZER:
            continue
        named = [gradients[w] for w in kernel.writes if w in gradients]
        named += [layer_of[s] for s in kernel.reads if s in layer_of]
        kernel.scope = named[0] if named else before.get(kernel.phase, before.get(Phase.FORWARD, ()))
        before[kernel.phase] = kernel.scope
        if named and len(kernel.reads) == 1:
            layer_of.update(dict.fromkeys(kernel.writes, named[0]))


class Names:
    """Hands out unique names; the second use of a name gets `.2`, and so on."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self.counts: Counter[str] = Counter()

    def unique(self, wanted: str) -> str:
        name = wanted or "unnamed"
        while name in self.taken:
            self.counts[wanted] += 1
            name = f"{wanted}.{self.counts[wanted] + 1}"
        self.taken.add(name)
        return name
