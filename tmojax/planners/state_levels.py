"""State that rests: no more of it than has to, host memory or coming and going, for different amounts of recomputation.

State of which no room is left at the update has to begin and end the step in host memory (`Rest.ON_HOST`): it comes in
beside the gradient synchronisation, and goes out again at the end of the step. What only the activations need room for
goes out when the step begins, while links are idle, and comes in once (`Rest.AWAY`), or is encoded in its place where
that is allowed (`Rest.ENCODED`). How much of either is enough is found on decoded lists, by bisection; the exact
simulator then chooses between amounts of recomputation, and between more of one and less of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from tmojax.planners.ratio import fair_rate
from tmojax.planners.state_outline import SHARES, shed
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, LinkPolicyKind
from tmojax.relax.coordinate import Coordination, together
from tmojax.relax.decisions import Choice, DeviceDecision, Rest, rests_of
from tmojax.relax.decode import DoesNotFit

STRIDE = 4  # what rests in host memory is spread over the update: every fourth unit first
MORE_HOSTED = (0.25, 0.5, 1.0)  # of what comes and goes, in host memory instead
# Of what links can carry each way in a micro-batch: offloaded instead of recomputed, but not in the first and the last.
RELIEVED = (0.1, 0.2, 0.3, 0.45, 0.7)


@dataclass(frozen=True, eq=False)
class Level:
    """hosted, away: of how many units of every class of devices. way: what the latter do, come and go or are encoded.
    base: of every class, before state is placed."""

    way: Rest
    base: dict[int, DeviceDecision]
    hosted: dict[int, int]
    away: dict[int, int]


class StateLevels:
    """units: of every class of devices, groups of resting state tensors that are decided together, in the order of
    their updates."""

    def __init__(self, bench: Workbench, units: dict[int, list[np.ndarray]], start: Candidate) -> None:
        self.bench, self.start = bench, start
        self.units = {first: [unit for shift in range(STRIDE) for unit in own[shift::STRIDE]]
                      for first, own in units.items()}  # fmt: skip
        self.best: Candidate | None = None
        self._known: tuple[Level, Coordination] | None = None

    def search(self) -> Candidate | None:
        """The best plan found; None if none fits, or no state rests."""
        if not self.units:
            return None
        ways = [way for way in (Rest.AWAY, Rest.ENCODED) if way in rests_of(self.bench.problem, True)]
        for change, way in product(self._bases(), ways):
            if (level := self._least(way, {first: change(first) for first in self.units})) is not None:
                for policy in (LinkPolicyKind.FCFS, LinkPolicyKind.FAIR):
                    self._try(level, together(self.bench.problem, policy))
        if self._known is None:
            return None
        level, coordination = self._known
        for share in MORE_HOSTED:
            hosted = {first: level.hosted[first] + round(share * away) for first, away in level.away.items()}
            if (other := self._least(level.way, level.base, hosted)) is not None:
                self._try(other, coordination)
        if {Action.OFFLOAD, Action.RECOMPUTE} <= self.bench.problem.actions:
            level = self._known[0]
            for share in RELIEVED:
                base = {first: self._relieved(first, decision, share) for first, decision in level.base.items()}
                for policy in (LinkPolicyKind.FCFS, LinkPolicyKind.FAIR):
                    self._try(replace(level, base=base), together(self.bench.problem, policy))
        return self.best

    def _bases(self) -> list[Callable[[int], DeviceDecision]]:
        """What activations do: as in the start, and with more and less recomputed, cheapest first."""

        def recomputed(share: float) -> Callable[[int], DeviceDecision]:
            return lambda first: replace(
                self.start.decisions[first], choice=shed(self.bench.problem, self.bench.view(first), share, False),
                first_choice=None, last_choice=None,
            )  # fmt: skip

        as_start = [self.start.decisions.__getitem__]
        return as_start + [recomputed(share) for share in SHARES if Action.RECOMPUTE in self.bench.problem.actions]

    def _with_state(self, way: Rest, first: int, base: DeviceDecision, hosted: int, away: int) -> DeviceDecision:
        """The first `hosted` units in host memory, the last `away` ones of the others as `way` says."""
        units = self.units[first]
        state_out = base.state_out.astype(np.int8)
        for index, unit in enumerate(units):
            state_out[unit] = (Rest.ON_HOST if index < hosted else
                               way if index >= len(units) - away else Rest.ON_DEVICE)  # fmt: skip
        return replace(base, state_out=state_out)

    def _least(self, way: Rest, base: dict[int, DeviceDecision], hosted: dict[int, int] | None = None) -> Level | None:
        """The least that fits on every class: of what is hosted first (unless given), then of the others."""
        at_least, away = {}, {}
        for first, decision in base.items():
            count = len(self.units[first])

            def fits(hosted: int, away: int, first=first, decision=decision) -> bool:
                tried = self._with_state(way, first, decision, hosted, away)
                return not isinstance(self.bench.decode(first, tried), DoesNotFit)

            least = least_true(count, lambda n, fits=fits, count=count: fits(n, count - n))
            least = least if hosted is None or least is None else min(max(least, hosted[first]), count)
            if least is None:
                return None
            at_least[first] = least
            found = least_true(count - least, lambda n, fits=fits, least=least: fits(least, n))
            if found is None:
                return None
            away[first] = found
        return Level(way, base, at_least, away)

    def _relieved(self, first: int, decision: DeviceDecision, share: float) -> DeviceDecision:
        """`decision` with what is dearest to recompute for its bytes offloaded instead, so that it takes `share` of a
        micro-batch of compute; not in the first micro-batch, in which state leaves, nor in the last one, which state
        comes in behind."""
        view = self.bench.view(first)
        recomputed = np.flatnonzero((decision.choice == Choice.RECOMPUTE) & view.needed & view.may_offload)
        cost = view.recompute_s[recomputed] / np.maximum(view.size_bytes[recomputed], 1)
        dearest = recomputed[np.argsort(-cost, kind="stable")]
        room = share * fair_rate(self.bench, first) * float(view.slot_s.sum())
        choice = decision.choice.copy()
        choice[dearest[np.cumsum(view.size_bytes[dearest]) <= room]] = Choice.OFFLOAD
        return replace(decision, choice=choice, first_choice=decision.in_first, last_choice=decision.in_last)

    def _try(self, level: Level, coordination: Coordination) -> None:
        coordination = replace(coordination, slots=self.bench.slots())
        own = {first: self._with_state(level.way, first, level.base[first], level.hosted[first], level.away[first])
               for first in self.units}  # fmt: skip
        decisions = tuple(
            own.get(first, self.start.decisions[device]) for device, first in enumerate(self.bench.device_class)
        )
        found = self.bench.evaluate(decisions, coordination)
        if isinstance(found, Candidate) and (self.best is None or found.step_s < self.best.step_s * (1 - 1e-9)):
            self.best, self._known = found, (level, coordination)


def least_true(most: int, holds: Callable[[int], bool]) -> int | None:
    """The least of 0 to `most` for which `holds`, if it does for all above one for which it does; None if not even for
    `most`."""
    if not holds(most):
        return None
    below, found = -1, most
    while found - below > 1:
        middle = (below + found) // 2
        if holds(middle):
            found = middle
        else:
            below = middle
    return found
