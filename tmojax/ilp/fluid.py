"""Which tensors of one GPU stay, move or are recomputed: a mixed-integer program with copies as fluids.

The model is one micro-batch that repeats K times and an update section (design: fluid, aggregated MILP of the lock-step
case). It knows of other GPUs only what its rates say: the full rate of the path (each GPU alone), an equal share of
it at every moment (lock-step), or the full rate at every moment and a share over the whole step (budget).

Slots are merged into *fluid steps*; memory in a step is that of its worst slot, a copy in occupies memory from the
step in which it crosses, a copy out until the end of its step. Small tensors stay, resting state leaves in groups.
The decode decides what is true.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tmojax.bounds.highs import INFINITY, Answer, LinearModel
from tmojax.ilp.solver import SolverSettings, solve_figures, solve_milp
from tmojax.ilp.steps import small_candidates, state_groups, weighted_steps, worst_bytes
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import Choice, DeviceDecision


@dataclass(frozen=True)
class PathRates:
    """Bytes per second that copies out, copies in, and both together may use (inf: no such limit)."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    joint_bytes_per_s: float = float("inf")


@dataclass(frozen=True, eq=False)
class FluidSolution:
    """decision: None without a solution; when relaxed, the larger shares. offloaded, recomputed, kept [I] and
    state_out [S]: shares in 0..1. objective_s: claimed step time (inf without a solution); bound_s: proved minimum of
    this model, which is no bound of the problem. period_s: of one micro-batch. answer: of the solver. figures: for
    reports (`solve_figures`), with the fluid steps, the candidates kept because they are small, and the groups of
    resting state.
    """

    decision: DeviceDecision | None
    offloaded: np.ndarray
    recomputed: np.ndarray
    kept: np.ndarray
    state_out: np.ndarray
    objective_s: float
    bound_s: float
    period_s: float
    answer: Answer
    figures: dict[str, Any]


def solve_fluid(
    view: StepView,
    *,
    capacity_bytes: int,
    rates: PathRates,
    budget: PathRates | None = None,
    budget_taken_bytes: float = 0.0,
    allow_offload: bool = True,
    allow_recompute: bool = True,
    settings: SolverSettings = SolverSettings(),  # noqa: B008 - immutable
    start: DeviceDecision | None = None,
    relax: bool = False,
    max_steps: int = 160,
    small_share: float = 2e-4,
) -> FluidSolution:
    """Solve the fluid model of one device. Deterministic unless the time limit ends it.

    rates: limits at every moment. budget: limits on all bytes of a step, less `budget_taken_bytes` that others
    (collectives) move on each of its paths. start: a decision from which the search starts, if the model allows it.
    relax: drop integrality. max_steps: fluid steps to merge slots into.
    small_share: candidates below this share of the capacity are kept, the smallest first, until together they take 1
    % of it.
    """
    begin = time.perf_counter()
    built = FluidModel(view, capacity_bytes, rates, allow_offload, allow_recompute, max_steps, small_share)
    built.add_budget(budget, budget_taken_bytes)
    build_s = time.perf_counter() - begin
    if relax:
        answer = built.model.solve(time_limit_s=settings.time_limit_s, threads=settings.threads, relax=True)
    else:
        answer = solve_milp(built.model, settings, None if start is None else built.start_values(start))
    count = len(view.tensor)
    shares = np.zeros((3, count))
    state_out = np.zeros(len(view.state_tensor))
    decision, period_s = None, float("inf")
    if len(answer.values):
        for row, columns in enumerate((built.keep, built.move, built.rerun)):
            shares[row, columns >= 0] = answer.values[columns[columns >= 0]]
        shares[0, built.fixed] = 1.0
        inside = built.group >= 0
        state_out[inside] = answer.values[built.leaves[built.group[inside]]]
        period_s = float(answer.values[built.period]) * built.unit_s
        choice = shares.argmax(axis=0).astype(np.int8)  # rows are in the order of `Choice`
        choice[~view.needed & (shares.max(axis=0) < 0.5)] = Choice.RECOMPUTE
        decision = DeviceDecision(choice, state_out > 0.5)
    figures = solve_figures(answer, settings, unit_s=built.unit_s, build_s=build_s) | {
        "fluid_steps": len(built.first),
        "fixed_candidates": int(built.fixed.sum()),
        "state_groups": len(built.leaves),
    }
    return FluidSolution(
        decision, shares[1], shares[2], shares[0], state_out,
        answer.objective * built.unit_s, answer.bound * built.unit_s, period_s, answer, figures,
    )  # fmt: skip


class HostedState(NamedTuple):
    """A state tensor that is on the host when the step begins and ends, if its column is 1. size: in units of the
    model; due: step of its first use; idle_from: first step behind its last use (the number of steps: none)."""

    column: int
    size: float
    due: int
    idle_from: int


