"""What crosses a shared link after a collective for which its devices have waited (docs/bounds.md, section 3,
point 16)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.bounds.columns import ClassColumns, StepRows
from tmojax.bounds.critical_path import JointPaths, joint_paths
from tmojax.bounds.device_classes import shared_links
from tmojax.bounds.ends import still_crossing
from tmojax.bounds.highs import Answer
from tmojax.bounds.placement import leaving
from tmojax.bounds.windows import VIOLATED, Side, sides_of
from tmojax.problem import Problem

COLLECTIVES = 12  # looked at: neighbours say nearly the same


@dataclass(frozen=True)
class _Arrival:
    """The latest mean time at which the devices of a class (`name`: of its first device) can have come to a collective,
    in units of time: the sum of value * column over `terms`, and `least` more; `value`: for an answer."""

    name: str
    least: float
    terms: list[tuple[int, float]]
    value: float


class Synchronised:
    """Finds the rows that an answer violates; the paths are those of the problem."""

    def __init__(self, problem: Problem, rows: StepRows, classes: list[ClassColumns]) -> None:
        self._problem, self._rows, self._classes = problem, rows, classes
        self._joint = joint_paths(problem, COLLECTIVES) if problem.workload.collectives else []
        self._leaving = {member.name: leaving(problem, member) for member in classes}

    def add(self, answer: Answer) -> int:
        """Add for every shared link and collective the row that `answer` violates most; their number."""
        added = 0
        for paths in self._joint:
            arrival = self._arrival(paths, answer)
            if arrival is None:
                continue
            for link in sorted(shared_links(self._problem)):
                if sides := [side for side in sides_of(link, self._classes) if _takes_part(side[0], paths)]:
                    added += self._add(paths, arrival, link, sides, answer)
                    added += sum(self._add_placed(paths, arrival, link, side[0], answer) for side in sides if side[1])
        return added

    def _arrival(self, paths: JointPaths, answer: Answer) -> _Arrival | None:
        """Of the class that comes last."""
        found = []
        for member in self._classes:
            if not _takes_part(member, paths):
                continue
            (_, end), unit_s = member.blocks[-1], self._rows.unit.time_s
            until_s = np.min([paths.until_s[d] for d in member.spec.devices], axis=0)
            moments = end.moments
            left = (until_s[moments.slots] - moments.from_slot_s) / unit_s
            j = int(np.argmax(left + answer.values[end.time[:-1]]))
            if left[j] == -np.inf:
                continue
            terms = [*((other.end_time, float(n)) for n, other in member.blocks[:-1]), (int(end.time[j]), 1.0)]
            value = float(left[j]) + sum(v * answer.values[c] for c, v in terms)
            found.append(_Arrival(member.name, float(left[j]), terms, value))
        return max(found, key=lambda one: one.value, default=None)

    def _add(self, paths: JointPaths, arrival: _Arrival, link: int, sides: list[Side], answer: Answer) -> int:
        spec, unit = self._problem.machine.links[link], self._rows.unit
        rate = unit.rate(spec.bandwidth_bytes_per_s)
        since = [np.min([paths.since_s[d] for d in member.spec.devices], axis=0)[member.blocks[-1][1].moments.slots]
                 + member.blocks[-1][1].moments.from_slot_s for member, *_ in sides]  # fmt: skip
        best: tuple[float, float, list[tuple[int, float]]] = (0.0, 0.0, [])
        for wait_s in np.unique(np.concatenate([[0.0], *since])):
            if wait_s < 0:  # need not wait for the collective
                continue
            flows: list[tuple[int, float]] = []
            for (member, leaves, enters), starts_s in zip(sides, since, strict=True):
                j = int(np.searchsorted(np.maximum.accumulate(starts_s), wait_s))  # the first moment no earlier
                flows += [(column, value * member.sharing(link))
                          for column, value in still_crossing(member, leaves, enters, j)]  # fmt: skip
            fixed = self._collective_bytes(paths, link, float(wait_s)) / unit.size_bytes / rate
            fixed += float(wait_s) / unit.time_s
            value = arrival.value + fixed + sum(v * answer.values[c] for c, v in flows) / rate
            if value > best[0]:
                best = (value, fixed, flows)
        value, fixed, flows = best
        if value <= answer.values[self._rows.step] * VIOLATED:
            return 0
        self._rows.add(
            f"link {spec.name} after a collective for which {arrival.name} has waited", 1.0, arrival.least + fixed,
            [*((c, -v) for c, v in arrival.terms), *((c, -v / rate) for c, v in flows)],
        )  # fmt: skip
        return 1

    def _add_placed(
        self, paths: JointPaths, arrival: _Arrival, link: int, member: ClassColumns, answer: Answer
    ) -> int:
        """The same for state that has no place on the devices between two steps, and leaves plain after its update."""
        slots, left_bytes = self._leaving[member.name]
        if not len(slots):
            return 0
        spec, unit = self._problem.machine.links[link], self._rows.unit
        since_s = np.min([paths.since_s[d] for d in member.spec.devices], axis=0)[slots]
        ends_s = since_s + member.blocks[-1][1].gaps.slot_s[slots]
        fixed = float(np.max(ends_s + member.sharing(link) * left_bytes / spec.bandwidth_bytes_per_s)) / unit.time_s
        if arrival.value + fixed <= answer.values[self._rows.step] * VIOLATED:
            return 0
        label = f"state placed elsewhere, over link {spec.name}, after a collective for which {arrival.name} has waited"
        self._rows.add(label, 1.0, arrival.least + fixed, [(c, -v) for c, v in arrival.terms])
        return 1

    def _collective_bytes(self, paths: JointPaths, link: int, wait_s: float) -> float:
        """Bytes over the link of collectives that start no earlier than `wait_s` after this one."""
        total, machine = 0.0, self._problem.machine
        for name, later_s in paths.later_s:
            if later_s >= wait_s:
                one = self._problem.workload.collective(name)
                total += one.size_bytes * machine.collective_loads(one.kind, one.devices).get(link, 0.0)
        return total


def _takes_part(member: ClassColumns, paths: JointPaths) -> bool:
    return set(member.spec.devices) <= set(paths.devices)
