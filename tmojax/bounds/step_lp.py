"""The linear program of a whole step: blocks of micro-batches, state that moves once a step, links, and windows of
time.

Minimise the step time. Without a barrier the rows hold for repeated steps too; `add_barrier` adds what only a
step that starts and ends with a barrier must obey.
"""

from __future__ import annotations

import time

import numpy as np

from tmojax.bounds.block import Units, add_block
from tmojax.bounds.collective_bytes import collective_bytes, links_with_collectives
from tmojax.bounds.columns import ClassColumns, StepRows
from tmojax.bounds.critical_path import CriticalPath, critical_paths, shortest
from tmojax.bounds.device_classes import DeviceClass, device_classes, shared_links
from tmojax.bounds.encoded import resting_encode_s
from tmojax.bounds.ends import add_ends, add_last_windows, add_path
from tmojax.bounds.gaps import Gaps, find_gaps
from tmojax.bounds.highs import INFINITY, Answer, LinearModel
from tmojax.bounds.inputs import mean_first_input_s
from tmojax.bounds.least_bytes import least_bytes
from tmojax.bounds.moments import choose_moments
from tmojax.bounds.placement import add_placement
from tmojax.bounds.resting import add_rest, add_seams
from tmojax.bounds.step_bytes import step_bytes
from tmojax.bounds.synchronised import Synchronised
from tmojax.bounds.turns import add_turns
from tmojax.bounds.whole import moves_whole
from tmojax.bounds.windows import add_long_windows, add_short_windows
from tmojax.problem import Problem
from tmojax.units import format_bytes

# Programs with more columns for each class are solved faster by an interior point method, from scratch: BERT-large,
# 43,000 columns, in 6 s; the simplex method takes more than 12 s, also to go on after the rows of a barrier are added.
INTERIOR_POINT_COLUMNS = 30_000
LEAST_COMPUTE = 1e-5  # of a copy of the whole memory: less compute than that in a micro-batch is not the unit of time


