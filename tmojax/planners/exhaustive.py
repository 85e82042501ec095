"""The best schedule of a wide family for tiny problems, by trying all of it: what other planners are measured against.

*Family.* One or two GPUs; whole tensors, plain; copies between a GPU and its own host memory; the default order. Every
combination of one list per GPU as `tmojax.planners.device_lists` describes them, under

- every explicit order of the copies on every contended link, one at a time (and two at a time where a copy alone cannot
  fill the link);
- fair sharing; first come first served with one or two slots; priority in every order of the GPUs with one or two;
- and, with two GPUs, the policies without an explicit order once more with the compute of one GPU held back until any
  given run of the other has ended.

Waits add nothing to explicit orders with one slot: times are then longest paths in a fixed graph, and a wait is one
more edge in it. For the same reason a list in which allocations wait for more releases cannot be better there; under
the other policies such lists are not tried. A planner that uses peers, slices, shards or codecs can be faster than
the optimum of this family, and so can preemption by several waits under fair sharing.

*Search.* A limit on the step time starts at the proven lower bound and grows. Lists that alone, with the links for
themselves, take more than the limit are cut while they are built; pairs of lists whose bytes do not cross the contended
links in time are not simulated. Once the best schedule found takes no more than the limit, it is the optimum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product

import numpy as np

from tmojax.bounds import bound
from tmojax.errors import InputError
from tmojax.planners.base import Planner, PlanResult, Status, Stopwatch, does_not_fit
from tmojax.planners.device_lists import DeviceLists, FoundList, build_list
from tmojax.problem import (
    COMPUTE_STREAM,
    Action,
    Kind,
    LinkPolicy,
    LinkPolicyKind,
    ListBuilder,
    Problem,
    Schedule,
    largest_op_bytes,
)
from tmojax.relax.decode import DoesNotFit
from tmojax.simulate import Prepared, prepare

GROWTH = (1.0, 1.01, 1.03, 1.06, 1.1, 1.16, 1.25, 1.4, 1.6, 2.0, 2.6, 3.5, 5.0, 8.0, 16.0)
SAME = 1e-9  # relative; simulated times of one schedule differ by rounding


@dataclass(frozen=True)
class _Contended:
    """A set of links that the same queues use; a queue is (device, inwards)."""

    links: tuple[int, ...]
    queues: tuple[tuple[int, bool], ...]
    bytes_per_s: float
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Exhaustive(Planner):
    """Try everything on a tiny problem.

    most_partial: partial lists of one GPU at any limit; most_simulations: in total. Beyond them the result is the best
    plan so far (`Status.FEASIBLE`), and says what ended the search."""

    name: str = "exhaustive"
    most_partial: int = 300_000
    most_simulations: int = 300_000

    def __post_init__(self) -> None:
        for name in ("most_partial", "most_simulations"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)} must be at least 1")

    def actions(self, problem: Problem) -> frozenset[Action]:
        return problem.actions & {Action.OFFLOAD, Action.RECOMPUTE}

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        problem = replace(problem, actions=self.actions(problem))
        for device in range(problem.workload.device_count):
            op, needed = largest_op_bytes(problem.workload, device)
            if (over := needed - problem.capacity_bytes(device)) > 0:
                return does_not_fit(self.name, problem, DoesNotFit(device, op, 0, over), watch)
        if why := _uncovered(problem):
            return PlanResult(self.name, Status.NOT_FOUND, message=why, plan_s=watch.read_s())
        proved = bound(problem)
        if proved.bound_s == float("inf"):
            return PlanResult(self.name, Status.INFEASIBLE, message=proved.message, plan_s=watch.read_s())
        search = _Search(problem, self.most_partial, self.most_simulations)
        message = search.run(max(proved.bound_s, 1e-12))
        details = {"bound_s": proved.bound_s, **search.counts()}
        if search.best is None:
            message = message or "no list of the family fits"
            return PlanResult(self.name, Status.NOT_FOUND, message=message, plan_s=watch.read_s(), details=details)
        status = Status.FEASIBLE if message else Status.OPTIMAL
        return PlanResult(
            self.name, status, search.best, search.best_s, watch.read_s(), message=message, details=details
        )


def _uncovered(problem: Problem) -> str:
    machine, workload = problem.machine, problem.workload
    if workload.device_count > 2:
        return f"exhaustive search covers 1 or 2 GPUs, not {workload.device_count}"
    if any(device.kind != "gpu" for device in machine.devices):
        return "exhaustive search covers GPUs only"
    if any(tensor.alias_group for program in workload.programs for tensor in program.tensors):
        return "exhaustive search does not cover alias groups"
    ops = sum(len(workload.sequence(device)) for device in range(workload.device_count))
    if ops > 60:
        return f"exhaustive search is for tiny problems: {ops} runs of ops in all, at most 60"
    # Host copies stay until the end of a list here, so there must be room for all of them at once.
    room: dict[int, int] = {}
    for device, spec in enumerate(machine.devices):
        count = workload.micro_batches
        sizes = sum(t.size_bytes * count for t in workload.program(device).tensors)
        room[spec.host_memory] = room.get(spec.host_memory, 0) + 2 * sizes
    for host, needed in room.items():
        memory = machine.memories[host]
        limit = memory.capacity_bytes - memory.reserve_bytes
        if memory.pinned_limit_bytes >= 0:
            limit = min(limit, memory.pinned_limit_bytes)
        if needed > limit:
            return f"exhaustive search needs {needed} bytes in {memory.name}, which may hold {limit}"
    return ""


class _Search:
    def __init__(self, problem: Problem, most_partial: int, most_simulations: int) -> None:
        self.problem, self.most_partial, self.most_simulations = problem, most_partial, most_simulations
        self.devices = [DeviceLists(problem, d) for d in range(problem.workload.device_count)]
        self.contended = _contended(problem)
        self.best: Schedule | None = None
        self.best_s = float("inf")
        self.lists = self.combinations = self.simulations = 0
        self._done: set[tuple] = set()
        first, last = self.devices[0], self.devices[-1]
        self.alike = (
            len(self.devices) == 2
            and problem.workload.device_program[0] == problem.workload.device_program[1]
            and (first.capacity, first.copy_rates) == (last.capacity, last.copy_rates)
        )

    def counts(self) -> dict[str, int]:
        return {"lists": self.lists, "combinations": self.combinations, "simulations": self.simulations}

    def run(self, least_s: float) -> str:
        """Search; the reason why the best schedule is not proved to be the optimum, or nothing."""
        for growth in GROWTH:
            limit_s = least_s * growth * (1 + SAME)
            if self.best is not None:
                limit_s = min(limit_s, self.best_s)
            found = []
            for place, device in enumerate(self.devices):
                if place and self.alike:
                    found.append(found[0])
                    continue
                lists = device.within(limit_s, self.most_partial)
                if lists is None:
                    return f"more than {self.most_partial} partial lists of one GPU within {limit_s:.6g} s"
                found.append(lists)
            self.lists = sum(map(len, found))
            if reason := self._combine(found):
                return reason
            if self.best_s <= limit_s * (1 + SAME):
                return ""
        return "" if self.best is None else f"the search ended at {GROWTH[-1]} times the lower bound"

    def _combine(self, found: list[list[FoundList]]) -> str:
        """Try all combinations of lists; a reason if that was too much."""
        choices = []
        for members in product(*(range(len(lists)) for lists in found)):
            if self.alike and members[0] > members[1]:
                continue
            chosen = [lists[i] for lists, i in zip(found, members, strict=True)]
            least_s = self._least_s(chosen)
            if least_s < self.best_s * (1 - SAME):
                choices.append((least_s, members, chosen))
        choices.sort(key=lambda item: item[:2])
        for variants in (self._simple, self._ordered, self._held_back):
            for least_s, _, chosen in choices:
                if least_s >= self.best_s * (1 - SAME):
                    break
                name = (variants, *(one.steps for one in chosen), *(one.resting for one in chosen))
                if name in self._done:  # at a lower limit
                    continue
                self._done.add(name)
                self.combinations += 1
                for ready, policies in variants(chosen):
                    self._try(ready, policies)
                    if self.simulations > self.most_simulations:
                        return f"more than {self.most_simulations} simulations"
        return ""

    def _try(self, ready: Prepared, policies: tuple[LinkPolicy, ...]) -> None:
        self.simulations += 1
        step_s = ready.run(link_policies=policies).step_s
        if step_s < self.best_s * (1 - SAME):
            self.best_s, self.best = step_s, replace(ready.schedule, link_policies=policies)

    def _least_s(self, chosen: list[FoundList]) -> float:
        """Valid for every schedule of these lists: each alone, and the bytes of all over each contended link."""
        least = max(one.least_s for one in chosen)
        for group in self.contended:
            first, after, size = float("inf"), float("inf"), 0
            for device, inwards in group.queues:
                one = chosen[device]
                moved = one.in_bytes if inwards else one.out_bytes
                if moved:
                    size += moved
                    first = min(first, one.first_in_s if inwards else one.first_out_s)
                    after = min(after, one.after_in_s if inwards else 0.0)
            if size:
                least = max(least, first + size / group.bytes_per_s + after)
        return least

    def _simple(self, chosen: list[FoundList]) -> Iterator[tuple[Prepared, tuple[LinkPolicy, ...]]]:
        ready = self._prepared([build_list(device, one) for device, one in zip(self.devices, chosen, strict=True)])
        for policies in self._simple_policies():
            yield ready, policies

    def _ordered(self, chosen: list[FoundList]) -> Iterator[tuple[Prepared, tuple[LinkPolicy, ...]]]:
        built = [build_list(device, one) for device, one in zip(self.devices, chosen, strict=True)]
        ready = self._prepared(built)
        for policies in self._orders([b[0] for b in built]):
            yield ready, policies

    def _prepared(self, built: list[tuple]) -> Prepared:
        return prepare(self.problem, Schedule(tuple(b[0] for b in built), tuple(b[1] for b in built)))

    def _held_back(self, chosen: list[FoundList]) -> Iterator[tuple[Prepared, tuple[LinkPolicy, ...]]]:
        built = [build_list(device, one) for device, one in zip(self.devices, chosen, strict=True)]
        for leader, follower in ((0, 1), (1, 0)) if len(built) == 2 else ():
            head = ListBuilder()
            head.wait(0, COMPUTE_STREAM)
            for row in built[leader][2]:
                event = ListBuilder()
                event.signal(0, row)
                lists = [b[0] for b in built]
                lists[leader] = np.concatenate([lists[leader][: row + 1], event.build(), lists[leader][row + 1 :]])
                lists[follower] = np.concatenate([head.build(), lists[follower]])
                ready = prepare(self.problem, Schedule(tuple(lists), tuple(b[1] for b in built)))
                for policies in self._simple_policies():
                    yield ready, policies

    def _simple_policies(self) -> Iterator[tuple[LinkPolicy, ...]]:
        yield self._on_contended(LinkPolicy())
        if not self.contended:
            return
        for slots in (1, 2):
            yield self._on_contended(LinkPolicy(LinkPolicyKind.FCFS, slots))
            if len(self.devices) > 1:
                for rank in permutations(range(len(self.devices))):
                    yield self._on_contended(LinkPolicy(LinkPolicyKind.PRIORITY, slots, rank))

    def _on_contended(self, policy: LinkPolicy) -> tuple[LinkPolicy, ...]:
        links = {link for group in self.contended for link in group.links}
        return tuple(policy if link in links else LinkPolicy() for link in range(len(self.problem.machine.links)))

    def _orders(self, lists: list[np.ndarray]) -> Iterator[tuple[LinkPolicy, ...]]:
        """Every order of the copies on every contended link that keeps the order of each copy engine."""
        groups = []
        for group in self.contended:
            queues = []
            for device, inwards in group.queues:
                kind = Kind.PREFETCH if inwards else Kind.OFFLOAD
                queues.append([(device, int(row)) for row in np.flatnonzero(lists[device]["kind"] == kind)])
            groups.append([(group, slots, merged) for slots in group.slots for merged in _merges(queues)])
        for picks in product(*groups):
            policies = [LinkPolicy()] * len(self.problem.machine.links)
            for group, slots, sequence in picks:
                for link in group.links:
                    policies[link] = LinkPolicy(LinkPolicyKind.ORDER, slots, sequence=sequence)
            if picks:
                yield tuple(policies)


def _merges(queues: list[list]) -> Iterator[tuple]:
    """All sequences that keep the order inside each queue."""
    if not any(queues):
        yield ()
        return
    for place, queue in enumerate(queues):
        if queue:
            rest = [*queues[:place], queue[1:], *queues[place + 1 :]]
            for tail in _merges(rest):
                yield (queue[0], *tail)


def _contended(problem: Problem) -> tuple[_Contended, ...]:
    """Links that several copy queues of the problem use, in groups with the same queues."""
    machine = problem.machine
    users: dict[int, list[tuple[int, bool]]] = {}
    lane: dict[tuple[int, bool], float] = {}
    for device, spec in enumerate(machine.devices):
        for inwards in (False, True):
            ends = (spec.host_memory, spec.memory) if inwards else (spec.memory, spec.host_memory)
            route = machine.route(*ends)
            lane[device, inwards] = min(machine.links[link].bandwidth_bytes_per_s for link in route.links)
            for link in route.links:
                users.setdefault(link, []).append((device, inwards))
    groups: dict[tuple, list[int]] = {}
    for link, queues in sorted(users.items()):
        if len(queues) > 1:
            groups.setdefault(tuple(queues), []).append(link)
    found = []
    for queues, links in groups.items():
        rate = min(machine.links[link].bandwidth_bytes_per_s for link in links)
        slots = (1, 2) if any(lane[queue] < rate for queue in queues) else (1,)
        found.append(_Contended(tuple(links), queues, rate, slots))
    return tuple(found)
