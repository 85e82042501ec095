"""What a compiled step keeps in memory: which storages exist, and which kernels make them.

The rules follow what XLA does for GPUs (docs/importer.md compares them with compiled steps):

1. Matrix products, convolutions, reductions, scatters, gathers, sorts, unknown primitives and results are materialised;
   so are the operands of matrix products and of unknown primitives, and what `checkpoint_name` names.
2. Element-wise chains, broadcasts, slices and conversions are computed inside the kernels that use them.
3. An element-wise value that several kernels need is recomputed in each of them, unless that costs more memory traffic
   than writing and reading it, where an expensive function such as tanh counts as traffic too.
4. Kernels over the same elements that share an input are one kernel with several outputs (`jax_grouping`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tmojax.importers.jax_roofline import equation_flops, is_matmul
from tmojax.importers.jax_tracing import Equation, Graph
from tmojax.problem.workload import Phase

REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin reduce reduce_window_sum "
    "reduce_window_max cumsum cumprod cummax cummin cumlogsumexp".split()
)
INDEXED = frozenset("gather scatter scatter-add scatter-mul scatter-min scatter-max scatter_add".split())
PARTIAL_READS = frozenset("slice dynamic_slice gather split unstack".split())
# Functions that a GPU evaluates as a long polynomial; exp, log, sqrt and division are a few instructions.
EXPENSIVE = frozenset(
    "tanh erf erfc erf_inv pow sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh lgamma digamma random_bits "
    "threefry2x32 expm1 log1p igamma cbrt".split()
)
ELEMENTWISE = EXPENSIVE | frozenset(
    "add add_any sub mul div rem neg sign floor ceil round abs max min and or not xor eq ne lt le gt ge select_n clamp "
    "exp exp2 log logistic sqrt rsqrt integer_pow square one_minus_square is_finite nextafter convert_element_type "
    "population_count clz "
    "bitcast_convert_type reduce_precision broadcast_in_dim iota slice dynamic_slice dynamic_update_slice split "
    "unstack concatenate stack pad shift_left shift_right_logical shift_right_arithmetic real imag complex conj "
    "random_seed random_wrap random_unwrap random_fold_in tile".split()
)
# What an expensive function costs per element, as memory traffic of the same duration (40 FLOPs on an A100). It lies
# between the values at which XLA keeps the tanh of GELU in bf16 (more than 2) and recomputes it in fp32 (less than 4).
EXPENSIVE_TRAFFIC_BYTES = 3
# An element-wise value this many times smaller than every kernel that needs it is recomputed without further thought.
SMALL_VALUE_RATIO = 64


@dataclass(slots=True)
class Kernel:
    """The computation of one materialised storage (or the outputs of one opaque equation).

    `reads` maps each storage that is read to the bytes touched; `elements` is the size of the iteration space.
    `kind` is `matmul`, `reduce`, `elementwise`, `indexed` or `opaque`; `fused` lists equations computed inside.
    """

    root: int
    writes: list[int]
    reads: dict[int, int]
    kind: str
    elements: int
    phase: Phase
    scope: tuple[str, ...]
    matmul_flops: int
    vector_flops: int
    fused: list[int] = field(default_factory=list)


@dataclass
class Fusion:
    """Kernels in equation order, the materialised storages, and how often each rule applied."""

    kernels: list[Kernel]
    materialised: set[int]
    counts: dict[str, int]
    tagged: dict[str, int]


def _kind(equation: Equation) -> str:
    name = equation.primitive
    if is_matmul(name):
        return "matmul"
    if name in REDUCTIONS:
        return "reduce"
    if name in INDEXED:
        return "indexed"
    return "elementwise" if name in ELEMENTWISE else "opaque"


class _Fuser:
    def __init__(self, graph: Graph, bf16_vector: bool):
        self.bf16_vector = bf16_vector
        self.graph = graph
        self.users: list[list[int]] = [[] for _ in graph.storages]
        for index, equation in enumerate(graph.equations):
            for source in dict.fromkeys(equation.inputs):
                self.users[source].append(index)
        self.kinds = [_kind(equation) for equation in graph.equations]
        self.results = set(graph.results)
        self.materialised: set[int] = {*graph.arguments, *graph.constants}
        self.tagged: dict[str, int] = {}
        self.scalars = self.counters()
        self.counts = {"element-wise values recomputed": 0, "expensive values kept": 0, "element-wise values kept": 0}

    def counters(self) -> set[int]:
        """Scalar results that follow element-wise from arguments and constants alone: step counters and the like.

        Their old value is as good, and reading it allows updating them in place. Scalars that contain anything else,
        such as a gradient of a scalar parameter or a sum of such, have to be read.
        """
        graph = self.graph
        known = {s for s in range(len(graph.storages)) if not self.produced(s)}
        gradients = set(graph.tags.values())
        for index, equation in enumerate(graph.equations):
            if self.kinds[index] == "elementwise" and known.issuperset(equation.inputs):
                known.update(set(equation.outputs) - gradients)
        return {s for s in self.results & known if self.produced(s) and graph.storages[s].elements == 1}

    def produced(self, storage: int) -> bool:
        return self.graph.storages[storage].producer >= 0

    def fixed(self) -> None:
        """Rule 1."""
        graph = self.graph
        for index, equation in enumerate(graph.equations):
            kind = self.kinds[index]
            if kind != "elementwise":
                self.materialised.update(equation.outputs)
            if kind in ("matmul", "opaque"):
                self.materialised.update(i for i in equation.inputs if self.produced(i))
        self.materialised.update(s for s in graph.results if self.produced(s))
        self.materialised.update(
            s for s, storage in enumerate(graph.storages) if storage.given_name and self.produced(s) and self.users[s]
        )
        # A gradient is one tensor, even where its last step is an addition; its reader converts it.
        self.tagged = {name: self.unconverted(storage) for name, storage in graph.tags.items()}
        self.materialised.update(self.tagged.values())

    def unconverted(self, storage: int) -> int:
        """Undo conversions, which the reader of a gradient does itself."""
        while self.produced(storage):
            equation = self.graph.equations[self.graph.storages[storage].producer]
            if equation.primitive != "convert_element_type" or storage in self.results:
                break
            storage = equation.inputs[0]
        return storage

    def roots(self) -> list[frozenset[int]]:
        """For every storage, the equations of the kernels that would compute it inside (empty if materialised)."""
        roots: list[frozenset[int]] = [frozenset()] * len(self.graph.storages)
        for index in range(len(self.graph.equations) - 1, -1, -1):
            for out in self.graph.equations[index].outputs:
                found: set[int] = set()
                for user in self.users[out]:
                    user_equation = self.graph.equations[user]
                    if self.kinds[user] != "elementwise":
                        found.add(user)
                        continue
                    for user_out in user_equation.outputs:
                        if user_out in self.materialised:
                            found.add(user)
                        else:
                            found |= roots[user_out]
                roots[out] = frozenset(found)
        return roots

    def shared_values(self) -> None:
        """Rule 3: decide for every element-wise value with several users, in order of computation."""
        graph = self.graph
        roots = self.roots()
        leaves: list[dict[int, int]] = [{} for _ in graph.storages]
        expensive = [False] * len(graph.storages)
        kept: dict[int, str] = {}
        for index, equation in enumerate(graph.equations):
            if self.kinds[index] != "elementwise":
                continue
            below: dict[int, int] = {}
            costly = equation.primitive in EXPENSIVE
            for source in equation.inputs:
                if source in self.materialised and source not in self.scalars:
                    below[source] = max(below.get(source, 0), self.touched(equation, source))
                else:
                    below.update(leaves[source])
                    costly = costly or expensive[source]
            for out in equation.outputs:
                leaves[out], expensive[out] = below, costly
                storage = graph.storages[out]
                # Pieces of one array may go to different kernels: they count as its users.
                uses = sum(len(graph.equations[user].outputs) for user in self.users[out])
                if out in self.materialised or storage.elements <= 1 or not below or uses < 2:
                    continue
                count = len(roots[out])
                if count < 2:
                    continue
                # Statistics of rows cost nothing beside the rows that every reader goes through anyway.
                if storage.elements * SMALL_VALUE_RATIO <= min(self.iteration_elements(r) for r in roots[out]):
                    continue
                read = sum(below.values())
                if costly:
                    read += storage.elements * EXPENSIVE_TRAFFIC_BYTES
                if count * storage.size_bytes < (count - 1) * read:
                    if costly and storage.dtype == "bfloat16" and not self.bf16_vector:
                        storage.dtype, storage.size_bytes = "float32", 2 * storage.size_bytes
                    self.materialised.add(out)
                    kept[out] = "expensive values kept" if costly else "element-wise values kept"
        roots = self.roots()
        for out in reversed(list(kept)):
            if len(roots[out]) < 2:
                self.materialised.discard(out)
                del kept[out]
        for rule in kept.values():
            self.counts[rule] += 1

    def iteration_elements(self, index: int) -> int:
        """Elements that the kernel of an equation goes through: its outputs, or what a reduction reduces."""
        equation = self.graph.equations[index]
        count = max((self.graph.storages[out].elements for out in equation.outputs), default=0)
        if self.kinds[index] == "reduce" and equation.inputs:
            count = max(count, self.graph.storages[equation.inputs[0]].elements)
        return count

    def touched(self, equation: Equation, source: int, needed: set[int] | None = None) -> int:
        """Bytes of `source` that an equation reads: slices and gathers read only what they return.

        With `needed`, only those of its outputs are computed: one piece of a split array.
        """
        storage = self.graph.storages[source]
        if equation.primitive not in PARTIAL_READS or storage.elements == 0:
            return storage.size_bytes
        item = storage.size_bytes // storage.elements
        returned = (
            sum(self.graph.storages[o].elements for o in equation.outputs if needed is None or o in needed) * item
        )
        return min(storage.size_bytes, returned)

    def kernel(self, index: int, writes: list[int]) -> Kernel:
        """Collect the equations that the kernel of one equation computes, down to what it reads."""
        graph = self.graph
        root = graph.equations[index]
        needed = set(writes)
        fused = [index]
        seen = {index}
        stack = [index]
        visited: list[Equation] = []
        while stack:
            visited.append(graph.equations[stack.pop()])
            for source in visited[-1].inputs:
                needed.add(source)
                producer = graph.storages[source].producer
                inside = source not in self.materialised or source in self.scalars
                if inside and producer >= 0 and producer not in seen:
                    seen.add(producer)
                    fused.append(producer)
                    stack.append(producer)
        reads: dict[int, int] = {}
        for equation in visited:
            for source in equation.inputs:
                if source in self.materialised and source not in self.scalars:
                    size = graph.storages[source].size_bytes
                    reads[source] = min(size, reads.get(source, 0) + self.touched(equation, source, needed))
        elements = self.iteration_elements(index)
        matmul = vector = 0
        for position in fused:
            flops = equation_flops(graph.equations[position], graph)
            if self.kinds[position] == "matmul":
                matmul += flops
            else:
                vector += flops
        return Kernel(index, writes, reads, self.kinds[index], elements, root.phase, root.scope, matmul, vector, fused)

    def fuse(self) -> Fusion:
        self.fixed()
        self.shared_values()
        kernels = []
        uses = [0] * len(self.graph.equations)
        for index, equation in enumerate(self.graph.equations):
            writes = [out for out in equation.outputs if out in self.materialised]
            if writes:
                kernel = self.kernel(index, writes)
                for position in kernel.fused[1:]:
                    uses[position] += 1
                kernels.append(kernel)
        self.counts["element-wise values recomputed"] = sum(1 for count in uses if count > 1)
        self.counts["equations fused away"] = len(self.graph.equations) - len(kernels)
        return Fusion(kernels, self.materialised, self.counts, self.tagged)


def fuse(graph: Graph, bf16_vector: bool = True) -> Fusion:
    """Apply the rules to a flat graph and return one kernel per materialised storage, in equation order.

    Without `bf16_vector` arithmetic, expensive bf16 values that are kept are kept in fp32, as they were computed.
    """
    return _Fuser(graph, bf16_vector).fuse()