class StepLp:
    """Builds and solves the linear program of a problem."""

    def __init__(self, problem: Problem, *, whole: bool = False) -> None:
        """whole: with columns for each device, also where several are equal, and for whole tensors."""
        self._problem, self._whole = problem, whole
        self._model = LinearModel()
        self._micro_batches = problem.workload.micro_batches
        specs = device_classes(problem, apart=whole)
        paths = critical_paths(problem)
        read = [(spec, _gaps_of_blocks(problem, spec), shortest([paths[device] for device in spec.devices]))
                for spec in specs]  # fmt: skip
        compute_s = max(path.total_s for _, _, path in read) / self._micro_batches
        capacity_bytes = max(spec.capacity_bytes for spec in specs)
        slowest = min(min(spec.out_bytes_per_s, spec.in_bytes_per_s) for spec, _, _ in read)
        # Beside copies that take far longer than all ops, rates in units of compute time are too small for the solver.
        copy_s = capacity_bytes / slowest if slowest > 0 else 0.0
        self.unit = Units(capacity_bytes / 10, max(compute_s, LEAST_COMPUTE * copy_s, 1e-12) / 100)
        self._longest = self._upper_limit(read)
        self._rows = StepRows(self._model, self.unit, int(self._model.add_columns(1, 0.0, self._longest, cost=1.0)[0]))
        self._least_s: list[float] | None = None
        self._has_turns = False
        self._synchronised: Synchronised | None = None
        self._has_new_kinds_of_rows = True
        # Fewer moments where there is more of everything else: a lower bound, but one that is ready in time.
        gaps = max(sum(len(gaps[0].tensor) for _, gaps, _ in read), 1)
        tight, exact = int(np.clip(50 * 1800 / gaps, 16, 80)), int(np.clip(4 * 1000 / gaps, 1, 4))
        self._read = [gaps for _, gaps, _ in read]
        self._classes = [self._add_class(*one, tight, exact) for one in read]
        self._add_links()

    def size(self) -> dict[str, int]:
        return {"device_classes": len(self._classes), "gaps": sum(len(c.gaps.tensor) for c in self._classes),
                "moments": sum(len(c.blocks[-1][1].moments.places) for c in self._classes)}  # fmt: skip

    def solve(self, time_limit_s: float, threads: int) -> Answer:
        above = INTERIOR_POINT_COLUMNS * len(self._classes) if self._has_new_kinds_of_rows else float("inf")
        self._has_new_kinds_of_rows = False
        return self._model.solve(time_limit_s=time_limit_s, threads=threads, one_of_each=True,
                                 interior_point_above=above)  # fmt: skip

    def whole_columns(self) -> np.ndarray:
        """Shares that are 0 or 1 on a device in a micro-batch (docs/bounds.md, section 3, point 12): of what that
        micro-batch wrote, where one set of columns stands for one micro-batch. Only with `whole`."""
        found = [np.zeros(0, np.int64)]
        for member in self._classes:
            for repeat, block in member.blocks if not member.gaps.may_compress else ():
                if repeat == 1:
                    found += [block.moved[moves_whole(block.gaps) & (block.moved >= 0)], block.again[block.again >= 0]]
                    found.append(block.gone)
        return np.concatenate(found)

    def solve_whole(self, time_limit_s: float, threads: int, most_nodes: int) -> Answer:
        """As `solve`, with `whole_columns` integer, which they remain."""
        self._model.make_integer(self.whole_columns())
        return self._model.solve(time_limit_s=time_limit_s, threads=threads, gap=0.0, most_nodes=most_nodes)

    def add_least_bytes(self, deadline: float, threads: int) -> None:
        """Add what each device moves at least because large tensors move as a whole (docs/bounds.md, section 3,
        point 13)."""
        for member, read in zip(self._classes, self._read, strict=True):
            for out, into in ((False, True), (True, True)):
                ways = ((out, member.moved_out), (into, member.moved_in))
                columns = [column for wanted, way in ways for column in way if wanted]
                least = least_bytes(read, member.spec.capacity_bytes, self._micro_batches, self.unit.size_bytes,
                                    (out, into), deadline - time.perf_counter(), threads)  # fmt: skip
                if least > 0:
                    self._model.add_row(least, INFINITY, *((c, 1.0) for c in columns))

    def _upper_limit(self, read: list[tuple[DeviceClass, list[Gaps], CriticalPath]]) -> float:
        """A time that the minimum cannot exceed: everything computed a few times over and everything copied one by
        one."""
        total_s = self.unit.time_s
        for spec, blocks, path in read:
            rate = min((r for r in (spec.out_bytes_per_s, spec.in_bytes_per_s) if r > 0), default=1.0)
            of_state = sum(float(gaps.size_bytes.sum() + gaps.resting_bytes.sum()) for gaps in blocks)
            moved = 2.0 * self._micro_batches * (of_state + blocks[0].input_bytes) + blocks[0].step_input_bytes
            runs = sum(float(gaps.slot_s[gaps.producer[gaps.producer >= 0]].sum() + gaps.slot_s.sum())
                       for gaps in blocks)  # fmt: skip
            total_s += path.total_s + len(spec.devices) * (self._micro_batches * runs + moved / rate)
        loads = sum(
            collective.size_bytes * load / self._problem.machine.links[link].bandwidth_bytes_per_s
            for collective in self._problem.workload.collectives
            for link, load in self._problem.machine.collective_loads(collective.kind, collective.devices).items()
        )
        return 2.0 * (total_s + loads) / self.unit.time_s

    def _add_class(self, spec: DeviceClass, read: list[Gaps], path: CriticalPath, tight: int,
                   exact: int) -> ClassColumns:  # fmt: skip
        model, count = self._model, self._micro_batches
        resting = sorted({int(tensor) for gaps in read for tensor in gaps.resting})
        shares = dict(zip(resting, map(int, model.add_columns(len(resting))), strict=True))
        coded = dict(zip(resting, map(int, model.add_columns(len(resting))), strict=True))
        # The first and the last micro-batch have their own decisions, because windows of time begin and end in them.
        repeats = [1] if count == 1 else [1, 1] if count == 2 else [1, count - 2, 1]
        columns = [[np.array([way[int(t)] for t in gaps.resting], np.int64) for way in (shares, coded)]
                   for gaps in read]  # fmt: skip
        # Of the earlier ones all have the same gaps and moments.
        moments = [choose_moments(gaps, spec.capacity_bytes, tight, exact) for gaps in read]
        blocks = tuple(
            (n, add_block(model, read[which], spec, moments[which], columns[which][0], columns[which][1], self.unit,
                          self._longest, first_block=place == 0, whole=self._whole and n == 1))
            for place, (n, which) in enumerate(zip(repeats, [0] * (len(repeats) - 1) + [-1], strict=True))
        )  # fmt: skip
        add_seams(model, blocks, self.unit.size_bytes)
        if any(block.coding >= 0 for _, block in blocks):
            # Placements are plain, so what is encoded in a step has been encoded in it.
            each_s = {int(t): float(s) for gaps in read
                      for t, s in zip(gaps.resting, resting_encode_s(gaps), strict=True)}  # fmt: skip
            model.add_row(0.0, INFINITY, *((block.coding, float(n)) for n, block in blocks if block.coding >= 0),
                          *((coded[t], -s / self.unit.time_s) for t, s in each_s.items()))  # fmt: skip
        gaps = read[-1]
        out_terms, in_terms, fixed_in, late = step_bytes(model, self.unit.size_bytes, read, blocks, shares, count)
        # No more than what everything moving all the time would take.
        most = 4.0 * (count * (sum(float(g.size_bytes.sum() + g.resting_bytes.sum()) for g in read) + gaps.input_bytes)
                      + gaps.step_input_bytes) / self.unit.size_bytes  # fmt: skip
        moved_out = model.add_columns(max(len(spec.out_links), 1), 0.0, most)
        moved_in = model.add_columns(max(len(spec.in_links), 1), 0.0, most)
        model.add_row(0.0, 0.0, (moved_out, 1.0), *((c, -v) for c, v in out_terms))
        model.add_row(fixed_in, fixed_in, (moved_in, 1.0), *((c, -v) for c, v in in_terms))
        name = self._problem.machine.devices[spec.devices[0]].name
        for label, rate, columns in (
            ("out", spec.out_bytes_per_s, (moved_out,)), ("in", spec.in_bytes_per_s, (moved_in,)),
            ("both ways", spec.joint_bytes_per_s, (moved_out, moved_in)),
        ):  # fmt: skip
            if rate < float("inf"):
                self._rows.add(f"bytes of {name} {label}", self.unit.rate(rate), 0.0, [(c, -1.0) for c in columns])
        spans = [(block.end_time, -float(n)) for n, block in blocks]
        self._rows.add(f"compute, recomputation and stalls of {name}", 1.0, 0.0, spans)
        if late >= 0 and spec.out_bytes_per_s < float("inf"):
            end = blocks[-1][1]
            place = int(np.searchsorted(end.moments.places, 2 * gaps.late_change, side="right")) - 1
            rate = self.unit.rate(spec.out_bytes_per_s)
            goes = [(late, -1.0), (int(end.out[-1]), -1.0), (int(end.out[place]), 1.0)]
            before = [*spans[:-1], (int(end.time[place]), -1.0)]
            self._rows.add(f"state of {name} that goes out after the update", rate, 0.0,
                           [*((c, v * rate) for c, v in before), *goes])  # fmt: skip
        return ClassColumns(name, spec, path, blocks, moved_out, moved_in, late)

    def _flow(self, link: int, member: ClassColumns) -> list[tuple[np.ndarray, float]]:
        """Terms: bytes of a step that all devices of a class together send over a shared link."""
        terms = []
        for direction, columns in enumerate((member.moved_out, member.moved_in)):
            for place, column in enumerate(columns):
                if users := member.spec.users.get((direction, place, link), 0):
                    terms.append((column, float(users)))
        return terms

    def _add_links(self) -> None:
        for link in sorted(shared_links(self._problem)):
            terms = [term for member in self._classes for term in self._flow(link, member)]
            spec = self._problem.machine.links[link]
            rate = self.unit.rate(spec.bandwidth_bytes_per_s)
            self._rows.add(
                f"all bytes over link {spec.name}",
                rate,
                collective_bytes(self._problem, link) / self.unit.size_bytes,
                [(c, -v) for c, v in terms],
            )

        for member in self._classes:
            for own in links_with_collectives(self._problem, member.spec.devices):
                columns = [c for wanted, way in ((own.leaves, member.moved_out), (own.enters, member.moved_in))
                           for c in (way if wanted else ())]  # fmt: skip
                self._rows.add(
                    f"all bytes over link {self._problem.machine.links[own.links[0]].name}",
                    self.unit.rate(own.bandwidth_bytes_per_s),
                    own.collective_bytes / self.unit.size_bytes,
                    [(c, -1.0) for c in columns],
                )

    def add_barrier(self) -> None:
        """Add the rows of a step that a barrier ends which the end of every device makes; see `add_windows` for the
        others."""
        self._has_new_kinds_of_rows = True
        for member in self._classes:
            add_rest(self._model, member.blocks, self.unit.size_bytes)
            add_path(self._rows, member, mean_first_input_s(self._problem, member.spec.devices))
            add_ends(self._problem, self._rows, member)
            add_placement(self._problem, self._rows, member)

    def add_windows(self, answer: Answer, time_limit_s: float, threads: int) -> int:
        """Add the windows of time that the values of `answer` violate most; their number.

        The least time of a micro-batch is solved for once, and only if short windows may matter.
        """
        added = add_long_windows(self._problem, self._rows, self._classes, answer)
        added += add_last_windows(self._problem, self._rows, self._classes, answer)
        if self._synchronised is None:
            self._synchronised = Synchronised(self._problem, self._rows, self._classes)
        added += self._synchronised.add(answer)
        if not self._has_turns and not any(member.gaps.may_compress for member in self._classes):
            self._has_turns = True
            added += add_turns(self._problem, self._rows, self._classes, answer, self._longest, time_limit_s, threads)
        if self._micro_batches == 1:
            return added
        if self._least_s is None:
            # No micro-batch needs more than those of the answer.
            hoped = [min(answer.values[block.end_time] for _, block in member.blocks) * self.unit.time_s
                     for member in self._classes]  # fmt: skip
            if not add_short_windows(self._problem, self._rows, self._classes, answer, hoped, only_count=True):
                return added
            self._least_s = [self._least_block_s(member, time_limit_s, threads) for member in self._classes]
        return added + add_short_windows(self._problem, self._rows, self._classes, answer, self._least_s)

    def _least_block_s(self, member: ClassColumns, time_limit_s: float, threads: int) -> float:
        """What is proved for the time of one micro-batch of one device that has its links for itself, seconds."""
        model, first = LinearModel(), member.blocks[0][1]
        gaps = first.gaps
        resting, coded = (model.add_columns(len(gaps.resting_bytes)) for _ in range(2))
        block = add_block(model, gaps, member.spec, first.moments, resting, coded, self.unit, self._longest,
                          first_block=False)  # fmt: skip
        end = int(model.add_columns(1, 0.0, self._longest, cost=1.0)[0])
        model.add_row(0.0, INFINITY, (end, 1.0), (block.end_time, -1.0))
        answer = model.solve(time_limit_s=time_limit_s, threads=threads, one_of_each=True)
        return max(answer.bound * self.unit.time_s, float(gaps.slot_s.sum()))

    def binding(self, answer: Answer) -> str:
        """The rows with the largest multipliers, by name."""
        return "; ".join(self._tightest(answer)) or "memory and time together"

    def _tightest(self, answer: Answer, most: int = 3) -> list[str]:
        named = [(abs(answer.multipliers[row]) * step, label) for row, (label, step) in self._rows.named.items()
                 if row < len(answer.multipliers)]  # fmt: skip
        return [
            f"{label} (weight {weight:.2f})" for weight, label in sorted(named, reverse=True)[:most] if weight > 0.01
        ]

    def explain(self, answer: Answer) -> str:
        """What one device moves and recomputes at the optimum of the program."""
        if not len(answer.values):
            return "no solution was reached; the value comes from the multipliers"
        sentences = []
        for member in self._classes:
            moved_out, moved_in = (
                float(answer.values[c].sum()) * self.unit.size_bytes for c in (member.moved_out, member.moved_in)
            )
            sentences.append(f"{member.name}: {format_bytes(moved_out)} out and {format_bytes(moved_in)} in per step")
        return "; ".join(sentences)

    def why_infeasible(self) -> str:
        """The slot and the bytes that even the emptiest memory lacks, where one slot alone shows it."""
        for member in self._classes:
            short = int(member.gaps.touched_bytes.max(initial=0)) - member.spec.capacity_bytes
            if short > 0:
                slot = int(member.gaps.touched_bytes.argmax())
                op = self._problem.workload.program(member.spec.devices[0]).ops[member.gaps.slot_op[slot]]
                return (f"device {member.name}: op {op.name!r} alone needs {short} bytes more than the capacity of "
                        f"{member.spec.capacity_bytes}")  # fmt: skip
        return "no choice of what to move and recompute fits; raise the capacity or allow more actions"


def _gaps_of_blocks(problem: Problem, spec: DeviceClass) -> list[Gaps]:
    """Of any micro-batch but the last one, if there are several, and of the last one."""
    device = spec.devices[0]
    others = [find_gaps(problem, device)] if problem.workload.micro_batches > 1 else []
    return [*others, find_gaps(problem, device, last=True)]
