"""An evolution strategy over the relaxed variables, judged by the exact simulator.

CMA-ES with a diagonal covariance matrix, for there are hundreds of variables (Ros and Hansen 2008, A simple
modification in CMA-ES achieving linear time and space complexity), as the package `cma` has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.ablation.variants import Variant, Watched
from tmojax.planners.gradient import Start, made_to_fit
from tmojax.planners.sweep import sweep
from tmojax.planners.workbench import Candidate
from tmojax.relax.decisions import Choice, DeviceDecision, Rest
from tmojax.relax.decode import DoesNotFit
from tmojax.relax.rounding import round_state

Vector = NDArray[np.float64]
LOGIT = 2.0  # of a choice of the plan that it starts from, as in the descent
SHARE = 0.12  # micro-batches: a start moves by so much where a logit moves by 1, as in a move of local search


class Space:
    """Vectors for decisions and starts: for every class of equal GPUs two logits (offload, drop; that of keep is 0) for
    each candidate and each state tensor that may leave within the step, and two for resting state; then the start of
    every GPU but the first."""

    def __init__(self, bench: Watched) -> None:
        from tmojax.cost import relax_problem

        self.bench = bench
        self.classes = sorted(set(bench.device_class))
        model = relax_problem(bench.problem, [bench.view(device) for device in range(bench.device_count)])
        self.allowed = np.asarray(model.allowed)
        self.gaps = {device: np.array(model.state[device], np.int64).reshape(-1, 3) for device in self.classes}
        self.candidates = {device: len(bench.view(device).size_bytes) for device in self.classes}
        view = bench.view(0)
        micro_batch_s = float(view.slot_s.sum())
        self.latest = min(1.5, 0.99 * view.compute_s / micro_batch_s) if micro_batch_s else 0.0

    def vector(self, plan: Candidate) -> Vector:
        parts = []
        for device in self.classes:
            decision, gaps = plan.decisions[device], self.gaps[device]
            rest = np.asarray(decision.state_out, np.int64)
            others = np.delete(rest, gaps[:, 0])
            leaves = np.where(rest[gaps[:, 0]] == Rest.AWAY, Choice.OFFLOAD, Choice.KEEP)
            choice = np.asarray(decision.choice, np.int64)  # lent memory and codecs are out of reach: offload instead
            chosen = np.concatenate([np.where(choice > Choice.RECOMPUTE, Choice.OFFLOAD, choice), leaves])
            parts.append((LOGIT * np.eye(3)[chosen][:, 1:] - LOGIT * (chosen == Choice.KEEP)[:, None]).ravel())
            parts.append(np.array([LOGIT if kind in others else -LOGIT for kind in (Rest.ON_HOST, Rest.AWAY)]))
        return np.concatenate([*parts, np.array(plan.coordination.start_share[1:]) / SHARE])

    def plan(self, vector: Vector) -> tuple[tuple[DeviceDecision, ...], tuple[float, ...]]:
        """(Decisions of all GPUs, start shares): of every candidate the largest logit. The rounding of relaxed
        solutions, which also brings back what was dropped with little conviction, makes a worse search of it."""
        found, begin = {}, 0
        for device in self.classes:
            view, gaps, count = self.bench.view(device), self.gaps[device], self.candidates[device]
            end = begin + 2 * (count + len(gaps))
            logits = np.pad(vector[begin:end].reshape(-1, 2), ((0, 0), (1, 0)))
            logits[:count][~self.allowed[device, :count]] = -np.inf
            chosen = logits.argmax(axis=1).astype(np.int8)
            on_host, away = 1 / (1 + np.exp(-np.clip(vector[end : end + 2], -50, 50)))
            state_out, _ = round_state(view, gaps[chosen[count:] != Choice.KEEP], float(on_host), float(away))
            found[device] = DeviceDecision(chosen[:count], state_out)
            begin = end + 2
        shares = (0.0, *np.clip(SHARE * vector[begin:], 0.0, self.latest).tolist())
        return tuple(found[first] for first in self.bench.device_class), shares


@dataclass(frozen=True)
class Evolution(Variant):
    """spread: standard deviation of the first generation. At its end, and where it gets stuck, it begins again from the
    best vector with twice the population."""

    spread: float = 0.5

    def search(self, bench: Watched, starts: list[Start], seed: int) -> None:
        import cma

        if not starts:
            return
        space, known = Space(bench), starts[0].candidate
        best, best_s, population = space.vector(known), known.step_s, None
        while bench.spent_s() < self.budget_s:
            options = {"CMA_diagonal": True, "seed": seed + 1, "verbose": -9, "verb_log": 0}
            if population is not None:
                options["popsize"] = population
            strategy = cma.CMAEvolutionStrategy(best, self.spread, options)
            while not strategy.stop() and bench.spent_s() < self.budget_s:
                vectors = strategy.ask()
                times_s = [self._time_s(bench, space, vector, known) for vector in vectors]
                strategy.tell(vectors, times_s)
                if min(times_s) < best_s:
                    best, best_s = vectors[int(np.argmin(times_s))], min(times_s)
            population, seed = 2 * strategy.popsize, seed + 1000
        if bench.best is not None:
            sweep(bench, bench.best.decisions, starts=(bench.best.coordination.start_share,))

    def _time_s(self, bench: Watched, space: Space, vector: Vector, known: Candidate) -> float:
        """Step time under the best link policy, as of a rounding; twice that of the start where nothing fits."""
        if bench.spent_s() >= self.budget_s:
            return 2 * known.step_s
        decisions, starts = space.plan(np.asarray(vector))
        found = sweep(bench, decisions, shares=(), starts=(starts,))
        if isinstance(found, DoesNotFit):
            decisions = made_to_fit(bench, decisions, known)
            found = sweep(bench, decisions, shares=(), starts=(starts,))
        return 2 * known.step_s if isinstance(found, DoesNotFit) else found.step_s
