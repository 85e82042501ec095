"""Problems and plans of the small PyTorch networks."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch_networks import batch_of, network

from tmojax.importers.machine_build import load_machine
from tmojax.importers.torch_importer import ImportedTorchStep, import_torch_step
from tmojax.planners.registry import PLANNERS
from tmojax.problem import Action, Problem, Schedule, keep_all_footprint_bytes
from tmojax.problem.step_view import view_step
from tmojax.relax.decisions import Choice, DeviceDecision
from tmojax.relax.decode import DeviceList, decode

GPU = "A100-SXM4-40GB"
MACHINES = {1: "gh200", 2: "rtx3090x2-nvlink"}


@cache
def imported_step(name: str, gpus: int = 1, micro_batches: int = 1) -> ImportedTorchStep:
    return import_torch_step(*network(name), gpu=GPU, gpus=gpus, micro_batches=micro_batches)


def problem_of(imported: ImportedTorchStep, factor: float = 1.0) -> Problem:
    """A device has `factor` of the memory that keeping everything takes."""
    workload = imported.workload
    machine = load_machine(MACHINES[workload.device_count])
    problem = Problem("torch", workload, machine, frozenset({Action.OFFLOAD, Action.RECOMPUTE}))
    return problem.with_device_capacity(int(keep_all_footprint_bytes(workload, 0) * factor))


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


def ordinary_gradients(name: str, batches: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Gradients of the network without a plan: the mean over micro-batches. Random numbers start at 1."""
    module, loss, _ = network(name)
    torch.manual_seed(1)
    for batch in batches:
        value = loss(module, batch)
        value.backward(torch.full_like(value, 1 / len(batches)))
    return [p.grad for p in module.parameters() if p.grad is not None]


def batches_of(name: str, micro_batches: int, rank: int = 0) -> list[dict[str, torch.Tensor]]:
    return [batch_of(name, 100 * rank + k) for k in range(micro_batches)]
