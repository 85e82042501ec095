"""From groups of kernels to a `Workload`: tensors, ops, in-place updates, gradient synchronisation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tmojax.errors import InputError
from tmojax.importers.jax_fusion import Fusion, Kernel
from tmojax.importers.jax_grouping import Group
from tmojax.importers.jax_naming import Names, Scope, layer_label, strip_root
from tmojax.importers.jax_roofline import GpuSpec, duration_s, is_matmul
from tmojax.importers.jax_tracing import Graph
from tmojax.problem.workload import Collective, CollectiveKind, Lifetime, Op, Phase, Program, Tensor, TensorKind


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of the traced step. `result` is the index of the result that replaces it in place, or -1."""

    name: str
    kind: TensorKind
    persistent: bool
    result: int = -1


@dataclass
class Build:
    """What `build_program` needs besides the graph: the arguments in order, and names found while tracing."""

    graph: Graph
    fusion: Fusion
    groups: list[Group]
    arguments: list[Argument]
    root: str
    gradient_of: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Built:
    """A program, and how it came from the graph.

    `tensor_of` maps storages to tensors; a result that replaces an argument in place is that argument's tensor.
    `updated` maps such results to all tensors that they replace. `resets` [group]: accumulators that the op of the
    group clears. Op i is group i.
    """

    program: Program
    tensor_of: dict[int, int]
    updated: dict[int, list[int]]
    resets: dict[int, list[int]]


