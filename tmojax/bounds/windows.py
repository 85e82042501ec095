"""Windows of time on a shared link (docs/bounds.md, section 3, points 10 and 11).

All that crosses a link between moment h and moment p on every device crosses between the earliest h and the latest p.
A long window begins in the first micro-batch and ends in the last one; a short one begins and ends in the same. What
devices do at different times must have been delayed before, or be waited for after.
"""

from __future__ import annotations

import numpy as np

from tmojax.bounds.columns import ClassColumns, StepRows
from tmojax.bounds.device_classes import shared_links
from tmojax.bounds.highs import Answer
from tmojax.problem import Problem

VIOLATED = 1 + 1e-6  # times the step time of the last answer

Side = tuple[ClassColumns, bool, bool]  # a class, and whether what goes out, and what comes in, crosses the link


def sides_of(link: int, classes: list[ClassColumns]) -> list[Side]:
    """The classes whose copies certainly cross a link."""
    found = [(member, *member.crosses(link)) for member in classes]
    return [side for side in found if side[1] or side[2]]


def add_long_windows(
    problem: Problem, rows: StepRows, classes: list[ClassColumns], answer: Answer, most: int = 24
) -> int:
    """Add, for every shared link, the `most` long windows that the values of `answer` violate most; their number.

    T >= work before h + bytes that cross between h and p / bandwidth + work after p, with a slot h in the first
    block and p in the last one on every device. Classes are matched by the work that lies before h and after p.
    """
    added = 0
    for link in sorted(shared_links(problem)):
        if sides := sides_of(link, classes):
            added += _add_long(problem, rows, link, sides, answer, most)
    return added


def _add_long(problem: Problem, rows: StepRows, link: int, sides: list[Side], answer: Answer, most: int) -> int:
    spec = problem.machine.links[link]
    rate = rows.unit.rate(spec.bandwidth_bytes_per_s)
    heads = np.unique(np.concatenate([_before(*side) for side in sides]))
    rests = np.unique(np.concatenate([side[0].rests_s() for side in sides]))
    crossing = np.zeros((len(heads), len(rests)))
    any_fits = np.zeros(crossing.shape, bool)
    places = []
    for member, leaves, enters in sides:
        before, after = _before(member, leaves, enters), member.rests_s()
        begin = np.searchsorted(before, heads, side="left") - 1
        end = len(after) - 1 - np.searchsorted(after[::-1], rests, side="left")
        fits = (begin < len(before) - 1)[:, None] & (end >= 0)[None, :]
        if len(member.blocks) == 1:
            fits &= end[None, :] > begin[:, None]
        begin = np.minimum(begin, len(before) - 2)
        places.append((begin, end, fits))
        # The window must not end before it begins, also when nothing crosses: some device starts p no earlier
        # than h.
        starts = np.append(member.last_starts_s(), member.path.before_end[-1] + member.gaps.slot_s[-1])
        any_fits |= fits & (starts[end][None, :] >= heads[:, None])
        for column in (c for wanted, c in ((leaves, "out"), (enters, "into")) if wanted):
            first, last = (answer.values[getattr(member.blocks[k][1], column)] for k in (0, -1))
            whole = (
                0.0
                if len(member.blocks) == 1
                else first[-1] + sum(n * answer.values[getattr(b, column)[-1]] for n, b in member.blocks[1:-1])
            )
            part = last[end][None, :] - np.where(begin >= 0, first[begin], 0.0)[:, None] + whole
            crossing += np.where(fits, member.sharing(link) * part, 0.0)
    value = np.where(any_fits, (heads[:, None] + rests[None, :]) / rows.unit.time_s + crossing / rate, 0.0)
    limit = answer.values[rows.step] * VIOLATED
    added = 0
    for i, j in _worst(value, limit, most):
        terms: list[tuple[int, float]] = []
        for (member, leaves, enters), (begin, end, fits) in zip(sides, places, strict=True):
            for wanted, column in ((leaves, "out"), (enters, "into")):
                if wanted and fits[i, j]:
                    terms += _crossed(member.blocks, column, int(begin[i]), int(end[j]), -float(member.sharing(link)))
        label = f"link {spec.name} from {heads[i]:.4f} s after the start to {rests[j]:.4f} s before the end"
        rows.add(label, rate, float(heads[i] + rests[j]) / rows.unit.time_s * rate, terms)
        added += 1
    return added


