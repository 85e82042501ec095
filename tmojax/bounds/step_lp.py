"""The linear program of a whole step: blocks of micro-batches, state that moves once a step, links, and windows of
time.

Minimise the step time. Without a barrier the rows hold for repeated steps too; `add_barrier` adds what only a
step that starts and ends with a barrier must obey.
"""

from __future__ import annotations

import numpy as np

from tmojax.bounds.block import Units, add_block, choose_moments
from tmojax.bounds.collective_bytes import collective_bytes, links_with_collectives
from tmojax.bounds.columns import ClassColumns, StepRows
from tmojax.bounds.critical_path import CriticalPath, critical_paths, shortest
from tmojax.bounds.device_classes import DeviceClass, device_classes, shared_links
from tmojax.bounds.ends import add_ends, add_path
from tmojax.bounds.gaps import Gaps, Host, find_gaps
from tmojax.bounds.highs import INFINITY, Answer, LinearModel
from tmojax.bounds.inputs import mean_first_input_s
from tmojax.bounds.whole import written_inside
from tmojax.bounds.windows import add_long_windows, add_short_windows
from tmojax.problem import Problem
from tmojax.units import format_bytes

# Programs with more columns for each class are solved faster by an interior point method, from scratch: BERT-large,
# 43,000 columns, in 6 s; the simplex method takes more than 12 s, also to go on after the rows of a barrier are added.
INTERIOR_POINT_COLUMNS = 30_000


