"""What is decided for one device, before it becomes a list of instructions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

import numpy as np

from tmojax.problem import Action, Problem
from tmojax.problem.step_view import StepView


class Choice(IntEnum):
    """What happens to a candidate in its idle interval. RECOMPUTE of one that nobody needs means that it is dropped."""

    KEEP = 0
    OFFLOAD = 1
    RECOMPUTE = 2
    PEER = 3  # in memory that another GPU lends
    COMPRESS = 4  # kept encoded
    OFFLOAD_COMPRESSED = 5  # encoded, and that in host memory


SIMPLE = (Choice.KEEP, Choice.OFFLOAD, Choice.RECOMPUTE)
CODED = (Choice.COMPRESS, Choice.OFFLOAD_COMPRESSED)


class Rest(IntEnum):
    """Where a persistent tensor is when nothing needs it. Apart from ON_HOST it is on the device across the seam of
    steps."""

    ON_DEVICE = 0
    ON_HOST = 1  # comes to the device for its first use and leaves behind its last one, and in long gaps between them
    AWAY = 2  # leaves in every long gap between two uses within a step, if memory is short there
    ENCODED = 3  # is encoded in every long gap between two uses within a step


def rests_of(problem: Problem, resting: bool) -> tuple[Rest, ...]:
    """Where a state tensor may rest: one that no micro-batch touches (`resting`), or one that they use."""
    moving = ((Rest.ON_HOST, Rest.AWAY) if resting else (Rest.AWAY,)) if Action.OFFLOAD in problem.actions else ()
    encoded = (Rest.ENCODED,) if Action.COMPRESS in problem.actions and problem.machine.codecs else ()
    return (Rest.ON_DEVICE, *moving, *encoded)


@dataclass(frozen=True, eq=False)
class DeviceDecision:
    """choice [I]: `Choice` of every candidate of the `StepView`. state_out [S]: `Rest` of every state tensor (booleans
    read as ON_DEVICE and ON_HOST). last_choice [I]: the choices in the last micro-batch of the step, where they are
    not the same as in the others: behind it comes the gradient synchronisation, and no further micro-batch.
    first_choice [I]: those in the first one, if it is not the last: state that has to leave may not have left yet.
    lender: the device in whose memory PEER puts tensors. codec: index of the codec with which tensors are encoded."""

    choice: np.ndarray
    state_out: np.ndarray
    last_choice: np.ndarray | None = None
    first_choice: np.ndarray | None = None
    lender: int = -1
    codec: int = 0

    @property
    def in_last(self) -> np.ndarray:
        """[I] choices in the last micro-batch."""
        return self.choice if self.last_choice is None else self.last_choice

    @cached_property
    def borrows(self) -> bool:
        """Whether anything goes to the lender."""
        return any(bool((choice == Choice.PEER).any()) for choice in self._choices)

    @cached_property
    def encodes(self) -> bool:
        return self.encodes_state or any(int(choice.max(initial=0)) >= Choice.COMPRESS for choice in self._choices)

    @cached_property
    def encodes_state(self) -> bool:
        return bool((self.state_out == Rest.ENCODED).any())

    @property
    def _choices(self) -> list[np.ndarray]:
        return [choice for choice in (self.choice, self.last_choice, self.first_choice) if choice is not None]

    @property
    def in_first(self) -> np.ndarray:
        """[I] choices in the first micro-batch, if it is not the last."""
        return self.choice if self.first_choice is None else self.first_choice

    @property
    def key(self) -> tuple[bytes, bytes, bytes, bytes, int, int]:
        """The same for equal decisions."""
        choices = (self.choice, self.state_out, self.in_last, self.in_first)
        first, second, third, fourth = (values.tobytes() for values in choices)
        ways = self.lender if self.borrows else -1, self.codec if self.encodes else -1
        return first, second, third, fourth, *ways

    def same_as(self, other: DeviceDecision) -> bool:
        return self.key[4:] == other.key[4:] and all(
            np.array_equal(mine, others)
            for mine, others in (
                (self.choice, other.choice),
                (self.state_out, other.state_out),
                (self.in_last, other.in_last),
                (self.in_first, other.in_first),
            )
        )

    def by_host(self) -> DeviceDecision:
        """The same with host memory in place of peers and of codecs: for models that know no more."""
        if not self.borrows and not self.encodes:
            return self

        def moved(choice: np.ndarray) -> np.ndarray:
            return np.where(choice > Choice.RECOMPUTE, Choice.OFFLOAD, choice).astype(np.int8)

        last, first = (None if one is None else moved(one) for one in (self.last_choice, self.first_choice))
        state_out = np.where(self.state_out == Rest.ENCODED, Rest.AWAY, self.state_out).astype(np.int8)
        return replace(self, choice=moved(self.choice), state_out=state_out, last_choice=last, first_choice=first)

    def alike(self) -> DeviceDecision:
        """The same choices in all micro-batches."""
        return replace(self, last_choice=None, first_choice=None)


def keep_everything(view: StepView) -> DeviceDecision:
    """The decision that moves and recomputes nothing."""
    choice = np.where(view.needed, Choice.KEEP, Choice.RECOMPUTE).astype(np.int8)
    return DeviceDecision(choice, np.zeros(len(view.state_tensor), np.int8))
