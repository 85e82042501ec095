"""One micro-batch as nodes and values: what Checkmate's and POET's integer programmes are written over.

A *node* is an op or a run of consecutive ops that is executed as a whole; stage t of the programme is the one in which
node t runs for the first time, so there are as many stages as nodes. A *value* is a tensor that one node writes and
that may be dropped, kept or paged between its uses. Everything else is in memory for fixed stages ("held"): persistent
state, what the step ops read, what is updated in place, members of alias groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tmojax.problem import Lifetime, Problem
from tmojax.problem.step_view import StepView

FORBIDDEN = (2**62, 0.0)  # score of a merge that may not be made


@dataclass(frozen=True, eq=False)
class StageGraph:
    """Nodes in order of their first execution, T of them, and V values.

    node_s [T]: seconds with launch overhead. may_rerun [T]. reads, writes: the values of each node. transient_bytes
    [T]: what a node needs while it runs, beyond all that it reads and writes. fixed_bytes [T]: held in each stage.
    after_bytes [T]: what step ops need that stand behind a node's first execution.

    value_bytes [V]. producer [V]: the node that writes it, -1 for what lies in host memory at the start. tensor [V]:
    index in the program. ops: the ops of each node (program indices).
    """

    node_s: np.ndarray
    may_rerun: np.ndarray
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    transient_bytes: np.ndarray
    fixed_bytes: np.ndarray
    after_bytes: np.ndarray
    value_bytes: np.ndarray
    producer: np.ndarray
    tensor: np.ndarray
    ops: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.node_s)

    @cached_property
    def remakeable(self) -> np.ndarray:
        """[V]: whether the node that writes a value may run again."""
        return (self.producer >= 0) & self.may_rerun[np.maximum(self.producer, 0)]

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that read each value, ascending."""
        found: list[list[int]] = [[] for _ in self.value_bytes]
        for node, values in enumerate(self.reads):
            for value in values:
                found[value].append(node)
        return tuple(map(tuple, found))

    @cached_property
    def wanted_until(self) -> np.ndarray:
        """[V]: the last stage that can have a use for a value: its last user, or a rerun of one for a later stage."""
        last = np.zeros(len(self.value_bytes), np.int64)
        for value in sorted(range(len(last)), key=lambda v: -int(self.producer[v])):
            stages = [*self.users[value]]
            for node in self.users[value]:
                if self.may_rerun[node]:
                    stages += [int(last[written]) for written in self.writes[node]]
            last[value] = max(stages, default=int(self.producer[value]))
        return last

    @cached_property
    def rerun_until(self) -> np.ndarray:
        """[T]: the last stage in which a node may run; its own where it may not run again."""
        own = np.arange(self.stages)
        for node in np.flatnonzero(self.may_rerun).tolist():
            own[node] = max([node, *(int(self.wanted_until[value]) for value in self.writes[node])])
        return own


def stage_graph(problem: Problem, view: StepView, most_stages: int, *, page_inputs: bool) -> StageGraph:
    """The graph of one device's micro-batch with at most `most_stages` nodes (more where step ops stand between).

    `page_inputs`: inputs are values in host memory; otherwise they are held from the first op that reads them until the
    last stage that could want them.
    """
    room_bytes = problem.capacity_bytes(view.device) - int(view.state_bytes.sum())
    return _Builder(problem, view, page_inputs).build(most_stages, room_bytes)


