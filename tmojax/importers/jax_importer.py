"""Import a training step written in JAX: trace it at its real size without allocating, fuse, time, and build.

`import_train_step` takes a loss and an optax optimizer and makes the step itself, with K micro-batches and gradient
synchronisation. `import_step` takes any `step(state, batch)` as it is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.importers.jax_building import Argument, Build, build_program, synchronise_gradients
from tmojax.importers.jax_coarsening import coarsen_layers
from tmojax.importers.jax_fusion import ELEMENTWISE, INDEXED, REDUCTIONS, Fusion, fuse
from tmojax.importers.jax_grouping import group_kernels
from tmojax.importers.jax_naming import common_root, layer_label, strip_root
from tmojax.importers.jax_roofline import GpuSpec, find_gpu, is_matmul
from tmojax.importers.jax_tracing import TAG, Graph, flatten
from tmojax.problem.workload import Collective, Op, Phase, TensorKind, Workload, validate_workload

OPTIMIZER_SCOPE = "optimizer"
DEFAULT_BUCKET_BYTES = 25_000_000
_NOT_OPAQUE = ELEMENTWISE | REDUCTIONS | INDEXED | {"sort", "rng_bit_generator"}


@dataclass(frozen=True)
class ImportReport:
    """What the importer did. Counts are per micro-batch plus one optimizer update; times are wall-clock seconds.

    `matmul_flops` counts matrix products only; `uncounted_primitives` are kernels whose operations are not known, which
    are timed by the bytes that they move. `merged_ops` and `merged_tensors` vanished by coarsening (0 without it).
    """

    traced_equations: int
    equations: int
    ops: int
    tensors: int
    matmul_flops: int
    flops: int
    fusion: dict[str, int]
    uncounted_primitives: tuple[str, ...]
    coarsening: str
    merged_ops: int
    merged_tensors: int
    trace_s: float
    build_s: float

    def lines(self) -> list[str]:
        """The report as lines of text."""
        text = [
            f"{self.traced_equations} equations traced in {self.trace_s:.1f} s, {self.equations} after inlining and dead code",
            f"{self.ops} ops and {self.tensors} tensors, {self.flops / 1e12:.2f} TFLOP, built in {self.build_s:.1f} s",
            ", ".join(f"{count} {rule}" for rule, count in self.fusion.items()),
        ]
        if self.coarsening != "none":
            text.append(
                f"coarsened by {self.coarsening}: {self.merged_ops} ops and {self.merged_tensors} tensors merged away"
            )
        if self.uncounted_primitives:
            text.append(f"timed by bytes only: {', '.join(self.uncounted_primitives)}")
        return text


@dataclass(frozen=True)
class ImportedStep:
    """A workload with the report of how it came about."""

    workload: Workload
    report: ImportReport


def _paths(tree: Any, prefix: str) -> list[str]:
    """Dotted name of every leaf; purely numeric parts (tuple positions) are dropped where names stay unique."""
    full = [
        [part for part in jax.tree_util.keystr(path, simple=True, separator=".").split(".") if part]
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    short = [[part for part in parts if not part.isdigit()] for parts in full]
    repeated = Counter(map(tuple, short))
    chosen = [
        parts if repeated[tuple(brief)] > 1 or not brief else brief for parts, brief in zip(full, short, strict=True)
    ]
    return [".".join([prefix, *parts] if prefix else parts) for parts in chosen]


def _check(micro_batches: int, gpus: int, bucket_bytes: int, coarsen: str) -> None:
    for setting, value in (("micro_batches", micro_batches), ("gpus", gpus), ("bucket_bytes", bucket_bytes)):
        if value < 1:
            raise InputError(f"{setting}: {value} must be at least 1")
    if coarsen not in ("none", "layer"):
        raise InputError(f"coarsen: {coarsen!r} is unknown; choose none or layer")


def import_train_step(
    loss: Callable[[Any, Any], jax.Array],
    params: Any,
    batch: Any,
    optimizer: Any,
    *,
    gpu: str | GpuSpec,
    micro_batches: int = 1,
    gpus: int = 1,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    coarsen: str = "none",
    name: str = "train_step",
) -> ImportedStep:
    """Make a data-parallel training step from a loss and an optax optimizer, and import it.

    `params` and `batch` are trees of arrays or `jax.ShapeDtypeStruct`; `batch` is one micro-batch of one GPU. With
    `micro_batches` K > 1, gradients are added up in persistent accumulators of the parameters' dtype, which the optimizer
    resets. With `gpus` > 1, gradients are all-reduced in buckets of `bucket_bytes` in the last micro-batch.
    `coarsen="layer"` merges the ops of one layer and phase into one.
    Raises InputError for settings out of range, unknown GPUs, dtypes that the GPU lacks, and what `flatten` rejects.
    """
    _check(micro_batches, gpus, bucket_bytes, coarsen)
    begin = time.perf_counter()
    state = jax.eval_shape(optimizer.init, params)
    names = _paths(params, "")
    treedef = jax.tree.structure(params)

    def tagged(gradients: Any) -> Any:
        leaves = treedef.flatten_up_to(gradients)
        return treedef.unflatten([checkpoint_name(g, f"{TAG}{n}") for n, g in zip(names, leaves, strict=True)])

    def update(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        with jax.named_scope(OPTIMIZER_SCOPE):
            changes, state = optimizer.update(gradients, state, params)
            return jax.tree.map(lambda p, c: (p + c).astype(p.dtype), params, changes), state

    def single(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return *update(params, state, tagged(gradients)), value

    def accumulating(params: Any, state: Any, sums: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        sums = jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, tagged(gradients))
        with jax.named_scope(OPTIMIZER_SCOPE):
            mean = jax.tree.map(lambda s: s / jnp.asarray(micro_batches, s.dtype), sums)
        return *update(params, state, mean), sums, value

    def described(tree: Any, prefix: str, kind: TensorKind, first_result: int) -> list[Argument]:
        return [Argument(n, kind, True, first_result + i) for i, n in enumerate(_paths(tree, prefix))]

    arguments = described(params, "", TensorKind.WEIGHT, 0)
    arguments += described(state, "optimizer", TensorKind.OPTIMIZER_STATE, len(arguments))
    trees: tuple[Any, ...] = (params, state)
    if micro_batches > 1:
        sums = [Argument(f"{n}.grad", TensorKind.GRADIENT, True, len(arguments) + i) for i, n in enumerate(names)]
        arguments += sums
        trees += (params,)
    arguments += [Argument(n, TensorKind.INPUT, False) for n in _paths(batch, "batch")]
    closed = jax.make_jaxpr(accumulating if micro_batches > 1 else single)(*trees, batch)
    trace_s = time.perf_counter() - begin
    suffix = ".grad.micro_batch" if micro_batches > 1 else ".grad"
    return _import(
        closed, arguments, OPTIMIZER_SCOPE, suffix, gpu=gpu, micro_batches=micro_batches, gpus=gpus,
        bucket_bytes=bucket_bytes, coarsen=coarsen, name=name, trace_s=trace_s,
    )  # fmt: skip


def import_step(
    step: Callable[[Any, Any], Any],
    state: Any,
    batch: Any,
    *,
    gpu: str | GpuSpec,
    kind_of: Callable[[str], TensorKind] | None = None,
    gpus: int = 1,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    coarsen: str = "none",
    name: str = "train_step",
) -> ImportedStep:
    """Import `step(state, batch) -> (state, anything)` as it is, with one micro-batch and a donated state.

    `kind_of` maps the dotted name of a leaf of `state` to weight or optimizer state; without it, names that contain `opt`,
    `mu`, `nu`, `momentum`, `count` or `step` are optimizer state. Phases come from the name stack (`flatten`).
    Raises InputError if the new state does not have the structure of the old one, and as `import_train_step` does.
    """
    _check(1, gpus, bucket_bytes, coarsen)
    begin = time.perf_counter()
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(state, batch)
    if not isinstance(shapes, tuple) or not shapes or jax.tree.structure(shapes[0]) != jax.tree.structure(state):
        raise InputError(
            "step: it must return a tuple whose first item is the new state, with the structure of the old state"
        )
    names = _paths(state, "")
    arguments = [Argument(n, (kind_of or _guess_kind)(n), True, i) for i, n in enumerate(names)]
    arguments += [Argument(n, TensorKind.INPUT, False) for n in _paths(batch, "batch")]
    return _import(
        closed, arguments, None, ".grad", gpu=gpu, micro_batches=1, gpus=gpus, bucket_bytes=bucket_bytes, coarsen=coarsen,
        name=name, trace_s=time.perf_counter() - begin,
    )  # fmt: skip


def _guess_kind(name: str) -> TensorKind:
    parts = name.split(".")
    marks = ("mu", "nu", "momentum", "trace", "count", "step")
    is_state = any(part in marks or part.startswith("opt") for part in parts)
    return TensorKind.OPTIMIZER_STATE if is_state else TensorKind.WEIGHT


def _import(
    closed: Any, arguments: list[Argument], optimizer_scope: str | None, gradient_suffix: str, *, gpu: str | GpuSpec,
    micro_batches: int, gpus: int, bucket_bytes: int, coarsen: str, name: str, trace_s: float,
) -> ImportedStep:  # fmt: skip
    begin = time.perf_counter()
    spec = gpu if isinstance(gpu, GpuSpec) else find_gpu(gpu)
    graph = flatten(closed, optimizer_scope)
    fusion = fuse(graph)
    root = common_root(e.scope for e in graph.equations if e.phase is not Phase.OPTIMIZER)
    updated = {graph.results[a.result] for a in arguments if a.result >= 0}
    groups = group_kernels(graph, fusion, lambda kernel: layer_label(strip_root(kernel.scope, root)), updated)
    gradients = {storage: f"{param}{gradient_suffix}" for param, storage in fusion.tagged.items()}
    program = build_program(Build(graph, fusion, groups, arguments, root, gradients), spec, name, replicas=gpus > 1)
    merged_ops = merged_tensors = 0
    if coarsen == "layer":
        coarse = coarsen_layers(program)
        merged_ops = len(program.ops) - len(coarse.ops)
        merged_tensors = len(program.tensors) - len(coarse.tensors)
        program = coarse
    collectives: tuple[Collective, ...] = ()
    if gpus > 1:
        program, collectives = synchronise_gradients(program, gpus, bucket_bytes)
    workload = Workload(
        name,
        (program,),
        (0,) * gpus,
        micro_batches,
        f"roofline: {spec.name}, XLA-like fusion of the jaxpr",
        collectives,
    )
    validate_workload(workload)
    report = ImportReport(
        traced_equations=graph.traced_equations,
        equations=len(graph.equations),
        ops=len(program.ops),
        tensors=len(program.tensors),
        matmul_flops=sum(kernel.matmul_flops for kernel in fusion.kernels),
        flops=_total_flops(program.ops),
        fusion=fusion.counts,
        uncounted_primitives=_uncounted(graph, fusion),
        coarsening=coarsen,
        merged_ops=merged_ops,
        merged_tensors=merged_tensors,
        trace_s=trace_s,
        build_s=time.perf_counter() - begin,
    )
    return ImportedStep(workload, report)


def _total_flops(ops: tuple[Op, ...]) -> int:
    return sum(op.flops for op in ops)


def _uncounted(graph: Graph, fusion: Fusion) -> tuple[str, ...]:
    names = {graph.equations[kernel.root].primitive for kernel in fusion.kernels}
    return tuple(sorted(name for name in names if name not in _NOT_OPAQUE and not is_matmul(name)))
