"""Memory that one GPU lends to another (semantics 3.6)."""

from __future__ import annotations

import numpy as np

from tmojax.check.graph import Clocks, Graph
from tmojax.check.rules import START, Rule
from tmojax.check.static import Static
from tmojax.check.walk import ListWalk, Loan


def check_loans(static: Static, walks: list[ListWalk], graph: Graph, clocks: Clocks) -> None:
    """What a list allocates in a private memory of another device must be covered by loans."""
    for walk in walks:
        for memory in walk.state.borrowed:
            lender = walks[static.owners[memory][0]]
            loans = [loan for loan in lender.loans.values() if loan.to_device == walk.device]
            _Borrower(walk, lender, memory, loans, graph, clocks).check(static)


class _Borrower:
    """What one list does in the memory of one other device. A *place* counts its allocations and releases there.

    A loan covers an allocation if the lend is complete when it starts. A loan ends at the last place up to which all
    releases are complete when it is reclaimed; what is in use after that must fit into the loans that remain.
    """

    def __init__(
        self, walk: ListWalk, lender: ListWalk, memory: int, loans: list[Loan], graph: Graph, clocks: Clocks
    ) -> None:
        self._walk, self._memory = walk, memory
        self._entries = walk.state.borrowed[memory]
        self._size = np.array([loan.size_bytes for loan in loans], dtype=np.int64)
        first, lender_first = graph.first[walk.device], graph.first[lender.device]
        # A later lend waits for all that an earlier one waits for, so how many are complete says which.
        lends = [clocks.at_end(lender_first + loan.instruction) for loan in loans]
        self._lent = [
            _reached(lends, clocks.at_start(first + index)) if allocates and index != START else 0
            for index, allocates, _ in self._entries
        ]
        self._first = np.searchsorted(np.maximum.accumulate(self._lent), np.arange(len(loans)), side="right")
        # For each release, when it and all before it are complete.
        places = [place for place, (_, allocates, _) in enumerate(self._entries) if not allocates]
        returns = [clocks.at_end(first + self._entries[place][0]) for place in places]
        returns = np.maximum.accumulate(np.array(returns)) if returns else returns
        self._last = np.full(len(loans), len(self._entries) - 1)  # never reclaimed: lasts to the end
        for number, loan in enumerate(loans):
            if loan.reclaim >= 0:
                done = _reached(returns, clocks.at_start(lender_first + loan.reclaim))
                self._last[number] = places[done - 1] if done else -1

    def check(self, static: Static) -> None:
        owner = static.device_name(static.owners[self._memory][0])
        ends = set(self._last.tolist())
        for place, (index, allocates, used_bytes) in enumerate(self._entries):
            if allocates:
                count = self._lent[place]
                lent_bytes = int(self._size[:count][self._last[:count] >= place].sum())
                what = "are in use there, and the loans that surely cover it then are of"
            elif place in ends:
                lent_bytes = int(self._size[(self._first <= place) & (place < self._last)].sum())
                what = "are still in use there when a loan is reclaimed, and the others are of"
            else:
                continue
            if used_bytes > lent_bytes:
                message = f"{used_bytes} bytes of {owner} {what} {lent_bytes}"
                self._walk.state.report(Rule.LOAN, index, message, self._memory, used_bytes - lent_bytes)


def _reached(stages: list[np.ndarray] | np.ndarray, clock: np.ndarray) -> int:
    """How many of the stages, each of which includes the one before it, a clock has reached."""
    low, high = 0, len(stages)
    while low < high:
        middle = (low + high) // 2
        if (stages[middle] <= clock).all():
            low = middle + 1
        else:
            high = middle
    return low
