"""Checkmate's integer programme of rematerialisation.

Jain et al., "Checkmate: Breaking the memory wall with optimal tensor rematerialization", MLSys 2020, section 4: stages
in which node t runs first (4.6, frontier-advancing), R[t, i] node i runs in stage t, S[t, v] value v is kept from stage
t - 1 into t, FREE[t, v, k] value v is freed behind node k of stage t, U[t, k] memory at node k of stage t. Differences:

- A node may write several values; what it writes again although it is kept takes scratch memory only (`ALLOCATED`).
- FREE is bounded by each of its hazards instead of by their sum with a big constant (4.4): a stronger relaxation, in
  which FREE needs no integrality.
- Columns exist only where a value or a rerun can still be of use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.bounds.highs import LinearModel
from tmojax.ilp.checkmate_graph import StageGraph

INFINITE = float("inf")
NO_COLUMN = -1


@dataclass(frozen=True, eq=False)
class RematColumns:
    """Column of every variable, -1 where it does not exist (then it is 0). run [T, T]: R. kept [T, V]: S."""

    run: np.ndarray
    kept: np.ndarray


@dataclass(frozen=True, eq=False)
class StagePlan:
    """What a solution decides. run [T, T]: node i runs in stage t. kept [T, V]: value kept into stage t. come, go
    [T, V]: paged in, paged out during stage t (all false in Checkmate's)."""

    run: np.ndarray
    kept: np.ndarray
    come: np.ndarray
    go: np.ndarray

    def compute_s(self, graph: StageGraph) -> float:
        return float((self.run * graph.node_s).sum())


def checkmate_model(graph: StageGraph, capacity_bytes: int) -> tuple[LinearModel, RematColumns]:
    """Least compute time of one micro-batch in `capacity_bytes`, in units of `graph.node_s.sum()`."""
    model = LinearModel()
    columns = add_rematerialisation(model, graph, capacity_bytes, run_cost=graph.node_s / unit_s(graph))
    return model, columns


def unit_s(graph: StageGraph) -> float:
    """Seconds per unit of the objective: the compute time without recomputation (1 where that is 0)."""
    return float(graph.node_s.sum()) or 1.0


def add_rematerialisation(
    model: LinearModel, graph: StageGraph, capacity_bytes: int, *, run_cost: np.ndarray,
    come: np.ndarray | None = None, go: np.ndarray | None = None,
) -> RematColumns:  # fmt: skip
    """Add R, S, FREE and U with their rows. `come` and `go` [T, V] are columns of paging in and out of each stage."""
    stages, values = graph.stages, len(graph.value_bytes)
    stage, node = np.indices((stages, stages))
    exists = (node <= stage) & (stage <= graph.rerun_until[None, :])
    run = np.full((stages, stages), NO_COLUMN)
    own = node[exists] == stage[exists]
    run[exists] = model.add_columns(int(exists.sum()), own.astype(float), 1.0, run_cost[node[exists]], True)
    kept = np.full((stages, values), NO_COLUMN)
    stage = np.arange(stages)[:, None]
    exists = (stage > graph.producer[None, :]) & (stage <= graph.wanted_until[None, :])
    kept[exists] = model.add_columns(int(exists.sum()), integer=True)
    columns = RematColumns(run, kept)
    _availability(model, graph, columns, come)
    for number in range(stages):
        _memory(model, graph, columns, capacity_bytes, number, come, go)
    return columns


def _terms(*pairs: tuple[int, float]) -> list[tuple[int, float]]:
    return [(column, value) for column, value in pairs if column != NO_COLUMN]


def _availability(model: LinearModel, graph: StageGraph, columns: RematColumns, come: np.ndarray | None) -> None:
    """Inputs are there (4.2, 1b), and only what was there can be kept (1c)."""
    run, kept = columns.run, columns.kept
    for t in range(graph.stages):
        for node in range(t + 1):
            if run[t, node] == NO_COLUMN:
                continue
            for value in graph.reads[node]:
                source = int(graph.producer[value])
                made = int(run[t, source]) if source >= 0 else NO_COLUMN
                if made != NO_COLUMN and t == source:
                    continue  # it runs in this stage in any case
                terms = _terms((int(run[t, node]), 1.0), (made, -1.0), (int(kept[t, value]), -1.0))
                model.add_row(-INFINITE, 0.0, *terms)
        if t + 1 == graph.stages:
            break
        for value in np.flatnonzero(kept[t + 1] != NO_COLUMN).tolist():
            source = int(graph.producer[value])
            if source == t:
                continue
            terms = _terms(
                (int(kept[t + 1, value]), 1.0), (int(kept[t, value]), -1.0),
                (int(run[t, source]) if source >= 0 else NO_COLUMN, -1.0),
                (int(come[t, value]) if come is not None else NO_COLUMN, -1.0),
            )  # fmt: skip
            model.add_row(-INFINITE, 0.0, *terms)


def _memory(
    model: LinearModel, graph: StageGraph, columns: RematColumns, capacity_bytes: int, t: int,
    come: np.ndarray | None, go: np.ndarray | None,
) -> None:  # fmt: skip
    """Memory of stage t, node by node (4.3, 4.4), in units of the capacity. Bytes that are paged in during a stage
    count from its start; what is paged out during it stays until its end."""
    run, kept = columns.run, columns.kept
    size = graph.value_bytes / capacity_bytes
    fixed = graph.fixed_bytes[t] / capacity_bytes
    present = np.flatnonzero(kept[t] != NO_COLUMN)
    before: list[tuple[int, float]] = [(int(kept[t, v]), -size[v]) for v in present]
    if come is not None:
        before += [(int(come[t, v]), -size[v]) for v in np.flatnonzero(come[t] != NO_COLUMN)]
    level = fixed  # constant part of the memory before the node
    for node in np.flatnonzero(run[t] != NO_COLUMN).tolist():
        here = int(run[t, node])
        allocated = _allocated(model, graph, columns, t, node)
        used = int(model.add_columns(1, 0.0, 1.0)[0])
        model.add_row(level, level, (used, 1.0), *before, *((column, -size[v]) for v, column in allocated))
        scratch = [(column, -size[v]) for v, column in allocated if column != here]
        scratch_size = sum(-value for _, value in scratch)
        extra = graph.transient_bytes[node] / capacity_bytes + scratch_size
        if extra > 0:
            model.add_row(-INFINITE, 1.0, (used, 1.0), (here, extra), *scratch)
        freed = [(column, size[v]) for v, column in _freed(model, graph, columns, t, node, go)]
        before, level = [(used, -1.0), *freed], 0.0
        if node == t and graph.after_bytes[t]:
            model.add_row(
                -INFINITE, 1.0 - graph.after_bytes[t] / capacity_bytes, (used, 1.0), *((c, -s) for c, s in freed)
            )


def _allocated(
    model: LinearModel, graph: StageGraph, columns: RematColumns, t: int, node: int
) -> list[tuple[int, int]]:
    """(value, column) of what a node allocates: R itself, or at least R - S where only some of its values are kept."""
    here = int(columns.run[t, node])
    found = []
    for value in graph.writes[node]:
        kept = int(columns.kept[t, value])
        if kept == NO_COLUMN or len(graph.writes[node]) == 1:
            found.append((value, here))
        else:
            column = int(model.add_columns(1)[0])
            model.add_row(0.0, INFINITE, (column, 1.0), (here, -1.0), (kept, 1.0))
            found.append((value, column))
    return found


def _freed(
    model: LinearModel, graph: StageGraph, columns: RematColumns, t: int, node: int, go: np.ndarray | None
) -> list[tuple[int, int]]:
    """(value, FREE column) of the values that may be freed behind a node of stage t (4.4): it ran, the value is not
    kept into the next stage nor on its way out, and no later node of the stage reads it."""
    run, kept = columns.run, columns.kept
    found = []
    for value in (*graph.reads[node], *graph.writes[node]):
        free = int(model.add_columns(1)[0])
        model.add_row(-INFINITE, 0.0, (free, 1.0), (int(run[t, node]), -1.0))
        hazards = [int(run[t, later]) for later in graph.users[value] if later > node]
        if t + 1 < graph.stages:
            hazards.append(int(kept[t + 1, value]))
        if go is not None:
            hazards.append(int(go[t, value]))
        for hazard in hazards:
            if hazard != NO_COLUMN:
                model.add_row(-INFINITE, 1.0, (free, 1.0), (hazard, 1.0))
        found.append((value, free))
    return found


def read_plan(graph: StageGraph, columns: RematColumns, values: np.ndarray) -> StagePlan:
    """The plan of a solution [columns], integers rounded."""

    def flags(index: np.ndarray) -> np.ndarray:
        return (index != NO_COLUMN) & (values[np.maximum(index, 0)] > 0.5)

    nothing = np.zeros(columns.kept.shape, bool)
    return StagePlan(flags(columns.run), flags(columns.kept), nothing, nothing)
