"""The relaxed periodic model and its optimisation under one name (design: periodic transcription)."""

from tmojax.cost.build import relax_problem
from tmojax.cost.model import PeriodicModel
from tmojax.relax.descent import Descent
from tmojax.relax.optimise import RelaxedSolution, Sensitivity, WarmStart, machine_sensitivity, optimise
from tmojax.relax.replayed import ReplayedTime, replay_schedules

__all__ = [
    "Descent",
    "PeriodicModel",
    "RelaxedSolution",
    "ReplayedTime",
    "Sensitivity",
    "WarmStart",
    "machine_sensitivity",
    "optimise",
    "relax_problem",
    "replay_schedules",
]
