"""A part of one GPU's decisions anew in its fluid model, the rest and the other GPUs' bytes as they are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tmojax.bounds.highs import SolverStatus
from tmojax.ilp.fluid import FluidModel, PathRates
from tmojax.ilp.solver import SolverSettings, solve_milp
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import Choice, DeviceDecision, Rest


@dataclass(frozen=True)
class Surroundings:
    """What the model knows of everything else. rates: of the path at every moment. budget, taken_bytes: rates over the
    whole step, and what others move on them. capacity_bytes: of the device, with what leaves in ways that the model
    has not."""

    rates: PathRates
    budget: PathRates
    taken_bytes: float
    capacity_bytes: int
    offload: bool
    recompute: bool


MOST_STEPS = 1000  # fluid steps; what is fixed costs the solver nothing, so there may be one for every op
SMALL = 0.0  # share of the capacity below which candidates are left out: none is
# The model counts memory by its worst slot in a step and knows no state that leaves within a step, so that a decision
# that fits may not fit in it.
WIDER = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4, 1.8)


def capacity_that_fits(view: StepView, decision: DeviceDecision, around: Surroundings,
                       settings: SolverSettings) -> int:  # fmt: skip
    """The device's capacity, or as much more (in coarse steps) as the model needs for `decision` itself."""
    nothing = np.zeros(len(view.tensor), bool)
    for factor in WIDER:
        wider = replace(around, capacity_bytes=int(around.capacity_bytes * factor))
        if respond(view, decision, nothing, False, wider, settings)[0] is not None:
            return wider.capacity_bytes
    return around.capacity_bytes


def respond(view: StepView, decision: DeviceDecision, free: np.ndarray, free_state: bool, around: Surroundings,
            settings: SolverSettings) -> tuple[DeviceDecision | None, SolverStatus]:  # fmt: skip
    """The model's best decision that differs from `decision` in the candidates `free` [I] only (and in resting state,
    if `free_state`); None without a solution."""
    built = FluidModel(view, around.capacity_bytes, around.rates, around.offload, around.recompute, MOST_STEPS, SMALL)
    built.add_budget(around.budget, around.taken_bytes)
    values = built.start_values(decision)
    # What is idle for one step cannot leave and be back in the model; the decode does not let it leave either.
    short = (built.move >= 0) & (built.keep >= 0) & (built.stop - built.begin < 2)
    short[short] = values[built.move[short]] > 0.5
    values[built.move[short]], values[built.keep[short]] = 0.0, 1.0
    known = values.tolist()
    columns = {Choice.KEEP: built.keep, Choice.OFFLOAD: built.move, Choice.RECOMPUTE: built.rerun}
    for of_choice in columns.values():
        for column in of_choice[~free & (of_choice >= 0)].tolist():
            built.model.add_row(known[column], known[column], (column, 1.0))
    if not free_state:
        for column in built.leaves.tolist():
            built.model.add_row(known[column], known[column], (column, 1.0))
    answer = solve_milp(built.model, settings, values)
    if not len(answer.values):
        return None, answer.status
    choice = decision.choice.copy()
    for index in np.flatnonzero(free).tolist():
        shares = {kind: answer.values[c[index]] for kind, c in columns.items() if c[index] >= 0}
        if shares and max(shares.values()) > 0.5:
            choice[index] = max(shares, key=shares.__getitem__)
        elif shares and not view.needed[index]:
            choice[index] = Choice.RECOMPUTE
    state_out = decision.state_out.astype(np.int8)
    for group, column in enumerate(built.leaves.tolist() if free_state else ()):
        if (answer.values[column] > 0.5) != (values[column] > 0.5):
            state_out[built.group == group] = Rest.ON_HOST if answer.values[column] > 0.5 else Rest.ON_DEVICE
    return replace(decision.alike(), choice=choice, state_out=state_out), answer.status
