"""PyTorch steps that run by a plan, one process per device (docs/run-a-plan.md). Needs the extra `torch`."""

from tmojax.execute_torch.planned_step import PlannedTorchStep, StepOutcome

__all__ = ["PlannedTorchStep", "StepOutcome"]
