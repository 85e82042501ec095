"""The relaxed periodic model and its optimisation under one name (design: periodic transcription)."""

from tmojax.cost.build import relax_problem
from tmojax.cost.model import PeriodicModel
from tmojax.relax.descent import Descent
from tmojax.relax.optimise import RelaxedSolution, Sensitivity, WarmStart, machine_sensitivity, optimise
from tmojax.relax.periodic_fixed import EstimatedTime, evaluate_fixed

__all__ = [
    "Descent",
    "EstimatedTime",
    "PeriodicModel",
    "RelaxedSolution",
    "Sensitivity",
    "WarmStart",
    "evaluate_fixed",
    "machine_sensitivity",
    "optimise",
    "relax_problem",
]
