"""Redundant constraints that give the CP-SAT model a bound: bytes that must have crossed a link when memory is fullest.

The argument is that of bound (c) in docs/bounds.md, as linear rows of the model: at the start of the fullest op of a
micro-batch, what is not resident must have left, and on a link copies take turns. The cumulative constraints imply the
rows; the solver does not see that by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tmojax.ilp.cp_sat_links import IN, OUT, Limit
from tmojax.ilp.cp_sat_step import StoreKind

if TYPE_CHECKING:
    from tmojax.ilp.cp_sat_device import DevicePart
    from tmojax.ilp.cp_sat_model import CpModel


@dataclass
class _Moment:
    """The start of one run. gone: (literal that the store is away by a copy, gap)."""

    part: DevicePart
    run: int
    gone: list[tuple[Any, int]]

    @property
    def start(self) -> Any:
        return self.part.run_start[self.run]


def add_cuts(joint: CpModel) -> None:
    """Rows for the fullest moment of every micro-batch and for all bytes of every link with turns."""
    count = joint.model.problem.workload.micro_batches
    by_batch: list[list[_Moment]] = [[] for _ in range(count)]
    for part in joint.devices:
        for micro_batch, run in enumerate(_fullest(part, count)):
            if run >= 0:
                by_batch[micro_batch].append(_moment(part, run))
    for limit in joint.model.network.limits:
        if limit.kind is not Limit.SLOTS or len(limit.share) == 1:
            continue
        _all_bytes(joint, limit)
        for moments in by_batch:
            if len(moments) == len(joint.devices):
                _before(joint, limit, moments)
                _behind(joint, limit, moments)


def _fullest(part: DevicePart, count: int) -> list[int]:
    """Per micro-batch the op that needs most memory if nothing leaves (-1: none)."""
    step = part.step
    load = [0] * (len(step.runs) + 1)
    for store in step.stores:
        if store.kind is not StoreKind.STATE and store.touches:
            load[store.touches[0]] += store.size_bytes
            load[store.touches[-1] + 1] -= store.size_bytes
    best, most, total = [-1] * count, [-1] * count, 0
    for index, run in enumerate(step.runs):
        total += load[index]
        if not run.collective and total + run.workspace_bytes > most[run.micro_batch]:
            best[run.micro_batch], most[run.micro_batch] = index, total + run.workspace_bytes
    return best


def _moment(part: DevicePart, run: int) -> _Moment:
    """Adds the memory row at the start of `run` and the literals of what is away there."""
    cp, step, joint = part.joint.cp, part.step, part.joint
    memory = joint.memories[part.number]
    now = part.times.runs[run] if part.times else 0
    moment, row, fixed = _Moment(part, run, []), [], step.runs[run].workspace_bytes
    for number, store in enumerate(step.stores):
        gaps, ends = memory.ends[number]
        place = next((i for i, gap in enumerate(gaps) if step.gaps[gap].before < run < step.gaps[gap].after), -1)
        inside = bool(store.touches) and store.touches[0] <= run <= store.touches[-1]
        state = store.kind is StoreKind.STATE
        if place < 0:
            if state and store.may_rest and not inside:
                row.append((part.rests[number], -store.size_bytes))
            fixed += store.size_bytes if inside or state else 0
            continue
        gap = gaps[place]
        if not step.gaps[gap].needed:
            continue
        fixed += store.size_bytes
        gone = joint.boolean(_away(part, gap, now))
        row.append((gone, -store.size_bytes))
        if state and store.may_rest:
            row.append((part.rests[number], -store.size_bytes))
        cp.add(ends[place] <= part.run_start[run]).only_enforce_if(gone)
        backs = part.back[gap]
        cp.add_bool_or([*(literal for literal, _, _ in backs), ~gone])
        for literal, start, _ in backs:
            cp.add(start >= part.run_start[run] + 1).only_enforce_if(gone, literal)
        copy = part.copies.get((gap, IN))
        if copy is None:
            continue
        if gap in part.restored:
            moved = joint.boolean(_away(part, gap, now) and gap in part.times.into if part.times else False)
            cp.add_bool_or([moved, ~gone, ~copy.present])
        else:
            moved = gone
        moment.gone.append((moved, gap))
    capacity = joint.model.capacity_bytes[part.number]
    if row:
        cp.add(sum(literal * size for literal, size in row) <= capacity - fixed)
    return moment


def _away(part: DevicePart, gap: int, now: int) -> bool:
    if part.times is None:
        return False
    found = part.joint.memories[part.number].known[part.step.gaps[gap].store]
    if gap not in found:
        return False
    earlier = [segment.end for key, segment in found.items() if key != gap and segment.start < found[gap].start]
    return found[gap].start > now and max(earlier, default=0) <= now


def _flow(joint: CpModel, device: int, way: int, gap: int) -> int:
    step = joint.model.steps[device]
    size = step.stores[step.gaps[gap].store].size_bytes
    network = joint.model.network
    return network.copy_ticks(device, way, size) - network.paths[device][way].setup_ticks


def _all_bytes(joint: CpModel, limit) -> None:
    copies = [copy for part in joint.devices for copy in part.copies.values() if (copy.device, copy.way) in limit.share]
    network = joint.model.network
    flows = [copy.present * (copy.ticks - network.paths[copy.device][copy.way].setup_ticks) for copy in copies]
    if flows:
        joint.cp.add(sum(flows) <= joint.makespan * limit.slots)


def _before(joint: CpModel, limit, moments: list[_Moment]) -> None:
    """What is away has crossed before the last device reaches its fullest op, and so have all earlier micro-batches."""
    terms, head = [], joint.horizon
    for moment in moments:
        part = moment.part
        if (part.number, OUT) not in limit.share:
            continue
        wanted = [(literal, gap) for literal, gap in moment.gone if (gap, OUT) in part.copies]
        wanted += [
            (copy.present, gap)
            for (gap, way), copy in part.copies.items()
            if way == OUT and not part.step.gaps[gap].seam and part.step.gaps[gap].after <= moment.run
        ]
        fresh = [(literal, gap) for literal, gap in wanted if gap not in part.clean_copies]
        terms += [literal * _flow(joint, part.number, OUT, gap) for literal, gap in fresh]
        head = min([head, *(part.earliest(part.step.gaps[gap].written) for _, gap in wanted)])
    if terms:
        last = joint.integer(0, joint.horizon, max(m.part.times.runs[m.run] for m in moments if m.part.times)
                             if joint.start else None)  # fmt: skip
        joint.cp.add_max_equality(last, [moment.start for moment in moments])
        joint.cp.add(sum(terms) <= (last - head) * limit.slots)
        joint.cp.add(joint.makespan >= last + min(moment.part.left(moment.run) for moment in moments))


def _behind(joint: CpModel, limit, moments: list[_Moment]) -> None:
    """What is away, and what later micro-batches bring back, crosses after the first device reaches its fullest op."""
    terms, tail = [], joint.horizon
    for moment in moments:
        part = moment.part
        if (part.number, IN) not in limit.share:
            continue
        wanted = list(moment.gone)
        wanted += [
            (copy.present, gap)
            for (gap, way), copy in part.copies.items()
            if way == IN and not part.step.gaps[gap].always and part.step.gaps[gap].before >= moment.run
        ]
        terms += [literal * _flow(joint, part.number, IN, gap) for literal, gap in wanted]
        tail = min([tail, *(part.left(part.step.gaps[gap].after) for _, gap in wanted)])
    if terms:
        first = joint.integer(0, joint.horizon, min(m.part.times.runs[m.run] for m in moments if m.part.times)
                              if joint.start else None)  # fmt: skip
        joint.cp.add_min_equality(first, [moment.start for moment in moments])
        joint.cp.add(sum(terms) <= (joint.makespan - tail - first) * limit.slots)
        joint.cp.add(first >= min(moment.part.earliest(moment.run - 1) for moment in moments))
