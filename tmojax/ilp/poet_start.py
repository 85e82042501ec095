"""Plans of paging and reruns without a search: starts for the programmes, which are slow to find good plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tmojax.ilp.checkmate_graph import StageGraph
from tmojax.ilp.checkmate_model import StagePlan
from tmojax.ilp.checkmate_rounding import cheap_plan, peak_by_stage, plan_of_dropped
from tmojax.ilp.poet_model import Paging, stage_periods_s
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import Choice, DeviceDecision


@dataclass(frozen=True, eq=False)
class Decided:
    """A decision of the candidates of a view, to be read for the values of a graph."""

    view: StepView
    decision: DeviceDecision

    def _chosen(self, graph: StageGraph, choice: Choice) -> np.ndarray:
        return np.isin(graph.tensor, self.view.tensor[self.decision.choice == choice])

    def dropped(self, graph: StageGraph) -> np.ndarray:
        """[V]: values that are recomputed."""
        return self._chosen(graph, Choice.RECOMPUTE)

    def paged(self, graph: StageGraph) -> np.ndarray:
        """[V]: values that are offloaded."""
        return self._chosen(graph, Choice.OFFLOAD)


def plan_of_paged(graph: StageGraph, paged: np.ndarray, dropped: np.ndarray, *, stays: bool = False) -> StagePlan:
    """`dropped` [V] values run again; `paged` [V] values are away in the longest gap between two stages that use them:
    paged out in the stage behind the one use, and in ahead of the other. Gaps of less than two stages are kept."""
    plan = plan_of_dropped(graph, dropped & ~paged, stays=stays)
    kept, come, go = plan.kept.copy(), plan.come.copy(), plan.go.copy()
    for value in np.flatnonzero(paged).tolist():
        source = int(graph.producer[value])
        stages = [t for t in range(graph.stages) if plan.run[t, list(graph.users[value])].any()]
        uses = sorted({source, *stages})
        before, after = max(pairwise(uses), key=lambda gap: gap[1] - gap[0], default=(0, 0))
        # Only where it stays by itself: a rerun of its node inside of the gap would be there without any paging.
        if source < 0 or after - before < 3 or not kept[before + 1 : after + 1, value].all():
            continue
        go[before + 1, value] = come[after - 1, value] = True
        kept[before + 2 : after, value] = False
    return replace(plan, kept=kept, come=come, go=go)


def paging_start(
    graph: StageGraph, capacity_bytes: int, rerun_cost: np.ndarray, page_cost: np.ndarray
) -> StagePlan | None:
    """Where memory is exceeded most, a value that idles there is dropped or paged, the one with the most bytes per cost
    ([V] each, inf where it is not allowed), until everything fits; None when nothing more helps."""
    values = len(graph.value_bytes)
    paged, dropped = np.zeros(values, bool), np.zeros(values, bool)
    cost = np.stack([np.where(graph.remakeable, rerun_cost, np.inf), page_cost])
    plan = plan_of_paged(graph, paged, dropped)
    peaks = peak_by_stage(graph, plan)
    for _ in range(2 * values):
        worst = int(np.argmax(peaks))
        if peaks[worst] <= capacity_bytes:
            return plan
        used = np.zeros(values, bool)
        for node in np.flatnonzero(plan.run[worst]):
            used[[*graph.reads[node], *graph.writes[node]]] = True
        idle = plan.kept[worst] & ~used & (graph.value_bytes > 0)
        score = np.where(idle[None, :], graph.value_bytes[None, :] / np.maximum(cost, 1e-300), -np.inf)
        score[np.isinf(cost)] = -np.inf
        way, value = divmod(int(np.argmax(score)), values)
        if not np.isfinite(score[way, value]):
            return None
        cost[way, value] = np.inf
        trial = (paged.copy(), dropped.copy())
        trial[1 - way][value] = True
        tried = plan_of_paged(graph, *trial)
        tried_peaks = peak_by_stage(graph, tried)
        if tried_peaks[worst] < peaks[worst] and tried_peaks.max() <= max(peaks.max(), capacity_bytes):
            (paged, dropped), plan, peaks = trial, tried, tried_peaks
    return None


def best_start(
    graph: StageGraph, capacity_bytes: int, paging: Paging | None = None, *, rerun: bool = True, page: bool = True,
    decided: Decided | None = None,
) -> StagePlan | None:  # fmt: skip
    """The fastest of a few plans that fit, or None. Without `paging` nothing is paged. `decided`: what another planner
    decided; one of the plans follows it."""
    values = len(graph.value_bytes)
    never = np.full(values, np.inf)
    rerun_s = graph.node_s[np.maximum(graph.producer, 0)] if rerun else never
    found = [cheap_plan(graph, capacity_bytes)] if rerun else []
    if paging is None or not page:
        found.append(paging_start(graph, capacity_bytes, rerun_s, never))
    else:
        page_s = paging.in_s(graph.value_bytes) + paging.out_s(graph.value_bytes)
        # Copies hide behind compute as far as there is any, so they are cheaper than they are long.
        found += [paging_start(graph, capacity_bytes, rerun_s, page_s * share) for share in (1.0, 0.1, 0.01)]
    if decided is not None:
        drop, away = decided.dropped(graph) & rerun, decided.paged(graph) & (page and paging is not None)
        plan = plan_of_paged(graph, away, drop, stays=True)
        found.append(plan if peak_by_stage(graph, plan).max() <= capacity_bytes else None)
    fitting = [plan for plan in found if plan is not None]
    if paging is None:
        return min(fitting, key=lambda plan: plan.compute_s(graph), default=None)
    return min(fitting, key=lambda plan: float(stage_periods_s(graph, plan, paging).sum()), default=None)
