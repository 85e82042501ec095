"""Problems and plans of the small PyTorch networks of `experiments/ways_out`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "ways_out"))
from rows import machine_of
from torch_networks import NETWORKS, batch_of, network
from torch_rows import GPU, imported_step, ordinary_gradients, problem_of

from tmojax.planners.registry import PLANNERS
from tmojax.problem import Problem, Schedule
from tmojax.problem.step_view import view_step
from tmojax.relax.decisions import Choice, DeviceDecision
from tmojax.relax.decode import DeviceList, decode

__all__ = [
    "GPU",
    "NETWORKS",
    "any_plan",
    "batch_of",
    "batches_of",
    "imported_step",
    "machine_of",
    "network",
    "ordinary_gradients",
    "planned",
    "problem_of",
]


def planned(problem: Problem, planner: str) -> Schedule:
    result = PLANNERS[planner]().plan(problem)
    assert result.schedule is not None, result.message
    return result.schedule


def any_plan(problem: Problem, seed: int) -> Schedule:
    """A plan of one device that keeps, offloads and recomputes at random, and frees as early as it can."""
    view, random = view_step(problem, 0), np.random.default_rng(seed)
    choice = random.integers(0, 3, len(view.tensor))
    choice[(choice == Choice.RECOMPUTE) & ~view.may_recompute] = Choice.KEEP
    choice[(choice == Choice.OFFLOAD) & ~view.may_offload] = Choice.KEEP
    decision = DeviceDecision(choice.astype(np.int8), np.zeros(len(view.state_tensor), np.int8))
    found = decode(problem, view, decision, lookahead_runs=int(random.integers(1, 9)), release_at_once=True)
    assert isinstance(found, DeviceList)
    return Schedule((found.rows,), (found.initial,))


def batches_of(name: str, micro_batches: int, rank: int = 0) -> list[dict[str, torch.Tensor]]:
    return [batch_of(name, 100 * rank + k) for k in range(micro_batches)]