def _worst(value: np.ndarray, limit: float, most: int) -> list[tuple[int, int]]:
    """Windows above `limit`. Neighbouring windows say nearly the same: the best start for every end, and of these
    the best in each of `most` stretches."""
    starts = value.argmax(axis=0)
    best = value[starts, np.arange(value.shape[1])]
    parts = np.array_split(np.arange(value.shape[1]), min(most, value.shape[1]))
    chosen = [int(part[np.argmax(best[part])]) for part in parts]
    return [(int(starts[j]), j) for j in chosen if best[j] > limit]


def _before(member: ClassColumns, leaves: bool, enters: bool) -> np.ndarray:
    """[J + 2] least seconds before: the first byte that a block counts on this link, the moments, the end of the
    block. No byte crosses before the first, so a moment before it may count as being then."""
    block, path = member.blocks[0][1], member.path
    before = path.before_end if len(member.blocks) == 1 else path.before[0]
    first = before[0] + member.first_byte_s(block, leaves, enters)
    return np.maximum(np.array([first, *member.first_starts_s(), before[-1] + block.gaps.slot_s[-1]]), first)


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


def add_short_windows(
    problem: Problem,
    rows: StepRows,
    classes: list[ClassColumns],
    answer: Answer,
    least_s: list[float],
    most: int = 12,
    *,
    only_count: bool = False,
) -> int:
    """Add, for every shared link and block, the `most` short windows that the values of `answer` violate most; their
    number. least_s: of every class, the least time of a micro-batch of one device that has its links for itself.

    Classes are matched by the share of the compute of a micro-batch that lies before h and p. only_count: add nothing.
    """
    added, count = 0, problem.workload.micro_batches
    for link in sorted(shared_links(problem)):
        first = 0
        for place, (repeat, _) in enumerate(classes[0].blocks):
            micro_batches = range(first, first + repeat)
            first += repeat
            views = [_ShortView(member, place, link, least, micro_batches, count)
                     for member, least in zip(classes, least_s, strict=True) if any(member.crosses(link))]  # fmt: skip
            views = [view for view in views if view.share[0] < 1]  # of others nothing crosses within a micro-batch
            if views:
                added += _add_short(problem, rows, link, views, answer, most, only_count)
    return added


def _add_short(problem: Problem, rows: StepRows, link: int, views: list[_ShortView], answer: Answer, most: int,
               only_count: bool) -> int:  # fmt: skip
    spec = problem.machine.links[link]
    rate = rows.unit.rate(spec.bandwidth_bytes_per_s)
    shares = np.unique(np.concatenate([view.share for view in views]))
    begin, end = [view.begin(shares) for view in views], [view.end(shares) for view in views]
    before = np.min([view.before[:, at] for view, at in zip(views, begin, strict=True)], axis=0).mean(axis=0)
    after = np.min([view.after[:, at] for view, at in zip(views, end, strict=True)], axis=0).mean(axis=0)
    value = (before[:, None] + after[None, :]) / rows.unit.time_s
    for view, head, tail in zip(views, begin, end, strict=True):
        crossed = view.crossed(answer)
        value += view.members * (crossed[tail][None, :] - crossed[head][:, None]) / rate
    value[shares[:, None] >= shares[None, :]] = 0.0
    chosen = _worst(value, answer.values[rows.step] * VIOLATED, most)
    for i, j in chosen if not only_count else []:
        terms = [term for view, head, tail in zip(views, begin, end, strict=True)
                 for term in view.terms(int(head[i]), int(tail[j]))]  # fmt: skip
        label = f"link {spec.name} in {shares[i]:.0%} to {shares[j]:.0%} of micro-batch {views[0].number}"
        rows.add(label, rate, float(before[i] + after[j]) / rows.unit.time_s * rate, terms)
    return len(chosen)


