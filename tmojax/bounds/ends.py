"""The end of a step that a barrier ends: what is still to be done after a moment of the last micro-batch, by a device
and by a shared link (docs/bounds.md, section 3, points 6 and 9)."""

from __future__ import annotations

import numpy as np

from tmojax.bounds.collective_bytes import collective_bytes_after, links_with_collectives
from tmojax.bounds.columns import ClassColumns, StepRows
from tmojax.bounds.device_classes import shared_links
from tmojax.bounds.highs import INFINITY
from tmojax.bounds.resting import shared_transfer
from tmojax.problem import Problem


def add_path(rows: StepRows, member: ClassColumns, input_s: float) -> None:
    """The step lasts for the micro-batches up to a moment of the last one, and from there on for the longest path:
    compute, collectives, and the data that pass between them, of all devices. The same from the first moment of the
    first micro-batch on, which comes no earlier than its own longest path and inputs let it.

    input_s: before the devices can start their first slot, on average.
    """
    *others, (_, end) = member.blocks
    earlier = [(block.end_time, -float(n)) for n, block in others]
    moments = member.moments
    rest_s = [*(member.path.after[-1, moments.slots] - moments.from_slot_s), member.path.after_last_s]
    begin = int(member.blocks[0][1].time[0])
    before_s = max(float(member.path.before[0, moments.slots[0]]) + moments.from_slot_s[0],
                   input_s + moments.from_start_s[0])  # fmt: skip
    offset_s = [*moments.from_start_s, member.gaps.slot_s.sum()]
    for j, time in enumerate(end.time):
        # Where only compute lies up to the next moment, the row of that one says more.
        if j + 1 < len(rest_s) and rest_s[j] <= rest_s[j + 1] + (offset_s[j + 1] - offset_s[j]) * (1 + 1e-9):
            continue
        label = f"compute and collectives of {member.name}"
        if j + 1 < len(rest_s):
            label += f" after {offset_s[j]:.4f} s of compute of the last micro-batch"
        terms = [*earlier, (int(time), -1.0)]
        rows.add(label, 1.0, float(rest_s[j]) / rows.unit.time_s, terms)
        if before_s > moments.from_start_s[0] and int(time) != begin:
            label += ", first op late"
            rows.add(label, 1.0, float(before_s + rest_s[j]) / rows.unit.time_s, [*terms, (begin, 1.0)])


def add_ends(problem: Problem, rows: StepRows, member: ClassColumns) -> None:
    """What all members of a class send over a shared link, and each of them over its own, after a moment of the last
    micro-batch, and the state that they send out before a moment of the first one."""
    devices, slots = member.spec.devices, member.moments.slots
    for link in sorted(shared_links(problem)):
        spec = problem.machine.links[link]
        after = collective_bytes_after(problem, link, devices, member.gaps, slots)
        _add_ends(rows, spec.name, spec.bandwidth_bytes_per_s, member, *member.crosses(link), after, member.members)
    for own in links_with_collectives(problem, devices):
        after = np.mean([collective_bytes_after(problem, link, (device,), member.gaps, slots)
                         for device, link in zip(devices, own.links, strict=True)], axis=0)  # fmt: skip
        name = problem.machine.links[own.links[0]].name
        _add_ends(rows, name, own.bandwidth_bytes_per_s, member, own.leaves, own.enters, after, 1)


def _add_ends(
    rows: StepRows, name: str, bandwidth_bytes_per_s: float, member: ClassColumns, leaves: bool, enters: bool,
    after: np.ndarray, sharing: int,
) -> None:  # fmt: skip
    """sharing: how many devices of the class use the link together; after [J + 1]: bytes of collectives on it."""
    gaps = member.gaps
    rate = rows.unit.rate(bandwidth_bytes_per_s)
    (_, begin), (_, end) = member.blocks[0], member.blocks[-1]
    state = float(gaps.resting_bytes[gaps.resting_late].sum()) / rows.unit.size_bytes
    ways = int(leaves and begin.resting.late_out >= 0) + int(enters and end.resting.late_in >= 0)
    earlier = [(block.end_time, -float(n)) for n, block in member.blocks[:-1]]
    every = max(1, len(after) // 20)  # neighbouring moments say nearly the same
    for j in range((len(after) - 1) % every, len(after), every):
        collective = float(after[j]) / rows.unit.size_bytes
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
            0.0 if leaves or collective else min([member.path.after_last_s, *gaps.resting_left_s[gaps.resting_late]])
        )
        tail = use_s / rows.unit.time_s
        label = f"link {name} after a moment of the last micro-batch of {member.name}"
        slopes = shared_transfer(sharing, ways * state, rate)
        for slope, offset in (slopes[0], slopes[-1]) if late else slopes[:1]:
            terms = [*earlier, (int(end.time[j]), -1.0), *((c, -v / rate) for c, v in flows)]
            rows.add(label, 1.0, collective / rate + offset + tail, [*terms, *((c, -slope * v) for c, v in late)])
    if leaves and begin.resting.late_out >= 0:
        for time, out in zip(begin.time[::every], begin.resting.out[::every], strict=True):
            for slope, offset in shared_transfer(sharing, state, rate):
                rows.model.add_row(offset, INFINITY, (int(time), 1.0), (int(out), -slope))
