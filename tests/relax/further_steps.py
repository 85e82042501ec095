"""Steps on which every action is allowed: random ones with two codecs and uneven memory, and one to check by hand."""

from dataclasses import replace

import numpy as np
from random_steps import random_problem, shared_path_machine

from tmojax.problem import Action, Codec, Lifetime, Op, Phase, Problem, Program, Tensor, TensorKind, Workload
from tmojax.relax.decisions import Choice, DeviceDecision

HALF = Codec("half", 1, 2, 400.0, 800.0, 1)
THIRD = Codec("third", 1, 3, 100.0, 150.0)
SLOW_HALF = Codec("half", 1, 2, 40.0, 20.0)


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

    state = np.array([rng.choice([0, 1, 2, 3] if resting else [0, 2, 3]) for resting in view.state_resting], np.int8)
    last, first = (choices() if rng.random() < 0.3 else None for _ in range(2))
    return DeviceDecision(choices(), state, last, first, lender, codec)


def step(size_bytes: int, workspace_bytes: int) -> Program:
    """f writes a in 1 s, g needs workspace for 2 s, h reads a for 1 s."""
    return Program("step", (Tensor("a", size_bytes, TensorKind.ACTIVATION, Lifetime.MICRO_BATCH),), (
        Op("f", Phase.FORWARD, 1.0, (), (0,)),
        Op("g", Phase.FORWARD, 2.0, (), (), workspace_bytes=workspace_bytes),
        Op("h", Phase.BACKWARD, 1.0, (0,), ()),
    ))  # fmt: skip


def problem_of(programs, capacities, rate: float = 10.0, codec: Codec = SLOW_HALF) -> Problem:
    machine = shared_path_machine(len(capacities), 1, rate=rate)
    memories = list(machine.memories)
    for gpu, capacity in enumerate(capacities):
        memories[gpu] = replace(memories[gpu], capacity_bytes=capacity)
    machine = replace(machine, memories=tuple(memories), overheads=replace(machine.overheads, launch_s=0.0),
                      codecs=(codec,))  # fmt: skip
    used = tuple(range(len(programs)))
    return Problem("by hand", Workload("by hand", programs, used, 1, "by hand"), machine, frozenset(Action))
