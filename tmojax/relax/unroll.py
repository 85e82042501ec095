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

from tmojax.problem import PLAIN, Codec, Kind, Lifetime, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import DeviceDecision, Rest
from tmojax.relax.encoded_state import encode_state, long_gaps
from tmojax.relax.fit import END, TENSOR, TO_PEER, WRITTEN, state_gaps
from tmojax.relax.template import Template
from tmojax.relax.unrolled_step import UnrolledStep

# A gap of a state tensor is worth a trip to the host if it spans more than this part of a micro-batch's runs.
LONG_GAP = 1 / 8


@dataclass(frozen=True, eq=False)
class _Layout:
    """What of a device's step does not depend on decisions. step_uses[tensor]: its places among the step ops.
    step_use_tensor, step_use_place, step_use_changes [N]: the same as arrays, and whether that op changes it (1, 0).
    step_made, step_inputs: tensors that step ops write, and inputs of the whole step or that only step ops touch;
    step_readers[tensor]: the micro-batch ops that touch one of these."""

    sizes: np.ndarray
    per_micro_batch: np.ndarray
    step_ops: np.ndarray
    slot_before: np.ndarray
    workspace: np.ndarray
    collective: np.ndarray
    step_uses: dict[int, list[int]]
    step_use_tensor: np.ndarray
    step_use_place: np.ndarray
    step_use_changes: np.ndarray
    step_made: tuple[int, ...]
    step_inputs: tuple[int, ...]
    step_readers: dict[int, list[int]]


_layouts: WeakKeyDictionary[StepView, _Layout] = WeakKeyDictionary()


def _layout(problem: Problem, view: StepView) -> _Layout:
    if view not in _layouts:
        program = problem.workload.program(view.device)
        step_ops = [index for index, op in enumerate(program.ops) if op.step_op]
        uses: dict[int, list[int]] = {}
        changes: list[tuple[int, int, bool]] = []
        for place, index in enumerate(step_ops):
            op = program.ops[index]
            for tensor in (*op.reads, *op.writes, *op.updates):
                uses.setdefault(tensor, []).append(place)
                changes.append((tensor, place, tensor in op.updates))
        made = [t for t in uses if program.producer[t] != -1 and program.ops[program.producer[t]].step_op]
        readers: dict[int, list[int]] = {}
        for index in view.slot_op.tolist():
            op = program.ops[index]
            for tensor in (*op.reads, *op.updates):
                readers.setdefault(tensor, []).append(index)
        step_long = [t for t in readers if program.tensors[t].lifetime is Lifetime.STEP]
        inputs = [t for t in program.inputs if t in step_long or (t in uses and t not in readers)]
        step_uses = np.array(changes, np.int64).reshape(-1, 3)
        _layouts[view] = _Layout(
            np.array([tensor.size_bytes for tensor in program.tensors], np.int64),
            np.array([tensor.lifetime is Lifetime.MICRO_BATCH for tensor in program.tensors], bool),
            np.array(step_ops, np.int64),
            np.searchsorted(view.slot_op, step_ops) - 1,
            np.array([op.workspace_bytes for op in program.ops], np.int64),
            np.array([bool(op.collective) for op in program.ops]),
            uses, step_uses[:, 0], step_uses[:, 1], step_uses[:, 2], tuple(made), tuple(inputs),
            {t: readers[t] for t in (*made, *inputs) if t in readers},
        )  # fmt: skip
    return _layouts[view]


def unroll(
    problem: Problem, view: StepView, decision: DeviceDecision, template: Template, last: Template | None = None,
    first: Template | None = None,
) -> UnrolledStep:  # fmt: skip
    """Unroll a template over all micro-batches of a step; `last` and `first` describe those if they differ. A single
    micro-batch is the last one."""
    unroller = _Unroller(_layout(problem, view), view, decision, template, last or template, first or template)
    return unroller.result(problem.machine.codecs[decision.codec] if decision.encodes_state else None)


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

    def result(self, codec: Codec | None) -> UnrolledStep:
        """codec: of state that is encoded."""
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
        resident = np.cumsum(self.profile)[: self.total]
        step = UnrolledStep(kind, op, micro_batch, resident + scratch, freed, gaps)
        if codec is None:
            return step
        tensors = self.view.state_tensor[self.decision.state_out == Rest.ENCODED]
        use_ptr, run, _ = self._state_uses(tensors)
        encoded = long_gaps(tensors, use_ptr, run, max(2, int(self.body * LONG_GAP)))
        start_bytes = int(layout.sizes[self.view.state_tensor[self.decision.state_out != Rest.ON_HOST]].sum())
        return encode_state(step, start_bytes, resident, encoded, layout.sizes, codec, self.decision.codec)

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
        return int(self.step_place[self.layout.step_uses[tensor][-1]])

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
        """Tensors that live once in the step; those that no op writes come from the host."""
        for tensors, from_host in ((self.layout.step_made, False), (self.layout.step_inputs, True)):
            index = np.array(tensors, np.int64)
            runs = [self._step_tensor_runs(tensor) for tensor in tensors]
            first, final = (np.array([pick(one) for one in runs], np.int64) for pick in (min, max))
            instance = np.where(self.layout.per_micro_batch[index], self.count - 1, 0)
            self._occupy(first, final, self.layout.sizes[index])
            self._free(final, index, instance)
            if from_host:
                self._add_gaps(index, instance, self.layout.sizes[index], -1, -1, first, 1)

    def _step_tensor_runs(self, tensor: int) -> list[int]:
        """The runs of the step that touch such a tensor."""
        runs = [int(self.step_place[place]) for place in self.layout.step_uses.get(tensor, ())]
        if tensor in self.layout.step_readers:
            for template, _, place in self._parts():
                touches = np.isin(template.runs, self.layout.step_readers[tensor]) & (template.coding < 0)
                runs += place[:, touches].ravel().tolist()
        return runs

    def _state(self) -> None:
        view, sizes = self.view, self.layout.sizes
        rests = self.decision.state_out.astype(np.int8)
        self.profile[0] += sizes[view.state_tensor[rests != Rest.ON_HOST]].sum()
        leaves = np.flatnonzero((rests == Rest.ON_HOST) | (rests == Rest.AWAY))
        tensors, on_host = view.state_tensor[leaves], rests[leaves] == Rest.ON_HOST
        shortest = np.where(on_host & view.state_resting[leaves], self.total, max(2, int(self.body * LONG_GAP)))
        use_ptr, run, changes = self._state_uses(tensors)
        self.gaps.append(
            state_gaps(tensors, sizes[tensors], on_host, shortest, use_ptr, run, changes, self.total, self.profile)
        )

    def _state_uses(self, tensors: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(first use of each of the state tensors [S + 1], run [N], changes it [N]) of all their uses, in order."""
        place_of = np.full(len(self.layout.sizes), -1)
        place_of[tensors] = np.arange(len(tensors))
        layout = self.layout
        uses = [(layout.step_use_tensor, self.step_place[layout.step_use_place], layout.step_use_changes)]
        for template, batches, places in self._parts():
            uses.append((
                np.tile(template.state_tensor, len(batches)), places[:, template.state_run].ravel(),
                np.tile(template.state_changes, len(batches)),
            ))  # fmt: skip
        tensor, run, changes = (np.concatenate(column) for column in zip(*uses, strict=True))
        place = place_of[tensor]
        order = np.lexsort((changes, run, place))
        order = order[np.searchsorted(place[order], 0) :]
        return np.searchsorted(place[order], np.arange(len(tensors) + 1)), run[order], changes[order]
