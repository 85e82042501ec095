"""The end of a step that a barrier ends: what is still to be done after a moment of the last micro-batch, by a device
and by a shared link (docs/bounds.md, section 3, points 6 and 9)."""

from __future__ import annotations

import numpy as np

from tmojax.bounds.collective_bytes import collective_bytes_after, links_with_collectives
from tmojax.bounds.columns import ClassColumns, StepRows
from tmojax.bounds.device_classes import shared_links
from tmojax.bounds.highs import INFINITY, Answer
from tmojax.bounds.resting import shared_transfer
from tmojax.bounds.windows import VIOLATED, Side, sides_of
from tmojax.problem import Problem


def add_path(rows: StepRows, member: ClassColumns, input_s: float) -> None:
    """The step lasts for the micro-batches up to a moment of the last one, and from there on for the longest path:
    compute, collectives, and the data that pass between them, of all devices. The same from the first moment of the
    first micro-batch on, which comes no earlier than its own longest path and inputs let it.

    input_s: before the devices can start their first slot, on average.
    """
    *others, (_, end) = member.blocks
    earlier = [(block.end_time, -float(n)) for n, block in others]
    first = member.blocks[0][1]
    rest_s, starts_s = member.rests_s(), member.last_starts_s()
    begin, begin_s = int(first.time[0]), float(first.moments.from_start_s[0])
    before_s = max(float(member.first_starts_s()[0]), input_s + begin_s)
    offset_s = [*end.moments.from_start_s, end.gaps.slot_s.sum()]
    compute_s = sum(n * float(block.gaps.slot_s.sum()) for n, block in others)
    for j, time in enumerate(end.time):
        if j < len(starts_s) and starts_s[j] > (compute_s + offset_s[j]) * (1 + 1e-9):
            # It waits for collectives.
            rows.model.add_row(starts_s[j] / rows.unit.time_s, INFINITY, (int(time), 1.0),
                               *((c, -v) for c, v in earlier))  # fmt: skip
        # Where only compute lies up to the next moment, the row of that one says more.
        if j + 1 < len(rest_s) and rest_s[j] <= rest_s[j + 1] + (offset_s[j + 1] - offset_s[j]) * (1 + 1e-9):
            continue
        label = f"compute and collectives of {member.name}"
        if j + 1 < len(rest_s):
            label += f" after {offset_s[j]:.4f} s of compute of the last micro-batch"
        terms = [*earlier, (int(time), -1.0)]
        rows.add(label, 1.0, float(rest_s[j]) / rows.unit.time_s, terms)
        if before_s > begin_s and int(time) != begin:
            label += ", first op late"
            rows.add(label, 1.0, float(before_s + rest_s[j]) / rows.unit.time_s, [*terms, (begin, 1.0)])


