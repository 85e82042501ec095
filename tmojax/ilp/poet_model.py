"""POET's integer programme of rematerialisation and paging, extended so that paging takes time.

Patil et al., "POET: Training neural networks on tiny devices with integrated rematerialization and paging", ICML 2022,
section 4: to Checkmate's stages it adds, for every stage and value, whether it is paged out or in during the stage and
whether a copy is in the other memory. There, paging costs energy and no time, and what arrives takes no memory before
the next stage. Here:

- A stage takes as long as the longest of its compute, its copies out, its copies in (and both together, where the path
  is half-duplex): they overlap, and the next stage begins when all have ended. The programme minimises the sum.
- A copy takes latency and set-up, then its bytes at the rate of the path; its bytes count at both ends all that stage.
- What is once copied out stays in the other memory, whose bytes are limited as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.bounds.highs import LinearModel
from tmojax.ilp.checkmate_graph import StageGraph
from tmojax.ilp.checkmate_model import (
    INFINITE,
    NO_COLUMN,
    RematColumns,
    StagePlan,
    add_rematerialisation,
    read_plan,
    unit_s,
)


@dataclass(frozen=True)
class Paging:
    """Rates of the path out, in, and of both together, bytes per second; seconds before the first byte of a copy."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    joint_bytes_per_s: float = INFINITE
    out_copy_s: float = 0.0
    in_copy_s: float = 0.0

    def out_s(self, size_bytes: np.ndarray) -> np.ndarray:
        return self.out_copy_s + size_bytes / self.out_bytes_per_s

    def in_s(self, size_bytes: np.ndarray) -> np.ndarray:
        return self.in_copy_s + size_bytes / self.in_bytes_per_s


@dataclass(frozen=True, eq=False)
class Energy:
    """Joules of a run of each node [T], and of paging each value in and out [V]: the published objective."""

    run_joule: np.ndarray
    in_joule: np.ndarray
    out_joule: np.ndarray


@dataclass(frozen=True, eq=False)
class PagingColumns:
    """remat: as of Checkmate's. come, go [T, V]: paged in, out (-1: no such column). period [T]: how long each stage
    takes."""

    remat: RematColumns
    come: np.ndarray
    go: np.ndarray
    period: np.ndarray  # empty when energy is minimised


def poet_model(
    graph: StageGraph, capacity_bytes: int, paging: Paging, host_bytes: float = INFINITE, *,
    rerun: bool = True, page: bool = True, energy: Energy | None = None,
) -> tuple[LinearModel, PagingColumns]:  # fmt: skip
    """Least time of one micro-batch in `capacity_bytes`, in units of `graph.node_s.sum()`.

    Values without a producer lie in the other memory at the start; what of them is wanted in the first stage is brought
    before it, which takes its own time. `rerun`: whether nodes may run again; `page`:
    whether values may be copied out. `energy`: minimise it instead, in joules, as if paging took no time.
    """
    model = LinearModel()
    stages, values = graph.stages, len(graph.value_bytes)
    stage = np.arange(stages)[:, None]
    given = graph.producer[None, :] < 0
    may = graph.value_bytes[None, :] > 0
    # Out: resident at the start of the stage and wanted behind the next one. In: for a later stage, once it was out.
    exists = page & ~given & may & (stage > graph.producer[None, :]) & (stage + 2 <= graph.wanted_until[None, :])
    go = np.full((stages, values), NO_COLUMN)
    cost = np.broadcast_to(energy.out_joule if energy else 0.0, exists.shape)[exists]
    go[exists] = model.add_columns(int(exists.sum()), cost=cost, integer=True)
    first_in = np.where(given, 0, graph.producer[None, :] + 2)
    exists = (given | page) & may & (stage >= first_in) & (stage + 1 <= graph.wanted_until[None, :])
    come = np.full((stages, values), NO_COLUMN)
    cost = np.broadcast_to(energy.in_joule if energy else 0.0, exists.shape)[exists]
    come[exists] = model.add_columns(int(exists.sum()), cost=cost, integer=True)
    run_cost = energy.run_joule if energy else np.zeros(stages)
    remat = add_rematerialisation(model, graph, capacity_bytes, run_cost=run_cost, come=come, go=go)
    if not rerun:
        for t, node in zip(*np.nonzero(remat.run != NO_COLUMN), strict=True):
            if t != node:
                model.add_row(0.0, 0.0, (int(remat.run[t, node]), 1.0))
    _paging_rows(model, graph, remat, come, go, host_bytes)
    if energy:
        return model, PagingColumns(remat, come, go, np.zeros(0, np.int64))
    longest = graph.node_s.sum() + paging.out_s(graph.value_bytes).sum() + paging.in_s(graph.value_bytes).sum()
    # A stage takes its own node at least: so the bound is never below the compute time.
    least = np.append(graph.node_s, 0.0) / unit_s(graph)
    period = model.add_columns(stages + 1, least, 2 * longest / unit_s(graph), 1.0)
    _period_rows(model, graph, remat, come, go, paging, period)
    return model, PagingColumns(remat, come, go, period)


