"""The segments of a schedule: its compute instructions one by one, or joined between transfer points.

Joined ops are one program: one dispatch, and values that the compiler may fuse away. A segment is as long as it can be
without more live bytes than the plan counts; what does not fit is halved and compiled again.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from tmojax.execute.compiled_step import CompiledStep
from tmojax.execute.joining import Extent, Joining
from tmojax.execute.lists import Copy, Node, PreparedList
from tmojax.execute.segments import Compiled, Instance, Run
from tmojax.problem import Kind, Problem


@dataclass(frozen=True, eq=False)
class Segment:
    """Compute instructions of one list that are dispatched as one program.

    `position`: the instruction at which it counts as dispatched, one of `nodes`. `inside`: copies that the plan counts
    and that are no arrays, because only this segment uses them.
    """

    nodes: tuple[Node, ...]
    position: int
    compiled: Compiled
    inside: frozenset[Copy]

    @cached_property
    def instructions(self) -> tuple[int, ...]:
        """Places in the list."""
        return tuple(node.index for node in self.nodes)

    @cached_property
    def after_start(self) -> tuple[int, ...]:
        """Instructions outside whose arrays it uses."""
        return tuple(sorted({i for node in self.nodes for i in node.after_start} - set(self.instructions)))

    @cached_property
    def after_end(self) -> tuple[int, ...]:
        """Instructions outside that must be complete."""
        return tuple(sorted({i for node in self.nodes for i in node.after_end} - set(self.instructions)))


Segments = tuple[tuple[Segment, ...], ...]


def single_segments(compiled: CompiledStep, lists: Sequence[PreparedList]) -> Segments:
    """[device]: every compute instruction alone, in list order."""
    return tuple(
        tuple(_single(compiled, one.device, node) for node in one.nodes.values() if node.kind is Kind.COMPUTE)
        for one in lists
    )


def joined_segments(compiled: CompiledStep, problem: Problem, lists: Sequence[PreparedList]) -> Segments:
    """[device]: compute instructions joined as far as the list and its bytes allow, in list order."""
    shared = {
        copy for one in lists for node in one.nodes.values() for copy in (*node.reads, *node.writes)
        if copy[0] != one.device
    }  # fmt: skip
    chosen = [_Choice(compiled, one.device, Joining(problem, one, shared)).run() for one in lists]
    for device, choices in enumerate(chosen):
        compiled.compiler(device).compile_ahead(
            (_runs(nodes), _instances(kept), compiled.devices[device])
            for nodes, _, kept in choices if len(nodes) > 1
        )  # fmt: skip
    return tuple(
        tuple(_segment(compiled, device, *choice) for choice in choices) for device, choices in enumerate(chosen)
    )


def segments_text(problem: Problem, segments: Segments) -> str:
    """A line per device: how many programs run its ops, and the bytes that they need beside what they return."""
    lines = []
    for device, own in enumerate(segments):
        runs = sum(len(segment.nodes) for segment in own)
        programs = len({id(segment.compiled.executable) for segment in own})
        lines.append(
            f"{problem.machine.devices[device].name}: {len(own)} programs for {runs} ops, {programs} different; at "
            f"most {max((len(s.nodes) for s in own), default=0)} ops in one, "
            f"{max((s.compiled.workspace_bytes for s in own), default=0)} bytes of temporaries"
        )
    return "\n".join(lines)


class _Choice:
    """How one list is cut: (nodes, position, copies that are kept) per segment."""

    def __init__(self, compiled: CompiledStep, device: int, joining: Joining) -> None:
        self._compiled, self._device, self._joining = compiled, device, joining

    def run(self) -> list[tuple[tuple[Node, ...], int, frozenset[Copy]]]:
        found = []
        for stretch in self._joining.stretches():
            rest, most = stretch, len(stretch)
            while rest:
                extent = self._longest(rest, most)
                nodes = tuple(rest[: extent.count])
                found.append((nodes, extent.position, self._joining.kept(nodes)))
                rest, most = rest[extent.count :], 2 * extent.count
        return found

    def _longest(self, stretch: Sequence[Node], most: int) -> Extent:
        """At most `most` instructions: as many as fit, and half as many each time that they do not."""
        extents = self._joining.extents(stretch[:most])
        while True:
            extent = next(extent for extent in reversed(extents) if extent.count <= most)
            if extent.count == 1 or self._needed_bytes(stretch[: extent.count]) <= extent.limit_bytes:
                return extent
            most = extent.count // 2  # at least 1

    def _needed_bytes(self, nodes: Sequence[Node]) -> int:
        kept = self._joining.kept(nodes)
        sizes = self._compiled.array_bytes[self._device]
        workspace_bytes = self._compiled.compiler(self._device).workspace_bytes(
            _runs(nodes), _instances(kept), self._compiled.devices[self._device]
        )
        return workspace_bytes + sum(sizes[copy[1]] for copy in kept)


def _segment(
    compiled: CompiledStep, device: int, nodes: tuple[Node, ...], position: int, kept: frozenset[Copy]
) -> Segment:
    if len(nodes) == 1:
        return _single(compiled, device, nodes[0])
    program = compiled.compiler(device).compile(_runs(nodes), _instances(kept), compiled.devices[device])
    made = {copy for node in nodes for copy in node.creates}
    return Segment(nodes, position, program, frozenset(made - kept))


def _single(compiled: CompiledStep, device: int, node: Node) -> Segment:
    return Segment((node,), node.index, compiled.op(device, node.op, node.micro_batch), frozenset())


def _runs(nodes: Sequence[Node]) -> tuple[Run, ...]:
    return tuple(
        Run(
            node.op, node.micro_batch,
            tuple(copy[1] for copy, keep in zip(node.writes, node.kept, strict=True) if not keep), node.again,
        )
        for node in nodes
    )  # fmt: skip


def _instances(copies: Set[Copy]) -> frozenset[Instance]:
    return frozenset((copy[1], copy[2]) for copy in copies)
