"""From the network's logits to a plan: a few roundings, decoded and simulated, then one sweep of the best."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tmojax.learned.features import interval_features, surroundings_of
from tmojax.learned.network import Weights
from tmojax.planners.ratio import RESTS
from tmojax.planners.repair import repair
from tmojax.planners.sweep import even_starts, sweep
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, LinkPolicyKind
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import Choice, DeviceDecision, Rest
from tmojax.relax.decode import DoesNotFit

# Added to the logit of recompute, then of keep: where the network errs, it errs alike on all candidates of a step.
SHIFTS = ((0.0, 0.0), (1.0, 0.0), (-1.0, 0.0), (0.0, 1.5), (0.0, -4.0), (2.0, 0.0), (-2.0, 0.0), (0.5, -4.0),
          (-0.5, -4.0), (1.0, -4.0), (-1.0, -4.0), (3.0, 0.0), (-3.0, 0.0), (2.0, -4.0))  # fmt: skip
REPAIR_ROUNDS = 6


def logits_of(bench: Workbench, weights: Weights) -> dict[int, np.ndarray]:
    """Logits of every class of equal GPUs; what may not be done has -inf."""
    actions = bench.problem.actions
    found = {}
    for device in sorted(set(bench.device_class)):
        view = bench.view(device)
        features = interval_features(view, surroundings_of(bench.problem, device))
        logits = weights.logits(features, view.size_bytes / max(1, view.size_bytes.sum()))
        logits[~view.may_offload | (Action.OFFLOAD not in actions), Choice.OFFLOAD] = -np.inf
        may_drop = view.may_recompute & (~view.needed | (Action.RECOMPUTE in actions))
        logits[~may_drop, Choice.RECOMPUTE] = -np.inf
        found[device] = logits
    return found


def rounded(view: StepView, logits: np.ndarray, shift: tuple[float, float], rest: tuple[Rest, Rest]) -> DeviceDecision:
    """The largest logit of every candidate; state as `rest` says, of what rests in micro-batches and what they use."""
    moved = logits + np.array([shift[1], 0.0, shift[0]])
    # What backward does not use is kept only on purpose, as heuristics do: it is dropped where it may be.
    choice = moved.argmax(axis=1).astype(np.int8)
    return DeviceDecision(choice, np.where(view.state_resting, *rest).astype(np.int8))


def warm_start(bench: Workbench, weights: Weights, most_shifts: int = len(SHIFTS)) -> Candidate | DoesNotFit:
    """The fastest of the roundings, with the best link policy and stagger."""
    logits = logits_of(bench, weights)
    best: Candidate | DoesNotFit | None = None
    best_rest = RESTS[0]

    def attempt(shift: tuple[float, float], rest: tuple[Rest, Rest]) -> None:
        nonlocal best, best_rest
        found = _quick(bench, logits, shift, rest)
        if (
            best is None
            or isinstance(best, DoesNotFit)
            or (isinstance(found, Candidate) and found.step_s < best.step_s)
        ):
            best, best_rest = found, rest

    for rest in _rests(bench):
        attempt(SHIFTS[0], rest)
    for shift in SHIFTS[1:most_shifts]:
        attempt(shift, best_rest)
    if not isinstance(best, Candidate):
        assert best is not None
        return best
    swept = sweep(bench, best.decisions)
    return swept if isinstance(swept, Candidate) and swept.step_s < best.step_s else best


def _rests(bench: Workbench) -> Iterator[tuple[Rest, Rest]]:
    has_state = any(len(bench.view(device).state_tensor) for device in range(bench.device_count))
    yield from RESTS if has_state and Action.OFFLOAD in bench.problem.actions else RESTS[:1]


def _quick(
    bench: Workbench, logits: dict[int, np.ndarray], shift: tuple[float, float], rest: tuple[Rest, Rest]
) -> Candidate | DoesNotFit:
    """One rounding, the same on equal GPUs, repaired where it does not fit; simulated under two policies."""
    decisions = {}
    for device, values in logits.items():
        decision = rounded(bench.view(device), values, shift, rest)
        fitted = repair(bench, device, decision, REPAIR_ROUNDS)
        if isinstance(fitted, DoesNotFit):
            return fitted
        decisions[device] = fitted
    share = 1.0 if bench.problem.workload.micro_batches > 1 else 0.0
    return sweep(bench, tuple(decisions[first] for first in bench.device_class), shares=(),
                 starts=(even_starts(bench, share),), policies=(LinkPolicyKind.FCFS, LinkPolicyKind.FAIR))  # fmt: skip
