"""A selection for a step of one micro-batch in which state takes much of the memory: what leaves, what is made again,
and where each state tensor rests, in one mixed-integer programme.

Rules and searches that decide for state and for activations in turn do not find it: what state leaves free is what
recomputation needs, and chains of it need more than the model knows. So the model (`tmojax.ilp.fluid`, every GPU with
its share of the links) chooses, chains that do not fit are broken (`tmojax.relax.chain_breaks`), and the decode judges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from tmojax.cost.state import LONG_GAP, find_state_gaps
from tmojax.ilp.fluid import FluidModel, HostedState
from tmojax.planners.fluid import path_rates
from tmojax.planners.sweep import sweep
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, Problem
from tmojax.problem.step_view import NEVER, StepView
from tmojax.relax.chain_breaks import break_chains
from tmojax.relax.decisions import Choice, DeviceDecision, Rest, keep_everything
from tmojax.relax.decode import DoesNotFit
from tmojax.relax.template import build_template
from tmojax.relax.unroll import unroll

MOST_STEPS = 160
SMALL_SHARE = 2e-4  # of the capacity: smaller tensors are not decided
GAP, MOST_NODES, WALL_S = 5e-3, 60, 300.0  # as of other selections (`tmojax.planners.selection`)
CAPACITIES = (1.0, 0.985, 0.97)  # shares of the memory that the model is told of, for what it does not know
ROUNDS = 10  # of breaking chains with less memory where the decode fails
RESERVE = 5e-4  # of the memory, on top of what is missing there
NEAR = 2  # slots on both sides of it


def whole_step_selections(bench: Workbench) -> Iterator[tuple[DeviceDecision, ...]]:
    """Decisions of all GPUs, equal ones alike, that fit; none where the step has several micro-batches, or little state
    that could leave."""
    problem = bench.problem
    classes = sorted(set(bench.device_class))
    if problem.workload.micro_batches > 1 or Action.OFFLOAD not in problem.actions:
        return
    if not all(len(find_state_gaps(problem, bench.view(device)).state) for device in classes):
        return
    for share in CAPACITIES:
        chosen = {device: _select(bench, device, int(share * problem.capacity_bytes(device))) for device in classes}
        decisions = tuple(chosen[first] for first in bench.device_class)
        fitting = tuple(decision for decision in decisions if decision is not None)
        if len(fitting) == bench.device_count:
            yield fitting


def selected_plans(bench: Workbench, limit_s: float = float("inf")) -> list[Candidate]:
    """The fastest of the selections, with the fastest policy and stagger, if it takes less than `limit_s`."""
    found = [sweep(bench, decisions) for decisions in whole_step_selections(bench)]
    plans = [plan for plan in found if isinstance(plan, Candidate) and plan.step_s < limit_s]
    return sorted(plans, key=lambda plan: plan.step_s)[:1]


def _select(bench: Workbench, device: int, capacity_bytes: int) -> DeviceDecision | None:
    problem, view = bench.problem, bench.view(device)
    built = _WholeStepModel(problem, view, capacity_bytes)
    answer = built.model.solve(time_limit_s=WALL_S, gap=GAP, most_nodes=MOST_NODES)
    if not len(answer.values):
        return None
    decision = built.decision(answer.values)
    slot_of = {int(op): slot for slot, op in enumerate(view.slot_op)}
    room = problem.capacity_bytes(device) + _freed_by_state(problem, view, decision.state_out).astype(float)
    for _ in range(ROUNDS):
        decision = replace(decision, choice=break_chains(view, decision.choice, room))
        found = bench.decode(device, decision)
        if not isinstance(found, DoesNotFit):
            return decision
        slot = slot_of.get(found.wanted_by, len(view.slot_op) - 1)
        near = slice(max(0, slot - NEAR), slot + NEAR + 1)
        room[near] -= found.bytes_over + RESERVE * problem.capacity_bytes(device)
    return None


def _freed_by_state(problem: Problem, view: StepView, state_out: np.ndarray) -> np.ndarray:
    """[Q] bytes that are free at every slot because of where state rests."""

    def profile(decision: DeviceDecision) -> np.ndarray:
        template = build_template(problem, view, decision)
        step = unroll(problem, view, decision, template)
        where = {int(op): run for run, op in reversed(list(enumerate(step.op.tolist())))}
        return step.profile_bytes[[where[int(op)] for op in view.slot_op]]

    kept = keep_everything(view)
    return profile(kept) - profile(replace(kept, state_out=state_out))


class _WholeStepModel(FluidModel):
    """The fluid model with state tensors that may be away between two uses, and that may rest on the host.

    pieces: (index of the state tensor, its first and last slot). gap_state: the state tensor of every candidate behind
    those of the step.
    """

    def __init__(self, problem: Problem, view: StepView, capacity_bytes: int) -> None:
        self.step_view = view
        uses = _state_uses(problem, view)
        large = [index for index in sorted(uses) if view.state_bytes[index] > SMALL_SHARE * capacity_bytes]
        self.pieces = [(index, uses[index][0], uses[index][-1]) for index in large]
        shortest = max(2, int(len(view.slot_op) * LONG_GAP))
        pairs = [(index, before, after) for index in large for before, after in pairwise(uses[index])]
        gaps = [pair for pair in pairs if pair[2] - pair[1] > shortest]
        self.gap_state = np.array([index for index, _, _ in gaps], np.int64)
        rates = path_rates(problem, view.device, shared=True)
        recompute = Action.RECOMPUTE in problem.actions
        super().__init__(_with_gaps(view, gaps), capacity_bytes, rates, True, recompute, MOST_STEPS, SMALL_SHARE)

    def _add_hosted(self) -> tuple[HostedState, ...]:
        self.hosted_columns = columns = self.model.add_columns(len(self.pieces), integer=True)
        return tuple(
            HostedState(int(column), float(self.step_view.state_bytes[index]) / self.unit_bytes,
                        int(np.searchsorted(self.end, first, side="right")),
                        int(np.searchsorted(self.first, last + 1, side="left")))
            for column, (index, first, last) in zip(columns, self.pieces, strict=True)
        )  # fmt: skip

    def decision(self, values: np.ndarray) -> DeviceDecision:
        """The larger shares of a solution."""
        view, own = self.view, len(self.step_view.tensor)
        shares = np.zeros((3, len(view.tensor)))
        for row, columns in enumerate((self.keep, self.move, self.rerun)):  # in the order of `Choice`
            shares[row, columns >= 0] = values[columns[columns >= 0]]
        shares[0, self.fixed] = 1.0
        choice = shares.argmax(axis=0).astype(np.int8)
        choice[~view.needed & (shares.max(axis=0) < 0.5)] = Choice.RECOMPUTE
        state_out = np.zeros(len(view.state_tensor), np.int8)
        state_out[self.gap_state[choice[own:] == Choice.OFFLOAD]] = Rest.AWAY
        for (index, _, _), column in zip(self.pieces, self.hosted_columns, strict=True):
            if values[column] > 0.5:
                state_out[index] = Rest.ON_HOST
        return DeviceDecision(choice[:own], state_out)


def _state_uses(problem: Problem, view: StepView) -> dict[int, list[int]]:
    """Slots that touch each state tensor, by its index."""
    ops, number = problem.workload.program(view.device).ops, {int(t): i for i, t in enumerate(view.state_tensor)}
    uses: dict[int, list[int]] = {}
    for slot, op in enumerate(view.slot_op.tolist()):
        for tensor in dict.fromkeys((*ops[op].reads, *ops[op].updates)):
            if tensor in number:
                uses.setdefault(number[tensor], []).append(slot)
    return uses


def _with_gaps(view: StepView, gaps: list[tuple[int, int, int]]) -> StepView:
    """`view` with gaps of state (index, slots around it) as further candidates that may be kept or moved."""
    base = view.base_bytes.copy()
    for index, before, after in gaps:
        base[before + 1 : after] -= view.state_bytes[index]
    index, before, after = np.array(gaps, np.int64).reshape(-1, 3).T
    yes, no = np.ones(len(gaps), bool), np.zeros(len(gaps), bool)
    return replace(
        view, base_bytes=base, tensor=np.append(view.tensor, view.state_tensor[index]),
        size_bytes=np.append(view.size_bytes, view.state_bytes[index]), idle_from=np.append(view.idle_from, before),
        idle_to=np.append(view.idle_to, after), producer_slot=np.append(view.producer_slot, before),
        needed=np.append(view.needed, yes), may_recompute=np.append(view.may_recompute, no),
        same_until=np.append(view.same_until, np.full(len(gaps), NEVER)),
        may_offload=np.append(view.may_offload, yes), recompute_s=np.append(view.recompute_s, np.zeros(len(gaps))),
        recompute_inputs=view.recompute_inputs + ((),) * len(gaps), dependents=view.dependents + ((),) * len(gaps),
    )  # fmt: skip
