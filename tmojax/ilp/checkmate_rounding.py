"""Plans of stages without a search: from the values to keep (two-phase rounding), and from the values to drop.

Checkmate's approximation (Jain et al., MLSys 2020, section 5): solve the linear relaxation with some of the memory set
aside, round only S, and let R follow as the fewest runs with which everything is there when it is read. The paper
rounds at one half; other thresholds and allowances are tried here as well, and the cheapest plan that fits is taken.
"""

from __future__ import annotations

import numpy as np

from tmojax.ilp.checkmate_graph import StageGraph
from tmojax.ilp.checkmate_model import StagePlan


def plan_of_kept(graph: StageGraph, kept: np.ndarray) -> StagePlan:
    """Second phase: the fewest runs for given S [T, V]. What may not run again is kept from its first run instead."""
    stages = graph.stages
    kept = kept.copy()
    run = np.eye(stages, dtype=bool)
    for t in range(stages):
        wanted = list(graph.reads[t])
        if t + 1 < stages:
            wanted += np.flatnonzero(kept[t + 1] & (graph.producer <= t)).tolist()
        while wanted:
            value = wanted.pop()
            source = int(graph.producer[value])
            if kept[t, value] or (source >= 0 and run[t, source]):
                continue
            if graph.remakeable[value]:
                run[t, source] = True
                wanted += graph.reads[source]
            else:
                kept[source + 1 : t + 1, value] = True
    nothing = np.zeros(kept.shape, bool)
    return StagePlan(run, kept, nothing, nothing)


def plan_of_dropped(graph: StageGraph, dropped: np.ndarray, *, stays: bool = False) -> StagePlan:
    """Every value of `dropped` [V] is away in the longest gap between two of its uses. What runs again inside of that
    gap, for another value, is dropped again at the end of the stage, or (`stays`) kept until its last use: more memory,
    fewer runs."""
    stages, values = graph.stages, len(graph.value_bytes)
    kept = np.zeros((stages, values), bool)
    gap = np.full((values, 2), -1)
    for value in np.flatnonzero(dropped & graph.remakeable).tolist():
        places = [int(graph.producer[value]), *graph.users[value]]
        longest = max(range(len(places) - 1), key=lambda i: places[i + 1] - places[i], default=-1)
        if longest >= 0 and places[longest + 1] - places[longest] > 1:
            gap[value] = places[longest], places[longest + 1]
    run = np.eye(stages, dtype=bool)
    last = np.array([max(users, default=-1) for users in graph.users])
    there = graph.producer < 0
    for t in range(stages):
        kept[t] = there
        wanted = list(graph.reads[t])
        while wanted:
            value = wanted.pop()
            source = int(graph.producer[value])
            if there[value] or (source >= 0 and run[t, source]):
                continue
            run[t, source] = True
            wanted += graph.reads[source]
        for node in np.flatnonzero(run[t]):
            there[list(graph.writes[node])] = True
            if stays and node != t:
                gap[list(graph.writes[node])] = -1
        there &= (last > t) & ~((gap[:, 0] <= t) & (t < gap[:, 1]))
    nothing = np.zeros(kept.shape, bool)
    # What may not run again but is wanted by a rerun after its last use is kept by the second phase.
    return plan_of_kept(graph, kept) if not _complete(graph, run) else StagePlan(run, kept, nothing, nothing)


def _complete(graph: StageGraph, run: np.ndarray) -> bool:
    again = run & ~np.eye(graph.stages, dtype=bool)
    return not again[:, ~graph.may_rerun].any()


def peak_by_stage(graph: StageGraph, plan: StagePlan) -> np.ndarray:
    """[T] most bytes of a plan in each stage, counted as the programmes count them."""
    peaks = np.zeros(graph.stages, np.int64)
    for t in range(graph.stages):
        resident = plan.kept[t].copy()
        stays = plan.go[t] | (plan.kept[t + 1] if t + 1 < graph.stages else False)
        nodes = np.flatnonzero(plan.run[t]).tolist()
        last = {value: node for node in nodes for value in graph.reads[node]}
        used = int(graph.fixed_bytes[t] + graph.value_bytes[resident].sum() + graph.value_bytes[plan.come[t]].sum())
        for node in nodes:
            scratch = 0
            for value in graph.writes[node]:
                size = int(graph.value_bytes[value])
                scratch, used = (scratch + size, used) if resident[value] else (scratch, used + size)
                resident[value] = True
            peaks[t] = max(peaks[t], used + scratch + int(graph.transient_bytes[node]))
            for value in (*graph.reads[node], *graph.writes[node]):
                if resident[value] and not stays[value] and last.get(value, -1) <= node:
                    resident[value] = False
                    used -= int(graph.value_bytes[value])
        peaks[t] = max(peaks[t], used + int(graph.after_bytes[t]))
    return peaks


def plan_peak_bytes(graph: StageGraph, plan: StagePlan) -> int:
    """Most bytes of a plan in any stage."""
    return int(peak_by_stage(graph, plan).max())


def cheap_plan(graph: StageGraph, capacity_bytes: int) -> StagePlan | None:
    """The cheapest plan that fits, of those that drop the values with the most bytes per second of recomputation, up to
    some share of all bytes; None where none of them fits. A start for the programmes."""
    cost = np.maximum(graph.node_s[np.maximum(graph.producer, 0)], 1e-30)
    order = np.argsort(-graph.value_bytes / cost, kind="stable")
    order = order[graph.remakeable[order]]
    best: tuple[float, StagePlan] | None = None
    for share in np.linspace(0, 1, 21):
        dropped = np.zeros(len(graph.value_bytes), bool)
        dropped[order[: round(share * len(order))]] = True
        for stays in (False, True):
            plan = plan_of_dropped(graph, dropped, stays=stays)
            seconds = plan.compute_s(graph)
            if (best is None or seconds < best[0]) and plan_peak_bytes(graph, plan) <= capacity_bytes:
                best = (seconds, plan)
    return best[1] if best else None
