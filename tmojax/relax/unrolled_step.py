"""The runs of a whole step of one device, and what its memory needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class UnrolledStep:
    """kind, op, micro_batch, profile_bytes [U]: per run; the profile has everything away that may be away. kind:
    Kind.COMPUTE or COLLECTIVE, or ENCODE or DECODE, whose "op" is a tensor.

    freed [F, 4]: (run, tensor, instance, form): the copy that is freed behind that run. gaps [M, 10]: see
    `tmojax.relax.fit`.
    """

    kind: np.ndarray
    op: np.ndarray
    micro_batch: np.ndarray
    profile_bytes: np.ndarray
    freed: np.ndarray
    gaps: np.ndarray
