"""The two coordination mechanisms of TMO as heuristics, alone and together; offload only.

Source: S.-F. Lin et al., "Tensor Movement Orchestration in Multi-GPU Training Systems", HPCA 2023. Its abstract
says what the mechanisms are: (1) accesses of different GPUs to the PCIe channel are interleaved by selecting disjoint
swapped-out tensors for each GPU; (2) swap commands are orchestrated to avoid contention. How tensors are dealt out,
which order the commands get, and what happens where memory is too short for disjoint sets, it does not say: these are
this project's choices, described with each planner. `tmo-milp` builds on the same two ideas with an integer programme.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tmojax.errors import InputError
from tmojax.planners.base import Planner, PlanResult, Status, Stopwatch, does_not_fit
from tmojax.planners.fluid import Oblivious
from tmojax.planners.ilp import IlpPlanner
from tmojax.planners.repair import repair
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, LinkPolicyKind, Machine, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.coordinate import host_links, together
from tmojax.relax.decisions import Choice, DeviceDecision, Rest, keep_everything
from tmojax.relax.decode import DoesNotFit

# One GPU at a time on a shared link (or as many as fill it): in the order of their commands, in that of the GPUs, or in
# turns of a forward or a backward each (`tmojax.relax.turns`).
ONE_AT_A_TIME = (LinkPolicyKind.FCFS, LinkPolicyKind.PRIORITY, LinkPolicyKind.ORDER)


def contending_groups(machine: Machine) -> list[list[int]]:
    """GPUs whose copies can slow each other down: joined by links narrower than what their users can move together.

    Groups and their members are in the order of the devices; a GPU with a path of its own is a group of one.
    """
    gpus = [device for device, spec in enumerate(machine.devices) if spec.kind == "gpu"]
    demand = np.zeros(len(machine.links))
    for device in gpus:
        spec = machine.devices[device]
        for way in ((spec.memory, spec.host_memory), (spec.host_memory, spec.memory)):
            links = list(machine.route(*way).links)
            demand[np.array(links)] += min(machine.links[link].bandwidth_bytes_per_s for link in links)
    narrow = {
        index for index, link in enumerate(machine.links) if demand[index] > link.bandwidth_bytes_per_s * (1 + 1e-9)
    }
    groups: list[tuple[set[int], list[int]]] = []
    for device in gpus:
        links, members = host_links(machine, device) & narrow, [device]
        for group in [group for group in groups if group[0] & links]:
            groups.remove(group)
            links, members = links | group[0], group[1] + members
        groups.append((links, members))
    return sorted(sorted(members) for _, members in groups)


def deal(view: StepView, members: int, movers: float, block_share: float) -> np.ndarray:
    """Which GPU may swap what: [members, I], true for `movers` of the members on average.

    Candidates that may leave are dealt out in the order in which they become idle, in blocks of neighbours of at least
    `block_share` of all bytes (0: one by one). Each block goes to the GPUs that have the fewest bytes so far, the first
    of equals; with movers = 1.25, one to three blocks and two to every fourth.
    """
    pool = np.flatnonzero(view.needed & view.may_offload)
    pool = pool[np.lexsort((pool, view.idle_from[pool]))]
    least_bytes = block_share * float(view.size_bytes[pool].sum())
    chosen = np.zeros((members, len(view.tensor)), bool)
    dealt = np.zeros(members, np.int64)
    blocks, block = 0, []
    for position, index in enumerate(pool.tolist()):
        block.append(index)
        size = int(view.size_bytes[block].sum())
        if size < least_bytes and position + 1 < len(pool):
            continue
        count = int((blocks + 1) * movers) - int(blocks * movers)
        takers = np.argsort(dealt, kind="stable")[:count]
        chosen[np.ix_(takers, np.array(block))] = True
        dealt[takers] += size
        blocks, block = blocks + 1, []
    return chosen


def _swap(view: StepView, leaves: np.ndarray, rest: Rest) -> DeviceDecision:
    """Offload the candidates `leaves` [I], keep the others; `rest` of the state that no micro-batch uses."""
    choice = keep_everything(view).choice
    choice[leaves] = Choice.OFFLOAD
    return DeviceDecision(choice, np.where(view.state_resting, rest, Rest.ON_DEVICE).astype(np.int8))


def disjoint_sets(
    bench: Workbench, block_share: float, rest: Rest, whole: bool = False
) -> tuple[tuple[DeviceDecision, ...], float] | DoesNotFit:
    """(decisions of all devices, how many GPUs of one group may swap the same tensor, the mean, at most).

    Among GPUs of a group that run the same program in the same memory, every tensor is dealt to one GPU. Where some GPU
    cannot free enough with its part, as few as possible are dealt to two, and so on (in eighths of the tensors, or with
    `whole` all to the same number). The decode then keeps what need not leave. Where even everything is not enough,
    `repair` sends more state away.
    """
    chosen: dict[int, DeviceDecision] = {}
    most = 1.0
    for group in contending_groups(bench.problem.machine):
        for first in dict.fromkeys(bench.device_class[device] for device in group):
            alike = [device for device in group if bench.device_class[device] == first]
            movers = _least_movers(bench, alike, block_share, rest)
            if movers is not None:
                movers = float(np.ceil(movers)) if whole else movers
                sets = deal(bench.view(first), len(alike), movers, block_share)
                decisions = [_swap(bench.view(first), leaves, rest) for leaves in sets]
            else:
                movers = float(len(alike))
                everything = _swap(bench.view(first), deal(bench.view(first), 1, 1.0, block_share)[0], rest)
                fitted = repair(bench, first, everything)
                if isinstance(fitted, DoesNotFit):
                    return fitted
                decisions = [fitted] * len(alike)
            most = max(most, movers)
            chosen.update(zip(alike, decisions, strict=True))
    others = (d for d in range(bench.device_count) if d not in chosen)
    chosen.update((device, keep_everything(bench.view(device))) for device in others)
    return tuple(chosen[device] for device in range(bench.device_count)), most


def _least_movers(bench: Workbench, alike: list[int], block_share: float, rest: Rest) -> float | None:
    """The least `movers` of `deal` with which all of `alike` fit, by bisection over eighths; None if not even all."""
    view = bench.view(alike[0])

    def fits(eighths: int) -> bool:
        sets = deal(view, len(alike), eighths / 8, block_share)
        return not any(isinstance(bench.decode(alike[0], _swap(view, leaves, rest)), DoesNotFit) for leaves in sets)

    low, high = 8, 8 * len(alike)
    if fits(low):
        return 1.0
    if not fits(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high / 8


def one_at_a_time(bench: Workbench, decisions: tuple[DeviceDecision, ...]) -> Candidate | DoesNotFit:
    """The fastest of ONE_AT_A_TIME, all GPUs starting at once."""
    return bench.with_policies(decisions, (0.0,) * bench.device_count, ONE_AT_A_TIME)


def _offload_only(problem: Problem) -> Problem:
    return replace(problem, actions=problem.actions & {Action.OFFLOAD})


def _not_allowed(name: str, watch: Stopwatch) -> PlanResult:
    message = f"needs action {Action.OFFLOAD.value!r}, which the problem does not allow"
    return PlanResult(name, Status.NOT_FOUND, message=message, plan_s=watch.read_s())


@dataclass(frozen=True)
class _Disjoint(Planner):
    """block_shares: sizes of the blocks that are dealt out, shares of all bytes that may leave; the fastest is kept."""

    block_shares: tuple[float, ...] = (0.0, 1 / 16, 1 / 4, 1 / 2)

    def __post_init__(self) -> None:
        if not self.block_shares or not all(0 <= share <= 1 for share in self.block_shares):
            raise InputError(f"block_shares: {list(self.block_shares)} must be at least one number between 0 and 1")

    def actions(self, problem: Problem) -> frozenset[Action]:
        return problem.actions & {Action.OFFLOAD}

    @abstractmethod
    def _coordinate(self, bench: Workbench, decisions: tuple[DeviceDecision, ...]) -> Candidate | DoesNotFit:
        """The schedule of the selected decisions."""

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        if Action.OFFLOAD not in problem.actions:
            return _not_allowed(self.name, watch)
        bench = Workbench(_offload_only(problem))
        best: tuple[Candidate, dict[str, Any]] | None = None
        failure: DoesNotFit | None = None
        tried: set[tuple[bytes, ...]] = set()
        for block_share, rest, whole in self._options(bench):
            sets = disjoint_sets(bench, block_share, rest, whole)
            if isinstance(sets, DoesNotFit):
                failure = failure or sets
                continue
            key = tuple(part.tobytes() for decision in sets[0] for part in (decision.choice, decision.state_out))
            if key in tried:
                continue
            tried.add(key)
            found = self._coordinate(bench, sets[0])
            if isinstance(found, DoesNotFit):
                failure = failure or found
            elif best is None or found.step_s < best[0].step_s:
                best = found, {"block_share": block_share, "state_rests": rest.name.lower(), "movers": sets[1],
                               "policy": found.coordination.policy.value}  # fmt: skip
        if best is None:
            assert failure is not None
            return does_not_fit(self.name, problem, failure, watch)
        found, details = best
        return PlanResult(self.name, Status.FEASIBLE, found.schedule, found.step_s, watch.read_s(),
                          candidate=found, details=details)  # fmt: skip

    def _options(self, bench: Workbench) -> Iterator[tuple[float, Rest, bool]]:
        resting = any(bench.view(device).state_resting.any() for device in range(bench.device_count))
        for rest in (Rest.ON_DEVICE, Rest.ON_HOST, Rest.AWAY) if resting else (Rest.ON_DEVICE,):
            for block_share in self.block_shares:
                yield block_share, rest, False
                yield block_share, rest, True


@dataclass(frozen=True)
class TmoDisjoint(_Disjoint):
    """TMO's first mechanism: GPUs on one path swap disjoint sets of tensors; commands run as they come.

    Sets are those of `disjoint_sets`; state that rests (optimizer state) is treated alike on all GPUs: on the device,
    on the host, or away in its gaps, whichever is fastest. All GPUs start at once and share links fairly.
    `details["movers"]`: how many GPUs of a group may swap the same tensor, on average over the tensors; more than 1
    where memory is too short for disjoint sets.
    """

    name: str = "tmo-disjoint"

    def _coordinate(self, bench: Workbench, decisions: tuple[DeviceDecision, ...]) -> Candidate | DoesNotFit:
        return bench.evaluate(decisions, together(bench.problem))


@dataclass(frozen=True)
class Tmo(_Disjoint):
    """Both mechanisms of TMO at once: the sets of `tmo-disjoint`, the commands ordered as by `tmo-ordered`."""

    name: str = "tmo"

    def _coordinate(self, bench: Workbench, decisions: tuple[DeviceDecision, ...]) -> Candidate | DoesNotFit:
        return one_at_a_time(bench, decisions)


@dataclass(frozen=True)
class TmoOrdered(IlpPlanner):
    """TMO's second mechanism: the selection of contention-oblivious large-model support, its swap commands ordered.

    The selection is that of `oblivious` (taken over from an earlier one of the run where that may only offload), for a
    GPU that has the path to itself. On every shared link one GPU copies at a time, or as many as fill it, in the
    fastest of three orders (`one_at_a_time`); `details["policy"]` says in which ("order": in turns).
    """

    name: str = "tmo-ordered"

    def actions(self, problem: Problem) -> frozenset[Action]:
        return problem.actions & {Action.OFFLOAD}

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        if Action.OFFLOAD not in problem.actions:
            return _not_allowed(self.name, watch)
        offload = _offload_only(problem)
        known = seeds if problem.actions == offload.actions else ()
        support = Oblivious(self.time_limit_s, self.gap, self.threads, self.solver)
        selected = support.plan(offload, seed=seed, seeds=known)
        if selected.candidate is None:
            return replace(selected, planner=self.name, plan_s=watch.read_s())
        bench = Workbench(offload)
        decisions = selected.candidate.decisions
        found = one_at_a_time(bench, decisions)
        if isinstance(found, DoesNotFit):
            return does_not_fit(self.name, problem, found, watch)
        details = dict(selected.details) | {"policy": found.coordination.policy.value}
        del details["oblivious_selection"]  # the mark of selections with all actions of the problem
        return self.planned(found, details, watch)
