"""torchtitan's outer linear programme: which fractions of every layer's activations are kept, recomputed, offloaded.

Source: pytorch/torchtitan, graph_trainer's memory policy `auto_perf_maxing` (pull request 4636 of 2026, the outer level
of its two-level solver): keep + recompute + offload = 1 in every layer; memory in forward and in backward of every
layer, the neighbour's copies in flight included; a layer's copies out must hide in its own forward time, its copies in
in its own backward time; host memory; minimise the time of recomputation plus a price on offloaded bytes. Two things
are given more than there: every layer has its own times, and what may not be recomputed or offloaded is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.bounds.highs import INFINITY, LinearModel, SolverStatus
from tmojax.ilp.fluid import PathRates
from tmojax.ilp.outer_lp_layers import Layers
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import Choice, DeviceDecision, keep_everything


@dataclass(frozen=True, eq=False)
class OuterFractions:
    """keep, recompute, offload [L] (empty without a solution). added_s: objective, seconds of a micro-batch."""

    keep: np.ndarray
    recompute: np.ndarray
    offload: np.ndarray
    added_s: float
    bound_s: float
    status: SolverStatus
    solve_s: float
    rows: int
    columns: int


def shares_allowed(view: StepView, layers: Layers, allowed: np.ndarray) -> np.ndarray:
    """[L] share of each layer's saved bytes whose candidates are `allowed` [I] to do something."""
    chosen = allowed & (layers.layer >= 0)
    found = np.bincount(layers.layer[chosen], weights=view.size_bytes[chosen], minlength=layers.count)
    return found / np.maximum(layers.saved_bytes, 1)


def solve_outer(
    view: StepView, layers: Layers, capacity_bytes: int, rates: PathRates, host_bytes: float, *, offload_price: float,
    allow_offload: bool, allow_recompute: bool, time_limit_s: float, threads: int,
) -> OuterFractions:  # fmt: skip
    """Solve the programme of one device. `offload_price`: seconds per second of copying out."""
    count, unit = layers.count, float(capacity_bytes)
    size = layers.saved_bytes / unit
    total_s = float(layers.forward_s.sum()) or 1.0
    model = LinearModel()
    may_offload = shares_allowed(view, layers, view.may_offload) * allow_offload
    may_offload[-1] = 0.0  # the last layer's activations are wanted at once
    may_recompute = shares_allowed(view, layers, view.may_recompute) * allow_recompute
    out_s = layers.saved_bytes / rates.out_bytes_per_s
    keep = model.add_columns(count)
    # A little more than nothing per byte, so that of equal solutions the one with less traffic is taken.
    price = np.maximum(offload_price, 1e-6) * out_s / total_s
    recompute = model.add_columns(count, 0.0, may_recompute, layers.forward_s / total_s)
    offload = model.add_columns(count, 0.0, may_offload, price)
    for b in range(count):
        model.add_row(1.0, 1.0, (int(keep[b]), 1.0), (int(recompute[b]), 1.0), (int(offload[b]), 1.0))
        below = [(keep[:b], size[:b])] if b else []
        neighbour = [(int(offload[b - 1]), size[b - 1])] if b else []
        for others in (layers.forward_bytes[b], layers.backward_bytes[b]):
            model.add_row(-INFINITY, 1.0 - float(size[b]) - others / unit, *below, *neighbour)
        for rate, window_s in (
            (rates.out_bytes_per_s, layers.forward_s[b]),
            (rates.in_bytes_per_s, layers.backward_s[b]),
        ):
            model.add_row(-INFINITY, rate * window_s / unit, (int(offload[b]), size[b]))
    if np.isfinite(host_bytes):
        model.add_row(-INFINITY, host_bytes / unit, (offload, size))
    answer = model.solve(time_limit_s=time_limit_s, threads=threads)
    found = answer.status is SolverStatus.OPTIMAL
    fractions = [np.clip(answer.values[index], 0, 1) if found else np.zeros(0) for index in (keep, recompute, offload)]
    return OuterFractions(
        fractions[0], fractions[1], fractions[2], answer.objective * total_s if found else float("inf"),
        answer.bound * total_s, answer.status, answer.solve_s, answer.rows, answer.columns,
    )  # fmt: skip


def round_fractions(view: StepView, layers: Layers, fractions: OuterFractions) -> DeviceDecision:
    """The inner level, greedy: in every layer the bytes that are cheapest to run again are recomputed up to the layer's
    fraction, of the rest the largest tensors offloaded up to theirs; a fraction is rounded to the nearer tensor."""
    decision = keep_everything(view)
    choice = decision.choice.copy()
    for b in range(layers.count):
        members = np.flatnonzero(layers.layer == b)
        by_cost = sorted(members, key=lambda i: (view.recompute_s[i] / max(int(view.size_bytes[i]), 1), i))
        by_size = sorted(members, key=lambda i: (-int(view.size_bytes[i]), i))
        for order, share, allowed, what in (
            (by_cost, fractions.recompute[b], view.may_recompute, Choice.RECOMPUTE),
            (by_size, fractions.offload[b], view.may_offload, Choice.OFFLOAD),
        ):
            wanted = share * float(layers.saved_bytes[b])
            for index in order:
                size = float(view.size_bytes[index])
                if choice[index] == Choice.KEEP and allowed[index] and wanted >= size / 2 and wanted > 0:
                    choice[index] = what
                    wanted -= size
    return DeviceDecision(choice, decision.state_out)
