"""Neighbours of a plan: what a search on the exact simulator changes from one candidate to the next.

Moves change the choices for one candidate, for two, for a role in its layers or in a window; where state rests; what is
taken over from other plans; who lends; and the coordination: starts, link policy, prefetch distance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tmojax.planners.peers_and_codecs import Lending
from tmojax.planners.sweep import POLICIES, TURNS, even_starts
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, Kind, LinkPolicyKind
from tmojax.problem.step_view import StepView
from tmojax.relax.coordinate import Coordination, shared_links
from tmojax.relax.decisions import Choice, DeviceDecision, rests_of
from tmojax.relax.decode import NEVER
from tmojax.simulate import simulate

UNGUIDED = 0.3  # of the moves on candidates are drawn without the guide's weights
TRIES = 4  # at taking something over that differs
RANKED = 0.4  # a plan of the guide is taken so much more often than the next
NEAREST = 12  # candidates to a wait are changed
FINEST = 4.0  # a start moves by a step that is halved so often at most
SPANS = (0.05, 0.5)  # of the slots of a micro-batch, in a window


@dataclass(frozen=True, eq=False)
class Guide:
    """What a search is told by others. plans: decisions of all devices, the best first, of which it takes over parts.
    weight: for the first device of every class, how likely a candidate is to be changed [I], not negative."""

    plans: tuple[tuple[DeviceDecision, ...], ...]
    weight: dict[int, np.ndarray]


class Move(NamedTuple):
    """A neighbour, before it is decoded; `kind`: how it was made."""

    kind: str
    decisions: tuple[DeviceDecision, ...]
    coordination: Coordination
    lookahead_runs: tuple[int, ...]


class Moves:
    """Proposes neighbours; kinds of move that paid recently are drawn more often."""

    def __init__(self, bench: Workbench, rng: np.random.Generator, guide: Guide | None = None) -> None:
        self.bench, self.rng, self.guide = bench, rng, guide
        problem = bench.problem
        self.offload = Action.OFFLOAD in problem.actions
        self.recompute = Action.RECOMPUTE in problem.actions
        self.compress = Action.COMPRESS in problem.actions and len(problem.machine.codecs) > 0
        self.lending = Lending(bench)
        self.roles = {d: _roles(bench, d) for d in set(bench.device_class)}
        kinds = ["lookahead"]
        if shared_links(problem.machine):
            kinds += ["policy"]
        if bench.device_count > 1:
            kinds += ["start", "starts"]
        peers = self.lending.possible
        if (self.offload or self.recompute or self.compress or peers) and all(self.roles.values()):
            kinds += ["one", "block", "role", "trade", "border", "wait"]
            if problem.workload.micro_batches > 1 and any(len(bench.view(d).collective_op) for d in self.roles):
                kinds += ["last"]
        if self.offload and any(len(bench.view(d).state_tensor) for d in range(bench.device_count)):
            kinds += ["state"]
        if peers and bench.device_count > 2:
            kinds += ["lender"]
        if self.compress and len(problem.machine.codecs) > 1:
            kinds += ["codec"]
        if guide is not None and guide.plans:
            kinds += ["take-over"]
        self.weight = {kind: 1.0 for kind in kinds}
        self._waited: tuple[Candidate | None, list[np.ndarray]] = (None, [])
        self.role_of: dict[int, np.ndarray] = {}
        self.chance: dict[int, np.ndarray] = {}
        for device, weight in ({} if guide is None else guide.weight).items():
            role_of = np.full(len(weight), -1)
            for number, members in enumerate(self.roles[device]):
                role_of[members] = number
            chance = np.where(role_of >= 0, weight, 0.0)
            if chance.sum() > 0:
                self.role_of[device], self.chance[device] = role_of, chance / chance.sum()
        # Nobody can start after the first device has ended: with one micro-batch that is soon.
        view = bench.view(0)
        micro_batch_s = float(view.slot_s.sum())
        self.latest_share = min(1.5, 0.99 * view.compute_s / micro_batch_s) if micro_batch_s else 0.0

    def feedback(self, kind: str, improved: bool) -> None:
        """How a move of a kind ended: whether it was faster than what it changed."""
        self.weight[kind] = min(4.0, max(0.25, self.weight[kind] * (1.5 if improved else 0.96)))

    def propose(self, current: Candidate) -> Move:
        """A neighbour of `current`; it may be equal to it, or not fit."""
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
            decisions = self._decisions(kind, current)
        return Move(kind, decisions, coordination, lookahead)

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
        step = self.rng.normal(0, 0.12) * 2.0 ** -self.rng.uniform(0, FINEST)
        shares[device] = float(min(self.latest_share, max(0.0, shares[device] + step)))
        return replace(now, start_share=tuple(shares))

    def _decisions(self, kind: str, current: Candidate) -> tuple[DeviceDecision, ...]:
        """Change one device, or all devices of a class alike."""
        now = current.decisions
        device = int(self.rng.integers(self.bench.device_count))
        if kind == "wait":
            wait_s = np.array([waits.sum() for waits in self._waits(current)])
            if wait_s.sum() > 0:
                device = int(self.rng.choice(len(wait_s), p=wait_s / wait_s.sum()))
        first = self.bench.device_class[device]
        view = self.bench.view(device)
        changed = now[device]
        changed = replace(changed, lender=self.lending.lender(now, device))
        if kind == "state":
            changed = self._flip_state(view, changed)
        elif kind == "lender":
            changed = self.lending.other(now, device, self.rng)
        elif kind == "codec":
            changed = replace(changed, codec=int(self.rng.integers(len(self.bench.problem.machine.codecs))))
        elif kind == "take-over":
            changed = self._take_over(device, changed)
        elif kind == "trade":
            changed = self._flip(view, self._flip(view, changed, self._pick(first, "one")), self._pick(first, "one"))
        elif kind == "wait":
            changed = self._flip(view, changed, self._near_wait(device, current))
        elif kind == "border":
            changed = self._border(view, first, changed)
        elif kind == "last":
            changed = self._flip(view, changed, self._pick(first, ("one", "block", "role")[self.rng.integers(3)]), True)
        else:
            changed = self._flip(view, changed, self._pick(first, kind))
        if self.rng.random() < 0.6:
            same = [d for d in range(len(now)) if self.bench.device_class[d] == first and now[d].same_as(now[device])]
        else:
            same = [device]
        return tuple(
            self.lending.taken(now, d, changed) if d in same and d != device else changed if d == device else decision
            for d, decision in enumerate(now)
        )

    def _pick(self, first: int, kind: str) -> np.ndarray:
        """Indices of candidates to change together: one, one role in neighbouring layers, or one role everywhere."""
        members, wanted = self._role(first)
        if kind == "role":
            return members
        if kind == "one" or len(members) == 1:
            return members[[int(self.rng.integers(len(members)))]] if wanted < 0 else np.array([wanted])
        length = int(self.rng.integers(2, len(members) + 1))
        low, high = 0, len(members) - length
        if wanted >= 0:  # the block holds it
            place = int(np.flatnonzero(members == wanted)[0])
            low, high = max(0, place - length + 1), min(high, place)
        begin = int(self.rng.integers(low, high + 1))
        return members[begin : begin + length]

    def _waits(self, current: Candidate) -> list[np.ndarray]:
        """[Q] for every device: seconds that its compute waits before each slot, in all micro-batches."""
        if self._waited[0] is not current:
            simulation = simulate(self.bench.problem, current.schedule)
            waits = []
            for device, rows in enumerate(current.schedule.lists):
                computes = np.flatnonzero(rows["kind"] == Kind.COMPUTE)
                start_s, end_s = simulation.start_s[device][computes], simulation.end_s[device][computes]
                wait_s = np.maximum(start_s - np.concatenate([[0.0], end_s[:-1]]), 0.0)
                view = self.bench.view(device)
                slot_of = np.full(len(self.bench.problem.workload.program(device).ops), -1)
                slot_of[view.slot_op] = np.arange(len(view.slot_op))
                slot = slot_of[rows["op"][computes]]
                waits.append(np.bincount(slot[slot >= 0], wait_s[slot >= 0], minlength=len(view.slot_op)))
            self._waited = (current, waits)
        return self._waited[1]

    def _near_wait(self, device: int, current: Candidate) -> np.ndarray:
        """A candidate that becomes idle, or is needed again, near a slot before which compute waits; long waits more
        often."""
        waits, view = self._waits(current)[device], self.bench.view(device)
        members = np.concatenate(self.roles[self.bench.device_class[device]])
        if waits.sum() > 0:
            slot = int(self.rng.choice(len(waits), p=waits / waits.sum()))
            apart = np.minimum(np.abs(view.idle_from[members] - slot), np.abs(view.idle_to[members] - slot))
            members = members[np.argsort(apart, kind="stable")[:NEAREST]]
        return members[[int(self.rng.integers(len(members)))]]

    def _border(self, view: StepView, first: int, decision: DeviceDecision) -> DeviceDecision:
        """Treat a candidate as its role is treated in the next layer, or in the one before, where that differs."""
        (members, _), now = self._role(first), decision.choice
        edges = np.flatnonzero(now[members[1:]] != now[members[:-1]])
        if not len(edges):
            return decision
        edge, later = int(edges[self.rng.integers(len(edges))]), int(self.rng.integers(2))
        one, option = members[edge + later], int(now[members[edge + 1 - later]])
        return self._chosen(decision, np.array([one]), option) if _allowed(view, option)[one] else decision

    def _role(self, first: int) -> tuple[np.ndarray, int]:
        """The candidates of a role, and the one for whose weight in the guide it was drawn (-1: none)."""
        role, wanted = self.roles[first], self._wanted(first)
        return role[int(self.rng.integers(len(role)))] if wanted < 0 else role[self.role_of[first][wanted]], wanted

    def _wanted(self, first: int) -> int:
        """A candidate drawn by the weights of the guide; -1 for any (now and then, and without a guide)."""
        if first not in self.chance or self.rng.random() < UNGUIDED:
            return -1
        return int(self.rng.choice(len(self.chance[first]), p=self.chance[first]))

    def _take_over(self, device: int, now: DeviceDecision) -> DeviceDecision:
        """What another plan decides for a device, for a role, for a window of the micro-batch, or for its state."""
        assert self.guide is not None
        view, roles = self.bench.view(device), self.roles[self.bench.device_class[device]]
        for _ in range(TRIES):
            place = min(int(self.rng.geometric(RANKED)) - 1, len(self.guide.plans) - 1)
            other = self.guide.plans[place][device]
            if other.borrows and other.lender != now.lender:
                other = other.by_host()
            part = int(self.rng.integers(4 if roles else 1))
            mask = np.zeros(len(view.tensor), bool)
            state_out = now.state_out
            if part == 0:
                state_out = other.state_out
            elif part == 1:
                mask[:] = True
            elif part == 2:
                mask[roles[int(self.rng.integers(len(roles)))]] = True
            else:
                span = max(1, int(len(view.slot_op) * self.rng.uniform(*SPANS)))
                begin = int(self.rng.integers(0, max(1, len(view.slot_op) - span + 1)))
                for edge in (view.idle_from, view.idle_to):
                    mask |= (edge >= begin) & (edge < begin + span)
            choice = np.where(mask, other.choice, now.choice).astype(np.int8)
            last = np.where(mask, other.in_last, now.in_last).astype(np.int8)
            first = np.where(mask, other.in_first, now.in_first).astype(np.int8)
            changed = replace(
                now, choice=choice, state_out=state_out, last_choice=None if np.array_equal(choice, last) else last,
                first_choice=None if np.array_equal(choice, first) else first,
                codec=now.codec if now.encodes else other.codec,
            )  # fmt: skip
            if not changed.same_as(now):
                return changed
        return now

    def _flip(
        self, view: StepView, decision: DeviceDecision, members: np.ndarray, last: bool = False
    ) -> DeviceDecision:
        """Give all members one other choice that is allowed for the first of them. `last`: in the last micro-batch.

        Without `last`, where the last or the first micro-batch is different already: in all, or in all but that.
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
        members = members[_allowed(view, option)[members]]
        if last:
            choice = now.copy()
            choice[members] = option
            return replace(decision, last_choice=choice)
        return self._chosen(decision, members, option)

    def _chosen(self, decision: DeviceDecision, members: np.ndarray, option: int) -> DeviceDecision:
        """`decision` with another choice for some candidates."""
        choice = decision.choice.copy()
        choice[members] = option
        changed = replace(decision, choice=choice)
        for name, apart in (("last_choice", decision.last_choice), ("first_choice", decision.first_choice)):
            if apart is not None and not self.rng.integers(2):
                both = apart.copy()
                both[members] = option
                changed = replace(changed, **{name: both})
        return changed

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
        options = rests_of(self.bench.problem, resting)
        state_out = decision.state_out.astype(np.int8)
        state_out[members[begin : begin + length]] = options[int(self.rng.integers(len(options)))]
        return replace(decision, state_out=state_out)


def _allowed(view: StepView, option: int) -> np.ndarray:
    """[I] bool: the candidates that a choice is open to."""
    if option == Choice.KEEP:
        return np.ones(len(view.tensor), bool)
    return view.may_recompute if option == Choice.RECOMPUTE else view.may_offload


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
