"""Which tensors leave on which GPU, and when each crosses: a MILP of all GPUs that take turns on the channel.

A MILP around the two mechanisms of TMO (Lin et al., "Tensor Movement Orchestration in Multi-GPU Training Systems",
HPCA 2023): the sets of tensors that GPUs with the same program move are disjoint, and the order of the transfers on a
shared channel is decided. Variables, rows and assumptions: docs/ilp-baselines.md. One micro-batch is modelled; K of
them are claimed to take K times as long.

Products of decisions and their McCormick envelopes (McCormick, 1976), which are exact for binaries:

- leaves x away in step q: a <= x, a <= away; the lower side never binds and is left out, as is then `away` itself;
- transfer i leaves x transfer j leaves, the pair that needs an order: i before j + j before i = product, with all
  three sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from tmojax.bounds.highs import INFINITY, Answer, LinearModel
from tmojax.ilp.devices import DeviceTimes, ModelDevice, add_update, model_device
from tmojax.ilp.solver import SolverSettings, solve_figures, solve_milp
from tmojax.ilp.steps import small_candidates
from tmojax.problem import Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import DeviceDecision

CUTS = 24  # positions at which the bytes of all GPUs together bound the time


@dataclass(frozen=True, eq=False)
class TmoSolution:
    """decisions: of all devices; None without a solution. out_s, into_s: for every device, when the copy of each tensor
    that leaves starts, seconds from the start of a micro-batch. period_s: of a micro-batch. answer: of the last solve;
    figures: for reports. sharing: GPUs that may move one tensor."""

    decisions: tuple[DeviceDecision, ...] | None
    out_s: tuple[dict[int, float], ...]
    into_s: tuple[dict[int, float], ...]
    period_s: float
    sharing: int
    answer: Answer
    figures: dict[str, Any]


Rehearsal = Callable[[tuple[DeviceDecision, ...]], "list[DeviceTimes] | None"]


def solve_tmo(
    problem: Problem, views: Sequence[StepView], settings: SolverSettings, rehearse: Rehearsal, *,
    most_groups: int = 24, disjoint: bool = True, small_share: float = 2e-4,
) -> TmoSolution:  # fmt: skip
    """Solve the model of all devices. `views`: of every device (equal ones may share one). `rehearse` simulates the
    first selection, the one with the fewest bytes: its times are where the search starts.

    most_groups: groups of tensors per device. disjoint: as few GPUs as memory allows move the same tensor (one, where
    it can be). small_share: candidates below this share of the capacity stay, at most 1 % of it.
    """
    begin = time.perf_counter()
    gpus = []
    for device, view in enumerate(views):
        small = small_candidates(view, problem.capacity_bytes(device), small_share)
        allowed = view.needed & view.may_offload & ~small
        gpus.append(model_device(problem, device, views, allowed, most_groups))
    chosen, sharing, first = _choose(gpus, settings, disjoint)
    if chosen is None:
        figures = solve_figures(first, settings, unit_s=1.0, build_s=time.perf_counter() - begin - first.solve_s)
        figures |= {"claimed_step_s": None, "model_bound_s": None}  # its objective is no time
        return TmoSolution(None, (), (), float("inf"), sharing, first, figures | _sizes(gpus, sharing, 0))
    built = _Tmo(problem, gpus, sharing)
    build_s = time.perf_counter() - begin - first.solve_s
    times = rehearse(tuple(gpu.decision(*selected) for gpu, selected in zip(gpus, chosen, strict=True)))
    answer = solve_milp(built.model, settings, built.start(chosen, times))
    figures = solve_figures(answer, settings, unit_s=built.unit_s, build_s=build_s)
    figures |= _sizes(gpus, sharing, len(built.pairs)) | {
        "selection_s": first.solve_s,
        "selection_status": first.status.value,
    }
    if not len(answer.values):
        return TmoSolution(None, (), (), float("inf"), sharing, answer, figures)
    decisions, out_s, into_s = [], [], []
    for gpu in gpus:
        leaves = answer.values[gpu.columns["leaves"]] > 0.5
        decisions.append(gpu.decision(leaves, answer.values[gpu.columns["rests"]] > 0.5))
        for target, column in ((out_s, "out"), (into_s, "into")):
            target.append({
                int(tensor): float(answer.values[gpu.columns[column][group]]) * built.unit_s
                for group in np.flatnonzero(leaves) for tensor in gpu.view.tensor[gpu.groups.members[group]]
            })  # fmt: skip
    period_s = float(answer.values[built.period]) * built.unit_s
    return TmoSolution(tuple(decisions), tuple(out_s), tuple(into_s), period_s, sharing, answer, figures)


def _sizes(gpus: list[ModelDevice], sharing: int, pairs: int) -> dict[str, Any]:
    return {
        "groups": max(len(gpu.groups.members) for gpu in gpus),
        "most_tensors_in_a_group": max((len(m) for gpu in gpus for m in gpu.groups.members), default=0),
        "sharing": sharing,
        "ordered_pairs": pairs,
    }


def _choose(
    gpus: list[ModelDevice], settings: SolverSettings, disjoint: bool
) -> tuple[list[tuple[np.ndarray, np.ndarray]] | None, int, Answer]:
    """(leaving groups and resting state of every device, GPUs that may move one tensor, answer): memory alone, with the
    least sharing and then the fewest bytes, those first that are idle for long. None: nothing fits, or none was found
    in time."""
    model = LinearModel()
    unit = sum(float(gpu.groups.size_bytes.sum() + gpu.state_bytes.sum()) for gpu in gpus) or 1.0
    sharing = int(model.add_columns(1, 1.0, float(len(gpus)), cost=1.0, integer=True)[0])
    columns = []
    for gpu in gpus:
        ends = np.cumsum(gpu.seconds)
        idle = (ends[gpu.stop - 1] - ends[gpu.begin - 1]) / max(ends[-1], 1e-12)  # share of the micro-batch
        cost = gpu.groups.size_bytes * (2 - idle) / unit / 4
        leaves = model.add_columns(len(gpu.groups.members), cost=cost, integer=True)
        rests = model.add_columns(len(gpu.state_bytes), cost=gpu.state_bytes / unit / 2, integer=True)
        columns.append((leaves, rests))
        for step in gpu.short:
            inside = gpu.inside(step)
            size = np.concatenate([gpu.groups.size_bytes[inside], gpu.state_bytes]) / gpu.capacity_bytes
            model.add_row(float(gpu.missing[step]) / gpu.capacity_bytes, INFINITY,
                          (np.concatenate([leaves[inside], rests]), size))  # fmt: skip
    if disjoint:
        for members in _equal(gpus):
            for group in range(len(gpus[members[0]].groups.members)):
                model.add_row(-INFINITY, 0.0, *((columns[d][0][group], 1.0) for d in members), (sharing, -1.0))
    answer = solve_milp(model, SolverSettings(settings.time_limit_s / 4, 1e-3, settings.threads, settings.solver))
    if not len(answer.values):
        return None, len(gpus), answer
    values = answer.values > 0.5
    least = round(float(answer.values[sharing])) if disjoint else len(gpus)
    return [(values[leaves], values[rests]) for leaves, rests in columns], least, answer


def _equal(gpus: list[ModelDevice]) -> list[list[int]]:
    """Devices that share one view, by their first."""
    return [[g.device for g in gpus if g.first_equal == first] for first in sorted({g.first_equal for g in gpus})]


class _Tmo:
    """The model. Transfers are (device, 0 out or 1 in, group); pairs: of two transfers, the columns first before second
    and second before first."""

    def __init__(self, problem: Problem, gpus: list[ModelDevice], sharing: int) -> None:
        self.problem, self.gpus, self.model = problem, gpus, LinearModel()
        self.unit_s = max(*(float(gpu.seconds.sum()) for gpu in gpus), 1e-12) / 100
        # Longer than everything one after the other.
        total_s = sum(float(gpu.seconds.sum() + gpu.out_s.sum() + gpu.into_s.sum()) for gpu in gpus)
        self.longest = 1.01 * total_s / self.unit_s
        self.period = int(self.model.add_columns(1, 0.0, self.longest, cost=problem.workload.micro_batches)[0])
        for gpu in gpus:
            self._add_device(gpu)
        for members in _equal(gpus):
            for group in range(len(gpus[members[0]].groups.members)):
                if sharing < len(members):
                    self.model.add_row(-INFINITY, sharing, *((gpus[d].columns["leaves"][group], 1.0) for d in members))
        self.pairs: dict[tuple, tuple[int, int]] = {}
        self._add_order(sharing)
        self._add_channel_cuts()
        add_update(self.model, gpus, problem, self.unit_s)

    def _add_device(self, gpu: ModelDevice) -> None:
        model, count, longest = self.model, len(gpu.groups.members), self.longest
        leaves = model.add_columns(count, integer=True)
        rests = model.add_columns(len(gpu.state_bytes), integer=True)
        out, into = model.add_columns(count, 0.0, longest), model.add_columns(count, 0.0, longest)
        start = model.add_columns(len(gpu.seconds) + 1, 0.0, longest)
        gpu.columns = {"leaves": leaves, "rests": rests, "out": out, "into": into, "start": start}
        seconds, out_s, into_s = gpu.seconds / self.unit_s, gpu.out_s / self.unit_s, gpu.into_s / self.unit_s
        for step, duration in enumerate(seconds):
            model.add_row(float(duration), INFINITY, (start[step + 1], 1.0), (start[step], -1.0))
        model.add_row(0.0, INFINITY, (self.period, 1.0), (start[-1], -1.0))
        for step in gpu.short:
            inside = gpu.inside(step)
            away = model.add_columns(len(inside), integer=True)
            size = np.concatenate([gpu.groups.size_bytes[inside], gpu.state_bytes]) / gpu.capacity_bytes
            model.add_row(
                float(gpu.missing[step]) / gpu.capacity_bytes, INFINITY, (np.concatenate([away, rests]), size)
            )
            for group, column in zip(inside, away, strict=True):
                gpu.away[int(group), int(step)] = int(column)
                model.add_row(0.0, INFINITY, (leaves[group], 1.0), (column, -1.0))
                # Out before the step begins; back only after it has ended.
                model.add_row(
                    float(out_s[group]) - longest, INFINITY, (start[step], 1.0), (out[group], -1.0), (column, -longest)
                )
                model.add_row(
                    float(seconds[step]) - longest,
                    INFINITY,
                    (into[group], 1.0),
                    (start[step], -1.0),
                    (column, -longest),
                )
        for group in range(count):
            ready = int(gpu.ready[group])
            model.add_row(float(seconds[ready]), INFINITY, (out[group], 1.0), (start[ready], -1.0))
            model.add_row(
                float(out_s[group]) - longest,
                INFINITY,
                (into[group], 1.0),
                (out[group], -1.0),
                (leaves[group], -longest),
            )
            model.add_row(
                float(into_s[group]) - longest, INFINITY, (start[gpu.stop[group]], 1.0), (into[group], -1.0),
                (leaves[group], -longest),
            )  # fmt: skip
        # Copy engines: out in the order in which tensors are written, in as they are wanted.
        for column, order, duration in (
            (out, np.arange(count), out_s), (into, np.argsort(gpu.groups.idle_to, kind="stable"), into_s)
        ):  # fmt: skip
            for before, after in pairwise(order):
                model.add_row(
                    0.0, INFINITY, (column[after], 1.0), (column[before], -1.0), (leaves[before], -duration[before])
                )

    def _conflict(self, first: tuple[ModelDevice, int], second: tuple[ModelDevice, int]) -> bool:
        """Whether two copies share a link that is narrower than what both want together."""
        links = self.problem.machine.links
        routes = [(gpu.out_route, gpu.into_route)[way] for gpu, way in (first, second)]
        rates = [min(links[link].bandwidth_bytes_per_s for link in route.links) for route in routes]
        shared = set(routes[0].links) & set(routes[1].links)
        return any(sum(rates) > links[link].bandwidth_bytes_per_s * (1 + 1e-9) for link in shared)

    def _add_order(self, sharing: int) -> None:
        """Two transfers that leave on one channel have an order."""
        model, longest = self.model, self.longest
        ways = [(gpu, way) for gpu in self.gpus for way in (0, 1)]
        for first, second in combinations(ways, 2):
            if not self._conflict(first, second):
                continue
            a, b = first[0], second[0]
            for i in range(len(a.groups.members)):
                for j in range(len(b.groups.members)):
                    twice = a is not b and a.first_equal == b.first_equal and i == j and sharing == 1
                    if twice or (a is b and i == j):  # never both, or ordered anyway
                        continue
                    forth, back = (int(c) for c in model.add_columns(2, integer=True))
                    self.pairs[(a.device, first[1], i), (b.device, second[1], j)] = forth, back
                    both = ((forth, 1.0), (back, 1.0))
                    leaves = (a.columns["leaves"][i], -1.0), (b.columns["leaves"][j], -1.0)
                    model.add_row(-1.0, INFINITY, *both, *leaves)
                    for one in leaves:
                        model.add_row(-INFINITY, 0.0, *both, one)
                    begins = [g.columns[("out", "into")[w]][n] for (g, w), n in ((first, i), (second, j))]
                    lasts = [(g.out_s, g.into_s)[w][n] / self.unit_s for (g, w), n in ((first, i), (second, j))]
                    for column, before, after, last in ((forth, *begins, lasts[0]), (back, *begins[::-1], lasts[1])):
                        model.add_row(last - longest, INFINITY, (after, 1.0), (before, -1.0), (column, -longest))

    def _add_channel_cuts(self) -> None:
        """Implied by the order, and what the relaxation lacks without it: for positions of all GPUs, the bytes that
        are away there cross the link after the first tensor is written and before the last GPU goes on, and
        likewise back."""
        bandwidth = {link: spec.bandwidth_bytes_per_s for link, spec in enumerate(self.problem.machine.links)}
        short = [gpu for gpu in self.gpus if len(gpu.short)]
        for link, rate in bandwidth.items():
            for way in (0, 1):
                users = [gpu for gpu in short if link in (gpu.out_route, gpu.into_route)[way].links]
                for share in np.linspace(0.0, 1.0, CUTS) if users else ():
                    terms: list[tuple[Any, Any]] = []
                    heads, tails = [], []
                    for gpu in users:
                        step = int(gpu.short[round(share * (len(gpu.short) - 1))])
                        inside = gpu.inside(step)
                        terms += [
                            (gpu.away[int(n), step], -gpu.groups.size_bytes[n] / rate / self.unit_s) for n in inside
                        ]
                        ends = np.cumsum(gpu.seconds)
                        heads.append(ends[gpu.ready].min(initial=np.inf) if way == 0 else ends[step])
                        begins = ends[-1] - ends + gpu.seconds  # compute from the start of each step to the end
                        tails.append(begins[step] if way == 0 else begins[gpu.stop].min(initial=np.inf))
                    outside_s = float(min(heads) + min(tails))
                    if terms and outside_s < np.inf:
                        self.model.add_row(outside_s / self.unit_s, INFINITY, (self.period, 1.0), *terms)

    def start(self, chosen: list[tuple[np.ndarray, np.ndarray]], times: list[DeviceTimes] | None) -> np.ndarray:
        """Values [columns] of the chosen groups: away and in order as in `times`; without, away as long as they can be
        and in the order in which they are written and wanted. Times are left to the solver."""
        values = np.full(self.model.columns, np.nan)
        order: dict[tuple[int, int, int], tuple[float, int, int]] = {}
        for gpu, (leaves, rests) in zip(self.gpus, chosen, strict=True):
            begin = np.where(leaves, 0, len(gpu.seconds))  # steps begin[n] .. stop[n] - 1 have group n away
            stop = np.where(leaves, len(gpu.seconds), 0)
            for group in np.flatnonzero(leaves).tolist():
                order[gpu.device, 0, group] = ((gpu.ready[group] + 1) / len(gpu.seconds), 0, gpu.device)
                order[gpu.device, 1, group] = (gpu.stop[group] / len(gpu.seconds), 1, gpu.device)
            if times is not None:
                leaves = self._as_simulated(gpu, times[gpu.device], leaves, begin, stop, order)
            values[gpu.columns["leaves"]], values[gpu.columns["rests"]] = leaves, rests
            resting = float(gpu.state_bytes[rests].sum())
            for step in gpu.short:
                inside = gpu.inside(step)
                away = leaves[inside] & (begin[inside] <= step) & (step < stop[inside])
                if gpu.groups.size_bytes[inside][away].sum() + resting < gpu.missing[step]:
                    away = leaves[inside]
                for group, is_away in zip(inside, away, strict=True):
                    values[gpu.away[int(group), int(step)]] = is_away
        for (first, second), (forth, back) in self.pairs.items():
            both = first in order and second in order
            before = both and order[first] < order[second]
            values[forth], values[back] = before, both and not before
        return values

    def _as_simulated(self, gpu: ModelDevice, times: DeviceTimes, leaves, begin, stop, order) -> np.ndarray:
        """Groups that really move; fills `begin`, `stop` and `order` with what was simulated."""
        moving = leaves.copy()
        step_begin_s = times.slot_begin_s[gpu.steps.first] + 1e-9
        step_end_s = times.slot_end_s[gpu.steps.end - 1] - 1e-9
        for group in np.flatnonzero(leaves).tolist():
            tensors = [t for t in gpu.view.tensor[gpu.groups.members[group]].tolist() if t in times.into_s]
            moving[group] = bool(tensors)
            for way, found in enumerate((times.out_s, times.into_s)):
                starts = [found[t][0] for t in tensors]
                if starts:
                    order[gpu.device, way, group] = (min(starts), way, gpu.device)
                else:
                    order.pop((gpu.device, way, group))
            if tensors:
                begin[group] = np.searchsorted(step_begin_s, max(times.out_s[t][1] for t in tensors))
                stop[group] = np.searchsorted(step_end_s, min(times.into_s[t][0] for t in tensors), "right")
        return moving