def _paging_rows(
    model: LinearModel, graph: StageGraph, remat: RematColumns, come: np.ndarray, go: np.ndarray, host_bytes: float
) -> None:
    """Only what is here goes, at most once; only what is there comes, to be kept and not over itself."""
    host_rows: list[list[tuple[int, float]]] = [[] for _ in range(graph.stages)]
    for value in range(len(graph.value_bytes)):
        leaves = go[:, value]
        stages_out = np.flatnonzero(leaves != NO_COLUMN)
        if len(stages_out):
            model.add_row(-INFINITE, 1.0, (leaves[stages_out], 1.0))
        for t in stages_out.tolist():
            model.add_row(-INFINITE, 0.0, (int(leaves[t]), 1.0), (int(remat.kept[t, value]), -1.0))
            for later in range(t, graph.stages):
                host_rows[later].append((int(leaves[t]), float(graph.value_bytes[value])))
        for t in np.flatnonzero(come[:, value] != NO_COLUMN).tolist():
            here = int(come[t, value])
            if graph.producer[value] >= 0:
                earlier = leaves[stages_out[stages_out < t]]
                model.add_row(-INFINITE, 0.0, (here, 1.0), (earlier, -1.0))
            model.add_row(-INFINITE, 0.0, (here, 1.0), (int(remat.kept[t + 1, value]), -1.0))
            if remat.kept[t, value] != NO_COLUMN:
                model.add_row(-INFINITE, 1.0, (here, 1.0), (int(remat.kept[t, value]), 1.0))
    if np.isfinite(host_bytes):
        for terms in host_rows:
            if sum(size for _, size in terms) > host_bytes:
                model.add_row(-INFINITE, 1.0, *((column, size / host_bytes) for column, size in terms))


def _period_rows(
    model: LinearModel, graph: StageGraph, remat: RematColumns, come: np.ndarray, go: np.ndarray, paging: Paging,
    period: np.ndarray,
) -> None:  # fmt: skip
    """period[t] is at least compute, copies out, copies in, and both together; period[T] is the head before stage 0."""
    unit = unit_s(graph)
    in_s, out_s = paging.in_s(graph.value_bytes) / unit, paging.out_s(graph.value_bytes) / unit
    joint_s = graph.value_bytes / paging.joint_bytes_per_s / unit
    for t in range(graph.stages):
        here = (int(period[t]), -1.0)
        nodes = np.flatnonzero(remat.run[t] != NO_COLUMN)
        model.add_row(-INFINITE, 0.0, (remat.run[t, nodes], graph.node_s[nodes] / unit), here)
        comes, goes = np.flatnonzero(come[t] != NO_COLUMN), np.flatnonzero(go[t] != NO_COLUMN)
        model.add_row(-INFINITE, 0.0, (come[t, comes], in_s[comes]), here)
        model.add_row(-INFINITE, 0.0, (go[t, goes], out_s[goes]), here)
        if np.isfinite(paging.joint_bytes_per_s):
            model.add_row(-INFINITE, 0.0, (come[t, comes], joint_s[comes]), (go[t, goes], joint_s[goes]), here)
    first = np.flatnonzero((graph.producer < 0) & (remat.kept[0] != NO_COLUMN))
    model.add_row(-INFINITE, 0.0, (remat.kept[0, first], np.maximum(in_s, joint_s)[first]), (int(period[-1]), -1.0))


def read_paging_plan(graph: StageGraph, columns: PagingColumns, values: np.ndarray) -> StagePlan:
    """The plan of a solution [columns], integers rounded."""
    plan = read_plan(graph, columns.remat, values)

    def flags(index: np.ndarray) -> np.ndarray:
        return (index != NO_COLUMN) & (values[np.maximum(index, 0)] > 0.5)

    return StagePlan(plan.run, plan.kept, flags(columns.come), flags(columns.go))


def stage_periods_s(graph: StageGraph, plan: StagePlan, paging: Paging) -> np.ndarray:
    """[T + 1] seconds of every stage of a plan, and of the head before the first one."""
    size = graph.value_bytes
    joint = size / paging.joint_bytes_per_s
    periods = np.maximum.reduce([
        (plan.run * graph.node_s).sum(1), (plan.come * paging.in_s(size)).sum(1), (plan.go * paging.out_s(size)).sum(1),
        (plan.come * joint).sum(1) + (plan.go * joint).sum(1),
    ])  # fmt: skip
    first = plan.kept[0] & (graph.producer < 0)
    return np.append(periods, float(np.maximum(paging.in_s(size), joint)[first].sum()))
