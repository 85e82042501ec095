"""Plans of one problem to compare the relaxed model on: neighbours of the best plan, and contended random plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tmojax.planners.repair import repair
from tmojax.planners.sweep import even_starts, sweep
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, LinkPolicyKind
from tmojax.problem.step_view import StepView
from tmojax.relax.coordinate import Coordination, host_links, link_policies
from tmojax.relax.decisions import Choice, DeviceDecision, Rest
from tmojax.relax.decode import DoesNotFit

NEAR = 1.10  # times the best plan known
CONTENDED = 1.10  # times the same plan with every shared link wide enough for all its users
MOST_TRIES = 1500
HOPELESS = 1.3  # neighbours this much slower under the best plan's coordination are not swept
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
# The estimates know no explicit orders.
POLICIES = (LinkPolicyKind.FAIR, LinkPolicyKind.FCFS, LinkPolicyKind.PRIORITY)


@dataclass(frozen=True)
class Drawn:
    """A plan and its exact time. `kind`: near or contended. `alone_s`: its time if GPUs did not share any link."""

    kind: str
    candidate: Candidate
    alone_s: float

    def as_dict(self) -> dict[str, Any]:
        """JSON values; decisions as one digit a candidate (`Choice`) and a state tensor (`Rest`)."""
        candidate, coordination = self.candidate, self.candidate.coordination
        return {
            "kind": self.kind,
            "choice": ["".join(map(str, d.choice.tolist())) for d in candidate.decisions],
            "state_out": ["".join(map(str, d.state_out.astype(int).tolist())) for d in candidate.decisions],
            "start_share": list(coordination.start_share),
            "policy": str(coordination.policy),
            "device_rank": list(coordination.device_rank),
            "slots": coordination.slots,
            "step_s": candidate.step_s,
            "alone_s": self.alone_s,
        }


def read_plan(plan: dict[str, Any]) -> tuple[tuple[DeviceDecision, ...], Coordination]:
    """Decisions and coordination of `Drawn.as_dict`."""
    decisions = tuple(
        DeviceDecision(np.array(list(choice), np.int8), np.array(list(state), np.int8))
        for choice, state in zip(plan["choice"], plan["state_out"], strict=True)
    )
    return decisions, Coordination(
        tuple(plan["start_share"]), LinkPolicyKind(plan["policy"]), tuple(plan["device_rank"]), plan["slots"]
    )


def draw(bench: Workbench, best: Candidate, count: int, seed: int) -> list[Drawn]:
    """`count` plans of each kind, fewer if `MOST_TRIES` do not yield them. Deterministic for a seed."""
    rng = np.random.default_rng(seed)
    return [*_near(bench, best, count, rng), *_contended(bench, count, rng)]


def _near(bench: Workbench, best: Candidate, count: int, rng: np.random.Generator) -> list[Drawn]:
    """Neighbours at up to `NEAR` times the best, spread over that range in bins of 1 % as far as they exist."""
    bins: dict[int, list[Candidate]] = {}
    enough = max(1, count // 10) * 2
    limit_s = HOPELESS * best.step_s
    for candidate in _distinct(bench, _neighbours(bench, best, rng), limit_s):
        over = candidate.step_s / best.step_s - 1
        if over < NEAR - 1:
            place = bins.setdefault(max(0, int(100 * over)), [])
            if len(place) < enough:
                place.append(candidate)
        if len(bins) == 10 and all(len(place) == enough for place in bins.values()):
            break
    chosen: list[Candidate] = []
    for turn in range(enough):  # one of each bin in turn
        chosen += [place[turn] for _, place in sorted(bins.items()) if turn < len(place)]
    return [Drawn("near", candidate, _alone_s(bench, candidate)) for candidate in chosen[:count]]


def _contended(bench: Workbench, count: int, rng: np.random.Generator) -> list[Drawn]:
    """Random plans that take at least `CONTENDED` times as long as if no link were shared."""
    chosen: list[Drawn] = []
    for candidate in _distinct(bench, _random_plans(bench, rng), np.inf):
        alone_s = _alone_s(bench, candidate)
        if candidate.step_s > CONTENDED * alone_s:
            chosen.append(Drawn("contended", candidate, alone_s))
        if len(chosen) == count:
            break
    return chosen


Proposal = tuple[tuple[DeviceDecision, ...], Coordination]


def _distinct(bench: Workbench, proposals: Iterator[Proposal], limit_s: float) -> Iterator[Candidate]:
    """Decisions that fit and were not tried before, each with the fastest link policy and starts of a sweep.

    The model knows no policies, and a planner would not keep a bad one. What takes longer than `limit_s` before the
    sweep is left out.
    """
    seen = set()
    for _ in range(MOST_TRIES):
        decisions, coordination = next(proposals)
        key = tuple((d.choice.tobytes(), d.state_out.tobytes()) for d in decisions)
        if key in seen:
            continue
        seen.add(key)
        first = bench.evaluate(decisions, coordination)
        if isinstance(first, DoesNotFit) or not first.step_s < limit_s:
            continue
        found = sweep(bench, decisions, shares=SHARES, policies=POLICIES, starts=(coordination.start_share,))
        if not isinstance(found, DoesNotFit) and np.isfinite(found.step_s):
            yield found


def _alone_s(bench: Workbench, candidate: Candidate) -> float:
    """The time of a plan on links so wide that sharing them costs nothing."""
    machine = bench.problem.machine
    used = [host_links(machine, device) for device in range(bench.device_count)]
    users = [max(1, sum(link in links for links in used)) for link in range(len(machine.links))]
    prepared = bench.prepare(candidate.decisions, candidate.coordination, candidate.lookahead_runs)
    assert not isinstance(prepared, DoesNotFit)
    fair = link_policies(machine, replace(candidate.coordination, policy=LinkPolicyKind.FAIR, device_rank=()))
    return prepared[1].run(link_policies=fair, link_scale=np.array(users, float)).step_s


def _coordination(bench: Workbench, rng: np.random.Generator) -> Coordination:
    """A random policy, and starts that are equal, evenly spread or random."""
    policy = POLICIES[rng.integers(len(POLICIES))]
    count = bench.device_count
    rank = tuple(int(g) for g in rng.permutation(count)) if policy is LinkPolicyKind.PRIORITY else ()
    starts = even_starts(bench, 0.0)
    if (way := rng.integers(3)) == 1:
        starts = even_starts(bench, float(rng.uniform(0, 1.1)))
    elif way == 2:
        starts = (0.0, *(float(share) for share in rng.uniform(0, 0.95, count - 1)))
    return Coordination(starts, policy, rank, bench.slots())


def _options(bench: Workbench, view: StepView, index: int) -> list[Choice]:
    actions = bench.problem.actions
    options = [Choice.KEEP] if view.needed[index] else []
    if Action.OFFLOAD in actions and view.may_offload[index]:
        options.append(Choice.OFFLOAD)
    if view.may_recompute[index] and (Action.RECOMPUTE in actions or not view.needed[index]):
        options.append(Choice.RECOMPUTE)
    return options


def _neighbours(bench: Workbench, best: Candidate, rng: np.random.Generator) -> Iterator[Proposal]:
    """Plans in which up to 64 choices differ from the best, of one GPU or of all."""
    views = [bench.view(device) for device in range(bench.device_count)]
    while True:
        decisions, coordination = list(best.decisions), best.coordination
        device = int(rng.integers(bench.device_count))
        changed = _flip_some(bench, views[device], decisions[device], int(2 ** rng.integers(0, 7)), rng)
        same = [d for d in range(bench.device_count) if bench.device_class[d] == bench.device_class[device]]
        for other in same if rng.random() < 0.5 else [device]:
            decisions[other] = changed
        yield tuple(decisions), coordination


def _flip_some(bench: Workbench, view: StepView, decision: DeviceDecision, count: int,
               rng: np.random.Generator) -> DeviceDecision:  # fmt: skip
    large = np.flatnonzero(view.size_bytes * 1000 >= view.size_bytes.max())
    choice, state_out = decision.choice.copy(), decision.state_out.astype(np.int8)
    for index in rng.choice(large, min(count, len(large)), replace=False).tolist():
        options = [option for option in _options(bench, view, index) if option != choice[index]]
        if options:
            choice[index] = options[int(rng.integers(len(options)))]
    movable = np.flatnonzero(view.state_resting) if Action.OFFLOAD in bench.problem.actions else []
    if len(movable) and rng.random() < 0.2:
        index = int(rng.choice(movable))
        state_out[index] = Rest.ON_DEVICE if state_out[index] == Rest.ON_HOST else Rest.ON_HOST
    return DeviceDecision(choice, state_out)


def _random_plans(bench: Workbench, rng: np.random.Generator) -> Iterator[Proposal]:
    """Every candidate by itself keeps, leaves or is recomputed, with odds drawn per plan; then repaired to fit."""
    while True:
        alike = rng.random() < 0.5
        odds = rng.dirichlet((1.0, 1.0, 1.0))
        host_share = float(rng.uniform(0, 1))
        decisions: list[DeviceDecision] = []
        for device in range(bench.device_count):
            if alike and device and bench.device_class[device] == bench.device_class[device - 1]:
                decisions.append(decisions[-1])
                continue
            fitted = repair(bench, device, _random_decision(bench, bench.view(device), odds, host_share, rng))
            if isinstance(fitted, DoesNotFit):
                break
            decisions.append(fitted)
        if len(decisions) == bench.device_count:
            yield tuple(decisions), _coordination(bench, rng)


def _random_decision(bench: Workbench, view: StepView, odds: np.ndarray, host_share: float,
                     rng: np.random.Generator) -> DeviceDecision:  # fmt: skip
    choice = np.full(len(view.size_bytes), Choice.RECOMPUTE, np.int8)
    for index in range(len(choice)):
        options = _options(bench, view, index)
        if options:
            weights = odds[options] + 1e-9
            choice[index] = rng.choice(options, p=weights / weights.sum())
    state_out = np.zeros(len(view.state_tensor), np.int8)
    if Action.OFFLOAD in bench.problem.actions:
        state_out[view.state_resting & (rng.random(len(state_out)) < host_share)] = Rest.ON_HOST
    return DeviceDecision(choice, state_out)
