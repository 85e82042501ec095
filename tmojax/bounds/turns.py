"""What devices wait for each other because each of them sends at least so much over a link that they share
(docs/bounds.md, section 3, point 14)."""

from __future__ import annotations

import numpy as np

from tmojax.bounds.block import Block, Units, add_block
from tmojax.bounds.collective_bytes import collective_bytes_after
from tmojax.bounds.columns import ClassColumns, StepRows
from tmojax.bounds.device_classes import shared_links
from tmojax.bounds.ends import after_arrival_s
from tmojax.bounds.highs import INFINITY, Answer, LinearModel, SolverStatus
from tmojax.problem import Problem

MOMENTS = 4  # looked at in the first and in the last micro-batch: each takes a linear program of its own
LEAST_SHARE = 1e-4  # of the step time: devices that wait for less are not worth a row


def add_turns(
    problem: Problem, rows: StepRows, classes: list[ClassColumns], answer: Answer, longest: float,
    time_limit_s: float, threads: int,
) -> int:  # fmt: skip
    """Add rows for the devices that come second, third, ... to a moment of the first micro-batch, and for those that
    have passed a moment of the last one before others; their number.

    answer: of the program so far. longest: units of time, more than the step can take when the objective is at its
    minimum. time_limit_s: for each linear program of one device.
    """
    added = 0
    for link in sorted(shared_links(problem)):
        for member in classes:
            if member.sharing(link) > 1 and any(member.crosses(link)):
                for last in (False, True):
                    added += _add(problem, rows, link, member, answer, longest, last, time_limit_s, threads)
    return added


def _add(
    problem: Problem, rows: StepRows, link: int, member: ClassColumns, answer: Answer, longest: float, last: bool,
    time_limit_s: float, threads: int,
) -> int:  # fmt: skip
    spec = problem.machine.links[link]
    rate = rows.unit.rate(spec.bandwidth_bytes_per_s)
    block = member.blocks[-1 if last else 0][1]
    others = (member.sharing(link) - 1) / 2
    # Other micro-batches take at least what they compute, so that so much less is left for this one.
    elsewhere = sum(n * float(other.gaps.slot_s.sum()) for n, other in member.blocks if other is not block)
    elsewhere /= rows.unit.time_s
    step = float(answer.values[rows.step])
    added = 0
    for j in _moments(block):
        alone = _least_bytes(member, block, j, member.crosses(link), last, step - elsewhere, rows.unit, longest,
                             time_limit_s, threads)  # fmt: skip
        if alone is None or alone[0] * others / rate < LEAST_SHARE * step:
            continue
        least, slope = alone  # bytes of a device: least - slope * (T - step)
        wait, per_step = (least + slope * step) * others / rate, slope * others / rate
        sent = [(column, -value / rate) for column, value in _sent(block, j, *member.crosses(link), last)]
        if last:
            after = collective_bytes_after(problem, link, member.spec.devices, member.gaps, block.moments.slots)
            if not after[j] and not member.crosses(link)[0]:
                wait += float(after_arrival_s(member)[j]) / rows.unit.time_s
            wait += float(after[j]) / rows.unit.size_bytes / rate
            earlier = [(other.end_time, -float(n)) for n, other in member.blocks[:-1]]
            label = f"link {spec.name}, one after another after a moment of the last micro-batch of {member.name}"
            rows.add(label, 1.0 + per_step, wait, [*earlier, (int(block.time[j]), -1.0), *sent])
        else:
            before = member.first_byte_s(block, *member.crosses(link))
            first_s = float(member.first_starts_s()[0] - block.moments.from_start_s[0]) + before if before else 0.0
            label = f"link {spec.name}, one after another before a moment of the first micro-batch of {member.name}"
            terms = [(int(block.time[j]), 1.0), *sent]
            rows.add(label, per_step, wait + max(first_s, 0.0) / rows.unit.time_s, terms)
        added += 1
    return added


def _moments(block: Block) -> list[int]:
    """Moments at which most must be away, each the worst of a stretch."""
    need = block.gaps.needed_bytes()[block.moments.slots]
    tight = np.flatnonzero(block.moments.tight)
    parts = np.array_split(tight, min(MOMENTS, len(tight))) if len(tight) else []
    return [int(part[np.argmax(need[part])]) for part in parts]


def _sent(block: Block, j: int, leaves: bool, enters: bool, last: bool) -> list[tuple[int, float]]:
    """Terms of what crosses the link from the start of the block to moment j, or (last) from there to its end."""
    flows = [columns for wanted, columns in ((leaves, block.out), (enters, block.into)) if wanted]
    if last:
        return [term for columns in flows for term in ((int(columns[-1]), 1.0), (int(columns[j]), -1.0))]
    return [(int(columns[j]), 1.0) for columns in flows]


def _least_bytes(
    member: ClassColumns, like: Block, j: int, crosses: tuple[bool, bool], last: bool, length: float, unit: Units,
    longest: float, time_limit_s: float, threads: int,
) -> tuple[float, float] | None:  # fmt: skip
    """(bytes, slope): what one device, which has its links for itself, sends at least in a micro-batch of `length`
    units of time; in one that is longer by d, less by no more than slope * d. None where nothing was proved."""
    model = LinearModel()
    resting, coded = (model.add_columns(len(like.gaps.resting_bytes)) for _ in range(2))
    block = add_block(model, like.gaps, member.spec, like.moments, resting, coded, unit, longest,
                      first_block=like is member.blocks[0][1])  # fmt: skip
    sent = _sent(block, j, *crosses, last)
    total = int(model.add_columns(1, 0.0, sum(model.most(column) for column, _ in sent), cost=1.0)[0])
    model.add_row(0.0, INFINITY, (total, 1.0), *((column, -value) for column, value in sent))
    fits = model.add_row(-INFINITY, length, (block.end_time, 1.0))
    answer = model.solve(time_limit_s=time_limit_s, threads=threads, one_of_each=True)
    if answer.status is not SolverStatus.OPTIMAL:
        return None
    # The multipliers prove a value for every right side of the row.
    return answer.bound, max(0.0, -float(answer.multipliers[fits]))
