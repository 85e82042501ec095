"""The traced step behind a workload, by the names of its ops and tensors: what execution needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tmojax.importers.jax_applying import Apply, Seen
from tmojax.importers.jax_building import Argument, Build, Built
from tmojax.importers.jax_tracing import Graph
from tmojax.problem.workload import Program


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A flat step whose ops and tensors have the names of a workload's program.

    Storages are numbers of `graph.storages`. `arguments`: one per `graph.arguments`, in the order of the leaves of
    `state_tree` (a tuple of trees: for `import_train_step` parameters, optimizer state and, for K > 1, accumulators)
    and then of `batch_tree`. `op_reads`, `op_writes`: storages that the kernels of an op read and make; collectives
    are not among the names. `tensor_of`: tensor that holds a storage (tensors that coarsening merged away are not
    there). `updated`: results that replace arguments in place, with the names of these. `resets`: accumulators that an
    op clears. `gradient_views`: of the tensors that are gradients, what gives them the shape of their weights.
    """

    graph: Graph
    arguments: tuple[Argument, ...]
    state_tree: Any
    batch_tree: Any
    op_reads: dict[str, frozenset[int]]
    op_writes: dict[str, tuple[int, ...]]
    tensor_of: dict[int, str]
    updated: dict[int, tuple[str, ...]]
    resets: dict[str, tuple[str, ...]]
    gradient_views: dict[str, tuple[Apply, ...]]


def bind_names(
    build: Build, built: Built, program: Program, runs: list[list[int]], state_tree: Any, batch_tree: Any
) -> TracedStep:
    """Name what `build_program` made as `program` does; `runs` [op]: ops of `built` that the op consists of."""
    names = [tensor.name for tensor in built.program.tensors]
    kept = {tensor.name for tensor in program.tensors}
    return TracedStep(
        graph=build.graph,
        arguments=tuple(build.arguments),
        state_tree=state_tree,
        batch_tree=batch_tree,
        op_reads={
            op.name: frozenset(source for i in run for kernel in build.groups[i].kernels for source in kernel.reads)
            for op, run in zip(program.ops, runs, strict=True)
        },
        op_writes={
            op.name: tuple(write for index in run for write in build.groups[index].writes)
            for op, run in zip(program.ops, runs, strict=True)
        },
        tensor_of={storage: names[tensor] for storage, tensor in built.tensor_of.items() if names[tensor] in kept},
        updated={storage: tuple(names[t] for t in tensors) for storage, tensors in built.updated.items()},
        resets={
            op.name: tuple(names[t] for index in run for t in built.resets.get(index, ()))
            for op, run in zip(program.ops, runs, strict=True)
        },
        gradient_views={
            build.gradient_of[storage]: _views(build.graph, build.graph.seen_tags[name], storage)
            for name, storage in build.fusion.tagged.items()
            if storage in build.gradient_of
        },
    )


def _views(graph: Graph, tag: Seen, made: int) -> tuple[Apply, ...]:
    """The views of a tagged gradient, from the storage `made`, of which it may be a conversion."""
    views, storage = tag.views, tag.storage
    while storage != made:
        (source,) = graph.equations[graph.storages[storage].producer].operands
        assert isinstance(source, Seen)
        views, storage = (*source.views, *views), source.storage
    return views
