"""Improve the decisions of a large step: a part of them is solved anew in the fluid model of one GPU.

The sub-model knows how many bytes the other GPUs and the collectives move in a step and leaves them their part of the
links; a random trust in what remains makes the proposals differ. What it proposes is decoded and simulated exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from tmojax.bounds.highs import SolverStatus
from tmojax.ilp.fluid import PathRates
from tmojax.ilp.neighbourhood import Neighbourhood
from tmojax.ilp.neighbourhood_fluid import Surroundings, capacity_that_fits, respond
from tmojax.ilp.solver import SolverSettings
from tmojax.planners.fluid import collective_bytes, path_rates
from tmojax.planners.repair import repair
from tmojax.planners.sweep import POLICIES
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, Kind
from tmojax.relax.decisions import DeviceDecision, Rest
from tmojax.relax.decode import NEVER, DoesNotFit
from tmojax.simulate import simulate

SUB_SETTINGS = SolverSettings(time_limit_s=60.0, gap=1e-3, threads=1)
TRUST = (0.75, 1.1)  # in the rates that the others' bytes leave
SPANS = (0.05, 0.4)  # of the slots of a micro-batch, in a window
NEAR = 1.02  # so close to the best, every link policy is tried
FASTER = 1 - 1e-9


@dataclass
class Log:
    """What a search did. improvements: per kind of neighbourhood. solves: sub-models by how they ended. wall_limited: a
    clock ended something, so that another machine could find another plan."""

    iterations: int = 0
    improvements: dict[str, int] = field(default_factory=dict)
    solves: dict[str, int] = field(default_factory=dict)
    wall_limited: bool = False

    def improved(self, kind: str) -> None:
        self.improvements[kind] = self.improvements.get(kind, 0) + 1

    def solved(self, status: str) -> None:
        self.solves[status] = self.solves.get(status, 0) + 1


def improve_decisions(bench: Workbench, start: Candidate, iterations: int, free: int, rng: np.random.Generator,
                      log: Log, over: Callable[[], bool]) -> Candidate:  # fmt: skip
    """The best candidate found, never slower than `start`. At most `free` candidates are decided anew at a time."""
    best, tried = start, set()
    capacities: dict[tuple, int] = {}
    state = Action.OFFLOAD in bench.problem.actions and any(
        bench.view(device).state_resting.any() for device in range(bench.device_count)
    )
    kinds = [kind for kind in Neighbourhood if kind is not Neighbourhood.STATE or state]
    for iteration in range(iterations):
        if over():
            log.wall_limited = True
            break
        kind = kinds[iteration % len(kinds)]
        log.iterations += 1
        decisions = _propose(bench, best, kind, free, rng, log, capacities)
        if decisions is None:
            continue
        key = tuple(item.key for item in decisions)
        if key in tried:
            continue
        tried.add(key)
        found = bench.evaluate(decisions, best.coordination, best.lookahead_runs)
        if isinstance(found, DoesNotFit):
            continue
        if found.step_s < best.step_s * NEAR:
            other = bench.with_policies(decisions, best.coordination.start_share, POLICIES, best.lookahead_runs)
            if not isinstance(other, DoesNotFit) and other.step_s < found.step_s:
                found = other
        if found.step_s < best.step_s * FASTER:
            best = found
            log.improved(kind.value)
    return best


def _propose(bench: Workbench, now: Candidate, kind: Neighbourhood, most: int, rng: np.random.Generator,
             log: Log, capacities: dict[tuple, int]) -> tuple[DeviceDecision, ...] | None:  # fmt: skip
    """Other decisions of one GPU, or of all that are equal and decide alike; of all GPUs for a layer."""
    lead = int(rng.integers(bench.device_count))
    alike = [
        device
        for device in range(bench.device_count)
        if bench.device_class[device] == bench.device_class[lead] and now.decisions[device].same_as(now.decisions[lead])
    ]
    together = kind is Neighbourhood.LAYER or rng.random() < 0.6
    group = alike if together else [lead]
    free = _free(bench, now, lead, kind, most, rng)
    around = _surroundings(bench, now, lead, group, float(rng.uniform(*TRUST)))
    key = (bench.device_class[lead], now.decisions[lead].key)
    if key not in capacities:
        capacities[key] = capacity_that_fits(bench.view(lead), now.decisions[lead], around, SUB_SETTINGS)
    around = replace(around, capacity_bytes=capacities[key])
    answer, status = respond(
        bench.view(lead), now.decisions[lead], free, kind is Neighbourhood.STATE, around, SUB_SETTINGS
    )
    log.solved(status.value)
    log.wall_limited |= status is SolverStatus.TIME_LIMIT
    if answer is None or answer.same_as(now.decisions[lead]):
        return None
    fitted = repair(bench, lead, answer)
    if isinstance(fitted, DoesNotFit):
        return None
    return tuple(fitted if device in group else decision for device, decision in enumerate(now.decisions))


def _free(bench: Workbench, now: Candidate, device: int, kind: Neighbourhood, most: int,
          rng: np.random.Generator) -> np.ndarray:  # fmt: skip
    """[I] bool: what may be decided anew; the larger tensors if there are too many."""
    view = bench.view(device)
    slots = len(view.slot_op)
    free = np.zeros(len(view.tensor), bool)
    if kind is Neighbourhood.LAYER:
        program = bench.problem.workload.program(device)
        layers = np.array([program.ops[view.slot_op[slot]].layer for slot in view.producer_slot.tolist()])
        if len(layers):
            free = layers == layers[int(rng.integers(len(layers)))]
    elif kind is not Neighbourhood.STATE:
        span = max(1, int(slots * rng.uniform(*SPANS)))
        centre = _waiting_slot(bench, now, device, rng) if kind is Neighbourhood.CONGESTED else -1
        begin = centre - span // 2 if centre >= 0 else int(rng.integers(0, max(1, slots - span + 1)))
        for edge in (view.idle_from, view.idle_to):
            free |= (edge >= begin) & (edge < begin + span)
    if free.sum() > most:
        size = np.where(free, view.size_bytes * rng.uniform(0.3, 1.0, len(free)), -1.0)
        free = np.zeros(len(free), bool)
        free[np.argsort(-size, kind="stable")[:most]] = True
    return free


def _waiting_slot(bench: Workbench, now: Candidate, device: int, rng: np.random.Generator) -> int:
    """A slot before which compute waits, long waits more often; -1 if it never does."""
    view, rows = bench.view(device), now.schedule.lists[device]
    simulation = simulate(bench.problem, now.schedule)
    computes = np.flatnonzero(rows["kind"] == Kind.COMPUTE)
    start_s, end_s = simulation.start_s[device][computes], simulation.end_s[device][computes]
    waits = np.maximum(start_s - np.concatenate([[0.0], end_s[:-1]]), 0.0)
    slot_of = np.full(len(bench.problem.workload.program(device).ops), -1)
    slot_of[view.slot_op] = np.arange(len(view.slot_op))
    slots = slot_of[rows["op"][computes]]
    per_slot = np.bincount(slots[slots >= 0], weights=waits[slots >= 0], minlength=len(view.slot_op))
    if per_slot.sum() <= 0:
        return -1
    return int(rng.choice(len(per_slot), p=per_slot / per_slot.sum()))


def _surroundings(bench: Workbench, now: Candidate, lead: int, group: list[int], trust: float) -> Surroundings:
    problem, view = bench.problem, bench.view(lead)
    rates = path_rates(problem, lead, shared=False)
    others = [device for device in range(bench.device_count) if device not in group]
    lookahead = now.lookahead_runs or (NEVER,) * bench.device_count
    moved = [bench.decode(device, now.decisions[device], lookahead[device]) for device in others]
    bytes_out = sum(item.moved_bytes[0] for item in moved if not isinstance(item, DoesNotFit))
    bytes_in = sum(item.moved_bytes[1] for item in moved if not isinstance(item, DoesNotFit))
    part = trust / len(group)
    budget = PathRates(rates.out_bytes_per_s * part, rates.in_bytes_per_s * part, rates.joint_bytes_per_s * part)
    taken = (max(bytes_out, bytes_in) + collective_bytes(problem, lead) * bench.device_count) / len(group)
    away = int(view.state_bytes[now.decisions[lead].state_out == Rest.AWAY].sum())
    return Surroundings(
        rates, budget, taken * trust, problem.capacity_bytes(lead) + away, Action.OFFLOAD in problem.actions,
        Action.RECOMPUTE in problem.actions,
    )  # fmt: skip