class _Builder:
    def __init__(self, build: Build, gpu: GpuSpec, replicas: bool):
        self.build, self.graph, self.gpu, self.replicas = build, build.graph, gpu, replicas
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.tensor_names, self.op_names = Names(), Names()
        self.tensor_of: dict[int, int] = {}
        self.updated: dict[int, list[int]] = {}

    def run(self, name: str) -> Built:
        self.add_arguments()
        self.add_produced()
        resets = self.resets()
        for index, group in enumerate(self.build.groups):
            self.add_op(group, resets.get(index, []))
        self.check_old_values()
        return Built(Program(name, tuple(self.tensors), tuple(self.ops)), self.tensor_of, self.updated, resets)

    def add_tensor(self, storage: int, tensor: Tensor) -> None:
        self.tensor_of[storage] = len(self.tensors)
        self.tensors.append(tensor)

    def tensor_bytes(self, tensor: int) -> int:
        return self.tensors[tensor].size_bytes

    def add_arguments(self) -> None:
        graph = self.graph
        used = {source for group in self.build.groups for kernel in group.kernels for source in kernel.reads}
        for storage, argument in zip(graph.arguments, self.build.arguments, strict=True):
            if storage not in used and not argument.persistent:
                continue
            persistent = Lifetime.STATE if argument.persistent else Lifetime.MICRO_BATCH
            tensor_name = self.tensor_names.unique(argument.name)
            shared = self.replicas and argument.kind in (TensorKind.WEIGHT, TensorKind.OPTIMIZER_STATE)
            size = graph.storages[storage].size_bytes
            self.add_tensor(
                storage,
                Tensor(tensor_name, size, argument.kind, persistent, replica_group=tensor_name if shared else ""),
            )
            if argument.result >= 0:
                result = graph.results[argument.result]
                if result != storage and graph.storages[result].producer >= 0:
                    self.updated.setdefault(result, []).append(self.tensor_of[storage])
        for result, targets in self.updated.items():
            self.tensor_of[result] = targets[0]
        # Arrays that the step closes over; they stay on the device.
        for storage in sorted(used):
            if storage not in self.tensor_of and graph.storages[storage].producer < 0:
                constant = self.tensor_names.unique("constant")
                self.add_tensor(
                    storage, Tensor(constant, graph.storages[storage].size_bytes, TensorKind.INPUT, Lifetime.STATE)
                )

    def add_produced(self) -> None:
        """Name what the kernels write: the largest tensor of a scope and phase gets the plain scope as its name."""
        graph = self.graph
        produced: list[tuple[int, Kernel]] = [
            (write, kernel) for group in self.build.groups for kernel in group.kernels for write in kernel.writes
        ]
        largest: dict[tuple[Phase, Scope], int] = {}
        for write, kernel in produced:
            key = (kernel.phase, kernel.scope)
            if (
                write not in self.tensor_of
                and not self.is_copy(kernel)
                and (key not in largest or graph.storages[write].elements >= graph.storages[largest[key]].elements)
            ):
                largest[key] = write
        read_by_optimizer = {
            source
            for group in self.build.groups
            if group.first.phase is Phase.OPTIMIZER
            for kernel in group.kernels
            for source in kernel.reads
        }
        for write, kernel in produced:
            if write in self.tensor_of:
                continue
            kind = TensorKind.ACTIVATION
            if kernel.phase is Phase.BACKWARD and (write in self.build.gradient_of or write in read_by_optimizer):
                kind = TensorKind.GRADIENT
            lifetime = Lifetime.STEP if kernel.phase is Phase.OPTIMIZER else Lifetime.MICRO_BATCH
            wanted = self.name_of(write, kernel, largest.get((kernel.phase, kernel.scope)) == write)
            self.add_tensor(
                write, Tensor(self.tensor_names.unique(wanted), graph.storages[write].size_bytes, kind, lifetime)
            )

    def name_of(self, write: int, kernel: Kernel, is_largest: bool) -> str:
        storage = self.graph.storages[write]
        if write in self.build.gradient_of:
            return self.build.gradient_of[write]
        scope = strip_root(kernel.scope, self.build.root)
        if storage.given_name:
            layer = layer_label(scope)
            return storage.given_name if layer in storage.given_name else f"{layer}.{storage.given_name}"
        primitive = self.graph.equations[kernel.root].primitive
        if self.is_copy(kernel):
            return f"{self.tensors[self.tensor_of[next(iter(kernel.reads))]].name}.{storage.dtype}"
        parts = list(scope) or [primitive]
        if kernel.phase is Phase.BACKWARD:
            parts.append("backward")
        if len(kernel.writes) > 1:
            parts.append(str(kernel.writes.index(write)))
        elif scope and not is_largest:
            parts.append(primitive)
        return ".".join(parts)

    def is_copy(self, kernel: Kernel) -> bool:
        """Say whether a kernel only converts an argument to another dtype."""
        converts = self.graph.equations[kernel.root].primitive == "convert_element_type"
        return converts and len(kernel.reads) == 1 and self.graph.storages[next(iter(kernel.reads))].producer < 0

    def resets(self) -> dict[int, list[int]]:
        """For every group, the gradient accumulators that it clears: it is the last of the optimizer to read them."""
        last_reader: dict[int, int] = {}
        for index, group in enumerate(self.build.groups):
            if group.first.phase is Phase.OPTIMIZER:
                for source in (source for kernel in group.kernels for source in kernel.reads):
                    spec = self.tensors[self.tensor_of[source]]
                    if spec.kind is TensorKind.GRADIENT and spec.lifetime is Lifetime.STATE:
                        last_reader[self.tensor_of[source]] = index
        cleared: dict[int, list[int]] = {}
        for tensor, index in last_reader.items():
            cleared.setdefault(index, []).append(tensor)
        return cleared

    def add_op(self, group: Group, resets: list[int]) -> None:
        graph = self.graph
        own = set(group.writes)
        reads: dict[int, int] = {}
        for kernel in group.kernels:
            for source, touched in kernel.reads.items():
                if source not in own:
                    reads[source] = max(reads.get(source, 0), touched)
        updates = tuple(dict.fromkeys([t for write in group.writes for t in self.updated.get(write, ())] + resets))
        writes = tuple(self.tensor_of[w] for w in group.writes if w not in self.updated)
        read_tensors = tuple(t for t in dict.fromkeys(self.tensor_of[s] for s in reads) if t not in updates)
        traffic = sum(reads.values()) + sum(graph.storages[w].size_bytes for w in group.writes)
        traffic += sum(map(self.tensor_bytes, resets))
        matmuls = [
            graph.equations[position]
            for kernel in group.kernels
            for position in kernel.fused
            if is_matmul(graph.equations[position].primitive)
        ]
        vector = sum(kernel.vector_flops for kernel in group.kernels)
        first = group.first
        name, layer = self.op_label(group, writes, updates, read_tensors)
        self.ops.append(
            Op(
                name=self.op_names.unique(name),
                phase=first.phase,
                duration_s=duration_s(self.gpu, matmuls, vector, traffic),
                reads=read_tensors,
                writes=writes,
                updates=updates,
                recomputable=not updates and first.phase is not Phase.OPTIMIZER,
                step_op=first.phase is Phase.OPTIMIZER,
                layer=layer,
                flops=sum(kernel.matmul_flops + kernel.vector_flops for kernel in group.kernels),
                memory_traffic_bytes=traffic,
            )
        )

    def op_label(
        self, group: Group, writes: tuple[int, ...], updates: tuple[int, ...], reads: tuple[int, ...]
    ) -> tuple[str, str]:
        """Name and layer of an op: those of its largest output, or of the weight or accumulator that it updates."""
        if not updates:
            names = [self.tensors[t].name for t in writes]
            plain = [t for t in writes if not any(self.tensors[t].name.startswith(f"{name}.") for name in names)]
            return self.tensors[max(plain, key=self.tensor_bytes)].name, self.layer_of(group.first)
        weights = [t for t in updates if self.tensors[t].kind is TensorKind.WEIGHT]
        target = self.tensors[(weights or list(updates))[0]].name
        if group.first.phase is not Phase.OPTIMIZER:
            made = [op.layer for op in self.ops if set(op.writes) & set(reads)]
            return f"accumulate.{target}", made[-1] if made else layer_label(target.split("."))
        return f"update.{target}", layer_label(target.split(".")) if weights else "optimizer"

    def layer_of(self, kernel: Kernel) -> str:
        return layer_label(strip_root(kernel.scope, self.build.root))

    def check_old_values(self) -> None:
        """An in-place update must be the last use of the old value, because afterwards it is gone."""
        updater: dict[int, int] = {}
        for index, group in enumerate(self.build.groups):
            for write in group.writes:
                for target in self.updated.get(write, ()):
                    updater[target] = index
        for index, group in enumerate(self.build.groups):
            own = set(group.writes)
            for kernel in group.kernels:
                for source in kernel.reads:
                    tensor = self.tensor_of[source]
                    is_old = self.graph.storages[source].producer < 0
                    if is_old and source not in own and updater.get(tensor, len(self.build.groups)) < index:
                        raise InputError(
                            f"step: op {self.ops[index].name!r} reads {self.tensors[tensor].name!r} after op "
                            f"{self.ops[updater[tensor]].name!r} replaced it in place; compute what needs the old "
                            f"value first"
                        )


