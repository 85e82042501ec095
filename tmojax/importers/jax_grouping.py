"""Join kernels into ops, and put the ops in order.

Kernels of one layer and phase over the same elements are one op with several outputs when they share an input (queries,
keys and values out of one product; weight, first and second moment of one optimizer step), when one consumes the
other's element-wise result at no extra reads, and when one normalises the rows that the other reduced (softmax, layer
normalisation). Joining never makes a cycle: a kernel joins another only if it can run at the other's place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tmojax.importers.jax_fusion import Fusion, Kernel
from tmojax.importers.jax_tracing import Equation, Graph
from tmojax.problem.workload import Phase

# A row that is reduced and normalised in one kernel must fit into the registers and shared memory of one block.
LONGEST_ROW_ELEMENTS = 16384
# A bias beside the tensor that it is added to is no reason to keep kernels apart.
EXTRA_READS = 1.1


@dataclass(slots=True)
class Group:
    """Kernels that run as one op; `position` orders groups and is the equation index of the kernel it stands at."""

    kernels: list[Kernel]
    position: float

    @property
    def first(self) -> Kernel:
        return self.kernels[0]

    @property
    def writes(self) -> list[int]:
        return [storage for kernel in self.kernels for storage in kernel.writes]


def _row_elements(kernel: Kernel, graph: Graph) -> int:
    """Length of a row if the kernel reduces trailing dimensions, else 0."""
    equation: Equation = graph.equations[kernel.root]
    axes = equation.params.get("axes")
    if kernel.kind != "reduce" or not axes or not equation.input_shapes:
        return 0
    shape = equation.input_shapes[0]
    trailing = tuple(range(len(shape) - len(axes), len(shape)))
    if tuple(sorted(axes)) != trailing:
        return 0
    length = 1
    for axis in axes:
        length *= shape[axis]
    return length


class _Grouper:
    def __init__(self, graph: Graph, fusion: Fusion, layer_of: Callable[[Kernel], str], replaced: dict[int, int]):
        self.graph = graph
        self.replaced = replaced
        self.groups: list[Group] = []
        self.owner: dict[int, Group] = {}
        self.readers: dict[int, list[Group]] = {}
        self.kernel_of = {write: kernel for kernel in fusion.kernels for write in kernel.writes}
        self.kernels = fusion.kernels
        self.layer = {id(kernel): layer_of(kernel) for kernel in fusion.kernels}

    def run(self) -> list[Group]:
        for kernel in self.kernels:
            group = self.join(kernel)
            if group is None:
                group = Group([kernel], self.position(kernel))
                self.groups.append(group)
            for write in kernel.writes:
                self.owner[write] = group
            for storage in kernel.reads:
                readers = self.readers.setdefault(storage, [])
                if not any(group is other for other in readers):
                    readers.append(group)
        self.replace_last()
        self.groups.sort(key=lambda group: group.position)
        return self.groups

    def replace_last(self) -> None:
        """Move in-place updates behind the last reader of the old value, unless the new value is needed before."""
        for group in self.groups:
            arguments = [self.replaced[write] for write in group.writes if write in self.replaced]
            old = [r.position for a in arguments for r in self.readers.get(a, ()) if r is not group]
            new = [r.position for w in group.writes for r in self.readers.get(w, ()) if r is not group]
            last = max(old, default=group.position)
            if group.position < last < min(new, default=math.inf):
                group.position = last + 0.25

    def position(self, kernel: Kernel) -> float:
        """Where a kernel of its own stands: at its equation, or, to add to an accumulator, as early as possible."""
        if kernel.phase is Phase.BACKWARD and all(write in self.replaced for write in kernel.writes):
            made = [self.owner[s].position for s in kernel.reads if s in self.owner]
            return max(made) + 0.5 if made else float(kernel.root)
        return float(kernel.root)

    def join(self, kernel: Kernel) -> Group | None:
        """Find an earlier group that this kernel can join, preferring producers, then siblings."""
        if kernel.kind not in ("elementwise", "reduce"):
            return None
        for storage in kernel.reads:
            producer = self.owner.get(storage)
            if producer is not None and self.fits(producer, kernel) and self.place(producer, kernel):
                return producer
        for storage, touched in kernel.reads.items():
            if self.graph.storages[storage].elements < kernel.elements or not touched:
                continue
            for group in reversed(self.readers.get(storage, ())):
                if self.fits(group, kernel) and self.place(group, kernel):
                    return group
        return None

    def fits(self, group: Group, kernel: Kernel) -> bool:
        """Say whether a kernel may run inside a group, next to it or on what it makes."""
        made = [storage for storage in kernel.reads if self.owner.get(storage) is group]
        return self.alike(group, kernel) and all(self.may_follow(kernel, storage) for storage in made)

    def alike(self, group: Group, kernel: Kernel) -> bool:
        first = group.first
        return (
            first.kind in ("elementwise", "reduce")
            and first.elements == kernel.elements
            and first.phase is kernel.phase
            and self.layer[id(first)] == self.layer[id(kernel)]
        )

    def may_follow(self, kernel: Kernel, storage: int) -> bool:
        """Say whether a kernel may run in one op with the kernel that makes its input `storage`."""
        maker = self.kernel_of[storage]
        if maker.kind == "reduce":
            length = _row_elements(maker, self.graph)
            shared = any(self.graph.storages[s].elements >= kernel.elements for s in kernel.reads if s in maker.reads)
            return 0 < length <= LONGEST_ROW_ELEMENTS and shared
        if self.graph.storages[storage].elements != kernel.elements:
            return False
        # In forward, an op is also what gets recomputed: joining must not make the consumer depend on larger inputs.
        size = self.graph.storages[storage].size_bytes
        return kernel.phase is not Phase.FORWARD or sum(maker.reads.values()) <= size * EXTRA_READS

    def place(self, group: Group, kernel: Kernel) -> bool:
        """Move the group, if needed, to where all inputs of both exist before it and all users of both come after."""
        latest = max(
            (self.owner[s].position for s in kernel.reads if s in self.owner and self.owner[s] is not group),
            default=-1.0,
        )
        if latest < group.position:
            group.kernels.append(kernel)
            return True
        for write in group.writes:
            for reader in self.readers.get(write, ()):
                if reader is not group and reader.position < kernel.root:
                    return False
        group.kernels.append(kernel)
        group.position = float(kernel.root)
        return True


def group_kernels(
    graph: Graph, fusion: Fusion, layer_of: Callable[[Kernel], str], replaced: dict[int, int]
) -> list[Group]:
    """Join the kernels of a fused graph into groups, in an order in which every read follows its write.

    `layer_of` labels kernels; only those of one layer are joined. `replaced` maps results to the arguments that they
    replace in place; no later group reads the old value, where that is possible.
    """
    return _Grouper(graph, fusion, layer_of, replaced).run()


def gradients_by_use(
    graph: Graph, groups: list[Group], replaced: dict[int, int], weights: dict[int, str]
) -> dict[str, int]:
    """Find the gradient of each weight where tracing did not mark it, by weight name.

    It is what the group that updates the weight reads from backward, if that is one storage of the weight's size.
    """
    made_by_backward = {w for group in groups if group.first.phase is Phase.BACKWARD for w in group.writes}
    found: dict[str, int] = {}
    for group in groups:
        reads = {storage for kernel in group.kernels for storage in kernel.reads if storage in made_by_backward}
        for weight in {replaced.get(write, -1) for write in group.writes} & weights.keys():
            same = [s for s in reads if graph.storages[s].elements == graph.storages[weight].elements]
            if len(same) == 1:
                found[weights[weight]] = same[0]
    return found
