"""PyTorch steps that run by a plan, one process per device (docs/run-a-plan.md). Needs the extra `torch`."""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ImportError("tmojax.execute_torch needs PyTorch: pip install 'tmojax[torch]'")

from tmojax.execute_torch.compiled import OffloadingPartition
from tmojax.execute_torch.planned_step import PlannedTorchStep, StepOutcome
from tmojax.execute_torch.selective import KernelAction, SelectiveCheckpoints, selective_planner

__all__ = [
    "KernelAction",
    "OffloadingPartition",
    "PlannedTorchStep",
    "SelectiveCheckpoints",
    "StepOutcome",
    "selective_planner",
]