def add_ends(problem: Problem, rows: StepRows, member: ClassColumns) -> None:
    """What all members of a class send over a shared link, and each of them over its own, after a moment of the last
    micro-batch, and the state that they send out before a moment of the first one."""
    devices, slots = member.spec.devices, member.blocks[-1][1].moments.slots
    for link in sorted(shared_links(problem)):
        spec = problem.machine.links[link]
        after = collective_bytes_after(problem, link, devices, member.gaps, slots)
        _add_ends(
            rows, spec.name, spec.bandwidth_bytes_per_s, member, *member.crosses(link), after, member.sharing(link)
        )
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
    rate = rows.unit.rate(bandwidth_bytes_per_s)
    (_, first), (_, end) = member.blocks[0], member.blocks[-1]
    if not leaves and not enters:
        return
    late = first.resting.late_most
    earlier = [(block.end_time, -float(n)) for n, block in member.blocks[:-1]]
    tail_s = np.zeros(len(after)) if leaves else after_arrival_s(member)
    every = max(1, len(after) // 24)  # neighbouring moments say nearly the same
    for j in range((len(after) - 1) % every, len(after), every):
        collective = float(after[j]) / rows.unit.size_bytes
        flows = still_out(member, j) if leaves else []
        limited: list[tuple[int, float]] = []  # of these no device counts more than `most`
        most = 0.0
        if enters:
            comes = still_in(member, j)
            if end.most_in[j] < INFINITY:
                limited, most = comes, float(end.most_in[j])
            else:
                flows += comes
        if leaves and _before_late_change(member, j):
            limited, most = [*limited, (member.late, 1.0)], most + late
        tail = 0.0 if collective else float(tail_s[j]) / rows.unit.time_s
        label = f"link {name} after a moment of the last micro-batch of {member.name}"
        for slope, offset in shared_transfer(sharing, most, rate) if limited else [(0.0, 0.0)]:
            terms = [*earlier, (int(end.time[j]), -1.0), *((c, -v / rate) for c, v in flows)]
            rows.add(label, 1.0, collective / rate + offset + tail, [*terms, *((c, -slope * v) for c, v in limited)])
    if leaves and first.resting.late_out >= 0:
        for time, out in zip(first.time[::every], first.resting.out[::every], strict=True):
            for slope, offset in shared_transfer(sharing, late, rate):
                rows.model.add_row(offset, INFINITY, (int(time), 1.0), (int(out), -slope))


def after_arrival_s(member: ClassColumns) -> np.ndarray:
    """[J + 1] least seconds to the end of the step from when all has come in that comes in after a moment of the last
    micro-batch: what comes in last is still to be used; if nothing comes in, there is what is left at the moment."""
    block = member.blocks[-1][1]
    used = block.gaps.end[(block.moved >= 0) & (block.gaps.end < len(block.gaps.slot_op))]
    use_s = np.min(member.path.after_end[used], initial=member.path.after_last_s + block.gaps.slot_s[-1])
    return np.minimum(use_s, member.rests_s())


def still_out(member: ClassColumns, j: int) -> list[tuple[int, float]]:
    """Bytes that go out between moment j of the last micro-batch and its end."""
    out = member.blocks[-1][1].out
    return [(int(out[-1]), 1.0), (int(out[j]), -1.0)]


def still_in(member: ClassColumns, j: int) -> list[tuple[int, float]]:
    """The same of what comes in."""
    into = member.blocks[-1][1].into
    return [(int(into[-1]), 1.0), (int(into[j]), -1.0)]


def still_crossing(member: ClassColumns, leaves: bool, enters: bool, j: int) -> list[tuple[int, float]]:
    """Bytes that cross a link after moment j of the last micro-batch, for certain."""
    flows = [*(still_out(member, j) if leaves else ()), *(still_in(member, j) if enters else ())]
    if leaves and _before_late_change(member, j):
        flows.append((member.late, 1.0))
    return flows


def _before_late_change(member: ClassColumns, j: int) -> bool:
    """Whether what `late` counts goes out after moment j of the last micro-batch."""
    moments = member.blocks[-1][1].moments
    return (member.late >= 0 and j < len(moments.places) and int(moments.slots[j]) <= member.gaps.late_change
            and int(moments.places[j]) % 2 == 0)  # fmt: skip


def add_last_windows(
    problem: Problem, rows: StepRows, classes: list[ClassColumns], answer: Answer, most: int = 12
) -> int:
    """Add, for every shared link, the `most` windows from a moment of the last micro-batch to the end of the step which
    the values of `answer` violate most, collectives included; their number.

    Classes are matched by the least time from the start of the step to the moment.
    """
    added = 0
    for link in sorted(shared_links(problem)):
        if sides := sides_of(link, classes):
            added += _add_last(problem, rows, link, sides, answer, most)
    return added


def _add_last(problem: Problem, rows: StepRows, link: int, sides: list[Side], answer: Answer, most: int) -> int:
    spec = problem.machine.links[link]
    rate = rows.unit.rate(spec.bandwidth_bytes_per_s)
    starts = [member.last_starts_s() for member, *_ in sides]
    collectives = [collective_bytes_after(problem, link, member.spec.devices, member.gaps,
                                          member.blocks[-1][1].moments.slots) for member, *_ in sides]  # fmt: skip
    found = []
    for begin_s in np.unique(np.concatenate(starts)):
        terms: list[tuple[int, float]] = []
        size_bytes = 0.0
        for (member, leaves, enters), start_s, after in zip(sides, starts, collectives, strict=True):
            j = int(np.searchsorted(start_s, begin_s))  # the first moment that is no earlier
            size_bytes = max(size_bytes, float(after[j]))
            flows = still_crossing(member, leaves, enters, j)
            terms += [(column, -float(member.sharing(link)) * value) for column, value in flows]
        least = float(begin_s) / rows.unit.time_s * rate + size_bytes / rows.unit.size_bytes
        value = (least - sum(v * answer.values[c] for c, v in terms)) / rate
        found.append((value, float(begin_s), least, terms))
    limit = answer.values[rows.step] * VIOLATED
    chosen = [one for one in sorted(found, key=lambda one: -one[0])[:most] if one[0] > limit]
    for _, begin_s, least, terms in chosen:
        rows.add(f"link {spec.name} from {begin_s:.4f} s after the start on", rate, least, terms)
    return len(chosen)
