"""State for which a device has no room between two steps: its new version leaves behind the update, plain
(docs/bounds.md, section 3, point 15)."""

from __future__ import annotations

import numpy as np

from tmojax.bounds.block import Block
from tmojax.bounds.columns import ClassColumns, StepRows
from tmojax.bounds.critical_path import least_until
from tmojax.bounds.device_classes import shared_links
from tmojax.problem import Lifetime, Problem


def add_placement(problem: Problem, rows: StepRows, member: ClassColumns) -> None:
    """Rows for what goes out of each member of a class, over every link that carries all of it, after the update of
    state that has to be placed elsewhere."""
    slots, left_bytes = leaving(problem, member)
    if not len(slots):
        return
    out_bytes_per_s = member.spec.out_bytes_per_s
    if 0 < out_bytes_per_s < float("inf"):
        _add(problem, rows, f"state of {member.name} placed elsewhere", out_bytes_per_s, 1, member, slots, left_bytes)
    for link in sorted(shared_links(problem)):
        if member.crosses(link)[0]:
            spec = problem.machine.links[link]
            label = f"state of {member.name} placed elsewhere, over link {spec.name}"
            _add(problem, rows, label, spec.bandwidth_bytes_per_s, member.sharing(link), member, slots, left_bytes)


def leaving(problem: Problem, member: ClassColumns) -> tuple[np.ndarray, np.ndarray]:
    """(slots of the last micro-batch in which state changes for the last time, bytes of each device that cross out
    after the end of that slot at least)."""
    program = problem.workload.program(member.spec.devices[0])
    slot_of = {int(op): slot for slot, op in enumerate(member.gaps.slot_op)}
    changed: dict[int, int] = {}
    for index, op in enumerate(program.ops):
        for tensor in (*op.writes, *op.updates):
            spec = program.tensors[tensor]
            if spec.lifetime is Lifetime.STATE and not spec.alias_group:
                # A collective changes it later than the slot before.
                changed[tensor] = slot_of.get(index, changed.get(tensor, -1))
    by_slot: dict[int, int] = {}
    for tensor, slot in changed.items():
        by_slot[slot] = by_slot.get(slot, 0) + program.tensors[tensor].size_bytes
    slots = np.array(sorted(by_slot), np.int64)
    size = np.array([by_slot[int(slot)] for slot in slots], np.int64)
    before = np.cumsum(size) - size  # may leave earlier
    left = int(size.sum()) - member.spec.capacity_bytes - before
    return slots[(left > 0) & (slots >= 0)], left[(left > 0) & (slots >= 0)]


def _add(
    problem: Problem, rows: StepRows, label: str, bytes_per_s: float, sharing: int, member: ClassColumns,
    slots: np.ndarray, left_bytes: np.ndarray,
) -> None:  # fmt: skip
    block, unit_s = member.blocks[-1][1], rows.unit.time_s
    ends_s = member.path.before_end[slots] + block.gaps.slot_s[slots]
    earlier = [(other.end_time, -float(n)) for n, other in member.blocks[:-1]]
    at = int(np.argmax(ends_s + sharing * left_bytes / bytes_per_s))
    slot, one_s = int(slots[at]), float(left_bytes[at]) / bytes_per_s
    # All devices send after the first of them can have updated it ...
    rows.add(label, 1.0, (float(ends_s[at]) + sharing * one_s) / unit_s, [])
    # ... and each after its own update, in any order.
    until_s = least_until(problem, member.spec.devices, int(block.gaps.slot_op[slot]))
    moments = block.moments
    passed_s = until_s[moments.slots] - moments.from_slot_s
    for j in np.flatnonzero(moments.places <= 2 * slot + 1).tolist():
        if j + 1 < len(passed_s) and passed_s[j] - passed_s[j + 1] <= _compute_s(block, j) * (1 + 1e-9):
            continue  # the row of the next moment says more
        least = (float(passed_s[j]) + (sharing + 1) / 2 * one_s) / unit_s
        rows.add(label, 1.0, least, [*earlier, (int(block.time[j]), -1.0)])


def _compute_s(block: Block, j: int) -> float:
    """Compute from moment j to the next."""
    return float(block.moments.from_start_s[j + 1] - block.moments.from_start_s[j])
