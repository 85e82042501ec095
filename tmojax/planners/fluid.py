"""Planners that select by the fluid MILP: each GPU alone (contention-oblivious), lock-step, and budget.

All three solve the same model of one GPU (`tmojax.relax.fluid_milp`); they differ in what it knows about the others:
nothing, an equal share of every link at every moment, or the bytes that all of them may move in the time of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from tmojax.planners.base import Planner, PlanResult, Status, Stopwatch, does_not_fit
from tmojax.planners.sweep import even_starts, sweep
from tmojax.planners.workbench import Workbench
from tmojax.problem import Action, LinkPolicyKind, Problem
from tmojax.relax.coordinate import host_links, shared_links
from tmojax.relax.decisions import DeviceDecision
from tmojax.relax.decode import DoesNotFit
from tmojax.relax.fluid_milp import FluidSolution, solve_fluid
