"""Local search on the exact simulator: threshold accepting over decisions, starts, policies and prefetch distance.

Every move is decoded and simulated exactly, so what is accepted really is faster. The number of simulations is fixed by
the settings and the size of the problem, never by the clock: the same seed gives the same plan.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tmojax.errors import InputError
from tmojax.planners.peers_and_codecs import find_lenders, possible_lenders
from tmojax.planners.robust import most_robust
from tmojax.planners.sweep import POLICIES, TURNS, even_starts
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, LinkPolicyKind
from tmojax.problem.step_view import StepView
from tmojax.relax.coordinate import Coordination, shared_links
from tmojax.relax.decisions import Choice, DeviceDecision, Rest
from tmojax.relax.decode import NEVER, DoesNotFit

LAST_PLANS = 4  # of the best plans of a search, are compared under jitter


@dataclass(frozen=True)
class SearchSettings:
    """evaluations: exact simulations at most. instructions: total simulated instructions at most, so that large
    problems take bounded time. second_share: part of them that goes to a second start. start_threshold: relative
    slow-down accepted at first; it falls linearly to zero."""

    evaluations: int = 1000
    instructions: int = 40_000_000
    second_share: float = 0.4
    start_threshold: float = 0.004

    def __post_init__(self) -> None:
        for name in ("evaluations", "instructions"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)} must be at least 1")
        if not 0 <= self.second_share <= 1:
            raise InputError(f"second_share: {self.second_share} must be between 0 and 1")
        if self.start_threshold < 0:
            raise InputError(f"start_threshold: {self.start_threshold} must not be negative")


@dataclass(frozen=True)
class SearchLog:
    """evaluations: simulations done. improvements: how often each kind of move led to a new best plan. plans: the start
    and the last of those best plans, slowest first."""

    evaluations: int
    improvements: dict[str, int]
    plans: tuple[Candidate, ...]


def local_search(
    bench: Workbench, start: Candidate, settings: SearchSettings, seed: int
) -> tuple[Candidate, SearchLog]:
    """Improve `start`; the result is never slower. Deterministic for a seed."""
    return _search(bench, start, budget_of(start, settings), settings.start_threshold, seed)


def search_from_two(
    bench: Workbench, first: Candidate, second: Candidate, settings: SearchSettings, seed: int
) -> tuple[Candidate, SearchLog]:
    """The faster of two searches; `second_share` of the simulations go to `second`, with another seed."""
    budget = budget_of(first, settings)
    later = int(budget * settings.second_share)
    best, log = _search(bench, first, max(1, budget - later), settings.start_threshold, seed)
    other, other_log = _search(bench, second, max(1, later), settings.start_threshold, seed + 1)
    improvements = {
        kind: log.improvements.get(kind, 0) + other_log.improvements.get(kind, 0)
        for kind in sorted({*log.improvements, *other_log.improvements})
    }
    total = SearchLog(log.evaluations + other_log.evaluations, improvements, log.plans + other_log.plans)
    return (other if other.step_s < best.step_s else best), total


def budget_of(start: Candidate, settings: SearchSettings) -> int:
    """Simulations that the settings allow for schedules of the size of `start`."""
    instructions = sum(len(rows) for rows in start.schedule.lists)
    return max(2, min(settings.evaluations, settings.instructions // max(1, instructions)))


def _search(
    bench: Workbench, start: Candidate, budget: int, start_threshold: float, seed: int
) -> tuple[Candidate, SearchLog]:
    rng = np.random.default_rng(seed)
    moves = _Moves(bench, rng)
    best = current = start
    plans = deque([start], maxlen=LAST_PLANS)
    improvements: dict[str, int] = {}
    since_best = 0
    for evaluation in range(budget):
        threshold = start_threshold * (1 - evaluation / budget)
        kind, decisions, coordination, lookahead = moves.propose(current)
        found = bench.evaluate(decisions, coordination, lookahead)
        since_best += 1
        if isinstance(found, DoesNotFit) or not found.step_s < float("inf"):
            moves.feedback(kind, False)
            continue
        moves.feedback(kind, found.step_s < current.step_s)
        if found.step_s <= current.step_s * (1 + threshold):
            current = found
        if found.step_s < best.step_s * (1 - 1e-9):
            best, since_best = found, 0
            plans.append(found)
            improvements[kind] = improvements.get(kind, 0) + 1
        elif since_best > 40:
            current, since_best = best, 0
    return best, SearchLog(budget, improvements, tuple(plans))


def robust_choice(
    bench: Workbench, log: SearchLog, settings: SearchSettings, limit_s: float, seed: int
) -> tuple[Candidate, dict[str, Any]]:
    """The most robust of the plans of a search that are nearly as fast as the fastest, with figures for the details.

    Takes a quarter of `evaluations` on top, and at most `instructions`.
    """
    rows = max(1, sum(len(rows) for rows in log.plans[-1].schedule.lists))
    simulations = min(settings.evaluations // 4, settings.instructions // rows)
    choice = most_robust(bench, log.plans, limit_s=limit_s, simulations=simulations, seed=seed)
    return choice.plan, choice.figures


class _Moves:
    """Proposes neighbours; kinds of move that paid recently are drawn more often."""

    def __init__(self, bench: Workbench, rng: np.random.Generator) -> None:
        self.bench, self.rng = bench, rng
        problem = bench.problem
        self.offload = Action.OFFLOAD in problem.actions
        self.recompute = Action.RECOMPUTE in problem.actions
        self.compress = Action.COMPRESS in problem.actions and len(problem.machine.codecs) > 0
        self.lenders = find_lenders(bench)
        self.roles = {d: _roles(bench, d) for d in set(bench.device_class)}
        kinds = ["lookahead"]
        if shared_links(problem.machine):
            kinds += ["policy"]
        if bench.device_count > 1:
            kinds += ["start", "starts"]
        peers = any(lender >= 0 for lender in self.lenders)
        if (self.offload or self.recompute or self.compress or peers) and all(self.roles.values()):
            kinds += ["one", "block", "role", "trade"]
            if problem.workload.micro_batches > 1 and any(len(bench.view(d).collective_op) for d in self.roles):
                kinds += ["last"]
        if self.offload and any(len(bench.view(d).state_tensor) for d in range(bench.device_count)):
            kinds += ["state"]
        if peers and bench.device_count > 2:
            kinds += ["lender"]
        if self.compress and len(problem.machine.codecs) > 1:
            kinds += ["codec"]
        self.weight = {kind: 1.0 for kind in kinds}
        # Nobody can start after the first device has ended: with one micro-batch that is soon.
        view = bench.view(0)
        micro_batch_s = float(view.slot_s.sum())
        self.latest_share = min(1.5, 0.99 * view.compute_s / micro_batch_s) if micro_batch_s else 0.0

    def feedback(self, kind: str, improved: bool) -> None:
        self.weight[kind] = min(4.0, max(0.25, self.weight[kind] * (1.5 if improved else 0.96)))

    def propose(self, current: Candidate):
        kinds = list(self.weight)
        weights = np.array([self.weight[kind] for kind in kinds])
        kind = kinds[int(self.rng.choice(len(kinds), p=weights / weights.sum()))]
        decisions, coordination, lookahead = current.decisions, current.coordination, current.lookahead_runs
        lookahead = lookahead or (NEVER,) * self.bench.device_count
        if kind == "lookahead":
            body = len(self.bench.view(0).slot_op)
            options = (NEVER, body, body // 2, body // 4, body // 8, body // 16)
            lookahead = (int(options[self.rng.integers(len(options))]),) * self.bench.device_count
        elif kind in ("policy", "start", "starts"):
            coordination = self._coordination(kind, coordination)
        else:
            decisions = self._decisions(kind, decisions)
        return kind, decisions, coordination, lookahead

    def _coordination(self, kind: str, now: Coordination) -> Coordination:
        count = self.bench.device_count
        if kind == "policy":
            policy = POLICIES[self.rng.integers(len(POLICIES))]
            ranked = policy in (LinkPolicyKind.PRIORITY, LinkPolicyKind.ORDER)
            rank = tuple(int(g) for g in self.rng.permutation(count)) if ranked else ()
            slots, turns = self.bench.slots(), 0
            if policy is LinkPolicyKind.ORDER:
                rank = rank if self.rng.integers(2) else ()
                slots, turns = slots + int(self.rng.integers(2)), int(self.rng.choice((0, 0, *TURNS)))
            return Coordination(now.start_share, policy, rank, slots, turns)
        if kind == "starts":
            return replace(
                now, start_share=even_starts(self.bench, float(min(self.latest_share, self.rng.uniform(0, 1.1))))
            )
        shares = list(now.start_share)
        device = int(self.rng.integers(1, count))
        shares[device] = float(min(self.latest_share, max(0.0, shares[device] + self.rng.normal(0, 0.12))))
        return replace(now, start_share=tuple(shares))

    def _decisions(self, kind: str, now: tuple[DeviceDecision, ...]) -> tuple[DeviceDecision, ...]:
        """Change one device, or all devices of a class alike."""
        device = int(self.rng.integers(self.bench.device_count))
        first = self.bench.device_class[device]
        view = self.bench.view(device)
        changed = now[device]
        changed = replace(changed, lender=self._lender(now, device)) if not changed.borrows else changed
        if kind == "state":
            changed = self._flip_state(view, changed)
        elif kind == "lender":
            changed = self._other_lender(now, device)
        elif kind == "codec":
            changed = replace(changed, codec=int(self.rng.integers(len(self.bench.problem.machine.codecs))))
        elif kind == "trade":
            changed = self._flip(view, self._flip(view, changed, self._pick(first, "one")), self._pick(first, "one"))
        elif kind == "last":
            changed = self._flip(view, changed, self._pick(first, ("one", "block", "role")[self.rng.integers(3)]), True)
        else:
            changed = self._flip(view, changed, self._pick(first, kind))
        if self.rng.random() < 0.6:
            same = [d for d in range(len(now)) if self.bench.device_class[d] == first and now[d].same_as(now[device])]
        else:
            same = [device]
        return tuple(
            self._for(now, d, changed) if d in same and d != device else changed if d == device else decision
            for d, decision in enumerate(now)
        )

    def _lender(self, now: tuple[DeviceDecision, ...], device: int) -> int:
        """Who may lend to a device, or -1: nobody both lends and borrows."""
        lender = now[device].lender if now[device].borrows else self.lenders[device]
        lends = any(other.borrows and other.lender == device for other in now)
        return -1 if lender < 0 or lends or now[lender].borrows else lender

    def _other_lender(self, now: tuple[DeviceDecision, ...], device: int) -> DeviceDecision:
        options = [other for other in possible_lenders(self.bench.problem.machine, device) if not now[other].borrows]
        if not now[device].borrows or not options:
            return now[device]
        return replace(now[device], lender=int(options[self.rng.integers(len(options))]))

    def _for(self, now: tuple[DeviceDecision, ...], device: int, changed: DeviceDecision) -> DeviceDecision:
        """What another device of the same kind changed, for this one, whose lender may be another."""
        if not changed.borrows:
            return changed
        lender = self._lender(now, device)
        return now[device] if lender < 0 else replace(changed, lender=lender)

    def _pick(self, first: int, kind: str) -> np.ndarray:
        """Indices of candidates to change together: one, one role in neighbouring layers, or one role everywhere."""
        role = self.roles[first]
        members = role[int(self.rng.integers(len(role)))]
        if kind == "role":
            return members
        if kind == "one" or len(members) == 1:
            return members[[int(self.rng.integers(len(members)))]]
        length = int(self.rng.integers(2, len(members) + 1))
        begin = int(self.rng.integers(0, len(members) - length + 1))
        return members[begin : begin + length]

    def _flip(
        self, view: StepView, decision: DeviceDecision, members: np.ndarray, last: bool = False
    ) -> DeviceDecision:
        """Give all members one other choice that is allowed for the first of them. `last`: in the last micro-batch.

        Without `last`, where the last micro-batch is different already: in all of them, or in all but that.
        """
        lead, now = int(members[0]), decision.in_last if last else decision.choice
        options = [Choice.KEEP]
        if self.offload and view.may_offload[lead]:
            options.append(Choice.OFFLOAD)
        if view.may_recompute[lead] and (self.recompute or not view.needed[lead]):
            options.append(Choice.RECOMPUTE)
        if view.may_offload[lead] and decision.lender >= 0:
            options.append(Choice.PEER)
        if view.may_offload[lead] and self.compress:
            options += [Choice.COMPRESS, Choice.OFFLOAD_COMPRESSED] if self.offload else [Choice.COMPRESS]
        options = [option for option in options if option != now[lead]]
        if not options:
            return decision
        option = options[int(self.rng.integers(len(options)))]
        choice = now.copy()
        allowed = {Choice.KEEP: np.ones(len(choice), bool), Choice.RECOMPUTE: view.may_recompute}.get(
            option, view.may_offload
        )
        choice[members[allowed[members]]] = option
        if last:
            return replace(decision, last_choice=choice)
        if decision.last_choice is None or self.rng.integers(2):
            return replace(decision, choice=choice)
        both = decision.last_choice.copy()
        both[members[allowed[members]]] = option
        return replace(decision, choice=choice, last_choice=both)

    def _flip_state(self, view: StepView, decision: DeviceDecision) -> DeviceDecision:
        """Let a random run of state tensors, all resting or all in use by micro-batches, rest elsewhere."""
        resting = (
            bool(self.rng.integers(2))
            if view.state_resting.any() and not view.state_resting.all()
            else bool(view.state_resting.any())
        )
        members = np.flatnonzero(view.state_resting == resting)
        if not len(members):  # another device's program has state, this one has none
            return decision
        length = int(self.rng.integers(1, len(members) + 1))
        begin = int(self.rng.integers(0, len(members) - length + 1))
        options = list(Rest) if resting else [Rest.ON_DEVICE, Rest.AWAY]
        state_out = decision.state_out.astype(np.int8)
        state_out[members[begin : begin + length]] = options[int(self.rng.integers(len(options)))]
        return replace(decision, state_out=state_out)


def _roles(bench: Workbench, device: int) -> list[np.ndarray]:
    """Candidates grouped by what they are in their layer: their producer's name without the layer's, in order of the
    layers.

    Negligible candidates (less than a thousandth of the largest) are left out.
    """
    view = bench.view(device)
    program = bench.problem.workload.program(device)
    groups: dict[tuple[str, int, bool], list[int]] = {}
    for index, tensor in enumerate(view.tensor.tolist()):
        if view.size_bytes[index] * 1000 < view.size_bytes.max():
            continue
        op = program.ops[program.producer[tensor]]
        name = op.name.replace(op.layer, "*", 1) if op.layer else op.name
        groups.setdefault((name, int(view.size_bytes[index]), bool(view.needed[index])), []).append(index)
    return [np.array(members, np.int64) for members in groups.values()]
