"""Import a training step written in JAX: trace it at its real size without allocating, fuse, time, and build.

`import_train_step` takes a loss and an optax optimizer and makes the step itself, with K micro-batches and gradient
synchronisation. `import_step` takes any `step(state, batch)` as it is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.importers.jax_building import Argument, Build, build_program, synchronise_gradients
from tmojax.importers.jax_coarsening import coarsen_layers, layer_runs
from tmojax.importers.jax_fusion import ELEMENTWISE, INDEXED, REDUCTIONS, Fusion, fuse
from tmojax.importers.jax_grouping import gradients_by_use, group_kernels
from tmojax.importers.jax_naming import common_root, layer_label, scopes_from_weights, strip_root
from tmojax.importers.jax_rewriting import rewrite
from tmojax.importers.jax_roofline import GpuSpec, find_gpu, is_matmul
from tmojax.importers.jax_traced import TracedStep, bind_names
from tmojax.importers.jax_tracing import TAG, Graph, flatten
from tmojax.problem.workload import Collective, Phase, TensorKind, Workload, validate_workload

OPTIMIZER_SCOPE = "optimizer"
DEFAULT_BUCKET_BYTES = 25_000_000
_NOT_OPAQUE = ELEMENTWISE | REDUCTIONS | INDEXED | {"sort", "rng_bit_generator", "select_and_scatter_add"}


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
            f"{self.traced_equations} equations traced in {self.trace_s:.1f} s, {self.equations} of them needed",
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
    """A workload with the report of how it came about, and the traced step behind it, which can be executed."""

    workload: Workload
    report: ImportReport
    traced: TracedStep


def _paths(tree: Any, prefix: str) -> list[str]:
    """Dotted name of every leaf; leading numbers (positions in optax chains) are dropped where names stay unique."""
    full = [
        [part for part in jax.tree_util.keystr(path, simple=True, separator=".").split(".") if part]
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    short = [list(dropwhile(str.isdigit, parts)) for parts in full]
    repeated = Counter(map(tuple, short))
    chosen = [
        parts if repeated[tuple(brief)] > 1 or not brief else brief for parts, brief in zip(full, short, strict=True)
    ]
    return [".".join([prefix, *parts] if prefix else parts) for parts in chosen]


@dataclass(frozen=True)
class _Settings:
    """The keyword arguments that both entries share."""

    gpu: str | GpuSpec
    micro_batches: int
    gpus: int
    bucket_bytes: int
    coarsen: str
    name: str

    def check(self) -> None:
        for setting in ("micro_batches", "gpus", "bucket_bytes"):
            if getattr(self, setting) < 1:
                raise InputError(f"{setting}: {getattr(self, setting)} must be at least 1")
        if self.coarsen not in ("none", "layer"):
            raise InputError(f"coarsen: {self.coarsen!r} is unknown; choose none or layer")


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
    `micro_batches` K > 1, gradients are added up in persistent accumulators of the parameters' dtype, which the
    optimizer resets. With `gpus` > 1, gradients are all-reduced in buckets of `bucket_bytes` in the last micro-batch.
    `coarsen="layer"` merges the ops of one layer and phase into one.
    Raises InputError for settings out of range, unknown GPUs, dtypes that the GPU lacks, and what `flatten` rejects.
    """
    settings = _Settings(gpu, micro_batches, gpus, bucket_bytes, coarsen, name)
    settings.check()
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
    trees = jax.tree.structure(trees), jax.tree.structure(batch)
    return _import(closed, arguments, trees, OPTIMIZER_SCOPE, suffix, settings, trace_s)


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

    `kind_of` maps the dotted name of a leaf of `state` to weight or optimizer state; without it, names with a part
    that begins with `opt` or is `mu`, `nu`, `momentum`, `trace`, `count` or `step` are optimizer state. Phases come
    from the name stack (`flatten`).
    Raises InputError if the new state does not have the structure of the old one, and as `import_train_step` does.
    """
    settings = _Settings(gpu, 1, gpus, bucket_bytes, coarsen, name)
    settings.check()
    begin = time.perf_counter()
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(state, batch)
    if not isinstance(shapes, tuple) or not shapes or jax.tree.structure(shapes[0]) != jax.tree.structure(state):
        raise InputError(
            "step: it must return a tuple whose first item is the new state, with the structure of the old state"
        )
    names = _paths(state, "")
    arguments = [Argument(n, (kind_of or _guess_kind)(n), True, i) for i, n in enumerate(names)]
    arguments += [Argument(n, TensorKind.INPUT, False) for n in _paths(batch, "batch")]
    trees = jax.tree.structure((state,)), jax.tree.structure(batch)
    return _import(closed, arguments, trees, None, ".grad", settings, time.perf_counter() - begin)


def _guess_kind(name: str) -> TensorKind:
    parts = name.split(".")
    marks = ("mu", "nu", "momentum", "trace", "count", "step")
    is_state = any(part in marks or part.startswith("opt") for part in parts)
    return TensorKind.OPTIMIZER_STATE if is_state else TensorKind.WEIGHT


def _import(
    closed: Any,
    arguments: list[Argument],
    trees: tuple[Any, Any],
    optimizer_scope: str | None,
    gradient_suffix: str,
    settings: _Settings,
    trace_s: float,
) -> ImportedStep:
    begin = time.perf_counter()
    gpu = settings.gpu if isinstance(settings.gpu, GpuSpec) else find_gpu(settings.gpu)
    graph = flatten(closed, optimizer_scope)
    rewrite(graph)
    fusion = fuse(graph, gpu.bf16_vector)
    root = common_root(e.scope for e in graph.equations if e.phase is not Phase.OPTIMIZER)
    weights = {s: a.name for s, a in zip(graph.arguments, arguments, strict=True) if a.kind is TensorKind.WEIGHT}
    owners = {n: tuple(part for part in n.split(".") if part != "value")[:-1] for n in weights.values()}
    scopes_from_weights(
        fusion.kernels,
        {storage: owners[n] for storage, n in weights.items()},
        {storage: owners[n] for n, storage in fusion.tagged.items()},
    )
    replaced = {
        graph.results[argument.result]: storage
        for storage, argument in zip(graph.arguments, arguments, strict=True)
        if argument.result >= 0 and graph.results[argument.result] != storage
    }
    groups = group_kernels(graph, fusion, lambda kernel: layer_label(strip_root(kernel.scope, root)), replaced)
    tagged = fusion.tagged or gradients_by_use(graph, groups, replaced, weights)
    gradients = {storage: f"{param}{gradient_suffix}" for param, storage in tagged.items()}
    build = Build(graph, fusion, groups, arguments, root, gradients)
    built = build_program(build, gpu, settings.name, replicas=settings.gpus > 1)
    program = fine = built.program
    runs = [[index] for index in range(len(fine.ops))]
    if settings.coarsen == "layer":
        program, runs = coarsen_layers(program), layer_runs(program)
    traced = bind_names(build, built, program, runs, *trees)
    merged_ops, merged_tensors = len(fine.ops) - len(program.ops), len(fine.tensors) - len(program.tensors)
    collectives: tuple[Collective, ...] = ()
    if settings.gpus > 1:
        program, collectives = synchronise_gradients(program, settings.gpus, settings.bucket_bytes)
    workload = Workload(
        name=settings.name,
        programs=(program,),
        device_program=(0,) * settings.gpus,
        micro_batches=settings.micro_batches,
        duration_source=f"roofline: {gpu.name}, kernels fused by rules that follow XLA",
        collectives=collectives,
    )
    validate_workload(workload)
    report = ImportReport(
        traced_equations=graph.traced_equations,
        equations=len(graph.equations),
        ops=len(program.ops),
        tensors=len(program.tensors),
        matmul_flops=sum(kernel.matmul_flops for kernel in fusion.kernels),
        flops=sum(op.flops for op in program.ops),
        fusion=fusion.counts,
        uncounted_primitives=_uncounted(graph, fusion),
        coarsening=settings.coarsen,
        merged_ops=merged_ops,
        merged_tensors=merged_tensors,
        trace_s=trace_s,
        build_s=time.perf_counter() - begin,
    )
    return ImportedStep(workload, report, traced)


def _uncounted(graph: Graph, fusion: Fusion) -> tuple[str, ...]:
    names = {graph.equations[kernel.root].primitive for kernel in fusion.kernels}
    return tuple(sorted(name for name in names if name not in _NOT_OPAQUE and not is_matmul(name)))
