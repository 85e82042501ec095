"""Strategies that keep tensors in the spare memory of another GPU or encoded, and starts for searches made of them.

Peers: whoever needs more than it has parks tensors with the GPU that has most to spare and is reached fastest (as
BPipe, ICML 2023, does between the first and the last stages of a pipeline). Codecs: tensors are encoded while they are
idle, and stay or go to the host.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tmojax.planners.base import PlanResult, Status, Stopwatch
from tmojax.planners.simple import SimpleStrategy
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, Machine, Problem, keep_all_footprint_bytes
from tmojax.relax.coordinate import Coordination, together
from tmojax.relax.decisions import Choice, DeviceDecision, keep_everything
from tmojax.relax.decode import DoesNotFit

LESS = (0.1, 0.25, 0.5, 1.0)  # of what is at peers
SHARES = (1.0, 0.75, 0.5, 0.25, 0.1)  # of the bytes that may leave


def possible_lenders(machine: Machine, device: int) -> list[int]:
    """GPUs with routes to and from the memory of a device."""
    own = machine.devices[device].memory
    return [
        other
        for other, spec in enumerate(machine.devices)
        if spec.kind == "gpu" and other != device and machine.has_route(own, spec.memory)
        and machine.has_route(spec.memory, own)
    ]  # fmt: skip


def find_lenders(bench: Workbench) -> tuple[int, ...]:
    """For every device the one that is to lend to it, or -1. Nobody both borrows and lends.

    Who is shortest of memory chooses first, among those that have more to spare than it has itself: who has most of
    what it is short of, then the fastest route, then the most spare memory. What it is short of is spare no more.
    """
    problem, machine, count = bench.problem, bench.problem.machine, bench.device_count
    lenders = [-1] * count
    if Action.PEER not in problem.actions:
        return tuple(lenders)
    footprint = {d: keep_all_footprint_bytes(problem.workload, d) for d in set(bench.device_class)}
    spare = [problem.capacity_bytes(d) - footprint[bench.device_class[d]] for d in range(count)]
    own = list(spare)
    for device in sorted(range(count), key=lambda d: own[d]):
        if device in lenders or own[device] >= 0:
            continue
        options = [
            other
            for other in possible_lenders(machine, device)
            if lenders[other] < 0 and spare[other] > own[device] and own[other] > own[device]
        ]
        if not options:
            continue
        short = -own[device]
        # A lender without any spare memory has to send its own tensors away instead.
        enough = {other: max(0, min(spare[other], short)) for other in options}
        lender = max(options, key=lambda o: (enough[o], _peer_rate(machine, device, o), spare[o], -o))
        lenders[device] = lender
        spare[lender] -= short
    return tuple(lenders)


def _peer_rate(machine: Machine, device: int, lender: int) -> float:
    """Bytes/s of a copy to the lender alone."""
    route = machine.route(machine.devices[device].memory, machine.devices[lender].memory)
    return min(machine.links[link].bandwidth_bytes_per_s for link in route.links)


class Lending:
    """Who may lend to whom while decisions change one GPU after the other."""

    def __init__(self, bench: Workbench) -> None:
        self.machine, self.lenders = bench.problem.machine, find_lenders(bench)
        self.possible = any(lender >= 0 for lender in self.lenders)

    def lender(self, now: Sequence[DeviceDecision], device: int) -> int:
        """Who lends, or may lend, to a device; -1: nobody, since nobody both lends and borrows."""
        if now[device].borrows:
            return now[device].lender
        lender = self.lenders[device]
        lends = any(other.borrows and other.lender == device for other in now)
        return -1 if lender < 0 or lends or now[lender].borrows else lender

    def other(self, now: Sequence[DeviceDecision], device: int, rng: np.random.Generator) -> DeviceDecision:
        """A borrower's decision with another lender, if there is one."""
        options = [other for other in possible_lenders(self.machine, device) if not now[other].borrows]
        if not now[device].borrows or not options:
            return now[device]
        return replace(now[device], lender=int(options[rng.integers(len(options))]))

    def taken(self, now: Sequence[DeviceDecision], device: int, changed: DeviceDecision) -> DeviceDecision:
        """What another device of the same kind changed, for this one, whose lender may be another."""
        if not changed.borrows:
            return changed
        lender = self.lender(now, device)
        return now[device] if lender < 0 else replace(changed, lender=lender)


