"""State that is kept encoded between its uses (`Rest.ENCODED`): further runs that encode and decode it.

At both ends of a step such a tensor is plain, as every placement is. It is encoded directly behind its last use before
each long gap, and at the very start if its first use is far from there, and decoded directly before the use behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.problem import PLAIN, Codec, Kind
from tmojax.relax.fit import END, START, TENSOR, WRITTEN
from tmojax.relax.unrolled_step import UnrolledStep


@dataclass(frozen=True, eq=False)
class EncodedGaps:
    """[N] each: tensor, the run behind which it is encoded (-1: at the start of the step), and the run before which it
    is decoded."""

    tensor: np.ndarray
    after: np.ndarray
    before: np.ndarray


def long_gaps(tensors: np.ndarray, use_ptr: np.ndarray, run: np.ndarray, shortest: int) -> EncodedGaps:
    """Gaps of more than `shortest` runs before uses of state tensors [S]; those of tensor s are the runs `run[use_ptr[
    s]:use_ptr[s + 1]]`, in order."""
    of = np.repeat(np.arange(len(tensors)), np.diff(use_ptr))
    first = np.zeros(len(run), bool)
    first[use_ptr[:-1][np.diff(use_ptr) > 0]] = True
    before = np.where(first, -1, np.concatenate([[-1], run[:-1]]))
    long = run - before > shortest
    return EncodedGaps(tensors[of[long]], before[long], run[long])


def encode_state(
    step: UnrolledStep, start_bytes: int, resident_bytes: np.ndarray, gaps: EncodedGaps, sizes: np.ndarray,
    codec: Codec, form: int,
) -> UnrolledStep:  # fmt: skip
    """`step`, in which state tensors are on the device all the time, with these gaps encoded.

    start_bytes: there before the first run. resident_bytes [U]: the profile without what only one run needs. sizes
    [tensors]: plain bytes. form: of the codec.
    """
    total, count = len(step.op), len(gaps.tensor)
    place = np.concatenate([gaps.after + 1, gaps.before])  # before these runs; what is encoded goes first
    tensor = np.tile(gaps.tensor, 2)
    decodes = np.repeat([False, True], count)
    order = np.lexsort((decodes, place))
    sorted_place = place[order]
    new = np.empty(2 * count, np.int64)  # run of each insertion
    new[order] = sorted_place + np.arange(2 * count)
    encode, decode = new[:count], new[count:]

    moved = np.arange(total + 1) + np.searchsorted(sorted_place, np.arange(total + 1), side="right")
    moved[total] = total + 2 * count

    def spread(values: np.ndarray, inserted: np.ndarray) -> np.ndarray:
        result = np.empty(total + 2 * count, values.dtype)
        result[moved[:total]], result[new] = values, inserted
        return result

    # Between two runs no more is there than in both.
    between = np.minimum(resident_bytes[place], np.where(place > 0, resident_bytes[place - 1], start_bytes))
    coded = np.array([codec.encoded_bytes(int(size)) for size in sizes[gaps.tensor]], np.int64)
    workspace = np.array([codec.workspace_bytes(int(size)) for size in sizes[tensor]], np.int64)
    change = np.zeros(total + 2 * count + 1, np.int64)
    np.add.at(change, encode, coded)
    np.add.at(change, decode + 1, -coded)
    np.add.at(change, encode + 1, -sizes[gaps.tensor])
    np.add.at(change, decode, sizes[gaps.tensor])
    profile = spread(step.profile_bytes, between + workspace) + np.cumsum(change)[:-1]

    table = step.gaps.copy()
    for column in (WRITTEN, START, END):
        inside = table[:, column] >= 0
        table[inside, column] = moved[table[inside, column]]
    table = table[np.lexsort((table[:, TENSOR], table[:, END], table[:, WRITTEN]))]
    freed = step.freed.copy()
    freed[:, 0] = moved[freed[:, 0]]
    left = np.stack([encode, gaps.tensor, np.zeros_like(encode), np.full_like(encode, PLAIN)], 1)
    used = np.stack([decode, gaps.tensor, np.zeros_like(decode), np.full_like(decode, form)], 1)
    freed = np.concatenate([freed, left, used])
    freed = freed[np.lexsort((freed[:, 1], freed[:, 0]))]
    return UnrolledStep(
        spread(step.kind, np.where(decodes, Kind.DECODE, Kind.ENCODE)), spread(step.op, tensor),
        spread(step.micro_batch, np.zeros(2 * count, np.int64)), profile, freed, table,
    )  # fmt: skip
