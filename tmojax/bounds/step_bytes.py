"""All bytes that one device of a class moves in a step (docs/bounds.md, section 3, point 8)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.bounds.gaps import Gaps, Host
from tmojax.bounds.highs import INFINITY, LinearModel


@dataclass(frozen=True)
class _Away:
    """A gap at an end of a micro-batch, or of state whose copy out falls into any time of the step."""

    head: bool
    tail: bool
    host: Host


_LEFT = _Away(False, False, Host.COPY_OUT)  # the share of a version that `out` of a block has


def step_bytes(
    model: LinearModel, unit_bytes: float, read: list[Gaps], blocks, shares: dict[int, int], micro_batches: int
):
    """Terms of the bytes that one device moves out and in per step, what it moves in whatever is decided, and the
    column of late state that goes out although it is not away at the end of the step (-1: none)."""
    out_terms: list[tuple] = [(block.out[-1:], np.array([repeat])) for repeat, block in blocks]
    in_terms: list[tuple] = [(block.into[-1:], np.array([repeat])) for repeat, block in blocks]
    size = {
        t: float(b)
        for gaps in read
        for t, b in zip([*gaps.tensor, *gaps.resting], [*gaps.size_bytes, *gaps.resting_bytes], strict=True)
    }
    gone: dict[int, list[tuple[int, float, _Away]]] = {}
    for repeat, block in blocks:
        gaps = block.gaps
        for i in np.flatnonzero((block.moved >= 0) & (
            (gaps.host >= Host.PER_STEP) | (gaps.start < 0) | (gaps.end >= len(gaps.slot_op))
        )):  # fmt: skip
            kind = _Away(gaps.start[i] < 0, gaps.end[i] >= len(gaps.slot_op), Host(gaps.host[i]))
            tensor, column = int(gaps.tensor[i]), int(block.moved[i])
            if kind.tail and kind.host is Host.COPY_OUT:
                gone.setdefault(tensor, []).append((block.left[tensor, int(gaps.made[i])], 0.0, _LEFT))
            gone.setdefault(tensor, []).append((column, float(repeat), kind))
    last = read[-1]
    late_out: list[tuple[int, float]] = []  # what goes out in the step, without what `out` of the last block has
    late_left: list[tuple[int, float]] = []
    back: list[tuple[int, float]] = []  # late state that comes in without being away when the last micro-batch begins
    for tensor in sorted(gone.keys() | shares.keys()):
        used, one = gone.get(tensor, []), size[tensor] / unit_bytes
        rests = [(shares[tensor], 1.0)] if tensor in shares else []
        heads = [(c, n) for c, n, kind in used if kind.head]
        tails = [(c, n) for c, n, kind in used if kind.tail]
        left = [(c, 1.0) for c, _, kind in used if kind is _LEFT]
        if tails or rests:
            # Absences from a last use to the first use of the next micro-batch, or step: counted at the head, so
            # only the excess is new.
            excess = int(model.add_columns(1, 0.0, float(micro_batches))[0])
            for more in (tails, rests) if rests else (tails,):
                model.add_row(0.0, INFINITY, (excess, 1.0), *((c, -n) for c, n in more), *heads)
            (back if tensor in shares and last.late[tensor] else in_terms).append((excess, one))
        if not last.dirty[tensor]:
            continue
        # Copies out of the version that passes from one micro-batch, or step, to the next: `left` is in `out`.
        if any(kind.host is Host.PER_MICRO_BATCH for *_, kind in used):
            copies = int(model.add_columns(1, 0.0, float(micro_batches))[0])
            inner_tails = [(c, n) for c, n, kind in used if kind.tail and kind.host is not Host.COPY_OUT]
            ways = [heads, [*inner_tails, *left]]
        else:
            copies = int(model.add_columns(1)[0])
            ways = [[(c, 1.0)] for c, _, kind in used if kind.host is Host.PER_STEP or kind is _LEFT]
            ways += [rests] if rests else []
        for way in ways:
            model.add_row(0.0, INFINITY, (copies, 1.0), *((c, -n) for c, n in way))
        out_terms += [(copies, one), *((c, -one) for c, _ in left)]
        if last.late[tensor]:
            late_out += [(copies, one), *((c, -one) for c, _ in left)]
            late_left += [(c, one) for c, _ in left]
    if back:
        # `into` of the blocks has some of it.
        more = int(model.add_columns(1, 0.0, float(micro_batches) * sum(one for _, one in back))[0])
        rested = [(int(block.resting.into[-1]), float(n)) for n, block in blocks if len(block.resting.into)]
        model.add_row(0.0, INFINITY, (more, 1.0), *rested, *((c, -one) for c, one in back))
        in_terms.append((more, 1.0))
    fixed_in = (micro_batches * last.input_bytes + last.step_input_bytes) / unit_bytes
    late, first = -1, blocks[0][1].resting
    if first.late_out >= 0:
        late = int(model.add_columns(1, 0.0, first.late_most)[0])
        model.add_row(0.0, INFINITY, (late, 1.0), (first.late_out, -1.0), *late_left)
        model.add_row(0.0, INFINITY, (late, -1.0), (int(first.out[-1]), -1.0), *late_out)
    return out_terms, in_terms, fixed_in, late
