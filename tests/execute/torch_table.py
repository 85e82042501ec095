"""The table of PyTorch networks in docs/run-a-plan.md: `python tests/execute/torch_table.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch_networks import NETWORKS, network
from torch_plans import imported_step, ordinary_gradients, problem_of

from tmojax.errors import InputError
from tmojax.execute_torch import PlannedTorchStep, SelectiveCheckpoints, selective_planner
from tmojax.planners.base import Planner
from tmojax.planners.registry import PLANNERS
from tmojax.problem import Problem, Schedule

FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
PARTS = {"mlp": "layers", "gpt": "h", "gpt-dropout": "h", "resnet": "blocks", "vit": "blocks"}
HEAD = """\
| network | way out | plan | same bits | planned | counted | host |
|---|---|---|---|---|---|---|"""


def least(name: str, make: Callable[[], Planner]) -> tuple[Problem, Schedule]:
    """A plan for the least of a few capacities that has one."""
    for factor in FACTORS:
        problem = problem_of(imported_step(name), factor)
        result = make().plan(problem)
        if result.schedule is not None:
            return problem, result.schedule
    raise AssertionError(f"{name}: no plan at all")


def same_bits(name: str, module: torch.nn.Module) -> str:
    expected = ordinary_gradients(name, [network(name)[2]])
    found = [p.grad for p in module.parameters() if p.grad is not None]
    return "yes" if all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) else "no"


def by_hooks(name: str, planner: str) -> str:
    problem, plan = least(name, PLANNERS[planner])
    module, loss, batch = network(name)
    torch.manual_seed(1)
    outcome = PlannedTorchStep(imported_step(name), problem, plan).step(module, loss, [batch])
    return (
        f"| {name} | hooks | {planner} | {same_bits(name, module)} | {outcome.planned_peak_bytes:,} | "
        f"{outcome.counted_peak_bytes:,} | {outcome.host_bytes:,} |"
    )


def by_checkpoints(name: str) -> str:
    module, loss, batch = network(name)
    paths = [f"{PARTS[name]}.{number}" for number, _ in module.get_submodule(PARTS[name]).named_children()]
    try:
        problem, plan = least(name, lambda: selective_planner(imported_step(name), paths, tie_layers=False))
    except InputError as error:
        assert "changes tensors in place" in str(error)
        return f"| {name} | checkpoints | refused: changes tensors in place | | | | |"
    points = SelectiveCheckpoints(imported_step(name), problem, plan, paths)
    torch.manual_seed(1)
    with points.applied(module):
        loss(module, batch).backward()
    points.verify()
    return f"| {name} | checkpoints | by-name | {same_bits(name, module)} | | | {points.sent_bytes:,} |"


def table() -> str:
    torch.set_num_threads(1)
    rows = [HEAD]
    for name in NETWORKS:
        rows += [by_hooks(name, planner) for planner in ("keep-all", "offload-all", "recompute-all", "ratio-sweep")]
        rows.append(by_checkpoints(name))
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