def build_program(build: Build, gpu: GpuSpec, name: str, replicas: bool) -> Built:
    """Make the program of one data-parallel GPU. Durations in seconds by the roofline, sizes in bytes.

    Raises InputError for a dtype that the GPU lacks and for an argument that is read after its in-place update.
    """
    return _Builder(build, gpu, replicas).run(name)


def synchronise_gradients(program: Program, gpus: int, bucket_bytes: int) -> tuple[Program, tuple[Collective, ...]]:
    """Insert all-reduces of gradient buckets, each directly after the op that finishes its last gradient.

    Gradients are taken in the order in which backward finishes them; a bucket is closed when it holds at least
    `bucket_bytes` (PyTorch DDP: 25 MB). The collectives are step ops: they run in the last micro-batch.
    """
    needed = {t for op in program.ops if op.phase is Phase.OPTIMIZER for t in (*op.reads, *op.updates)}
    finished: dict[int, int] = {}
    for index, op in enumerate(program.ops):
        if op.phase is Phase.BACKWARD:
            for tensor in (*op.writes, *op.updates):
                if tensor in needed and program.tensors[tensor].kind is TensorKind.GRADIENT:
                    finished[tensor] = index
    buckets: list[tuple[int, list[int], int]] = []
    members: list[int] = []
    held = 0
    for tensor, index in sorted(finished.items(), key=lambda item: (item[1], item[0])):
        members.append(tensor)
        held += program.tensors[tensor].size_bytes
        if held >= bucket_bytes:
            buckets.append((index, members, held))
            members, held = [], 0
    if members:
        buckets.append((max(finished[t] for t in members), members, held))
    ops = list(program.ops)
    collectives = []
    for number, (index, tensors, size) in reversed(list(enumerate(buckets))):
        label = f"all_reduce.{number}"
        ops.insert(
            index + 1,
            Op(
                name=label,
                phase=Phase.COLLECTIVE,
                duration_s=0.0,
                updates=tuple(tensors),
                recomputable=False,
                step_op=True,
                collective=label,
                layer=program.ops[index].layer,
            ),
        )
        collectives.append(Collective(label, CollectiveKind.ALL_REDUCE, size, tuple(range(gpus))))
    return replace(program, ops=tuple(ops)), tuple(reversed(collectives))