class _ShortView:
    """What a class has in one block: places are the first byte that may cross, the moments, and the end.

    share [J + 2]: of the compute of a micro-batch that lies before; before, after [K', J + 2]: least seconds from the
    start of the step and to its end, for each of the micro-batches that the block stands for.
    """

    def __init__(self, member: ClassColumns, place: int, link: int, least_s: float,
                 micro_batches: range, count: int) -> None:  # fmt: skip
        block, path = member.blocks[place][1], member.path
        moments, slot_s = block.moments, block.gaps.slot_s
        last = place == len(member.blocks) - 1
        self.members = member.sharing(link)
        leaves, enters = member.crosses(link)
        self.number = "each" if len(micro_batches) > 1 else str(micro_batches[0])
        self._columns = [c for wanted, c in ((leaves, block.out), (enters, block.into)) if wanted]
        total_s = float(slot_s.sum())
        first_s = member.first_byte_s(block, leaves, enters)
        at = np.array([first_s, *moments.from_start_s, total_s])
        # Nothing crosses before the first byte, so a window that begins earlier may count as beginning then.
        self.share = np.round(np.maximum(at, first_s) / (total_s or 1.0), 12)
        slots, inside = moments.slots, moments.from_slot_s
        before, after = [], []
        begin_s = path.before[0, 0]  # no earlier does the first micro-batch begin
        step_ops_s = float(member.gaps.slot_s[member.gaps.step_slot].sum())
        for k in micro_batches:
            start_s, rest_s = (path.before_end, path.after_end) if last else (path.before[k], path.after[k])
            starts = [start_s[0] + first_s, *(start_s[slots] + inside), start_s[-1] + slot_s[-1]]
            rests = path.after_last_s if last else path.after[k + 1, 0] if k + 2 < count else path.after_end[0]
            ends = [rests, *(rest_s[slots] - inside), rests]
            # The step ops are part of the last micro-batch.
            later_s = 0.0 if last else (count - 1 - k) * least_s + step_ops_s
            before.append(np.maximum(np.maximum(starts, starts[0]), begin_s + k * least_s + np.maximum(at, first_s)))
            after.append(np.maximum(ends, total_s - at + later_s + path.after_last_s))
        self.before, self.after = np.array(before), np.array(after)

    def begin(self, shares: np.ndarray) -> np.ndarray:
        """Places to begin a window at: of those with the largest share that is not above the one wanted, the first,
        since nothing is computed up to the others."""
        below = np.searchsorted(self.share, shares, side="right") - 1
        return np.searchsorted(self.share, self.share[np.maximum(below, 0)], side="left")

    def end(self, shares: np.ndarray) -> np.ndarray:
        """Places to end a window at: of those with the least share that is not below the one wanted, the last."""
        above = np.searchsorted(self.share, shares, side="left")
        return np.searchsorted(self.share, self.share[np.minimum(above, len(self.share) - 1)], side="right") - 1

    def crossed(self, answer: Answer) -> np.ndarray:
        """[J + 2] bytes that have crossed by each place, in units."""
        return np.concatenate([[0.0], np.sum([answer.values[column] for column in self._columns], axis=0)])

    def terms(self, begin: int, end: int) -> list[tuple[int, float]]:
        """Minus the bytes of all members that cross between two places."""
        found = []
        for column in self._columns:
            if end > 0:
                found.append((int(column[end - 1]), -float(self.members)))
            if begin > 0:
                found.append((int(column[begin - 1]), float(self.members)))
        return found
