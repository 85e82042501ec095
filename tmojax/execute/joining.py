"""Which compute instructions of a list may be dispatched together as one program, and in how many bytes.

Instructions are joined as long as that changes nothing that the list demands: everything else in the list starts when
it would, and no more bytes are live than the plan counts at one of the joined positions. Times play no part.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from tmojax.execute.lists import Change, Copy, Node, PreparedList
from tmojax.problem import COMPUTE_STREAM, Kind, Phase, Problem


@dataclass(frozen=True, slots=True)
class Extent:
    """The first `count` instructions of a stretch, dispatched as if all of them stood at `position`.

    `limit_bytes`: the most that the joined program may allocate, for outputs and everything else.
    """

    count: int
    position: int
    limit_bytes: int


class Joining:
    """The compute instructions of one list, in stretches without a transfer point between them.

    A transfer point is what another stream, list or event waits for, or what compute waits for: a copy that arrives,
    room that a copy makes, a collective, an event, a codec, a loan. The optimizer is kept apart from the gradients.
    """

    def __init__(self, problem: Problem, prepared: PreparedList, shared: Set[Copy] = frozenset()) -> None:
        """`shared`: copies of this device that other lists use."""
        self._prepared, self._shared = prepared, shared
        self._program = problem.workload.program(prepared.device)
        self._memory = problem.machine.devices[prepared.device].memory
        self._changes = prepared.changes[self._memory]
        self._nodes = sorted(prepared.nodes.values(), key=lambda node: node.index)
        self._creator, self._release = self._lifetimes()

    def _lifetimes(self) -> tuple[dict[int, int], dict[tuple[int, Copy], Change]]:
        """Who made what a release frees (by its position), and what frees what an instruction made."""
        creator: dict[int, int] = {}
        release: dict[tuple[int, Copy], Change] = {}
        made: dict[Copy, int] = {}
        frees = {change.position: change for change in self._changes if change.copy is not None}
        for position in sorted({*frees, *self._prepared.nodes}):
            if position in frees:
                copy = frees[position].copy
                assert copy is not None
                creator[position] = made.pop(copy, -1)
                release[creator[position], copy] = frees[position]
            else:
                made.update(dict.fromkeys(self._prepared.nodes[position].creates, position))
        return creator, release

    # --- transfer points ---------------------------------------------------------------------------------------

    def stretches(self) -> Iterator[list[Node]]:
        """Maximal runs of compute instructions that have no transfer point between them, in list order."""
        ends = self._awaited_nodes()
        stretch: list[Node] = []
        released: set[Copy] = set()
        arrived: dict[int, int] = defaultdict(lambda: -1)  # stream -> up to which instruction compute has waited
        place, pause = 0, False
        for node in self._nodes:
            if node.kind is not Kind.COMPUTE:
                if COMPUTE_STREAM in node.streams:
                    self._arrive(node, arrived, (*node.after_start, *node.after_end))
                    pause = True
                continue
            point = pause or bool(stretch and (stretch[-1].index in ends or self._apart(stretch[-1], node)))
            first = place
            while place < len(self._changes) and self._changes[place].position < node.index:
                point |= self._changes[place].loan_bytes != 0
                place += 1
            passed = self._changes[first:place]
            room = [index for change in passed for index in change.after_end]
            point |= self._arrive(node, arrived, (*node.after_start, *node.after_end, *room))
            released |= {change.copy for change in passed if change.copy is not None}
            # What is freed and made again is one copy inside of a program, and two in the list.
            if stretch and (point or not released.isdisjoint(node.creates)):
                yield stretch
                stretch = []
            if not stretch:
                released.clear()
            stretch.append(node)
            pause = False
        if stretch:
            yield stretch

    def _awaited_nodes(self) -> set[int]:
        """Compute instructions whose completion something beside later compute waits for."""
        positions = [[change.position for change in changes] for changes in self._prepared.changes]
        latest = [
            list(accumulate((self._latest(change.after_end) for change in changes), max))
            for changes in self._prepared.changes
        ]

        def room(memory: int, position: int) -> int:
            count = bisect_left(positions[memory], position)
            return latest[memory][count - 1] if count else -1

        found: set[int] = set()
        for node in self._nodes:
            if node.kind is not Kind.COMPUTE:
                rooms = (room(memory, node.index) for memory in node.allocates)
                found.add(max([self._latest((*node.after_start, *node.after_end)), *rooms]))
        for _, after in self._prepared.signals.values():
            if after in self._prepared.nodes:
                found.add(self._latest((after,)))
            else:
                change = self._prepared.change_of[after]
                found.add(max(self._latest(change.after_end), room(change.memory, after)))
        return found

    def _latest(self, indices: Sequence[int]) -> int:
        nodes = self._prepared.nodes
        return max((i for i in indices if nodes[i].kind is Kind.COMPUTE), default=-1)

    def _arrive(self, node: Node, arrived: dict[int, int], indices: Sequence[int]) -> bool:
        """Compute waits for these; true if it has not waited for all of them before."""
        fresh = False
        for index in indices:
            other = self._prepared.nodes[index]
            if COMPUTE_STREAM in other.streams:
                continue
            fresh |= index > arrived[other.streams[0]]
            for stream in other.streams:
                arrived[stream] = max(arrived[stream], index)
        return fresh

    def _apart(self, before: Node, node: Node) -> bool:
        return (self._optimizes(before) != self._optimizes(node)) or _overwrites(before) or _overwrites(node)

    def _optimizes(self, node: Node) -> bool:
        return self._program.ops[node.op].phase is Phase.OPTIMIZER

    # --- bytes -------------------------------------------------------------------------------------------------

    def extents(self, stretch: Sequence[Node]) -> list[Extent]:
        """The ways to join the begin of a stretch, shortest first, that can be expected to fit.

        A joined program allocates everything at its dispatch and frees nothing before its end. So, dispatched as if
        at a position, it may allocate what the plan has allocated for its instructions there, less what the plan has
        freed until there and the program still holds. What does not fit with the plan's own tensors is left out, as
        the compiler would have to do without one of them.
        """
        first = stretch[0].index
        place = bisect_left([change.position for change in self._changes], first)
        copies = scratch = held = outputs = peak = 0
        best, position = -1, first
        inside: dict[float, int] = defaultdict(int)  # last use -> bytes that end there
        found = []
        for count, node in enumerate(stretch, 1):
            while place < len(self._changes) and self._changes[place].position < node.index:
                change = self._changes[place]
                if change.copy is None:
                    retires = self._computed(change.instruction, first)
                    scratch -= self.scratch_bytes(change.instruction) if retires else 0
                elif self._computed(self._creator[change.position], first):
                    copies -= self._bytes(change.copy)
                elif self._latest(change.after_end) >= first:
                    held += self._bytes(change.copy)
                place += 1
            made = sum(map(self._bytes, node.creates))
            copies += made
            scratch += self.scratch_bytes(node.index)
            peak = max(peak, copies)
            if copies + scratch - held > best:
                best, position = copies + scratch - held, node.index
            for copy in node.creates:
                inside[self._last_use(node.index, copy)] += self._bytes(copy)
            outputs += made - inside.pop(node.index, 0)
            if max(outputs, peak) <= best or count == 1:
                found.append(Extent(count, position, best))
        return found

    def kept(self, nodes: Sequence[Node]) -> frozenset[Copy]:
        """Copies that joined instructions make and something else uses."""
        end = nodes[-1].index
        return frozenset(
            copy for node in nodes for copy in node.creates
            if self._last_use(node.index, copy) > end
        )  # fmt: skip

    def _computed(self, index: int, first: int) -> bool:
        return index >= first and self._prepared.nodes[index].kind is Kind.COMPUTE

    def _last_use(self, creator: int, copy: Copy) -> float:
        """The compute instruction that uses a copy last; infinite if others use it too, or it is never freed."""
        change = self._release.get((creator, copy))
        if change is None or copy in self._shared:
            return inf
        if any(self._prepared.nodes[i].kind is not Kind.COMPUTE for i in change.after_end):
            return inf
        return max(change.after_end)

    def scratch_bytes(self, index: int) -> int:
        """Bytes that the plan counts for a compute instruction beside the copies that it makes."""
        node = self._prepared.nodes[index]
        dropped = (copy for copy, keep in zip(node.writes, node.kept, strict=True) if not keep)
        return self._program.ops[node.op].workspace_bytes + sum(map(self._bytes, dropped))

    def _bytes(self, copy: Copy) -> int:
        return self._program.tensors[copy[1]].size_bytes


def _overwrites(node: Node) -> bool:
    """It writes a copy that is resident; the runtime deletes the old array before it dispatches."""
    return any(keep and copy not in node.creates for copy, keep in zip(node.writes, node.kept, strict=True))