def further_choices(bench: Workbench, lenders: tuple[int, ...]) -> list[tuple[Choice, int]]:
    """(choice, codec) that the problem allows besides keep, offload to the host, and recompute."""
    actions, codecs = bench.problem.actions, range(len(bench.problem.machine.codecs))
    found = [(Choice.PEER, 0)] if any(lender >= 0 for lender in lenders) else []
    if Action.COMPRESS in actions:
        found += [(Choice.COMPRESS, codec) for codec in codecs]
        if Action.OFFLOAD in actions:
            found += [(Choice.OFFLOAD_COMPRESSED, codec) for codec in codecs]
    return found


def in_part(bench: Workbench, base: tuple[DeviceDecision, ...], lenders: tuple[int, ...], choice: Choice, codec: int,
            share: float) -> tuple[DeviceDecision, ...]:  # fmt: skip
    """`base` with `choice` for `share` of the bytes that backward waits for and that may leave: first of what goes to
    the host in `base`, then of what is recomputed, then of what stays; evenly spread over each of them. A device
    without a lender keeps its decision where `choice` is PEER."""
    changed = []
    for device, decision in enumerate(base):
        view = bench.view(device)
        if choice is Choice.PEER and lenders[device] < 0:
            changed.append(decision)
            continue
        movable = view.needed & view.may_offload
        left = share * float(view.size_bytes[movable].sum())
        mixed = decision.choice.copy()
        kinds = (decision.choice > Choice.RECOMPUTE) | (decision.choice == Choice.OFFLOAD)
        for group in (kinds, decision.choice == Choice.RECOMPUTE, decision.choice == Choice.KEEP):
            members = np.flatnonzero(movable & group)
            size = view.size_bytes[members].astype(float)
            part = min(1.0, left / size.sum()) if size.sum() > 0 else 0.0
            left = max(0.0, left - size.sum())
            mixed[members[_spread(size, part)]] = choice
        ways = {"lender": lenders[device]} if choice is Choice.PEER else {"codec": codec}
        changed.append(replace(decision.alike(), choice=mixed, **ways))
    return tuple(changed)


def lend_less(bench: Workbench, decisions: tuple[DeviceDecision, ...]) -> tuple[DeviceDecision, ...]:
    """`decisions`; where a lender's list does not fit, with so much less at the peers, and more on the host, that all
    fit, if that is possible."""
    if Action.OFFLOAD not in bench.problem.actions or not any(decision.borrows for decision in decisions):
        return decisions
    for part in (0.0, *LESS):
        changed = []
        for device, decision in enumerate(decisions):
            members = np.flatnonzero(decision.choice == Choice.PEER)
            taken = members[_spread(bench.view(device).size_bytes[members].astype(float), part)]
            choices = {name: getattr(decision, name) for name in ("choice", "last_choice", "first_choice")}
            moved = {name: _with(choice, taken) for name, choice in choices.items() if choice is not None}
            changed.append(replace(decision, **moved) if part else decision)
        if not isinstance(bench.lists(tuple(changed)), DoesNotFit):
            return tuple(changed)
    return decisions


def _with(choice: np.ndarray, taken: np.ndarray) -> np.ndarray:
    changed = choice.copy()
    changed[taken] = Choice.OFFLOAD
    return changed


def _spread(size: np.ndarray, part: float) -> np.ndarray:
    """[N] bool: about `part` of the bytes, taken in turn from beginning to end."""
    taken = np.zeros(len(size), bool)
    owed = 0.0
    for index, one in enumerate(size.tolist()):
        owed += part * one
        taken[index] = owed >= one / 2 and part > 0
        owed -= one * taken[index]
    return taken


