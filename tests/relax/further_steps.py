"""Random steps on which every action is allowed: two codecs, and memory that differs between GPUs."""

from dataclasses import replace

import numpy as np
from random_steps import random_problem

from tmojax.problem import Action, Codec, Problem
from tmojax.relax.decisions import Choice, DeviceDecision

HALF = Codec("half", 1, 2, 400.0, 800.0, 1)
THIRD = Codec("third", 1, 3, 100.0, 150.0)


def further_problem(seed: int, factor: float) -> Problem:
    """A random problem with two codecs, in which every other GPU has twice the memory."""
    problem = random_problem(seed, factor=factor, actions=tuple(Action))
    memories = tuple(
        replace(memory, capacity_bytes=memory.capacity_bytes * (1 + index % 2)) if index < len(problem.machine.devices)
        else memory
        for index, memory in enumerate(problem.machine.memories)
    )  # fmt: skip
    return replace(problem, machine=replace(problem.machine, memories=memories, codecs=(HALF, THIRD)))


def random_decision(view, rng, lender: int, codec: int) -> DeviceDecision:
    def choices() -> np.ndarray:
        choice = np.zeros(len(view.tensor), np.int8)
        for index in range(len(choice)):
            options = [Choice.KEEP]
            if view.may_offload[index]:
                options += [Choice.OFFLOAD, Choice.COMPRESS, Choice.OFFLOAD_COMPRESSED]
                options += [Choice.PEER] * 2 * (lender >= 0)
            if view.may_recompute[index] or not view.needed[index]:
                options += [Choice.RECOMPUTE]
            choice[index] = rng.choice(options)
        return choice

    state = np.array([rng.choice([0, 1, 2] if resting else [0, 2]) for resting in view.state_resting], np.int8)
    last, first = (choices() if rng.random() < 0.3 else None for _ in range(2))
    return DeviceDecision(choices(), state, last, first, lender, codec)
