"""The whole step of one device: templates of the first, the middle and the last micro-batches, and the step ops in
their places.

Runs are counted over the step here. The result is what the fit (`tmojax.relax.fit`) works on: the memory that is needed
at every run in any case, and a table of gaps in which tensors may be away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from tmojax.problem import PLAIN, Kind, Lifetime, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import DeviceDecision, Rest
from tmojax.relax.fit import END, TENSOR, TO_PEER, WRITTEN
from tmojax.relax.template import Template

# A gap of a state tensor is worth a trip to the host if it spans more than this part of a micro-batch's runs.
LONG_GAP = 1 / 8


@dataclass(frozen=True, eq=False)
class UnrolledStep:
    """kind, op, micro_batch, profile_bytes [U]: per run; the profile has everything away that may be away. kind:
    Kind.COMPUTE or COLLECTIVE, or ENCODE or DECODE, whose "op" is a tensor.

    freed [F, 4]: (run, tensor, instance, form): the copy that is freed behind that run. gaps [M, 10]: see
    `tmojax.relax.fit`.
    """

    kind: np.ndarray
    op: np.ndarray
    micro_batch: np.ndarray
    profile_bytes: np.ndarray
    freed: np.ndarray
    gaps: np.ndarray


@dataclass(frozen=True, eq=False)
class _Layout:
    """What of a device's step does not depend on decisions. step_uses[tensor]: (places among the step ops, which
    change it)."""

    sizes: np.ndarray
    step_ops: np.ndarray
    slot_before: np.ndarray
    workspace: np.ndarray
    collective: np.ndarray
    step_uses: dict[int, tuple[list[int], list[bool]]]
    step_made: tuple[int, ...]
    step_inputs: tuple[int, ...]


_layouts: WeakKeyDictionary[StepView, _Layout] = WeakKeyDictionary()


def _layout(problem: Problem, view: StepView) -> _Layout:
    if view not in _layouts:
        program = problem.workload.program(view.device)
        step_ops = [index for index, op in enumerate(program.ops) if op.step_op]
        uses: dict[int, tuple[list[int], list[bool]]] = {}
        for place, index in enumerate(step_ops):
            op = program.ops[index]
            for tensor in (*op.reads, *op.writes, *op.updates):
                places, changes = uses.setdefault(tensor, ([], []))
                places.append(place)
                changes.append(tensor in op.updates)
        made = [t for t in uses if program.producer[t] != -1 and program.ops[program.producer[t]].step_op]
        inputs = [t for t in uses if program.producer[t] == -1 and program.tensors[t].lifetime is Lifetime.STEP]
        _layouts[view] = _Layout(
            np.array([tensor.size_bytes for tensor in program.tensors], np.int64),
            np.array(step_ops, np.int64),
            np.searchsorted(view.slot_op, step_ops) - 1,
            np.array([op.workspace_bytes for op in program.ops], np.int64),
            np.array([bool(op.collective) for op in program.ops]),
            uses, tuple(made), tuple(inputs),
        )  # fmt: skip
    return _layouts[view]


def unroll(
    problem: Problem, view: StepView, decision: DeviceDecision, template: Template, last: Template | None = None,
    first: Template | None = None,
) -> UnrolledStep:  # fmt: skip
    """Unroll a template over all micro-batches of a step; `last` and `first` describe those if they differ. A single
    micro-batch is the last one."""
    return _Unroller(_layout(problem, view), view, decision, template, last or template, first or template).result()


class _Unroller:
    def __init__(
        self, layout: _Layout, view: StepView, decision: DeviceDecision, template: Template, last: Template,
        first: Template,
    ) -> None:  # fmt: skip
        self.layout, self.view, self.decision = layout, view, decision
        self.template, self.last, self.first = template, last, first
        self.count, self.body, final = view.micro_batches, len(template.runs), len(last.runs)
        # Micro-batches before the last one: the first, if there is one, and the middle ones.
        self.middle = max(0, self.count - 2)
        self.opening = len(first.runs) if self.count > 1 else 0
        # A step op stands where the op table has it: in the last micro-batch, behind the first run of the op before.
        before = layout.slot_before
        behind = np.where(before < 0, 0, last.first_run[view.slot_op[np.maximum(before, 0)]] + 1)
        base = self.opening + self.middle * self.body
        self.total = base + final + len(layout.step_ops)
        self.last_place = base + np.arange(final) + np.searchsorted(behind, np.arange(final), side="right")
        self.step_place = base + behind + np.arange(len(layout.step_ops))
        self.profile = np.zeros(self.total + 1, np.int64)
        self.gaps: list[np.ndarray] = []
        self.freed: list[np.ndarray] = []

    def result(self) -> UnrolledStep:
        self._lives()
        self._inputs()
        self._step_tensors()
        self._state()
        layout = self.layout
        op = self._per_run("runs", layout.step_ops)
        coding = self._per_run("coding", np.full(len(layout.step_ops), -1))
        kind = np.where(coding >= 0, coding, np.where(layout.collective[np.where(coding >= 0, 0, op)],
                                                      Kind.COLLECTIVE, Kind.COMPUTE))  # fmt: skip
        micro_batch = np.zeros(self.total, np.int64)
        inside = np.repeat(np.arange(1, self.count - 1), self.body)
        micro_batch[self.opening : self.opening + len(inside)] = inside
        micro_batch[self.last_place] = self.count - 1
        scratch = self._per_run("scratch_bytes", layout.workspace[layout.step_ops])
        gaps = np.concatenate(self.gaps)
        gaps = gaps[np.lexsort((gaps[:, TENSOR], gaps[:, END], gaps[:, WRITTEN]))]
        freed = np.concatenate(self.freed)
        freed = freed[np.lexsort((freed[:, 1], freed[:, 0]))]
        profile = np.cumsum(self.profile)[: self.total] + scratch
        return UnrolledStep(kind, op, micro_batch, profile, freed, gaps)

    def _per_run(self, field: str, step: np.ndarray) -> np.ndarray:
        """A field [T] of the templates and values per step op as values per run of the step [U]."""
        values = np.empty(self.total, np.int64)
        inside = np.tile(getattr(self.template, field), self.middle)
        values[: self.opening] = getattr(self.first, field)[: self.opening]
        values[self.opening : self.opening + len(inside)] = inside
        values[self.last_place], values[self.step_place] = getattr(self.last, field), step
        return values

    def _parts(self) -> Iterator[tuple[Template, np.ndarray, np.ndarray]]:
        """(template, micro-batches [k], run of the step [k, T]) of the first one, the middle ones, and the last one."""
        if self.opening:
            yield self.first, np.array([0]), np.arange(self.opening)[None, :]
        if self.middle:
            begin = (self.opening + np.arange(self.middle) * self.body)[:, None]
            yield self.template, np.arange(1, self.count - 1), begin + np.arange(self.body)
        yield self.last, np.array([self.count - 1]), self.last_place[None, :]

    def _add_gaps(
        self, tensor, instance, size, written, start, end, host_stays,
        form: np.ndarray | int = PLAIN, to_peer: np.ndarray | int = 0,
    ) -> None:  # fmt: skip
        columns = np.empty((len(tensor), TO_PEER + 1), np.int64)
        for column, values in enumerate((tensor, instance, size, written, start, end, host_stays, 0, form, to_peer)):
            columns[:, column] = values
        self.gaps.append(columns)

    def _free(self, run: np.ndarray, tensor: np.ndarray, instance: np.ndarray, form: np.ndarray | int = PLAIN) -> None:
        """Plain copies, or those of the given forms, are freed behind a run."""
        self.freed.append(np.stack([run, tensor, instance, np.broadcast_to(form, run.shape)], 1))

    def _occupy(self, start: np.ndarray, end: np.ndarray, size: np.ndarray) -> None:
        """`size` bytes are resident from run `start` to run `end`, inclusive."""
        np.add.at(self.profile, start, size)
        np.add.at(self.profile, end + 1, -size)

    def _last_step_run(self, tensor: int) -> int:
        return int(self.step_place[self.layout.step_uses[tensor][0][-1]])

    def _lives(self) -> None:
        for template, batches, place in self._parts():
            start, end = place[:, template.life_start], place[:, template.life_end]
            if self.count - 1 in batches:
                for tensor, column in self._latest_lives(template).items():
                    end[-1, column] = max(end[-1, column], self._last_step_run(tensor))
            count = len(batches)
            self._occupy(start.ravel(), end.ravel(), np.tile(template.life_bytes, count))
            ends = ~template.life_before_gap
            tensors, forms = (np.tile(values[ends], count) for values in (template.life_tensor, template.life_form))
            self._free(end[:, ends].ravel(), tensors, np.repeat(batches, ends.sum()), forms)
            written, left, back = (place[:, runs].ravel()
                                   for runs in (template.gap_written, template.gap_from, template.gap_to))  # fmt: skip
            instances = np.repeat(batches, len(template.gap_tensor))
            tensors, size, forms, to_peer = (np.tile(values, count) for values in (
                template.gap_tensor, template.gap_bytes, template.gap_form, template.gap_to_peer))  # fmt: skip
            self._add_gaps(tensors, instances, size, written, left, back, 0, forms, to_peer)

    def _latest_lives(self, template: Template) -> dict[int, int]:
        """Of tensors that step ops use as well, the life that ends last."""
        latest: dict[int, int] = {}
        for column, tensor in enumerate(template.life_tensor.tolist()):
            if tensor in self.layout.step_uses:
                if tensor not in latest or template.life_end[column] > template.life_end[latest[tensor]]:
                    latest[tensor] = column
        return latest

    def _inputs(self) -> None:
        for template, batches, place in self._parts():
            first, final = place[:, template.input_first], place[:, template.input_last]
            if self.count - 1 in batches:
                for column, tensor in enumerate(template.input_tensor.tolist()):
                    if tensor in self.layout.step_uses:
                        final[-1, column] = self._last_step_run(tensor)
            tensors = np.tile(template.input_tensor, len(batches))
            instance = np.repeat(batches, first.shape[1])
            self._occupy(first.ravel(), final.ravel(), self.layout.sizes[tensors])
            self._free(final.ravel(), tensors, instance)
            self._add_gaps(tensors, instance, self.layout.sizes[tensors], -1, -1, first.ravel(), 1)

    def _step_tensors(self) -> None:
        """Tensors that live among the step ops only; those that no op writes come from the host."""
        for tensors, from_host in ((self.layout.step_made, False), (self.layout.step_inputs, True)):
            index = np.array(tensors, np.int64)
            first = np.array([self.step_place[self.layout.step_uses[t][0][0]] for t in tensors], np.int64)
            final = np.array([self._last_step_run(t) for t in tensors], np.int64)
            self._occupy(first, final, self.layout.sizes[index])
            self._free(final, index, np.zeros(len(index), np.int64))
            if from_host:
                self._add_gaps(index, 0, self.layout.sizes[index], -1, -1, first, 1)

    def _state(self) -> None:
        view, sizes = self.view, self.layout.sizes
        rests = self.decision.state_out.astype(np.int8)
        self.profile[0] += sizes[view.state_tensor[rests != Rest.ON_HOST]].sum()
        hosted = view.state_tensor[rests == Rest.ON_HOST].tolist()
        rows: list[tuple[int, ...]] = []
        shortest = max(2, int(self.body * LONG_GAP))
        resting = set(view.state_tensor[view.state_resting].tolist())
        for tensor in hosted:
            rows += self._hosted(tensor, self.total if tensor in resting else shortest)
        for tensor in view.state_tensor[rests == Rest.AWAY].tolist():
            size = int(sizes[tensor])
            for before, after, changed in self._long_gaps(tensor, shortest):
                self.profile[before + 1] -= size
                self.profile[after] += size
                rows.append((tensor, 0, size, before, before, after, 0, 0 if changed else 1, PLAIN, 0))
        self.gaps.append(np.array(rows, np.int64).reshape(-1, TO_PEER + 1))

    def _hosted(self, tensor: int, shortest: int) -> list[tuple[int, ...]]:
        """Rows of a state tensor that rests on the host: it comes before its first use, leaves in gaps of more than
        `shortest` runs between two uses, and for good behind the last one. The host copy stays all the time, so what
        has not changed leaves without a copy."""
        uses, size = self._state_uses(tensor), int(self.layout.sizes[tensor])
        if not uses:
            return []
        first, final = uses[0][0], uses[-1][0]
        self.profile[first] += size
        self.profile[final + 1] -= size
        rows = [(tensor, 0, size, -1, -1, first, 1, 0, PLAIN, 0)]
        before, changed = uses[0]  # changed since the gap before
        ever = changed
        for run, changes in uses[1:]:
            if run - before > shortest:
                self.profile[before + 1] -= size
                self.profile[run] += size
                written = before if ever else -1
                rows.append((tensor, 0, size, written, before, run, 1, 1 if ever and not changed else 0, PLAIN, 0))
                changed = False
            before, changed, ever = run, changed or changes, ever or changes
        rows.append((tensor, 0, size, final if ever else -1, final, self.total, 1, 0, PLAIN, 0))
        return rows

    def _state_uses(self, tensor: int) -> list[tuple[int, bool]]:
        """(run, changes it) of all uses of a state tensor, in order."""
        runs = [
            (place, changes)
            for template, _, places in self._parts()
            for run, changes in template.state_runs.get(tensor, [])
            for place in places[:, run].tolist()
        ]
        places, changes_by_step = self.layout.step_uses.get(tensor, ([], []))
        runs += [(int(self.step_place[place]), changed) for place, changed in zip(places, changes_by_step, strict=True)]
        return sorted(runs)

    def _long_gaps(self, tensor: int, shortest: int):
        """(last run before, first run after, content changed since the gap before) of the gaps of a state tensor.

        Where its first use is far from the start of the step, the first gap begins behind the first run.
        """
        before, changed = 0, True  # nothing is on the host yet
        for run, changes in self._state_uses(tensor):
            if run - before > shortest:
                yield before, run, changed
                changed = False
            before, changed = run, changed or changes