def further_starts(bench: Workbench, known: Candidate | None) -> Iterator[tuple[str, Candidate]]:
    """For every further choice the fastest plan that makes it for a part of what `known`, or keep-all, decides."""
    lenders = find_lenders(bench)
    keep = tuple(keep_everything(bench.view(device)) for device in range(bench.device_count))
    bases = [(keep, together(bench.problem))]
    if known is not None:
        bases.append((known.decisions, known.coordination))
    for choice, codec in further_choices(bench, lenders):
        best = _fastest(bench, bases, lenders, choice, codec)
        if best is not None:
            yield choice.name.lower().replace("_", " "), best


def _fastest(bench: Workbench, bases: list[tuple[tuple[DeviceDecision, ...], Coordination]], lenders: tuple[int, ...],
             choice: Choice, codec: int) -> Candidate | None:  # fmt: skip
    best: Candidate | None = None
    for base, coordination in bases:
        if choice is Choice.PEER and any(decision.borrows for decision in base):
            continue
        for share in SHARES:
            found = bench.evaluate(in_part(bench, base, lenders, choice, codec, share), coordination)
            if not isinstance(found, DoesNotFit) and (best is None or found.step_s < best.step_s):
                best = found
    return best if best is not None and best.step_s < float("inf") else None


@dataclass(frozen=True)
class _OneChoice(SimpleStrategy):
    """One further choice for a share of the tensors, the fastest of `SHARES`; the others stay."""

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        bench = Workbench(problem)
        lenders = find_lenders(bench)
        options = [option for option in further_choices(bench, lenders) if option[0] in self._choices()]
        if not options:
            return PlanResult(self.name, Status.NOT_FOUND, message=self._missing(problem), plan_s=watch.read_s())
        keep = tuple(keep_everything(bench.view(device)) for device in range(bench.device_count))
        found = [_fastest(bench, [(keep, together(problem))], lenders, *option) for option in options]
        best = min((plan for plan in found if plan is not None), key=lambda plan: plan.step_s, default=None)
        if best is None:
            return PlanResult(self.name, Status.NOT_FOUND, message="no share of them fits", plan_s=watch.read_s())
        return PlanResult(self.name, Status.FEASIBLE, best.schedule, best.step_s, watch.read_s(), candidate=best)

    @abstractmethod
    def _choices(self) -> tuple[Choice, ...]:
        """The choices that are tried."""

    @abstractmethod
    def _missing(self, problem: Problem) -> str:
        """Why there is none of them."""


@dataclass(frozen=True)
class PeerOffload(_OneChoice):
    """GPUs that are short of memory park tensors in the memory of those that have more (`find_lenders`)."""

    name: str = "peer-offload"

    def actions(self, problem: Problem) -> frozenset[Action]:
        return problem.actions & {Action.PEER}

    def _choices(self) -> tuple[Choice, ...]:
        return (Choice.PEER,)

    def _missing(self, problem: Problem) -> str:
        if Action.PEER not in problem.actions:
            return "needs action 'peer', which the problem does not allow"
        return "no GPU has more memory to spare than another one that it is joined to"


@dataclass(frozen=True)
class CompressAll(_OneChoice):
    """Idle tensors are encoded, with the codec that is fastest in the end, and stay or, where that is allowed and
    faster, go to the host."""

    name: str = "compress-all"

    def actions(self, problem: Problem) -> frozenset[Action]:
        return problem.actions & {Action.COMPRESS, Action.OFFLOAD}

    def _choices(self) -> tuple[Choice, ...]:
        return (Choice.COMPRESS, Choice.OFFLOAD_COMPRESSED)

    def _missing(self, problem: Problem) -> str:
        if Action.COMPRESS not in problem.actions:
            return "needs action 'compress', which the problem does not allow"
        return "the machine has no codecs"
