"""Progress, copies and memory of all GPUs per time bucket: a time-indexed MILP, kept for the record.

The formulation that suggests itself: buckets of time, common to all GPUs, in each of which every GPU makes some
progress and every link carries some bytes. All buckets have one length, which is a variable, so that no horizon has to
be known. Variables and rows: docs/ilp-baselines.md.

It is weak. Progress and copies are fractions, so a GPU can be half-way through many ops, and memory is averaged over
them: the model may be satisfied by a schedule that never exists, and claims times that no schedule reaches (sometimes
below what is proved for every schedule). Only which groups leave or are recomputed is integer. K micro-batches are
claimed to take K times as long as one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tmojax.bounds.highs import INFINITY, Answer, LinearModel
from tmojax.ilp.devices import ModelDevice, add_update, model_device
from tmojax.ilp.solver import SolverSettings, solve_figures, solve_milp
from tmojax.ilp.steps import small_candidates
from tmojax.problem import Action, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import DeviceDecision

THRESHOLDS = (0.2, 0.4, 0.6)  # of the shares of the linear relaxation


@dataclass(frozen=True, eq=False)
class TimeIndexedSolution:
    """selections: decisions of all devices, one set where the solver had a solution; else the linear relaxation rounded
    at several thresholds, empty where it had none either. answer: of the MILP; figures: for reports."""

    selections: tuple[tuple[DeviceDecision, ...], ...]
    answer: Answer
    figures: dict[str, Any]


def solve_time_indexed(
    problem: Problem, views: Sequence[StepView], settings: SolverSettings, *, buckets: int = 24, most_groups: int = 8,
    whole_steps: bool = False, small_share: float = 2e-4,
) -> TimeIndexedSolution:  # fmt: skip
    """Solve the model of all devices; views and groups as in `tmojax.ilp.tmo.solve_tmo`. buckets: of time. whole_steps:
    a step makes progress only after the one before is done, by one binary for each step and bucket."""
    begin = time.perf_counter()
    built = _TimeIndexed(problem, views, buckets, most_groups, whole_steps, small_share)
    build_s = time.perf_counter() - begin
    answer = solve_milp(built.model, settings)
    figures = solve_figures(answer, settings, unit_s=built.unit_s, build_s=build_s) | {
        "buckets": buckets,
        "groups": max(len(gpu.groups.members) for gpu in built.gpus),
        "most_tensors_in_a_group": max((len(m) for gpu in built.gpus for m in gpu.groups.members), default=0),
        "rounded": False,
    }
    if len(answer.values):
        return TimeIndexedSolution((built.decisions(answer.values, 0.5),), answer, figures)
    relaxed = built.model.solve(time_limit_s=settings.time_limit_s, threads=settings.threads, relax=True)
    if not len(relaxed.values):
        return TimeIndexedSolution((), answer, figures)
    selections = tuple(built.decisions(relaxed.values, threshold) for threshold in THRESHOLDS)
    return TimeIndexedSolution(selections, answer, figures | {"rounded": True, "relaxed_s": relaxed.solve_s})


class _TimeIndexed:
    """The model. Columns per device, [N, buckets] or [J, buckets], all cumulative shares at the end of a bucket: "done"
    of steps; "out", "into", "again" of groups. "leaves", "reruns" [N] and "rests" are the decisions."""

    def __init__(
        self, problem: Problem, views: Sequence[StepView], buckets: int, most_groups: int, whole: bool,
        small_share: float,
    ) -> None:  # fmt: skip
        self.problem, self.model, self.buckets, self.whole = problem, LinearModel(), buckets, whole
        self.offload, self.recompute = Action.OFFLOAD in problem.actions, Action.RECOMPUTE in problem.actions
        self.gpus = []
        for device, view in enumerate(views):
            movable = (view.may_offload & self.offload) | (view.may_recompute & self.recompute)
            small = small_candidates(view, problem.capacity_bytes(device), small_share)
            self.gpus.append(model_device(problem, device, views, view.needed & movable & ~small, most_groups))
        self.unit_s = max(*(float(gpu.seconds.sum()) for gpu in self.gpus), 1e-12) / 100
        total_s = sum(
            float(gpu.seconds.sum() + gpu.out_s.sum() + gpu.into_s.sum() + gpu.view.recompute_s.sum())
            for gpu in self.gpus
        )
        longest = 2 * total_s / self.unit_s
        cost = float(buckets * problem.workload.micro_batches)
        self.length = int(self.model.add_columns(1, 0.0, longest, cost=cost)[0])
        for gpu in self.gpus:
            self._add_device(gpu)
        self._add_links()
        add_update(self.model, self.gpus, problem, self.unit_s)

    def _add_device(self, gpu: ModelDevice) -> None:
        model, buckets = self.model, self.buckets
        count, steps = len(gpu.groups.members), len(gpu.seconds)
        view = gpu.view
        moves = np.array([view.may_offload[m].all() and self.offload for m in gpu.groups.members], bool)
        reruns = np.array([view.may_recompute[m].all() and self.recompute for m in gpu.groups.members], bool)
        gpu.columns = {
            "leaves": model.add_columns(count, upper=moves, integer=True),
            "reruns": model.add_columns(count, upper=reruns, integer=True),
            "rests": model.add_columns(len(gpu.state_bytes), upper=float(self.offload), integer=True),
            "done": model.add_columns(steps * buckets).reshape(steps, buckets),
            "out": model.add_columns(count * buckets).reshape(count, buckets),
            "into": model.add_columns(count * buckets).reshape(count, buckets),
            "again": model.add_columns(count * buckets).reshape(count, buckets),
        }
        done, out, into, again = (gpu.columns[name] for name in ("done", "out", "into", "again"))
        for table in (done, out, into, again):
            for row in table:
                for k in range(1, buckets):
                    model.add_row(0.0, INFINITY, (row[k], 1.0), (row[k - 1], -1.0))
        cost_s = np.array([self._recompute_s(gpu, group) for group in range(count)])
        for k in range(buckets):
            for step in range(steps - 1):
                if self.whole:
                    over = int(model.add_columns(1, integer=True)[0])
                    model.add_row(0.0, INFINITY, (done[step, k], 1.0), (over, -1.0))
                    model.add_row(0.0, INFINITY, (over, 1.0), (done[step + 1, k], -1.0))
                else:
                    model.add_row(0.0, INFINITY, (done[step, k], 1.0), (done[step + 1, k], -1.0))
            model.add_row(
                0.0, INFINITY, (self.length, 1.0), *_change(done, k, -gpu.seconds / self.unit_s),
                *_change(again, k, -cost_s / self.unit_s),
            )  # fmt: skip
        for step in range(steps):
            model.add_row(1.0, 1.0, (done[step, buckets - 1], 1.0))
        for group in range(count):
            self._add_group(gpu, group)
        self._add_memory(gpu)

    def _kept_or_back(self, gpu: ModelDevice, group: int, k: int) -> list[tuple[int, float]]:
        """1 - this: the share of a group that is on the device after its absence, if there is one."""
        columns = gpu.columns
        return [(int(columns["leaves"][group]), -1.0), (int(columns["reruns"][group]), -1.0),
                (int(columns["into"][group, k]), 1.0), (int(columns["again"][group, k]), 1.0)]  # fmt: skip

    def _add_group(self, gpu: ModelDevice, group: int) -> None:
        model, columns = self.model, gpu.columns
        leaves, reruns = int(columns["leaves"][group]), int(columns["reruns"][group])
        done, out, into, again = (columns[name] for name in ("done", "out", "into", "again"))
        model.add_row(-INFINITY, 1.0, (leaves, 1.0), (reruns, 1.0))
        for k in range(self.buckets):
            model.add_row(0.0, INFINITY, (leaves, 1.0), (out[group, k], -1.0))
            model.add_row(0.0, INFINITY, (done[gpu.ready[group], k], 1.0), (out[group, k], -1.0))
            model.add_row(0.0, INFINITY, (out[group, k], 1.0), (into[group, k], -1.0))
            model.add_row(0.0, INFINITY, (reruns, 1.0), (again[group, k], -1.0))
            wanted = done[gpu.stop[group], k]
            model.add_row(-1.0, INFINITY, (wanted, -1.0), *self._kept_or_back(gpu, group, k))
            for source in self._sources(gpu, group):
                model.add_row(-1.0, INFINITY, (again[group, k], -1.0), *self._kept_or_back(gpu, source, k))

    def _add_memory(self, gpu: ModelDevice) -> None:
        """Bytes at the end of a bucket: those of the steps in proportion to their progress, less what is away."""
        model, columns = self.model, gpu.columns
        done, out, into, again = (columns[name] for name in ("done", "out", "into", "again"))
        unit = gpu.capacity_bytes
        change = np.diff(gpu.missing).astype(float) / unit
        size = gpu.groups.size_bytes / unit
        count = len(size)
        if not (gpu.missing > 0).any():
            return
        for k in range(self.buckets):
            gone = model.add_columns(2 * count).reshape(2, count)  # away on the host, and dropped
            for group in range(count):
                model.add_row(0.0, INFINITY, (out[group, k], 1.0), (into[group, k], -1.0), (gone[0, group], -1.0))
                model.add_row(
                    0.0, INFINITY, (columns["reruns"][group], 1.0), (again[group, k], -1.0), (gone[1, group], -1.0)
                )
                idle = done[gpu.begin[group] - 1, k]
                model.add_row(0.0, INFINITY, (idle, 1.0), (gone[0, group], -1.0), (gone[1, group], -1.0))
            model.add_row(
                float(gpu.missing[0]) / unit, INFINITY, (done[1:, k], -change), (gone[0], size), (gone[1], size),
                (columns["rests"], gpu.state_bytes / unit),
            )  # fmt: skip

    def _recompute_s(self, gpu: ModelDevice, group: int) -> float:
        """Seconds to run a group's producers again, with those of their inputs that backward does not need."""
        view, seen = gpu.view, set()
        pending = gpu.groups.members[group].tolist()
        while pending:
            i = pending.pop()
            if int(view.producer_slot[i]) not in seen:
                seen.add(int(view.producer_slot[i]))
                pending += [source for source in view.recompute_inputs[i] if not view.needed[source]]
        return float(view.slot_s[sorted(seen)].sum())

    def _sources(self, gpu: ModelDevice, group: int) -> set[int]:
        """Other groups that recomputing a group reads."""
        view, members = gpu.view, set(gpu.groups.members[group].tolist())
        of = {int(i): number for number, group_members in enumerate(gpu.groups.members) for i in group_members}
        found, pending, seen = set(), list(members), set()
        while pending:
            i = pending.pop()
            for source in view.recompute_inputs[i]:
                if source in of and source not in members:
                    found.add(of[source])
                elif not view.needed[source] and source not in seen:
                    seen.add(source)
                    pending.append(source)
        return found

    def _add_links(self) -> None:
        for link, spec in enumerate(self.problem.machine.links):
            rate = spec.bandwidth_bytes_per_s * self.unit_s
            users = [
                (gpu.columns[name], -gpu.groups.size_bytes / rate)
                for gpu in self.gpus for name, route in (("out", gpu.out_route), ("into", gpu.into_route))
                if link in route.links
            ]  # fmt: skip
            for k in range(self.buckets if users else 0):
                terms = [term for table, taken in users for term in _change(table, k, taken)]
                self.model.add_row(0.0, INFINITY, (self.length, 1.0), *terms)

    def decisions(self, values: np.ndarray, threshold: float) -> tuple[DeviceDecision, ...]:
        """What leaves, is recomputed and rests where its share is more than `threshold`; the larger share wins."""
        found = []
        for gpu in self.gpus:
            leaves, reruns, rests = (values[gpu.columns[name]] for name in ("leaves", "reruns", "rests"))
            found.append(gpu.decision(
                (leaves > threshold) & (leaves >= reruns), rests > threshold, (reruns > threshold) & (reruns > leaves)
            ))  # fmt: skip
        return tuple(found)


def _change(table: np.ndarray, k: int, weights: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Terms: weights times what the cumulative columns `table` [., buckets] gain in bucket k."""
    return [(table[:, k], weights)] + ([(table[:, k - 1], -weights)] if k else [])
