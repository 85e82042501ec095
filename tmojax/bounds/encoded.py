"""What codecs take for idle bytes that a device keeps encoded (docs/bounds.md, section 3, point 17)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.bounds.gaps import Gaps, Host
from tmojax.bounds.highs import INFINITY, LinearModel


@dataclass(frozen=True, eq=False)
class Encoded:
    """Columns of one block. hidden [I]: share of each gap that is not there as a plain copy (-1: none). at_rest: terms
    of the bytes that resting state spares. runs: (column, first moment, last moment, time units) of codecs. coding:
    column of the time in which resting state is encoded (-1: none)."""

    hidden: np.ndarray
    at_rest: tuple[tuple[int, float], ...]
    runs: list[tuple[int, int, int, float]]
    coding: int


def add_encoded(
    model: LinearModel, gaps: Gaps, unit, idle: np.ndarray, other_ways: tuple[np.ndarray, np.ndarray],
    at_rest: tuple[np.ndarray, np.ndarray], moments: tuple[np.ndarray, np.ndarray, np.ndarray], count: int,
) -> Encoded:  # fmt: skip
    """idle [I]: gaps whose bytes count; other_ways [I]: columns of the shares that are moved and recomputed; at_rest
    [S]: columns of the shares of resting state that are away, and encoded, at some time of the step. moments [I]: those
    from which on a version can be encoded, and decoded, and by which it is plain again; count: of moments."""
    hidden, runs = np.full(len(gaps.tensor), -1), []
    pick = idle & (gaps.spare_bytes > 0)
    hidden[pick] = model.add_columns(int(pick.sum()))
    made, begin, end = moments
    versions: dict[tuple[int, int], int] = {}  # -> column of the share that is encoded at some time
    decode_s, encode_s = (per_byte * (gaps.size_bytes + gaps.spare_bytes) + gaps.codec_launch_s
                          for per_byte in (gaps.decode_s_per_byte, gaps.encode_s_per_byte))  # fmt: skip
    for i in np.flatnonzero(pick):
        kept = int(model.add_columns(1)[0])
        others = [(int(way[i]), 1.0) for way in other_ways if way[i] >= 0]
        model.add_row(0.0, INFINITY, (kept, 1.0), (int(hidden[i]), -1.0), *others)
        if gaps.end[i] < len(gaps.slot_op):  # else it may be decoded in the next micro-batch, where it counts
            runs.append((kept, int(begin[i]), int(end[i]), decode_s[i] / unit.time_s))
        if gaps.host[i] == Host.COPY_OUT:
            key = int(gaps.tensor[i]), int(gaps.made[i])
            if key not in versions:
                versions[key] = int(model.add_columns(1)[0])
                runs.append((versions[key], int(made[i]), count, encode_s[i] / unit.time_s))
            model.add_row(0.0, INFINITY, (versions[key], 1.0), (kept, -1.0))
    spare = gaps.resting_spare_bytes / unit.size_bytes
    if not spare.any():
        return Encoded(hidden, (), runs, -1)
    spared = int(model.add_columns(1, 0.0, float(spare.sum()))[0])
    away, coded = at_rest
    model.add_row(0.0, INFINITY, (away, spare), (coded, spare), (spared, -1.0))
    coding = int(model.add_columns(1, 0.0, float(resting_encode_s(gaps).sum()) / unit.time_s)[0])
    runs.append((coding, 0, count, 1.0))
    return Encoded(hidden, ((spared, 1.0),), runs, coding)


def resting_encode_s(gaps: Gaps) -> np.ndarray:
    """[S] seconds in which each resting tensor is encoded."""
    return gaps.encode_s_per_byte * (gaps.resting_bytes + gaps.resting_spare_bytes) + gaps.codec_launch_s