class _Builder:
    def __init__(self, problem: Problem, view: StepView, page_inputs: bool) -> None:
        self.program = problem.workload.program(view.device)
        self.view, self.slot_s = view, view.slot_s
        ops, tensors = self.program.ops, self.program.tensors
        self.slot_ops = [ops[op] for op in view.slot_op]
        count = len(tensors)
        by_step, updated = np.zeros(count, bool), np.zeros(count, bool)
        for op in ops:
            if op.step_op:
                by_step[[*op.reads, *op.writes, *op.updates]] = True
            else:
                updated[list(op.updates)] = True
        micro = np.array([tensor.lifetime is Lifetime.MICRO_BATCH for tensor in tensors], bool)
        aliased = np.array([bool(tensor.alias_group) for tensor in tensors], bool)
        written = np.array(self.program.producer) >= 0
        self.unstable = aliased | updated  # another version may be there when a node runs again
        self.is_value = micro & ~by_step & ~self.unstable & (written | page_inputs)
        self.is_input = micro & ~written
        self.by_step = by_step
        self.uses: list[list[int]] = [[] for _ in tensors]
        for slot, op in enumerate(self.slot_ops):
            for tensor in dict.fromkeys((*op.reads, *op.writes, *op.updates)):
                self.uses[tensor].append(slot)
        self.sizes = np.array([tensor.size_bytes for tensor in tensors], np.int64)

    def build(self, most_stages: int, room_bytes: int) -> StageGraph:
        groups = self._groups(most_stages, room_bytes)
        node_of = np.empty(len(self.slot_ops), np.int64)
        for node, (first, end) in enumerate(groups):
            node_of[first:end] = node
        values, producer = [], []
        for tensor in np.flatnonzero(self.is_value).tolist():
            nodes = node_of[self.uses[tensor]]
            made = self.program.producer[tensor] != -1
            # What lives and dies inside of one node is part of what that node needs while it runs.
            if len(nodes) and (nodes[0] != nodes[-1] or not made):
                values.append(tensor)
                producer.append(int(nodes[0]) if made else -1)
        index = {tensor: value for value, tensor in enumerate(values)}
        reads, writes, transient, may_rerun = [], [], [], []
        for first, end in groups:
            inside = self.slot_ops[first:end]
            written = {tensor for op in inside for tensor in op.writes}
            reads.append(tuple(dict.fromkeys(
                index[t] for op in inside for t in op.reads if t in index and t not in written)))  # fmt: skip
            writes.append(tuple(index[t] for op in inside for t in op.writes if t in index))
            transient.append(self._transient_bytes(first, end, index))
            touched = [*(t for op in inside for t in op.reads), *written]
            may_rerun.append(
                all(op.recomputable and not op.collective and not op.updates for op in inside)
                and not self.unstable[touched].any()
                and not any(self.by_step[t] for t in written)
            )
        held, after = self._held(groups, node_of)
        graph = StageGraph(
            np.array([self.slot_s[first:end].sum() for first, end in groups]), np.array(may_rerun, bool),
            tuple(reads), tuple(writes), np.array(transient, np.int64), held, after,
            self.sizes[values], np.array(producer, np.int64), np.array(values, np.int64),
            tuple(tuple(int(op) for op in self.view.slot_op[first:end]) for first, end in groups),
        )  # fmt: skip
        self._hold_inputs(graph, node_of)
        return graph

    def _hold_inputs(self, graph: StageGraph, node_of: np.ndarray) -> None:
        for tensor in np.flatnonzero(self.is_input & ~self.is_value).tolist():
            nodes = sorted(set(node_of[self.uses[tensor]].tolist()))
            if nodes:
                last = graph.stages - 1 if self.by_step[tensor] else max(int(graph.rerun_until[n]) for n in nodes)
                graph.fixed_bytes[nodes[0] : last + 1] += self.sizes[tensor]

    def _transient_bytes(self, first: int, end: int, index: dict[int, int]) -> int:
        """Most bytes at any op of a node beyond its values: workspace and what lives inside of the node only."""
        most = 0
        live: set[int] = set()
        inner = {t for op in self.slot_ops[first:end] for t in op.writes if self.is_value[t] and t not in index}
        for slot in range(first, end):
            op = self.slot_ops[slot]
            live |= {t for t in op.writes if t in inner}
            most = max(most, op.workspace_bytes + int(self.sizes[list(live)].sum()))
            live = {t for t in live if self.uses[t][-1] > slot}
        return most

    def _held(self, groups: list[tuple[int, int]], node_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(fixed_bytes, after_bytes) without held inputs; an alias group counts with its largest member."""
        tensors, stages = self.program.tensors, len(groups)
        fixed, after = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
        spans: dict[object, list[tuple[int, int, int]]] = {}
        for tensor, spec in enumerate(tensors):
            key, size = spec.alias_group or tensor, int(self.sizes[tensor])
            if spec.lifetime is Lifetime.STATE:
                spans.setdefault(key, []).append((0, stages - 1, size))
            elif (
                spec.lifetime is Lifetime.MICRO_BATCH
                and self.uses[tensor]
                and not self.is_value[tensor]
                and not (self.is_input[tensor] and not spec.alias_group)
            ):
                nodes = node_of[self.uses[tensor]]
                last = stages - 1 if self.by_step[tensor] else int(nodes[-1])
                spans.setdefault(key, []).append((int(nodes[0]), last, size))
        for members in spans.values():
            first, last = min(m[0] for m in members), max(m[1] for m in members)
            fixed[first : last + 1] += max(m[2] for m in members)
        # Step ops stand behind the node whose ops precede them in the table.
        places: list[tuple[int, int]] = []
        for op, spec in enumerate(self.program.ops):
            if spec.step_op:
                slot = int(np.searchsorted(self.view.slot_op, op)) - 1
                places.append((int(node_of[max(slot, 0)]), op))
        lives: dict[int, list[int]] = {}
        for place, (_, op) in enumerate(places):
            spec = self.program.ops[op]
            for tensor in (*spec.reads, *spec.writes, *spec.updates):
                if tensors[tensor].lifetime is not Lifetime.STATE and not self.uses[tensor]:
                    lives.setdefault(tensor, []).append(place)
        for place, (node, op) in enumerate(places):
            alive = [t for t, at in lives.items() if at[0] <= place <= at[-1]]
            need = self.program.ops[op].workspace_bytes + int(self.sizes[alive].sum())
            after[node] = max(after[node], need)
        for tensor, at in lives.items():
            fixed[places[at[0]][0] + 1 : places[at[-1]][0] + 1] += self.sizes[tensor]
        return fixed, after

    def _groups(self, most_stages: int, room_bytes: int) -> list[tuple[int, int]]:
        """Merge neighbours, those first whose merging loses the fewest bytes of freedom, down to `most_stages`.

        Lost are the choice between keeping the one's outputs and the other's (the smaller of the two), and the bytes by
        which both together need more at once than each. No node spans a step op, or needs more than `room_bytes`.
        """
        step_ops = [i for i, op in enumerate(self.program.ops) if op.step_op]
        step_behind = set(np.searchsorted(self.view.slot_op, step_ops).tolist())
        groups = [(slot, slot + 1) for slot in range(len(self.slot_ops))]
        value_at = [frozenset(t for t in (*op.reads, *op.writes) if self.is_value[t]) for op in self.slot_ops]

        def outputs(first: int, end: int, until: int) -> int:
            """Bytes that slots first..end write and that are read behind slot `until`."""
            made = {t for op in self.slot_ops[first:end] for t in op.writes if self.is_value[t]}
            return sum(int(self.sizes[t]) for t in made if self.uses[t][-1] >= until)

        def needs(first: int, end: int) -> int:
            touched = frozenset().union(*value_at[first:end])
            return sum(int(self.sizes[t]) for t in touched if self.uses[t][0] < first or self.uses[t][-1] >= end)

        def lost(place: int) -> tuple[int, float]:
            (a, b), (_, c) = groups[place], groups[place + 1]
            if b in step_behind:
                return FORBIDDEN
            apart = min(outputs(a, b, c), outputs(b, c, c))
            together = needs(a, c)
            if together > room_bytes:
                return FORBIDDEN
            grown = max(0, together - max(needs(a, b), needs(b, c)))
            return (apart + grown, float(self.slot_s[a:c].sum()))

        scores = [lost(place) for place in range(len(groups) - 1)]
        while len(groups) > max(most_stages, 1):
            place = min(range(len(scores)), key=scores.__getitem__)
            if scores[place] == FORBIDDEN:
                break
            groups[place : place + 2] = [(groups[place][0], groups[place + 1][1])]
            del scores[place]
            for near in (place - 1, place):
                if 0 <= near < len(scores):
                    scores[near] = lost(near)
        return groups
