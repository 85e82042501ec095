"""The PyTorch networks by plans: with hooks, and with selective checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from rows import Row, least
from torch_networks import batch_of, network

from tmojax.check import check
from tmojax.errors import InputError
from tmojax.execute_torch import PlannedTorchStep, SelectiveCheckpoints, selective_planner
from tmojax.importers.machine_build import load_machine
from tmojax.importers.torch_importer import ImportedTorchStep, import_torch_step
from tmojax.planners.registry import PLANNERS
from tmojax.problem import Action, Problem, keep_all_footprint_bytes

GPU = "A100-SXM4-40GB"
MACHINES = {1: "gh200", 2: "rtx3090x2-nvlink"}
HOOK_PLANNERS = ("keep-all", "offload-all", "recompute-all", "ratio-sweep")
PARTS = {
    "mlp": "layers",
    "gpt2": "h",
    "resnet": "blocks",
    "vit": "blocks",
    "scanned": "blocks",
}  # what stands under checkpoints


@cache
def imported_step(name: str, gpus: int = 1, micro_batches: int = 1) -> ImportedTorchStep:
    return import_torch_step(*network(name), gpu=GPU, gpus=gpus, micro_batches=micro_batches)


def problem_of(imported: ImportedTorchStep, factor: float = 1.0) -> Problem:
    """A device has `factor` of the memory that keeping everything takes."""
    workload = imported.workload
    machine = load_machine(MACHINES[workload.device_count])
    problem = Problem("torch", workload, machine, frozenset({Action.OFFLOAD, Action.RECOMPUTE}))
    return problem.with_device_capacity(int(keep_all_footprint_bytes(workload, 0) * factor))


def ordinary_gradients(name: str, batches: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Gradients of the network without a plan: the mean over micro-batches. Random numbers start at 1."""
    module, loss, _ = network(name)
    torch.manual_seed(1)
    for batch in batches:
        value = loss(module, batch)
        value.backward(torch.full_like(value, 1 / len(batches)))
    return [p.grad for p in module.parameters() if p.grad is not None]


def torch_rows(name: str) -> Iterator[Row]:
    """All rows of one network."""
    for planner in HOOK_PLANNERS:
        yield by_hooks(name, planner)
    yield by_checkpoints(name)


def compared(name: str, module: torch.nn.Module) -> tuple[bool, float]:
    """(same bits as the ordinary step, largest difference of a gradient relative to its largest number)."""
    expected = ordinary_gradients(name, [batch_of(name, 0)])
    found = [p.grad for p in module.parameters() if p.grad is not None]
    pairs = list(zip(found, expected, strict=True))
    difference = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs)
    return all(torch.equal(a, b) for a, b in pairs), difference


def by_hooks(name: str, planner: str) -> Row:
    imported = imported_step(name)
    problem, plan, share = least(lambda share: problem_of(imported, share), PLANNERS[planner]())
    module, loss, batch = network(name)
    torch.manual_seed(1)
    outcome = PlannedTorchStep(imported, problem, plan).step(module, loss, [batch])
    within = all(size <= outcome.planned_bytes[at] for at, size in outcome.counted_bytes.items())
    return Row(
        name, "torch hooks", planner, share, *compared(name, module), outcome.planned_peak_bytes,
        outcome.counted_peak_bytes, outcome.planned_host_bytes, outcome.host_bytes, within,
    )  # fmt: skip


def by_checkpoints(name: str) -> Row:
    imported = imported_step(name)
    paths = [f"{PARTS[name]}.{number}" for number, _ in network(name)[0].get_submodule(PARTS[name]).named_children()]
    try:
        planner = selective_planner(imported, paths, tie_layers=False)
    except InputError as error:
        if "changes tensors in place" not in str(error):
            raise
        return Row(name, "torch checkpoints", "by-name", 0, None, 0, 0, 0, 0, 0, True, "it changes tensors in place")
    problem, plan, share = least(lambda share: problem_of(imported, share), planner, offloading=True)
    points = SelectiveCheckpoints(imported, problem, plan, paths)
    module, loss, batch = network(name)
    torch.manual_seed(1)
    with points.applied(module):
        loss(module, batch).backward()
    points.verify()
    return Row(
        name, "torch checkpoints", "by-name", share, *compared(name, module), peak_of(problem, plan), 0,
        points.planned_bytes, points.sent_bytes, True,
    )  # fmt: skip


def peak_of(problem: Problem, plan: Any) -> int:
    """Most bytes of the plan on the device."""
    return check(problem, plan).peak_bytes[problem.machine.memories[problem.machine.devices[0].memory].name]
