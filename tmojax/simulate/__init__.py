"""Exact times of a schedule, event by event. Shares nothing with the checker or the cost model; imports no JAX."""

from tmojax.simulate.prepared import Prepared, prepare, simulate
from tmojax.simulate.simulation import Simulation
from tmojax.simulate.studies import SteadyState, jitter, steady_state

__all__ = ["Prepared", "Simulation", "SteadyState", "jitter", "prepare", "simulate", "steady_state"]