class FluidModel:
    """Columns and rows. keep, move, rerun [I]: columns (-1: none); leaves [groups]; group [S] (-1: stays)."""

    def __init__(
        self, view: StepView, capacity_bytes: int, rates: PathRates, allow_offload: bool, allow_recompute: bool,
        max_steps: int, small_share: float,
    ) -> None:  # fmt: skip
        self.view, self.model = view, LinearModel()
        # Units in which columns are neither huge nor below the solver's tolerances.
        self.unit_bytes = capacity_bytes / 10
        self.unit_s = max(float(view.slot_s.sum()), 1e-12) / 100
        self.size = view.size_bytes / self.unit_bytes
        count = len(view.tensor)
        self.fixed = small_candidates(view, capacity_bytes, small_share)
        self.steps = weighted_steps(view, capacity_bytes, max_steps)
        self.first, self.end = self.steps.first, self.steps.end
        self.begin, self.stop = self.steps.whole(view.idle_from, view.idle_to)
        moves = view.may_offload & allow_offload & ~self.fixed & (self.begin < self.stop)
        reruns = view.may_recompute & allow_recompute & ~self.fixed
        useful = view.needed | allow_recompute
        self.keep, self.move, self.rerun = (np.full(count, -1) for _ in range(3))
        for columns, where in ((self.keep, useful & ~self.fixed), (self.move, moves & useful), (self.rerun, reruns)):
            columns[where] = self.model.add_columns(int(where.sum()), integer=True)
        self.longest = self._longest(rates)
        self.group, group_bytes = state_groups(view)
        if not allow_offload:
            self.group, group_bytes = np.full(len(view.state_tensor), -1), np.zeros(0)
        self.group_size = group_bytes / self.unit_bytes
        self.leaves = self.model.add_columns(len(self.group_size), integer=True)
        self._add_choices()
        self.done = self._add_recompute_time()
        self._add_flows(capacity_bytes, rates)

    def rate(self, bytes_per_s: float) -> float:
        """A rate in units of bytes per unit of time."""
        return bytes_per_s * self.unit_s / self.unit_bytes

    def _longest(self, rates: PathRates) -> float:
        """More than any column of time needs: everything computed twice and copied one by one, in units of time."""
        view = self.view
        slowest = min(rates.out_bytes_per_s, rates.in_bytes_per_s, rates.joint_bytes_per_s)
        copies_s = 4.0 * float(view.size_bytes.sum() + view.state_bytes.sum()) / slowest
        compute_s = 2.0 * float(view.slot_s.sum() + view.recompute_s.sum() + view.step_s.sum())
        return 100.0 * (compute_s + copies_s) / self.unit_s

    def _terms(self, index: int | np.integer, value: float = 1.0, kinds: str = "kmr") -> list[tuple[int, float]]:
        by_kind = {"k": self.keep, "m": self.move, "r": self.rerun}
        return [(int(by_kind[kind][index]), value) for kind in kinds if by_kind[kind][index] >= 0]

    def _add_choices(self) -> None:
        """A needed candidate is kept, moved or recomputed; inputs of what is recomputed are available in one of these
        ways."""
        view = self.view
        for i in range(len(view.tensor)):
            if self.fixed[i] or not self._terms(i):
                continue
            self.model.add_row(1.0 if view.needed[i] else 0.0, 1.0, *self._terms(i))
            if self.rerun[i] >= 0:
                for source in view.recompute_inputs[i]:
                    if not view.needed[source]:
                        self.model.add_row(0.0, INFINITY, *self._terms(source), (self.rerun[i], -1.0))

    def _add_recompute_time(self) -> np.ndarray:
        """Columns [J]: time of recomputation in each fluid step. An op with several outputs runs again once for all of
        them."""
        view, model = self.view, self.model
        again = np.flatnonzero(self.rerun >= 0)
        done = model.add_columns(len(self.first), 0.0, self.longest)
        by_step: list[list[tuple[int, float]]] = [[] for _ in self.first]
        for slot in np.unique(view.producer_slot[again]):
            members = again[view.producer_slot[again] == slot]
            earliest = members[np.argmin(view.idle_to[members])]
            step = int(np.searchsorted(self.first, view.idle_to[earliest], side="right")) - 1
            column = self.rerun[members[0]]
            if len(members) > 1:
                column = int(model.add_columns(1)[0])
                for i in members:
                    model.add_row(0.0, INFINITY, (column, 1.0), (self.rerun[i], -1.0))
            by_step[step].append((int(column), float(view.recompute_s[earliest]) / self.unit_s))
        for step, terms in enumerate(by_step):
            model.add_row(0.0, 0.0, (done[step], -1.0), *terms)
        return done

    def _early(self) -> list[tuple[int, int, int, int]]:
        """(column, candidate, from slot, to slot): share of a candidate that is back before its own use for a
        recomputation."""
        view, spans = self.view, []
        for source in range(len(view.tensor)):
            wanting = [
                i for i in view.dependents[source] if self.rerun[i] >= 0 and view.idle_to[i] < view.idle_to[source]
            ]
            if not wanting or self.fixed[source] or not self._terms(source, kinds="mr"):
                continue
            wanting.sort(key=lambda i: view.idle_to[i])
            previous = -1
            for place, i in enumerate(wanting):
                column = int(self.model.add_columns(1)[0])
                self.model.add_row(0.0, INFINITY, (column, 1.0), (self.rerun[i], -1.0), *self._terms(source, kinds="k"))
                if previous >= 0:
                    self.model.add_row(0.0, INFINITY, (column, 1.0), (previous, -1.0))
                end = view.idle_to[wanting[place + 1]] if place + 1 < len(wanting) else view.idle_to[source]
                if end > view.idle_to[i]:
                    spans.append((column, source, int(view.idle_to[i]), int(end)))
                previous = column
        return spans

    def _add_flows(self, capacity_bytes: int, rates: PathRates) -> None:
        model, first, size = self.model, self.first, self.size
        steps, begin, stop = len(first), self.begin, self.stop
        hosted = self._add_hosted()
        absent = [(state.column, state.size) for state in hosted]  # at the start
        total = float(size[self.move >= 0].sum()) + sum(state.size for state in hosted)
        out = model.add_columns(steps + 1, 0.0, total)  # bytes that have crossed by the start of each step
        into = model.add_columns(steps + 1, 0.0, total)
        stay = model.add_columns(steps, 0.0, float(size.sum()))  # candidates in memory whatever the copies do
        leaving = model.add_columns(
            steps, 0.0, total
        )  # candidates to move that have become idle and are not wanted yet
        moving = np.flatnonzero(self.move >= 0)
        model.add_row(0.0, 0.0, (out[0], 1.0))
        model.add_row(0.0, 0.0, (into[0], 1.0))
        for j in range(steps):
            idle_now, over_now = np.flatnonzero(begin == j), np.flatnonzero((stop == j) & (begin < j))
            previous = [(stay[j - 1], 1.0)] if j else []
            model.add_row(
                0.0, 0.0, (stay[j], -1.0), *previous,
                *(t for i in idle_now if stop[i] > j for t in self._terms(i, size[i], "km")),
                *(t for i in over_now for t in self._terms(i, -size[i], "km")),
            )  # fmt: skip
            previous = [(leaving[j - 1], 1.0)] if j else []
            model.add_row(
                0.0, 0.0, (leaving[j], -1.0), *previous, *(t for i in idle_now for t in self._terms(i, size[i], "m")),
                *((state.column, state.size) for state in hosted if state.idle_from == j),
            )  # fmt: skip
            model.add_row(-INFINITY, 0.0, (out[j + 1], 1.0), (leaving[j], -1.0))
        must = model.add_columns(steps, 0.0, total)
        for j in range(steps):
            previous = [(must[j - 1], 1.0)] if j else []
            due = [i for i in moving if stop[i] == j]
            model.add_row(
                0.0, 0.0, (must[j], -1.0), *previous, *(t for i in due for t in self._terms(i, size[i], "m")),
                *((state.column, state.size) for state in hosted if state.due == j),
            )  # fmt: skip
            model.add_row(0.0, INFINITY, (into[j], 1.0), (must[j], -1.0))
            model.add_row(0.0, INFINITY, (out[j], 1.0), (into[j + 1], -1.0), *absent)
        everything = [(int(self.move[i]), -size[i]) for i in moving]
        leaves = ((state.column, -state.size) for state in hosted if state.idle_from < steps)
        model.add_row(0.0, 0.0, (out[steps], 1.0), *everything, *leaves)
        model.add_row(0.0, 0.0, (into[steps], 1.0), *everything, *((c, -value) for c, value in absent))
        self._add_memory(capacity_bytes, out, into, stay, absent)
        self._add_time(rates, out, into)

    def _add_hosted(self) -> tuple[HostedState, ...]:
        """State that rests on the host, for models that know of it: none in this one."""
        return ()

    def _add_memory(
        self, capacity_bytes: int, out: np.ndarray, into: np.ndarray, stay: np.ndarray, absent: list[tuple[int, float]]
    ) -> None:
        """Worst slot of a step + candidates that stay - what is out and not back. Partly idle candidates count as
        present."""
        model, size, begin, stop, end = self.model, self.size, self.begin, self.stop, self.end
        worst = worst_bytes(self.view, self.steps, begin, np.where(self.fixed, begin, stop)) / self.unit_bytes
        early: list[list[tuple[int, float]]] = [[] for _ in self.first]
        for column, i, low, high in self._early():
            for j in range(
                int(np.searchsorted(end, low, side="right")), int(np.searchsorted(self.first, high, side="left"))
            ):
                if begin[i] <= j < stop[i]:
                    early[j].append((column, float(size[i])))
        resting = [(int(c), -one) for c, one in zip(self.leaves, self.group_size, strict=True)]
        # Bytes that are out count from the start of the step; those that come in during it are there already. What
        # has come back for good is in the profile again, and has crossed out and in: it cancels.
        for j in range(len(self.first)):
            model.add_row(
                -INFINITY, capacity_bytes / self.unit_bytes - worst[j],
                (stay[j], 1.0), (out[j], -1.0), (into[j + 1], 1.0), *early[j], *resting,
                *((column, -value) for column, value in absent),
            )  # fmt: skip

    def _add_time(self, rates: PathRates, out: np.ndarray, into: np.ndarray) -> None:
        view, model = self.view, self.model
        length = self.steps.seconds(view.slot_s) / self.unit_s
        stall = model.add_columns(len(length), 0.0, self.longest)
        flows = (
            (rates.out_bytes_per_s, (out,)),
            (rates.in_bytes_per_s, (into,)),
            (rates.joint_bytes_per_s, (out, into)),
        )
        for j in range(len(length)):
            for rate, columns in flows:
                if rate < float("inf"):
                    per_unit = self.rate(rate)
                    terms = [t for c in columns for t in ((c[j + 1], -1.0), (c[j], 1.0))]
                    model.add_row(
                        -per_unit * length[j], INFINITY, (stall[j], per_unit), (self.done[j], per_unit), *terms
                    )
        self.period = int(model.add_columns(1, 0.0, self.longest, cost=float(view.micro_batches))[0])
        model.add_row(float(length.sum()), INFINITY, (self.period, 1.0), (stall, -1.0), (self.done, -1.0))
        self.update = int(model.add_columns(1, float(view.step_s.sum()) / self.unit_s, self.longest, cost=1.0)[0])
        self.moved = (int(out[-1]), int(into[-1]))
        state = [(int(c), -float(g)) for c, g in zip(self.leaves, self.group_size, strict=True)]
        # Resting state that left comes in for the update section and leaves after it; each direction may overlap the
        # ops.
        for rate, times in ((rates.out_bytes_per_s, 1.0), (rates.in_bytes_per_s, 1.0), (rates.joint_bytes_per_s, 2.0)):
            if rate < float("inf") and state:
                model.add_row(0.0, INFINITY, (self.update, self.rate(rate)), *((c, times * v) for c, v in state))

    def add_budget(self, budget: PathRates | None, taken_bytes: float) -> None:
        """All bytes of a step in a direction are limited by a rate times the step time."""
        if budget is None:
            return
        count = float(self.view.micro_batches)
        state = [(int(c), -float(g)) for c, g in zip(self.leaves, self.group_size, strict=True)]
        for rate, columns in ((budget.out_bytes_per_s, self.moved[:1]), (budget.in_bytes_per_s, self.moved[1:]),
                              (budget.joint_bytes_per_s, self.moved)):  # fmt: skip
            if rate < float("inf"):
                per_unit = self.rate(rate)
                self.model.add_row(
                    taken_bytes / self.unit_bytes, INFINITY, (self.period, count * per_unit), (self.update, per_unit),
                    *((c, -count) for c in columns), *((c, len(columns) * v) for c, v in state),
                )  # fmt: skip

    def start_values(self, decision: DeviceDecision) -> np.ndarray:
        """[columns]: the choices of a decision; what follows from them is left to the solver.

        Where the model has no column for a choice the candidate is kept; a group of state leaves if any of it does.
        """
        view = self.view
        values = np.full(self.model.columns, np.nan)
        by_choice = {Choice.KEEP: self.keep, Choice.OFFLOAD: self.move, Choice.RECOMPUTE: self.rerun}
        for columns in by_choice.values():
            values[columns[columns >= 0]] = 0.0
        again = np.zeros(len(view.tensor), bool)
        chosen = decision.by_host().choice
        for i in np.argsort(-view.producer_slot, kind="stable"):  # dependents first: what is dropped may be wanted
            choice = Choice(int(chosen[i]))
            dropped = choice is Choice.RECOMPUTE and not view.needed[i]
            again[i] = choice is Choice.RECOMPUTE and (view.needed[i] or any(again[j] for j in view.dependents[i]))
            column = by_choice[choice][i]
            column = self.keep[i] if column < 0 else column
            if column >= 0 and (again[i] or not dropped):
                values[column] = 1.0
        for group, column in enumerate(self.leaves):
            values[column] = float(decision.state_out[self.group == group].any())
        return values
