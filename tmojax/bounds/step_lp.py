"""The linear program of a whole step: blocks of micro-batches, state that moves once a step, links, and windows of
time.

Minimise the step time. Without a barrier the rows hold for repeated steps too; `add_barrier` adds what only a
step that starts and ends with a barrier must obey.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.bounds.block import Block, Moments, Units, add_block, choose_moments
from tmojax.bounds.collective_bytes import collective_bytes, collective_bytes_after
from tmojax.bounds.critical_path import CriticalPath, critical_path
from tmojax.bounds.device_classes import DeviceClass, device_classes, shared_links
from tmojax.bounds.gaps import Gaps, Host, find_gaps
from tmojax.bounds.highs import INFINITY, Answer, LinearModel
from tmojax.bounds.resting import shared_transfer
from tmojax.problem import Problem
from tmojax.units import format_bytes


@dataclass(frozen=True, eq=False)
class _Class:
    """One class of devices. blocks: (how many micro-batches, columns); moved_out, moved_in: columns of all bytes of a
    step, one per way of `spec.out_links` (`in_links`)."""

    spec: DeviceClass
    gaps: Gaps
    moments: Moments
    path: CriticalPath
    blocks: tuple[tuple[int, Block], ...]
    moved_out: np.ndarray
    moved_in: np.ndarray

    @property
    def members(self) -> int:
        return len(self.spec.devices)


class StepLp:
    """Builds and solves the linear program of a problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._model = LinearModel()
        # Rows that limit the step: what they are called, and the coefficient of the step.
        self._rows: dict[int, tuple[str, float]] = {}
        self._micro_batches = problem.workload.micro_batches
        specs = device_classes(problem)
        read = [(spec, find_gaps(problem, spec.devices[0]), critical_path(problem, spec.devices[0])) for spec in specs]
        compute_s = max(path.total_s for _, _, path in read) / self._micro_batches
        self.unit = Units(max(spec.capacity_bytes for spec in specs) / 10, max(compute_s, 1e-12) / 100)
        self._longest = self._upper_limit(read)
        self._step = int(self._model.add_columns(1, 0.0, self._longest, cost=1.0)[0])
        # Fewer moments where there is more of everything else: a lower bound, but one that is ready in time.
        tight = int(np.clip(50 * 1800 / max(sum(len(gaps.tensor) for _, gaps, _ in read), 1), 16, 80))
        self._classes = [self._add_class(*one, tight) for one in read]
        self._add_links()

    def size(self) -> dict[str, int]:
        return {"device_classes": len(self._classes), "gaps": sum(len(c.gaps.tensor) for c in self._classes),
                "moments": sum(len(c.moments.places) for c in self._classes)}  # fmt: skip

    def solve(self, time_limit_s: float, threads: int) -> Answer:
        return self._model.solve(time_limit_s=time_limit_s, threads=threads)

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

    def _add_class(self, spec: DeviceClass, gaps: Gaps, path: CriticalPath, tight: int) -> _Class:
        model, count = self._model, self._micro_batches
        moments = choose_moments(gaps, spec.capacity_bytes, tight)
        resting = model.add_columns(len(gaps.resting_bytes))
        # The first and the last micro-batch have their own decisions, because windows of time begin and end in them.
        repeats = [1] if count == 1 else [1, 1] if count == 2 else [1, count - 2, 1]
        blocks = tuple(
            (n, add_block(model, gaps, spec, moments, resting, self.unit, self._longest,
                          first_block=place == 0, last_block=place == len(repeats) - 1))
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
                self._add_named(f"bytes of {name} {label}", self.unit.rate(rate), 0.0, [(c, -1.0) for c in columns])
        spans = [(block.end_time, -float(n)) for n, block in blocks]
        self._add_named(f"compute, recomputation and stalls of {name}", 1.0, path.update_s / self.unit.time_s, spans)
        for label, column, rate, least_s, which in (
            ("in before", blocks[-1][1].resting.late_in, spec.in_bytes_per_s, gaps.resting_left_s, gaps.resting_late),
            ("out after", blocks[0][1].resting.late_out, spec.out_bytes_per_s, gaps.resting_changed_s,
             gaps.resting_late & gaps.resting_dirty),
        ):  # fmt: skip
            if column >= 0 and rate < float("inf"):
                crossing = (column, -1.0 / self.unit.rate(rate))
                self._add_named(f"state of {name} that comes {label} the update", 1.0,
                                float(least_s[which].min()) / self.unit.time_s, [*spans, crossing])  # fmt: skip
        return _Class(spec, gaps, moments, path, blocks, moved_out, moved_in)

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

    def _flow(self, link: int, member: _Class) -> list[tuple[np.ndarray, float]]:
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
            self._add_named(
                f"all bytes over link {spec.name}",
                rate,
                collective_bytes(self._problem, link) / self.unit.size_bytes,
                [(c, -v) for c, v in terms],
            )

    def add_barrier(self) -> None:
        """Add the rows of a step that a barrier ends which the end of every device makes; see `add_windows` for the
        others."""
        for member in self._classes:
            spans = [(block.end_time, -float(n)) for n, block in member.blocks]
            name = self._problem.machine.devices[member.spec.devices[0]].name
            self._add_named(
                f"compute and collectives of {name}", 1.0, member.path.after_last_s / self.unit.time_s, spans
            )
            for link in sorted(shared_links(self._problem)):
                self._add_ends(link, member)

    def _add_ends(self, link: int, member: _Class) -> None:
        """What all members of a class send over a shared link after a moment of the last micro-batch, and the state
        that they send out before a moment of the first one."""
        leaves, enters = (
            bool(ways) and all(link in way for way in ways) for ways in (member.spec.out_links, member.spec.in_links)
        )
        gaps, spec = member.gaps, self._problem.machine.links[link]
        rate, name = (
            self.unit.rate(spec.bandwidth_bytes_per_s),
            self._problem.machine.devices[member.spec.devices[0]].name,
        )
        (_, begin), (_, end) = member.blocks[0], member.blocks[-1]
        state = float(gaps.resting_bytes[gaps.resting_late].sum()) / self.unit.size_bytes
        ways = int(leaves and begin.resting.late_out >= 0) + int(enters and end.resting.late_in >= 0)
        earlier = [(block.end_time, -float(n)) for n, block in member.blocks[:-1]]
        after = collective_bytes_after(self._problem, link, member.spec.devices, gaps, member.moments.slots)
        every = max(1, len(after) // 20)  # neighbouring moments say nearly the same
        for j in range((len(after) - 1) % every, len(after), every):
            collective = float(after[j]) / self.unit.size_bytes
            flows: list[tuple[int, float]] = []
            late: list[tuple[int, float]] = []
            if leaves:
                flows += [(int(end.out[-1]), 1.0), (int(end.out[j]), -1.0)]
            if enters:
                flows += [(int(end.into[-1]), 1.0), (int(end.into[j]), -1.0)]
            if leaves and begin.resting.late_out >= 0:
                late.append((begin.resting.late_out, 1.0))
            if enters and end.resting.late_in >= 0:
                rest = end.resting
                late += [(rest.late_in, 1.0), (int(rest.into[-1]), 1.0), (int(rest.into[j]), -1.0)]
            if not flows:
                continue
            # What comes in last is still to be used.
            use_s = (
                0.0
                if leaves or collective
                else min([member.path.after_last_s, *gaps.resting_left_s[gaps.resting_late]])
            )
            tail = use_s / self.unit.time_s
            label = f"link {spec.name} after a moment of the last micro-batch of {name}"
            slopes = shared_transfer(member.members, ways * state, rate)
            for slope, offset in (slopes[0], slopes[-1]) if late else slopes[:1]:
                terms = [*earlier, (int(end.time[j]), -1.0), *((c, -v / rate) for c, v in flows)]
                self._add_named(
                    label, 1.0, collective / rate + offset + tail, [*terms, *((c, -slope * v) for c, v in late)]
                )
        if leaves and begin.resting.late_out >= 0:
            for time, out in zip(begin.time[::every], begin.resting.out[::every], strict=True):
                for slope, offset in shared_transfer(member.members, state, rate):
                    self._model.add_row(offset, INFINITY, (int(time), 1.0), (int(out), -slope))

    def add_windows(self, answer: Answer, most: int = 24) -> int:
        """Add, for every shared link, the `most` windows of time that the values of `answer` violate most; their
        number.

        T >= work before h + bytes that cross between h and p / bandwidth + work after p, with a slot h in the first
        block and p in the last one on every device. Classes are matched by the work that lies before h and after p.
        """
        added = 0
        for link in sorted(shared_links(self._problem)):
            sides = []
            for member in self._classes:
                ways_out, ways_in = member.spec.out_links, member.spec.in_links
                leaves = bool(ways_out) and all(link in way for way in ways_out)
                enters = bool(ways_in) and all(link in way for way in ways_in)
                if leaves or enters:
                    sides.append((member, leaves, enters))
            if sides:
                added += self._add_windows(link, sides, answer, most)
        return added

    def _add_windows(self, link: int, sides: list[tuple[_Class, bool, bool]], answer: Answer, most: int) -> int:
        spec = self._problem.machine.links[link]
        rate = self.unit.rate(spec.bandwidth_bytes_per_s)
        heads = np.unique(np.concatenate([self._before(*side) for side in sides]))
        rests = np.unique(np.concatenate([self._after(side[0]) for side in sides]))
        crossing = np.zeros((len(heads), len(rests)))
        any_fits = np.zeros(crossing.shape, bool)
        places = []
        for member, leaves, enters in sides:
            before, after = self._before(member, leaves, enters), self._after(member)
            begin = np.searchsorted(before, heads, side="left") - 1
            end = len(after) - 1 - np.searchsorted(after[::-1], rests, side="left")
            fits = (begin < len(before) - 1)[:, None] & (end >= 0)[None, :]
            if len(member.blocks) == 1:
                fits &= end[None, :] > begin[:, None]
            begin = np.minimum(begin, len(before) - 2)
            places.append((begin, end, fits))
            # The window must not end before it begins, also when nothing crosses: some device starts p no earlier
            # than h.
            starts = np.array([*self._starts(member, -1), member.path.before[-1, -1] + member.gaps.slot_s[-1]])
            any_fits |= fits & (starts[end][None, :] >= heads[:, None])
            for column in (c for wanted, c in ((leaves, "out"), (enters, "into")) if wanted):
                first, last = (answer.values[getattr(member.blocks[k][1], column)] for k in (0, -1))
                whole = (
                    0.0
                    if len(member.blocks) == 1
                    else first[-1] + sum(n * answer.values[getattr(b, column)[-1]] for n, b in member.blocks[1:-1])
                )
                part = last[end][None, :] - np.where(begin >= 0, first[begin], 0.0)[:, None] + whole
                crossing += np.where(fits, member.members * part, 0.0)
        value = np.where(any_fits, (heads[:, None] + rests[None, :]) / self.unit.time_s + crossing / rate, 0.0)
        limit = answer.values[self._step] * (1 + 1e-6)
        # Neighbouring windows say nearly the same: take the best start for every end, and of these the best in each
        # stretch.
        starts = value.argmax(axis=0)
        best = value[starts, np.arange(len(rests))]
        chosen = [
            int(part[np.argmax(best[part])]) for part in np.array_split(np.arange(len(rests)), min(most, len(rests)))
        ]
        added = 0
        for j in chosen:
            i = int(starts[j])
            if value[i, j] <= limit:
                continue
            terms: list[tuple[int, float]] = []
            for (member, leaves, enters), (begin, end, fits) in zip(sides, places, strict=True):
                for wanted, column in ((leaves, "out"), (enters, "into")):
                    if wanted and fits[i, j]:
                        terms += _crossed(member.blocks, column, int(begin[i]), int(end[j]), -float(member.members))
            label = f"link {spec.name} from {heads[i]:.4f} s after the start to {rests[j]:.4f} s before the end"
            self._add_named(label, rate, float(heads[i] + rests[j]) / self.unit.time_s * rate, terms)
            added += 1
        return added

    def _add_named(self, label: str, step: float, least: float, terms: list[tuple]) -> None:
        row = self._model.add_row(least, INFINITY, (self._step, step), *terms)
        self._rows[row] = (label, step)

    def _before(self, member: _Class, leaves: bool, enters: bool) -> np.ndarray:
        """[J + 2] least seconds before: the first byte that a block counts on this link, the moments, the end of the
        block. No byte crosses before the first, so a moment before it may count as being then."""
        gaps, before = member.gaps, member.path.before[0]
        usable = member.blocks[0][1].moved >= 0
        ends = before + gaps.slot_s
        first = float(ends[-1])
        if leaves and (pays := usable & (gaps.host == Host.COPY_OUT)).any():
            first = min(first, float(ends[gaps.made[pays]].min()))
        if enters and (inner := usable & (gaps.end < len(gaps.slot_op))).any():
            # What moves as a whole may be back before its gap begins, but not before it was made.
            since = np.where(gaps.host[inner] == Host.COPY_OUT, gaps.made[inner], gaps.start[inner])
            first = min(first, float(np.where(since >= 0, ends[since], 0.0).min()))
        return np.maximum(np.array([first, *self._starts(member, 0), ends[-1]]), first)

    @staticmethod
    def _starts(member: _Class, micro_batch: int) -> np.ndarray:
        """[J] least seconds from the start of the step to each moment of a micro-batch."""
        return member.path.before[micro_batch, member.moments.slots] + member.moments.from_slot_s

    def _after(self, member: _Class) -> np.ndarray:
        """[J + 1] least seconds from each moment of the last micro-batch, and from its end, to the end of the step."""
        return np.array(
            [*(member.path.after[-1, member.moments.slots] - member.moments.from_slot_s), member.path.after_last_s]
        )

    def binding(self, answer: Answer) -> str:
        """The rows with the largest multipliers, by name."""
        return "; ".join(self._tightest(answer)) or "memory and time together"

    def _tightest(self, answer: Answer, most: int = 3) -> list[str]:
        named = [(abs(answer.multipliers[row]) * step, label) for row, (label, step) in self._rows.items()
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
            name = self._problem.machine.devices[member.spec.devices[0]].name
            sentences.append(f"{name}: {format_bytes(moved_out)} out and {format_bytes(moved_in)} in per step")
        return "; ".join(sentences)

    def why_infeasible(self) -> str:
        """The slot and the bytes that even the emptiest memory lacks, where one slot alone shows it."""
        for member in self._classes:
            short = int(member.gaps.touched_bytes.max(initial=0)) - member.spec.capacity_bytes
            if short > 0:
                slot = int(member.gaps.touched_bytes.argmax())
                op = self._problem.workload.program(member.spec.devices[0]).ops[member.gaps.slot_op[slot]]
                name = self._problem.machine.devices[member.spec.devices[0]].name
                return (f"device {name}: op {op.name!r} alone needs {short} bytes more than the capacity of "
                        f"{member.spec.capacity_bytes}")  # fmt: skip
        return "no choice of what to move and recompute fits; raise the capacity or allow more actions"


def _crossed(blocks, which: str, begin: int, end: int, scale: float) -> list[tuple[int, float]]:
    """Terms of the bytes that cross between moment `begin` of the first block (-1: its start) and moment `end` of the
    last."""
    first, last = getattr(blocks[0][1], which), getattr(blocks[-1][1], which)
    terms = [(int(last[end]), scale)]
    if begin >= 0:
        terms.append((int(first[begin]), -scale))
    if len(blocks) > 1:
        terms.append((int(first[-1]), scale))
        terms += [(int(getattr(block, which)[-1]), scale * repeat) for repeat, block in blocks[1:-1]]
    return terms
