"""Exact times of a schedule, event by event. Shares nothing with the checker or the cost model; imports no JAX."""

from tmojax.simulate.prepared import Prepared, prepare, simulate
from tmojax.simulate.simulation import Simulation

__all__ = ["Prepared", "Simulation", "prepare", "simulate"]
