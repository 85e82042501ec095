"""From the network's logits to a plan: a few roundings, decoded and simulated, then one sweep of the best."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tmojax.learned.features import interval_features, prior_logits, surroundings_of
from tmojax.learned.network import Weights
from tmojax.planners.ratio import RESTS
from tmojax.planners.repair import repair
from tmojax.planners.simple import checkpoints
from tmojax.planners.sweep import POLICIES, SHARES, even_starts, sweep
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, LinkPolicyKind
from tmojax.relax.decisions import Choice, DeviceDecision, Rest
from tmojax.relax.decode import DoesNotFit

# Added to the logit of recompute: where heuristic and network err, they err alike on all candidates of a step.
SHIFTS = (0.0, 1.5, -1.5, 3.0, -3.0, 6.0, -6.0, 30.0, -30.0)
CLOSER = 3  # times that the neighbours of the best shift are tried, half as far away every time
REPAIR_ROUNDS = 30
# Instructions simulated to choose a rounding (twice), and then to coordinate it, so that large steps take bounded time.
ROWS_TO_CHOOSE, ROWS_TO_SWEEP = 250_000, 400_000
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


class _Roundings:
    """Tries roundings and remembers the fastest."""

    def __init__(self, bench: Workbench, logits: dict[int, np.ndarray]) -> None:
        self.bench, self.logits = bench, logits
        self.within = {device: checkpoints(bench.problem, bench.view(device), 1) for device in logits}
        self.best: Candidate | DoesNotFit | None = None
        self.rows = 0  # simulated

    def attempt(self, shift: float, rest: tuple[Rest, Rest], across: bool) -> bool:
        """Whether a rounding is the fastest so far. across: what passes from layer to layer may be recomputed."""
        if self.rows > ROWS_TO_CHOOSE and isinstance(self.best, Candidate):
            return False
        found = self._candidate(shift, rest, across)
        self.rows += rows_of(found) if isinstance(found, Candidate) else 0
        known = self.best
        if known is None or isinstance(known, DoesNotFit):
            self.best = found
            return isinstance(found, Candidate)
        if isinstance(found, Candidate) and found.step_s < known.step_s:
            self.best = found
            return True
        return False

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


def rows_of(plan: Candidate) -> int:
    """Instructions of all GPUs."""
    return sum(len(rows) for rows in plan.schedule.lists)


def warm_start(bench: Workbench, weights: Weights | None) -> Candidate | DoesNotFit:
    """The fastest of some roundings, of the heuristic's logits and of the same with what the network adds, with the best
    link policy and stagger. Without weights: of the former alone. Deterministic."""
    rounded = [_rounded(bench, logits_of(bench, each)) for each in dict.fromkeys((weights, None))]
    plans = [plan for plan in rounded if isinstance(plan, Candidate)]
    if not plans:
        return rounded[0]
    best = min(plans, key=lambda plan: plan.step_s)
    many = len(POLICIES) * len(SHARES) * rows_of(best) > ROWS_TO_SWEEP
    swept = sweep(bench, best.decisions, shares=FEW_SHARES if many else SHARES)
    return swept if isinstance(swept, Candidate) and swept.step_s < best.step_s else best


def _rounded(bench: Workbench, logits: dict[int, np.ndarray]) -> Candidate | DoesNotFit:
    """First where state rests, then how much is recomputed, ever closer."""
    tried = _Roundings(bench, logits)
    best_rest, best_shift = RESTS[0], SHIFTS[0]
    for rest in _rests(bench):
        if tried.attempt(SHIFTS[0], rest, False):
            best_rest = rest
    across = tried.attempt(SHIFTS[0], best_rest, True)
    for shift in SHIFTS[1:]:
        if tried.attempt(shift, best_rest, across):
            best_shift = shift
    apart = SHIFTS[1]
    for _ in range(CLOSER):
        apart /= 2
        for shift in (best_shift - apart, best_shift + apart):
            if tried.attempt(shift, best_rest, across):
                best_shift = shift
    assert tried.best is not None
    return tried.best


def _rests(bench: Workbench) -> Iterator[tuple[Rest, Rest]]:
    has_state = any(len(bench.view(device).state_tensor) for device in range(bench.device_count))
    yield from RESTS if has_state and Action.OFFLOAD in bench.problem.actions else RESTS[:1]
