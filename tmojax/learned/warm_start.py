"""From the network's logits to a plan: a few roundings, decoded and simulated, then one sweep of the best."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tmojax.learned.features import interval_features, prior_logits, surroundings_of
from tmojax.learned.weights import Weights
from tmojax.planners.ratio import RESTS
from tmojax.planners.repair import repair
from tmojax.planners.simple import checkpoints
from tmojax.planners.sweep import POLICIES, SHARES, even_starts, sweep
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, LinkPolicyKind
from tmojax.relax.decisions import Choice, DeviceDecision, Rest
from tmojax.relax.decode import DoesNotFit

# Added to the logit of recompute: where heuristic and network err, they err alike on all candidates of a step.
SHIFTS = (1.5, -1.5, 3.0, -3.0, 6.0, -6.0, 30.0, -30.0)
NEAR_SHIFTS = (0.75, -0.75)  # around the best of them
CLOSER = 3  # times that the neighbours of the best shift are tried, half as far away every time
REPAIR_ROUNDS = 4
# Ops decoded to choose a rounding, with the network and without, and instructions simulated to coordinate it: so that
# large steps take bounded time, on any machine with the same result.
OPS_TO_CHOOSE = (10_000, 6_000)
LEAST_POINTS = 4
ROWS_TO_SWEEP = 400_000
FEW_SHARES = (0.0, 1.0)  # staggers, where all of them are too many


def logits_of(bench: Workbench, weights: Weights | None) -> dict[int, np.ndarray]:
    """Logits of every class of equal GPUs; what may not be done has -inf."""
    actions = bench.problem.actions
    found = {}
    for device in sorted(set(bench.device_class)):
        view, around = bench.view(device), surroundings_of(bench.problem, device)
        logits = prior_logits(view, around)
        if weights is not None:
            logits += weights.logits(interval_features(view, around), view.size_bytes / max(1, view.size_bytes.sum()))
        logits[~view.may_offload | (Action.OFFLOAD not in actions), Choice.OFFLOAD] = -np.inf
        may_drop = view.may_recompute & (~view.needed | (Action.RECOMPUTE in actions))
        logits[~may_drop, Choice.RECOMPUTE] = -np.inf
        found[device] = logits
    return found


class Point(NamedTuple):
    """A rounding. shift: see SHIFTS. rest: of the state that rests in micro-batches, and of what they use. across: what
    passes from layer to layer may be recomputed."""

    shift: float
    rest: tuple[Rest, Rest]
    across: bool


class _Roundings:
    """Tries roundings and remembers the fastest."""

    def __init__(self, bench: Workbench, logits: dict[int, np.ndarray], ops: int) -> None:
        self.bench, self.logits = bench, logits
        self.most = max(LEAST_POINTS, ops // max(1, sum(len(bench.view(device).slot_op) for device in logits)))
        self.within = {device: checkpoints(bench.problem, bench.view(device), 1) for device in logits}
        self._best: Candidate | DoesNotFit | None = None
        self.seen: set[Point] = set()

    def better(self, known: Point, other: Point) -> Point:
        """The faster of two, of which `known` is the best so far, or the very first."""
        for point in (known, other):
            if point in self.seen or (len(self.seen) >= self.most and isinstance(self._best, Candidate)):
                continue
            self.seen.add(point)
            found = self._candidate(*point)
            if self._best is None or _time_s(found) < _time_s(self._best):
                self._best, known = found, point
        return known

    @property
    def best(self) -> Candidate | DoesNotFit:
        assert self._best is not None
        return self._best

    def _candidate(self, shift: float, rest: tuple[Rest, Rest], across: bool) -> Candidate | DoesNotFit:
        """The same on equal GPUs, repaired where it does not fit; simulated under one stagger."""
        bench, decisions = self.bench, {}
        for device, logits in self.logits.items():
            view = bench.view(device)
            moved = logits + np.array([0.0, 0.0, shift])
            if not across:
                moved[self.within[device] & np.isfinite(moved[:, :2]).any(axis=1), Choice.RECOMPUTE] = -np.inf
            wished = DeviceDecision(
                moved.argmax(axis=1).astype(np.int8), np.where(view.state_resting, *rest).astype(np.int8)
            )
            decision = repair(bench, device, wished, REPAIR_ROUNDS)
            if isinstance(decision, DoesNotFit):
                return decision
            decisions[device] = decision
        share = 1.0 if bench.problem.workload.micro_batches > 1 else 0.0
        everybody = tuple(decisions[first] for first in bench.device_class)
        starts = (even_starts(bench, share),)
        return sweep(bench, everybody, shares=(), starts=starts, policies=(LinkPolicyKind.FCFS,))


def _time_s(found: Candidate | DoesNotFit) -> float:
    return found.step_s if isinstance(found, Candidate) else float("inf")


def rows_of(plan: Candidate) -> int:
    """Instructions of all GPUs."""
    return sum(len(rows) for rows in plan.schedule.lists)


def warm_start(bench: Workbench, weights: Weights | None) -> Candidate | DoesNotFit:
    """The fastest of some roundings, of the heuristic's logits and of the same with what the network adds, under the
    best link policy and stagger. Without weights: of the former alone. Deterministic."""
    efforts = [(None, sum(OPS_TO_CHOOSE))]
    if weights is not None:
        efforts = [(weights, OPS_TO_CHOOSE[0]), (None, OPS_TO_CHOOSE[1])]
    rounded = [_rounded(bench, logits_of(bench, each), ops) for each, ops in efforts]
    plans = [plan for plan in rounded if isinstance(plan, Candidate)]
    if not plans:
        return rounded[0]
    best = min(plans, key=lambda plan: plan.step_s)
    many = len(POLICIES) * len(SHARES) * rows_of(best) > ROWS_TO_SWEEP
    swept = sweep(bench, best.decisions, shares=FEW_SHARES if many else SHARES)
    return swept if isinstance(swept, Candidate) and swept.step_s < best.step_s else best


def _rounded(bench: Workbench, logits: dict[int, np.ndarray], ops: int) -> Candidate | DoesNotFit:
    """Where state rests, whether layers are crossed, how much is recomputed, one after the other; then again, and how
    much ever closer."""
    tried = _Roundings(bench, logits, ops)
    best = Point(0.0, RESTS[0], False)
    rests = _rests(bench)
    for shifts, some in ((SHIFTS, rests[:3]), (NEAR_SHIFTS, rests)):
        for rest in some:
            best = tried.better(best, best._replace(rest=rest))
        best = tried.better(best, best._replace(across=not best.across))
        centre = best.shift
        for shift in shifts:
            best = tried.better(best, best._replace(shift=centre + shift))
    apart = NEAR_SHIFTS[0]
    for _ in range(CLOSER):
        apart /= 2
        centre = best.shift
        for shift in (-apart, apart):
            best = tried.better(best, best._replace(shift=centre + shift))
    return tried.best


def _rests(bench: Workbench) -> tuple[tuple[Rest, Rest], ...]:
    has_state = any(len(bench.view(device).state_tensor) for device in range(bench.device_count))
    return RESTS if has_state and Action.OFFLOAD in bench.problem.actions else RESTS[:1]
