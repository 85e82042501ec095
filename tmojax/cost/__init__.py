"""The relaxed, differentiable cost model of a training step (docs/cost-model.md)."""

from tmojax.cost.build import can_relax, relax_problem
from tmojax.cost.model import PeriodicModel
from tmojax.cost.timeline import Demand, Limits, Step, Timing, demand, run_step

__all__ = ["Demand", "Limits", "PeriodicModel", "Step", "Timing", "can_relax", "demand", "relax_problem", "run_step"]