class StepLp:
    """Builds and solves the linear program of a problem."""

    def __init__(self, problem: Problem, *, whole: bool = False) -> None:
        """whole: with columns for each device, also where several are equal, and for whole tensors."""
        self._problem, self._whole = problem, whole
        self._model = LinearModel()
        self._micro_batches = problem.workload.micro_batches
        specs = device_classes(problem, apart=whole)
        paths = critical_paths(problem)
        read = [(spec, find_gaps(problem, spec.devices[0]), shortest([paths[device] for device in spec.devices]))
                for spec in specs]  # fmt: skip
        compute_s = max(path.total_s for _, _, path in read) / self._micro_batches
        self.unit = Units(max(spec.capacity_bytes for spec in specs) / 10, max(compute_s, 1e-12) / 100)
        self._longest = self._upper_limit(read)
        self._rows = StepRows(self._model, self.unit, int(self._model.add_columns(1, 0.0, self._longest, cost=1.0)[0]))
        self._least_s: list[float] | None = None
        self._has_new_kinds_of_rows = True
        # Fewer moments where there is more of everything else: a lower bound, but one that is ready in time.
        tight = int(np.clip(50 * 1800 / max(sum(len(gaps.tensor) for _, gaps, _ in read), 1), 16, 80))
        self._classes = [self._add_class(*one, tight) for one in read]
        self._add_links()

    def size(self) -> dict[str, int]:
        return {"device_classes": len(self._classes), "gaps": sum(len(c.gaps.tensor) for c in self._classes),
                "moments": sum(len(c.moments.places) for c in self._classes)}  # fmt: skip

    def solve(self, time_limit_s: float, threads: int) -> Answer:
        afresh = self._has_new_kinds_of_rows and self._model.columns > INTERIOR_POINT_COLUMNS * len(self._classes)
        self._has_new_kinds_of_rows = False
        return self._model.solve(time_limit_s=time_limit_s, threads=threads, interior_point=afresh)

    def whole_columns(self) -> np.ndarray:
        """Shares that are 0 or 1 on a device in a micro-batch (docs/bounds.md, section 3, point 12): of what that
        micro-batch wrote, where one set of columns stands for one micro-batch. Only with `whole`."""
        found = [np.zeros(0, np.int64)]
        for member in self._classes:
            inner = written_inside(member.gaps)
            for repeat, block in member.blocks if not member.gaps.may_compress else ():
                if repeat == 1:
                    found += [columns[inner & (columns >= 0)] for columns in (block.moved, block.again)]
                    found.append(block.gone)
        return np.concatenate(found)

    def solve_whole(self, time_limit_s: float, threads: int, most_nodes: int) -> Answer:
        """As `solve`, with `whole_columns` integer, which they remain."""
        self._model.make_integer(self.whole_columns())
        return self._model.solve(time_limit_s=time_limit_s, threads=threads, gap=0.0, most_nodes=most_nodes)

    def _upper_limit(self, read: list[tuple[DeviceClass, Gaps, CriticalPath]]) -> float:
        """A time that the minimum cannot exceed: everything computed a few times over and everything copied one by
        one."""
        total_s = self.unit.time_s
        for spec, gaps, path in read:
            rate = min((r for r in (spec.out_bytes_per_s, spec.in_bytes_per_s) if r > 0), default=1.0)
            moved = 2.0 * self._micro_batches * (float(gaps.size_bytes.sum()) + gaps.input_bytes) + 2.0 * float(
                gaps.resting_bytes.sum()
            )
            runs = float(gaps.slot_s[gaps.producer[gaps.producer >= 0]].sum()) + float(gaps.slot_s.sum())
            total_s += path.total_s + len(spec.devices) * (
                self._micro_batches * runs + (moved + gaps.step_input_bytes) / rate
            )
        loads = sum(
            collective.size_bytes * load / self._problem.machine.links[link].bandwidth_bytes_per_s
            for collective in self._problem.workload.collectives
            for link, load in self._problem.machine.collective_loads(collective.kind, collective.devices).items()
        )
        return 2.0 * (total_s + loads) / self.unit.time_s

    def _add_class(self, spec: DeviceClass, gaps: Gaps, path: CriticalPath, tight: int) -> ClassColumns:
        model, count = self._model, self._micro_batches
        moments = choose_moments(gaps, spec.capacity_bytes, tight)
        resting = model.add_columns(len(gaps.resting_bytes))
        # The first and the last micro-batch have their own decisions, because windows of time begin and end in them.
        repeats = [1] if count == 1 else [1, 1] if count == 2 else [1, count - 2, 1]
        blocks = tuple(
            (n, add_block(model, gaps, spec, moments, resting, self.unit, self._longest,
                          first_block=place == 0, last_block=place == len(repeats) - 1,
                          whole=self._whole and n == 1))
            for place, n in enumerate(repeats)
        )  # fmt: skip
        out_terms, in_terms, fixed_in = self._step_bytes(gaps, blocks, resting)
        # No more than what everything moving all the time would take.
        most = 4.0 * (count * (float(gaps.size_bytes.sum()) + gaps.input_bytes) + float(gaps.resting_bytes.sum())
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
        self._rows.add(f"compute, recomputation and stalls of {name}", 1.0, path.update_s / self.unit.time_s, spans)
        for label, column, rate, least_s, which in (
            ("in before", blocks[-1][1].resting.late_in, spec.in_bytes_per_s, gaps.resting_left_s, gaps.resting_late),
            ("out after", blocks[0][1].resting.late_out, spec.out_bytes_per_s, gaps.resting_changed_s,
             gaps.resting_late & gaps.resting_dirty),
        ):  # fmt: skip
            if column >= 0 and rate < float("inf"):
                crossing = (column, -1.0 / self.unit.rate(rate))
                self._rows.add(f"state of {name} that comes {label} the update", 1.0,
                                float(least_s[which].min()) / self.unit.time_s, [*spans, crossing])  # fmt: skip
        return ClassColumns(name, spec, gaps, moments, path, blocks, moved_out, moved_in)

    def _step_bytes(self, gaps: Gaps, blocks, resting):
        """Terms of the bytes that one device moves out and in per step, and what it moves in whatever is decided."""
        model = self._model
        size = gaps.size_bytes / self.unit.size_bytes
        rest = gaps.resting_bytes / self.unit.size_bytes
        out_terms = [(resting[gaps.resting_dirty], rest[gaps.resting_dirty])]
        in_terms = [(resting, rest)]
        for repeat, block in blocks:
            out_terms.append((block.out[-1:], np.array([repeat])))
            in_terms.append((block.into[-1:], np.array([repeat])))
            head = (block.moved >= 0) & (gaps.host == Host.PER_MICRO_BATCH) & (gaps.start < 0)
            out_terms.append((block.moved[head], repeat * size[head]))
        state = sorted(set(gaps.tensor[(gaps.host >= Host.PER_STEP)].tolist()) | set(
            gaps.tensor[gaps.end >= len(gaps.slot_op)].tolist()))  # fmt: skip
        for tensor in state:
            own = np.flatnonzero(gaps.tensor == tensor)
            used = [(n, b, i) for n, b in blocks for i in own if b.moved[i] >= 0]
            if not used:
                continue
            one = size[own[0]]
            once = [(b.moved[i], n) for n, b, i in used if gaps.host[i] == Host.PER_STEP]
            if once:
                column = int(model.add_columns(1)[0])
                for moved, _ in once:
                    model.add_row(0.0, INFINITY, (column, 1.0), (moved, -1.0))
                out_terms.append((np.array([column]), np.array([one])))
            tails = [(b.moved[i], n) for n, b, i in used if gaps.end[i] >= len(gaps.slot_op)]
            heads = [(b.moved[i], n) for n, b, i in used if gaps.start[i] < 0]
            if tails:
                # Absences from a last use to the first use of the next micro-batch: counted at the head, so only the
                # excess is new.
                excess = int(model.add_columns(1, 0.0, float(self._micro_batches))[0])
                model.add_row(0.0, INFINITY, (excess, 1.0), *((c, -float(n)) for c, n in tails),
                              *((c, float(n)) for c, n in heads))  # fmt: skip
                in_terms.append((np.array([excess]), np.array([one])))
                if any(gaps.host[i] == Host.PER_MICRO_BATCH for i in own):
                    out_terms.append((np.array([excess]), np.array([one])))
        fixed_in = (self._micro_batches * gaps.input_bytes + gaps.step_input_bytes) / self.unit.size_bytes
        return out_terms, in_terms, fixed_in

    def _flow(self, link: int, member: ClassColumns) -> list[tuple[np.ndarray, float]]:
        """Terms: bytes of a step that all devices of a class together send over a shared link."""
        terms = []
        for columns, ways in ((member.moved_out, member.spec.out_links), (member.moved_in, member.spec.in_links)):
            for column, way in zip(columns, ways, strict=False):
                if link in way:
                    terms.append((column, float(member.members)))
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
            add_path(self._rows, member, mean_first_input_s(self._problem, member.spec.devices))
            add_ends(self._problem, self._rows, member)

    def add_windows(self, answer: Answer, time_limit_s: float, threads: int) -> int:
        """Add the windows of time that the values of `answer` violate most; their number.

        The least time of a micro-batch is solved for once, and only if short windows may matter.
        """
        added = add_long_windows(self._problem, self._rows, self._classes, answer)
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
        model, gaps = LinearModel(), member.gaps
        resting = model.add_columns(len(gaps.resting_bytes))
        block = add_block(model, gaps, member.spec, member.moments, resting, self.unit, self._longest,
                          first_block=False, last_block=False)  # fmt: skip
        end = int(model.add_columns(1, 0.0, self._longest, cost=1.0)[0])
        model.add_row(0.0, INFINITY, (end, 1.0), (block.end_time, -1.0))
        answer = model.solve(time_limit_s=time_limit_s, threads=threads)
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
