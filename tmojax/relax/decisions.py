"""What is decided for one device, before it becomes a list of instructions."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    read as ON_DEVICE and ON_HOST). last_choice [I]: the choices in the last micro-batch of the step, where they are
    not the same as in the others: behind it comes the gradient synchronisation, and no further micro-batch.
    first_choice [I]: those in the first one, if it is not the last: state that has to leave may not have left yet."""

    choice: np.ndarray
    state_out: np.ndarray
    last_choice: np.ndarray | None = None
    first_choice: np.ndarray | None = None

    @property
    def in_last(self) -> np.ndarray:
        """[I] choices in the last micro-batch."""
        return self.choice if self.last_choice is None else self.last_choice

    @property
    def in_first(self) -> np.ndarray:
        """[I] choices in the first micro-batch, if it is not the last."""
        return self.choice if self.first_choice is None else self.first_choice

    @property
    def key(self) -> tuple[bytes, bytes, bytes, bytes]:
        """The same for equal decisions."""
        return self.choice.tobytes(), self.state_out.tobytes(), self.in_last.tobytes(), self.in_first.tobytes()

    def same_as(self, other: DeviceDecision) -> bool:
        return all(
            np.array_equal(mine, others)
            for mine, others in (
                (self.choice, other.choice),
                (self.state_out, other.state_out),
                (self.in_last, other.in_last),
                (self.in_first, other.in_first),
            )
        )

    def alike(self) -> DeviceDecision:
        """The same choices in all micro-batches."""
        return replace(self, last_choice=None, first_choice=None)


def keep_everything(view: StepView) -> DeviceDecision:
    """The decision that moves and recomputes nothing."""
    choice = np.where(view.needed, Choice.KEEP, Choice.RECOMPUTE).astype(np.int8)
    return DeviceDecision(choice, np.zeros(len(view.state_tensor), np.int8))
