"""OffMate's step model: recompute, activation, weight and optimizer-state offload of one GPU in one programme.

Source: Zhao, Le Hellard, Eyraud-Dubois, Gusak and Beaumont, "OffMate: full fine-tuning of LLMs on a single GPU by
re-materialization and offloading", 2024, and its code (topal-team/rockmate, `ilp_offload`): forward and backward of
every layer are one step each; a layer takes one of several precomputed options of what it saves and what it runs again
(binary); which parts of saved activations, weights and optimizer state cross out and in during each step is continuous;
a step lasts as long as the longest of compute, bytes out and bytes in; the sum is minimised. Here as well: bytes of
both directions together on a half-duplex path, K micro-batches, gradients that accumulate. Not here: the optimizer on
the CPU, and shared weights as a special case.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.bounds.highs import INFINITY, Answer, LinearModel
from tmojax.ilp.fluid import PathRates
from tmojax.ilp.outer_lp_layers import Layers
from tmojax.ilp.solver import SolverSettings, solve_milp
from tmojax.problem import Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import Choice, DeviceDecision, Rest, keep_everything

Terms = list[tuple[int, float]]
OPTIONS = 5  # of a layer: shares 0, 1/4, .. 1 of the bytes that it may run again, cheapest first


@dataclass(frozen=True, eq=False)
class StepSolution:
    """decision: None without a solution. claimed_s: of the whole step. offloaded [L]: bytes of saved activations;
    resting_bytes: of optimizer state on the host."""

    decision: DeviceDecision | None
    claimed_s: float
    answer: Answer
    unit_s: float
    steps: int
    offloaded: np.ndarray
    resting_bytes: float


def layer_options(view: StepView, layers: Layers, allow_recompute: bool) -> list[list[np.ndarray]]:
    """Of every layer, the options: candidates that are dropped and run again. What other layers need to run again
    stays."""
    found = []
    for b in range(layers.count):
        members = [
            int(i)
            for i in np.flatnonzero(layers.layer == b)
            if view.may_recompute[i] and all(layers.layer[d] in (b, -1) for d in view.dependents[i])
        ]
        members.sort(key=lambda i: (view.recompute_s[i] / max(int(view.size_bytes[i]), 1), i))
        total = np.cumsum([0, *(int(view.size_bytes[i]) for i in members)])
        counts = {0}
        if allow_recompute:
            counts |= {int(np.searchsorted(total, total[-1] * k / (OPTIONS - 1))) for k in range(1, OPTIONS)}
        found.append([np.array(members[:count], np.int64) for count in sorted(counts)])
    return found


def solve_steps(
    problem: Problem, view: StepView, layers: Layers, capacity_bytes: int, rates: PathRates, settings: SolverSettings,
    *, allow_offload: bool, allow_recompute: bool,
) -> StepSolution:  # fmt: skip
    """Solve the step model of one device and round it: the larger tensors first, up to the bytes that leave."""
    return _StepModel(problem, view, layers, capacity_bytes, rates, allow_offload, allow_recompute).solve(settings)


class _StepModel:
    def __init__(
        self, problem: Problem, view: StepView, layers: Layers, capacity_bytes: int, rates: PathRates,
        allow_offload: bool, allow_recompute: bool,
    ) -> None:  # fmt: skip
        self.view, self.layers, self.rates, self.allow_offload = view, layers, rates, allow_offload
        self.unit, self.model = float(capacity_bytes), LinearModel()
        self.unit_s = float(view.slot_s.sum()) or 1.0
        self.steps = 2 * layers.count
        self.memory: list[Terms] = [[] for _ in range(self.steps)]
        self.out: list[Terms] = [[] for _ in range(self.steps)]
        self.into: list[Terms] = [[] for _ in range(self.steps)]
        self.extra: list[Terms] = [[] for _ in range(self.steps)]
        self.away = np.zeros(self.steps)  # state whose presence is a variable, in units of the capacity
        self.options = layer_options(view, layers, allow_recompute)
        self.pick: list[np.ndarray] = []
        self.activations_out: list[np.ndarray] = []
        for b in range(layers.count):
            self._add_layer(b)
        self.state_groups = self._add_state(problem) if allow_offload else []
        self.resting = -1
        self._add_rows()

    def _times(self, b: int) -> tuple[int, int]:
        """Steps of the forward and the backward of a layer."""
        return b, self.steps - 1 - b

    def _add_layer(self, b: int) -> None:
        model, view, layers = self.model, self.view, self.layers
        forward, backward = self._times(b)
        options = self.options[b]
        pick = model.add_columns(len(options), integer=True)
        model.add_row(1.0, 1.0, (pick, 1.0))
        saved = [float(layers.saved_bytes[b] - view.size_bytes[dropped].sum()) / self.unit for dropped in options]
        between = range(forward + 1, backward)
        for s in between:
            self.memory[s] += [(int(column), size) for column, size in zip(pick, saved, strict=True)]
        for column, dropped in zip(pick, options, strict=True):
            slots = np.unique(view.producer_slot[dropped], return_index=True)[1]
            self.extra[backward].append((int(column), float(view.recompute_s[dropped[slots]].sum()) / self.unit_s))
        self.pick.append(pick)
        members = (layers.layer == b) & view.may_offload
        most = float(view.size_bytes[members].sum()) / self.unit if self.allow_offload else 0.0
        if most <= 0 or len(between) < 2:
            self.activations_out.append(np.zeros(0, np.int64))
            return
        out = model.add_columns(len(between), 0.0, most)
        into = model.add_columns(len(between), 0.0, most)
        self.activations_out.append(out)
        model.add_row(0.0, 0.0, (out, 1.0), (into, -1.0))
        model.add_row(-INFINITY, 0.0, (out, 1.0), *((int(c), -size) for c, size in zip(pick, saved, strict=True)))
        for place, s in enumerate(between):
            # What has left before the step is away in it, what comes during it is there from its start.
            before, until = [(out[:place], -1.0)], [(into[: place + 1], 1.0)]
            self.memory[s] += [(int(c), v) for columns, v in (*before, *until) for c in columns]
            if place:
                model.add_row(-INFINITY, 0.0, (into[: place + 1], 1.0), (out[:place], -1.0))
            else:
                model.add_row(0.0, 0.0, (int(into[0]), 1.0))
            self.out[s].append((int(out[place]), 1.0))
            self.into[s].append((int(into[place]), 1.0))

    def _add_state(self, problem: Problem) -> list[tuple[list[int], np.ndarray]]:
        """(places in `state_tensor`, columns of the part that is there) of persistent tensors that micro-batches use,
        those with equal uses together."""
        program, view, model = problem.workload.program(self.view.device), self.view, self.model
        uses: dict[int, set[int]] = {}
        changed: set[int] = set()
        for slot, op in enumerate(view.slot_op.tolist()):
            b = int(self.layers.slot_layer[slot])
            step = self._times(b)[0 if slot < self.layers.forward_end else 1]
            spec = program.ops[op]
            changed.update(spec.updates)
            for tensor in (*spec.reads, *spec.updates):
                uses.setdefault(tensor, set()).add(step)
        groups: dict[tuple, list[int]] = {}
        for place, tensor in enumerate(view.state_tensor.tolist()):
            if (
                not view.state_resting[place]
                and view.state_bytes[place] > 0
                and not program.tensors[tensor].alias_group
            ):
                groups.setdefault((tuple(sorted(uses[tensor])), tensor in changed), []).append(place)
        found = []
        for (at, dirty), places in groups.items():
            size = float(view.state_bytes[places].sum()) / self.unit
            columns: list[int] = []
            for use, following in zip(at, (*at[1:], at[0] + self.steps), strict=True):
                gap = [step % self.steps for step in range(use + 1, following)]
                if len(gap) < 2:
                    continue
                here = model.add_columns(len(gap))
                into = model.add_columns(len(gap))
                out = model.add_columns(len(gap)) if dirty else np.zeros(0, np.int64)
                columns += here.tolist()
                for i, s in enumerate(gap):
                    # What is there in the next step was there or came; in the step of the next use, all of it.
                    there = [(int(here[i]), 1.0), (int(into[i]), 1.0)]
                    if i + 1 < len(gap):
                        model.add_row(0.0, INFINITY, *there, (int(here[i + 1]), -1.0))
                    else:
                        model.add_row(1.0, INFINITY, *there)
                    # All of it is part of what the layer's ops need anyway; the part that is away is subtracted.
                    self.memory[s] += [(int(here[i]), size), (int(into[i]), size)]
                    self.into[s].append((int(into[i]), size))
                    if dirty:
                        self.out[s].append((int(out[i]), size))
                        model.add_row(1.0, INFINITY, (int(here[i]), 1.0), *((int(c), 1.0) for c in out[:i]))
                    self.away[s] += size
            found.append((places, np.array(columns, np.int64)))
        return found

    def _add_rows(self) -> None:
        model, view, layers = self.model, self.view, self.layers
        resting = float(view.state_bytes[view.state_resting].sum()) / self.unit if self.allow_offload else 0.0
        self.resting = int(model.add_columns(1, 0.0, resting)[0])
        most_s = (
            100.0
            + 10.0
            * float(view.size_bytes.sum() + view.state_bytes.sum())
            / min(self.rates.out_bytes_per_s, self.rates.in_bytes_per_s)
            / self.unit_s
        )
        count = float(view.micro_batches)
        self.time = model.add_columns(self.steps, 0.0, most_s, count)
        self.update = int(model.add_columns(1, float(view.step_s.sum()) / self.unit_s, most_s, 1.0)[0])
        for s in range(self.steps):
            forward = s < layers.count
            b = s if forward else self.steps - 1 - s
            others = float((layers.forward_bytes if forward else layers.backward_bytes)[b] + layers.saved_bytes[b])
            room = 1.0 - others / self.unit + self.away[s]
            model.add_row(-INFINITY, room, *self.memory[s], (self.resting, -1.0))
            compute = float((layers.forward_s if forward else layers.backward_s)[b]) / self.unit_s
            model.add_row(compute, INFINITY, (int(self.time[s]), 1.0), *((c, -v) for c, v in self.extra[s]))
            self._add_copies(int(self.time[s]), self.out[s], self.into[s])
        both = [(self.resting, 1.0)]
        self._add_copies(self.update, both, both)

    def _add_copies(self, time: int, out: Terms, into: Terms) -> None:
        """A step lasts at least as long as its bytes out, its bytes in, and both together on what they share."""
        rates = self.rates
        for rate, terms in (
            (rates.out_bytes_per_s, out), (rates.in_bytes_per_s, into), (rates.joint_bytes_per_s, [*out, *into]),
        ):  # fmt: skip
            if terms and np.isfinite(rate):
                per_unit = rate * self.unit_s / self.unit
                self.model.add_row(0.0, INFINITY, (time, 1.0), *((c, -v / per_unit) for c, v in terms))

    def solve(self, settings: SolverSettings) -> StepSolution:
        answer = solve_milp(self.model, settings)
        values = answer.values
        if not len(values):
            return StepSolution(None, float("inf"), answer, self.unit_s, self.steps, np.zeros(0), 0.0)
        offloaded = np.array([float(values[columns].sum()) * self.unit for columns in self.activations_out])
        resting = float(values[self.resting]) * self.unit
        claimed_s = answer.objective * self.unit_s
        return StepSolution(
            self._round(values, offloaded, resting), claimed_s, answer, self.unit_s, self.steps, offloaded, resting
        )

    def _round(self, values: np.ndarray, offloaded: np.ndarray, resting: float) -> DeviceDecision:
        view = self.view
        kept = keep_everything(view)
        choice, rest = kept.choice.copy(), kept.state_out.copy()
        for b, pick in enumerate(self.pick):
            choice[self.options[b][int(np.argmax(values[pick]))]] = Choice.RECOMPUTE
            wanted = offloaded[b]
            members = np.flatnonzero((self.layers.layer == b) & view.may_offload & (choice == Choice.KEEP))
            for index in sorted(members, key=lambda i: (-int(view.size_bytes[i]), i)):
                if wanted > 0.5 * float(view.size_bytes[index]):
                    choice[index] = Choice.OFFLOAD
                    wanted -= float(view.size_bytes[index])
        for places, columns in self.state_groups:
            if len(columns) and float(values[columns].min()) < 0.5:
                rest[places] = Rest.AWAY
        homes = np.flatnonzero(view.state_resting)
        for place in sorted(homes, key=lambda i: (-int(view.state_bytes[i]), i)):
            if resting > 0.5 * float(view.state_bytes[place]):
                rest[place] = Rest.ON_HOST
                resting -= float(view.state_bytes[place])
        return DeviceDecision(choice, rest)
