"""What is decided for one device, before it becomes a list of instructions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from tmojax.problem.step_view import StepView


class Choice(IntEnum):
    """What happens to a candidate in its idle interval. RECOMPUTE of one that nobody needs means that it is dropped."""

    KEEP = 0
    OFFLOAD = 1
    RECOMPUTE = 2


class Rest(IntEnum):
    """Where a persistent tensor is when nothing needs it. Apart from ON_HOST it is on the device across the seam of
    steps."""

    ON_DEVICE = 0
    ON_HOST = 1  # resting tensors only: comes to the device for its update and leaves after it
    AWAY = 2  # leaves in every long gap between two uses within a step, if memory is short there


@dataclass(frozen=True, eq=False)
class DeviceDecision:
    """choice [I]: `Choice` of every candidate of the `StepView`. state_out [S]: `Rest` of every state tensor (booleans
    read as ON_DEVICE and ON_HOST)."""

    choice: np.ndarray
    state_out: np.ndarray

    def same_as(self, other: DeviceDecision) -> bool:
        return np.array_equal(self.choice, other.choice) and np.array_equal(self.state_out, other.state_out)


def keep_everything(view: StepView) -> DeviceDecision:
    """The decision that moves and recomputes nothing."""
    choice = np.where(view.needed, Choice.KEEP, Choice.RECOMPUTE).astype(np.int8)
    return DeviceDecision(choice, np.zeros(len(view.state_tensor), np.int8))
