"""Tiny stage graphs, and a search that tries every plan of them."""

from __future__ import annotations

import itertools

import numpy as np

from tmojax.ilp.checkmate_graph import StageGraph
from tmojax.ilp.checkmate_model import StagePlan


def random_graph(seed: int, stages: int, *, two_outputs: bool = False) -> StageGraph:
    """Nodes that read the one before them and some others, as backward does."""
    rng = np.random.default_rng(seed)
    producer, reads, writes = [], [], []
    for node in range(stages):
        known = [value for value, _ in enumerate(producer)]
        last = [value for value in known if producer[value] == node - 1]
        picked = [value for value in known if rng.random() < 0.35]
        reads.append(tuple(sorted({*last[:1], *picked})))
        made = 2 if two_outputs and node == 0 else 1
        writes.append(tuple(range(len(producer), len(producer) + made)))
        producer += [node] * made
    count = len(producer)
    return StageGraph(
        node_s=rng.integers(1, 9, stages).astype(float), may_rerun=rng.random(stages) < 0.9, reads=tuple(reads),
        writes=tuple(writes), transient_bytes=rng.integers(0, 3, stages), fixed_bytes=np.full(stages, 2),
        after_bytes=np.zeros(stages, np.int64), value_bytes=rng.integers(1, 6, count),
        producer=np.array(producer), tensor=np.arange(count), ops=tuple((node,) for node in range(stages)),
    )  # fmt: skip


def peak_bytes(graph: StageGraph, plan: StagePlan) -> int | None:
    """Most memory of a plan by walking through it, or None if it reads or keeps what is not there."""
    most = 0
    stages = graph.stages
    arrived: set[int] = set(np.flatnonzero(plan.kept[0]).tolist())
    host: set[int] = set(np.flatnonzero(graph.producer < 0).tolist())
    if not arrived <= host:
        return None
    for t in range(stages):
        resident = set(arrived)
        stays = set(np.flatnonzero(plan.kept[t + 1]).tolist()) if t + 1 < stages else set()
        comes, goes = set(np.flatnonzero(plan.come[t]).tolist()), set(np.flatnonzero(plan.go[t]).tolist())
        if not comes <= host or not goes <= resident:
            return None
        in_flight = sum(int(graph.value_bytes[v]) for v in comes)
        nodes = np.flatnonzero(plan.run[t]).tolist()
        if t not in nodes or max(nodes) > t:
            return None
        for place, node in enumerate(nodes):
            if node != t and not graph.may_rerun[node]:
                return None
            if not set(graph.reads[node]) <= resident:
                return None
            scratch = sum(int(graph.value_bytes[v]) for v in graph.writes[node] if v in resident)
            resident |= set(graph.writes[node])
            used = sum(int(graph.value_bytes[v]) for v in resident) + in_flight + int(graph.fixed_bytes[t])
            most = max(most, used + scratch + int(graph.transient_bytes[node]))
            for value in (*graph.reads[node], *graph.writes[node]):
                later = any(value in graph.reads[other] for other in nodes[place + 1 :])
                if not later and value not in stays and value not in goes:
                    resident.discard(value)
        host |= goes
        arrived = stays
        if not stays <= resident | comes:
            return None
    return most


def every_plan(graph: StageGraph, *, paging: bool = False):
    """Every (R, S) of a graph, and with `paging` every page in and out of the stages between: for very few nodes."""
    stages, values = graph.stages, len(graph.value_bytes)
    lower = [(t, i) for t in range(stages) for i in range(t) if graph.may_rerun[i]]
    pairs = itertools.product(range(stages), range(values))
    keeps = [(t, v) for t, v in pairs if graph.producer[v] < t <= max(graph.users[v], default=-1)]
    moves = [(t, v) for t, v in keeps if t + 1 < stages] if paging else []
    for again in itertools.product((False, True), repeat=len(lower)):
        run = np.eye(stages, dtype=bool)
        for (t, i), flag in zip(lower, again, strict=True):
            run[t, i] = flag
        for stay in itertools.product((False, True), repeat=len(keeps)):
            kept = np.zeros((stages, values), bool)
            for (t, v), flag in zip(keeps, stay, strict=True):
                kept[t, v] = flag
            for move in itertools.product((0, 1, 2), repeat=len(moves)):
                come, go = np.zeros((stages, values), bool), np.zeros((stages, values), bool)
                for (t, v), which in zip(moves, move, strict=True):
                    come[t, v], go[t, v] = which == 1, which == 2
                yield StagePlan(run, kept, come, go)
