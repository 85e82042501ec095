"""An exact selection for the timing of a relaxation: what a GPU does with the links that the relaxed plan leaves it.

Thresholds round every tensor for itself. Here the relaxed plan's timing is kept, with what every GPU gets of every link
in every slot, and the choices of one GPU are made anew by a small mixed-integer programme: the fluid model of one
GPU (`tmojax.ilp.fluid`) with rates that change from slot to slot, and with the gradient synchronisation behind the last
micro-batch. That micro-batch may decide differently from the others.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tmojax.bounds.highs import INFINITY, SolverStatus
from tmojax.cost.tail import step_collectives
from tmojax.ilp.fluid import FluidModel, PathRates
from tmojax.planners.fluid import path_rates
from tmojax.planners.local_search import Guide
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.coordinate import host_links, shared_links
from tmojax.relax.decisions import Choice, DeviceDecision, Rest
from tmojax.relax.decode import DoesNotFit
from tmojax.relax.rounding import Rounding, wanted_from

if TYPE_CHECKING:
    from tmojax.cost.model import PeriodicModel
    from tmojax.relax.optimise import RelaxedSolution

GB = 1e9
MOST_STEPS = 160
SMALL_SHARE = 2e-4  # of the capacity, as in `solve_fluid`
GAP = 5e-3  # relative, at which the solver stops
MOST_NODES = 60  # of its search: a limit that does not depend on the clock
MOST_SOLVES, LEAST_SOLVES, SOLVED_CANDIDATES = 32, 12, 15_000  # all together: so many candidates in so many solves
ROLE_FAILS = 3  # at ops that are alike, before recomputation of all of them is given up
ROUNDS = 12  # of solving with less memory, where the decode of a selection does not fit
RESERVE = 0.003  # of the memory, on top of what is missing at such an op
WALL_S = 300.0  # far beyond what so many nodes take
BINS = 4  # per slot, when the relaxed plan's use of a link is summed up over time


@dataclass(frozen=True, eq=False)
class LinkLimit:
    """rate [Q]: bytes per second at every slot of the `StepView` for copies in the directions `uses` (out, in)."""

    uses: tuple[bool, bool]
    rate: np.ndarray


@dataclass(frozen=True, eq=False)
class Synchronisation:
    """Collectives behind the last micro-batch, C of them, each followed by all later ones.

    slot [C]: fine slot behind which it may start (-1: at once); left_s [C]: from there, alone. links: for every shared
    link (uses, bytes per second for one of its users, bytes of collectives that are left [C] for one of its users).
    """

    slot: np.ndarray
    left_s: np.ndarray
    links: tuple[tuple[tuple[bool, bool], float, np.ndarray], ...]


def link_limits(model: PeriodicModel, solution: RelaxedSolution, restart: int) -> list[list[LinkLimit]]:
    """For every GPU: its own way out and in, and on every shared link what the relaxed plan gives it plus an equal part
    of what nobody uses then."""
    end_s, phase = solution.slot_end_s[restart], solution.phase[restart]
    flows = np.stack([solution.out_gb[restart], solution.in_gb[restart]], 1)  # [gpu, 2, slot]
    gpus, slots = end_s.shape
    period_s = float(end_s[:, -1].max())
    begin_s = phase * period_s
    horizon_s = period_s if model.wraps else float((begin_s + end_s[:, -1]).max())
    edge = np.linspace(0.0, horizon_s, BINS * slots + 1)
    knots = np.concatenate([np.zeros((gpus, 1)), end_s], 1)
    levels = np.concatenate([np.zeros((gpus, 2, 1)), flows], 2)

    def crossed(gpu: int, direction: int, at_s: np.ndarray) -> np.ndarray:
        turns = np.floor(at_s / period_s) if model.wraps else np.zeros_like(at_s)
        inside = np.interp(at_s - turns * period_s, knots[gpu], levels[gpu, direction])
        return inside + turns * levels[gpu, direction, -1]

    use, rate = np.asarray(model.link_use), np.asarray(model.link_gb_per_s)
    lane = np.asarray(model.lane_gb_per_s)
    found = []
    spare = []
    for link in range(len(rate)):
        moved = sum(
            np.diff(crossed(gpu, direction, edge - begin_s[gpu])) * use[link, gpu, direction]
            for gpu in range(gpus)
            for direction in range(2)
        )
        free = np.maximum(rate[link] * np.diff(edge) - moved, 0.0)
        spare.append(np.concatenate([[0.0], np.cumsum(free)]))
    for gpu in range(gpus):
        merged = np.asarray(model.merged[gpu])
        merged = merged[merged >= 0]
        slot_s = np.maximum(np.diff(knots[gpu]), 1e-12)
        limits = [LinkLimit((d == 0, d == 1), np.full(len(merged), lane[gpu, d] * GB)) for d in range(2)]
        for link in range(len(rate)):
            uses = use[link, gpu] > 0
            if not uses.any():
                continue
            own = sum(np.diff(levels[gpu, d]) for d in range(2) if uses[d])
            at = knots[gpu] + begin_s[gpu]
            turns = np.floor(at / horizon_s) if model.wraps else np.zeros_like(at)
            free = np.diff(np.interp(at - turns * horizon_s, edge, spare[link]) + turns * spare[link][-1])
            users = max(int((use[link] > 0).any(1).sum()), 1)
            limits.append(LinkLimit((bool(uses[0]), bool(uses[1])), ((own + free / users) / slot_s * GB)[merged]))
        found.append(limits)
    return found


class _SelectionModel(FluidModel):
    """The fluid model with rates by slot, and a cost for the last micro-batch with the synchronisation behind it."""

    def __init__(self, problem: Problem, view: StepView, capacity_bytes: int, limits: Sequence[LinkLimit],
                 sync: Synchronisation) -> None:  # fmt: skip
        self.limits, self.sync = limits, sync
        actions, shared = problem.actions, path_rates(problem, view.device, shared=True)
        offload, recompute = Action.OFFLOAD in actions, Action.RECOMPUTE in actions
        super().__init__(view, capacity_bytes, shared, offload, recompute, MOST_STEPS, SMALL_SHARE)

    def _add_time(self, rates: PathRates, out: np.ndarray, into: np.ndarray) -> None:
        view, model = self.view, self.model
        slot_s = np.maximum(view.slot_s, 1e-12)
        length = self.steps.seconds(view.slot_s) / self.unit_s
        steps = len(length)
        stall = model.add_columns(steps, 0.0, self.longest)
        ends = model.add_columns(steps + 1, 0.0, self.longest)
        flows = (out, into)
        for j in range(steps):
            model.add_row(
                length[j], length[j], (ends[j + 1], 1.0), (ends[j], -1.0), (stall[j], -1.0), (self.done[j], -1.0)
            )
            at = slice(int(self.first[j]), int(self.end[j]))
            for limit in self.limits:
                per_unit = self.rate(float(np.average(limit.rate[at], weights=slot_s[at])))
                terms = [t for used, c in zip(limit.uses, flows, strict=True) if used
                         for t in ((c[j + 1], -1.0), (c[j], 1.0))]  # fmt: skip
                model.add_row(-per_unit * length[j], INFINITY, (stall[j], per_unit), (self.done[j], per_unit), *terms)
        model.add_row(0.0, 0.0, (ends[0], 1.0))
        self.period = int(ends[steps])
        others = int(model.add_columns(1, 0.0, self.longest, cost=float(view.micro_batches - 1))[0])
        model.add_row(0.0, 0.0, (others, 1.0), (self.period, -1.0))
        last = int(model.add_columns(1, 0.0, self.longest, cost=1.0)[0])
        model.add_row(0.0, INFINITY, (last, 1.0), (self.period, -1.0))
        self._add_synchronisation(last, ends, flows)
        self.update = int(model.add_columns(1, float(view.step_s.sum()) / self.unit_s, self.longest, cost=1.0)[0])
        self.moved = (int(out[-1]), int(into[-1]))
        state = [(int(c), -float(g)) for c, g in zip(self.leaves, self.group_size, strict=True)]
        for rate, times in ((rates.out_bytes_per_s, 1.0), (rates.in_bytes_per_s, 1.0), (rates.joint_bytes_per_s, 2.0)):
            if rate < float("inf") and state:
                model.add_row(0.0, INFINITY, (self.update, self.rate(rate)), *((c, times * v) for c, v in state))

    def _add_synchronisation(self, last: int, ends: np.ndarray, flows: tuple[np.ndarray, np.ndarray]) -> None:
        """The last micro-batch ends no earlier than any collective and all behind it, with what is still copied."""
        sync = self.sync
        step = np.where(sync.slot < 0, 0, np.searchsorted(self.end, sync.slot, side="right") + 1)
        for j in np.unique(step).tolist():
            first = int(np.flatnonzero(step == j)[0])  # of those behind one step, the first has most behind it
            self.model.add_row(sync.left_s[first] / self.unit_s, INFINITY, (last, 1.0), (ends[j], -1.0))
            for uses, rate, left in sync.links:
                if left[first] <= 0:
                    continue
                per_unit = self.rate(rate)
                terms = [t for used, c in zip(uses, flows, strict=True) if used for t in ((c[-1], -1.0), (c[j], 1.0))]
                self.model.add_row(
                    left[first] / self.unit_bytes, INFINITY, (last, per_unit), (ends[j], -per_unit), *terms
                )


def synchronisation(
    bench: Workbench, device: int, link_users: dict[int, tuple[tuple[bool, bool], int]]
) -> Synchronisation:
    """What follows the last micro-batch of a device. link_users: of every shared link that it uses (index in the
    machine), the directions of its copies there and by how many devices the link is used."""
    found = step_collectives(bench.problem, bench.view(device))
    machine = bench.problem.machine
    links = tuple(
        (uses, machine.links[link].bandwidth_bytes_per_s / users, found.left_gb[link] * GB / users)
        for link, (uses, users) in link_users.items()
    )
    return Synchronisation(found.before, found.left_s, links)


def host_users(bench: Workbench, device: int) -> dict[int, tuple[tuple[bool, bool], int]]:
    """`link_users` of `synchronisation`."""
    machine = bench.problem.machine
    spec = machine.devices[device]
    out = set(machine.route(spec.memory, spec.host_memory).links)
    into = set(machine.route(spec.host_memory, spec.memory).links)
    used = [host_links(machine, other) for other in range(bench.device_count)]
    return {
        link: ((link in out, link in into), sum(link in links for links in used))
        for link in shared_links(machine) if link in out | into
    }  # fmt: skip


@dataclass(frozen=True)
class Selected:
    """decision: None without a solution; may not fit where all `solves` have been spent. time_limited: the clock ended
    a solve, so that another machine may find another one."""

    decision: DeviceDecision | None
    solves: int
    time_limited: bool


def _freed_bytes(problem: Problem, view: StepView, known: DeviceDecision) -> int:
    """What state that rests leaves free in the micro-batches."""
    left = (known.state_out == Rest.ON_HOST) | (known.state_out == Rest.AWAY)
    freed = int(view.state_bytes[left & view.state_resting].sum())
    if known.encodes_state:
        codec = problem.machine.codecs[known.codec]
        sizes = view.state_bytes[(known.state_out == Rest.ENCODED) & view.state_resting].tolist()
        freed += sum(size - codec.encoded_bytes(size) for size in sizes)
    return freed


def select(bench: Workbench, device: int, limits: Sequence[LinkLimit], known: DeviceDecision | None, *,
           rate_factor: float = 1.0, capacity_factor: float = 1.0, rounds: int = ROUNDS) -> Selected:  # fmt: skip
    """The best selection of one device for these rates.

    known: a decision whose state is taken over; without one the model decides for resting state. The factors make up
    for what the model does not know: whole tensors move, and the others are not quite where the relaxation has them. A
    selection that the decode rejects is made again with so much less memory at ops like the one that fails; `rounds`
    solves at most.
    """
    problem, view = bench.problem, bench.view(device)
    capacity = int(problem.capacity_bytes(device) * capacity_factor)
    rests = np.zeros(len(view.state_tensor), np.int8)
    if known is not None:
        rests = known.state_out.astype(np.int8)
        capacity += _freed_bytes(problem, view, known)
        view = replace(view, state_resting=np.zeros(len(view.state_tensor), bool))
    limits = [replace(limit, rate=limit.rate * rate_factor) for limit in limits]
    sync = synchronisation(bench, device, host_users(bench, device))
    limited, failed, decision = False, collections.Counter(), None
    for solves in range(1, rounds + 1):
        built = _SelectionModel(problem, view, capacity, limits, sync)
        answer = built.model.solve(time_limit_s=WALL_S, gap=GAP, most_nodes=MOST_NODES)
        limited |= answer.status is SolverStatus.TIME_LIMIT
        if not len(answer.values):
            return Selected(decision, solves, limited)
        choice, rests = _choices(built, answer.values), rests.copy()
        inside = built.group >= 0
        leaves = answer.values[built.leaves] > 0.5
        rests[inside] = np.where(leaves[built.group[inside]], Rest.ON_HOST, Rest.ON_DEVICE)
        decision = DeviceDecision(choice, rests)
        found = bench.decode(device, decision)
        if isinstance(found, DoesNotFit) and found.micro_batch == 0 and view.micro_batches > 1 and known is not None:
            # State that leaves may not have left yet: the first micro-batch does what is known to fit.
            apart = replace(decision, first_choice=known.by_host().in_first)
            if not isinstance(bench.decode(device, apart), DoesNotFit):
                return Selected(apart, solves, limited)
        if not isinstance(found, DoesNotFit):
            return Selected(decision, solves, limited)
        like = _slots_like(bench, view, found.op)
        if not len(like):  # an op of the update, whose memory is not in the model
            return Selected(decision, solves, limited)
        role = int(like[0])
        broken = like if failed[role] >= ROLE_FAILS else like[view.slot_op[like] == found.op]
        if failed[found.op, 0]:  # a long chain of recomputations, whose memory the model does not see: broken here
            view = replace(view, may_recompute=view.may_recompute & ~np.isin(view.producer_slot, broken))
        failed.update([role, (found.op, 0)])
        again = (choice == Choice.RECOMPUTE) & np.isin(view.producer_slot, like)
        wanted = wanted_from(view, choice)[again]
        reserved = np.zeros(len(view.slot_op), np.int64)
        reserved[like] = reserved[wanted[wanted < len(reserved)]] = found.bytes_over + int(RESERVE * capacity)
        view = replace(view, base_bytes=view.base_bytes + reserved)
    return Selected(decision, rounds, limited)


def _slots_like(bench: Workbench, view: StepView, op: int) -> np.ndarray:
    """Slots of an op and of those of other layers that are like it."""
    ops = bench.problem.workload.program(view.device).ops

    def role(index: int) -> str:
        return ops[index].name.replace(ops[index].layer, "*", 1) if ops[index].layer else ops[index].name

    return np.flatnonzero([role(index) == role(op) for index in view.slot_op.tolist()])


def _choices(built: FluidModel, values: np.ndarray) -> np.ndarray:
    """[I] the largest share of every candidate, as `solve_fluid` reads them."""
    view = built.view
    shares = np.zeros((3, len(view.tensor)))
    for row, columns in enumerate((built.keep, built.move, built.rerun)):  # in the order of `Choice`
        shares[row, columns >= 0] = values[columns[columns >= 0]]
    shares[0, built.fixed] = 1.0
    choice = shares.argmax(axis=0).astype(np.int8)
    choice[~view.needed & (shares.max(axis=0) < 0.5)] = Choice.RECOMPUTE
    return choice


# Of the links' rates and of the memory, for the best restart; other restarts are selected for with the first.
FACTORS = ((1.0, 1.0), (1.0, 0.95), (0.85, 1.0))


def selections(bench: Workbench, model: PeriodicModel, solution: RelaxedSolution, known: Candidate | None,
               restarts: int = 2) -> tuple[list[Rounding], bool]:  # fmt: skip
    """(decisions of all GPUs with start shares, as `round_solution` gives them; whether the clock ended a solve). GPUs
    of one class that start together decide alike; where not all do, the decisions of the first one are tried on all.

    known: the plan whose state is taken over, beside what the model decides for state.
    """
    devices = range(bench.device_count)
    found: dict[tuple, Rounding] = {}
    limited, candidates = False, max(len(bench.view(device).tensor) for device in devices)
    solves = min(MOST_SOLVES, max(LEAST_SOLVES, SOLVED_CANDIDATES // max(candidates, 1)))
    for place, restart in enumerate(np.argsort(solution.step_s, kind="stable")[:restarts].tolist()):
        limits = link_limits(model, solution, restart)
        shares = tuple(float(share) for share in solution.start_share[restart])
        group = [(bench.device_class[device], round(shares[device] * 32)) for device in devices]
        states: list[Candidate | None] = [known]
        if known is not None and any(bench.view(device).state_resting.any() for device in devices):
            states.append(None)
        for (rate, capacity), state in itertools.product(FACTORS if place == 0 else FACTORS[:1], states):
            chosen: dict[tuple, DeviceDecision | None] = {}
            for device in devices:
                if group[device] not in chosen and solves > 0:
                    plan = None if state is None else state.decisions[device]
                    selected = select(
                        bench, device, limits[device], plan, rate_factor=rate, capacity_factor=capacity,
                        rounds=min(ROUNDS, solves),
                    )  # fmt: skip
                    chosen[group[device]] = selected.decision
                    limited, solves = limited or selected.time_limited, solves - selected.solves
            decisions = [chosen.get(group[device]) for device in devices]
            options = [decisions]
            if len(chosen) > 1 and len(set(bench.device_class)) == 1:
                options.append(decisions[:1] * bench.device_count)
            for option in options:
                fitting = tuple(decision for decision in option if decision is not None)
                if len(fitting) == bench.device_count:
                    found.setdefault((*(decision.key for decision in fitting), shares), (fitting, shares))
    return list(found.values()), limited


def guide_of(bench: Workbench, model: PeriodicModel, solution: RelaxedSolution,
             plans: Sequence[tuple[DeviceDecision, ...]]) -> Guide:  # fmt: skip
    """For local search: `plans`, and weights of candidates by what the relaxation says of them.

    Half of the weight goes to bytes whose keeping is expensive at the memory prices of the best restart, half to bytes
    about which restarts disagree or that the best one has left undecided.
    """
    best = int(np.argmin(solution.step_s))
    weight = {}
    for device in sorted(set(bench.device_class)):
        view, merged = bench.view(device), np.asarray(model.merged[device])
        count = len(view.tensor)
        price = np.append(0.0, np.cumsum(solution.memory_price_s_per_byte[best, device]))
        low, high = merged[view.idle_from] + 1, np.maximum(merged[view.idle_to], merged[view.idle_from] + 1)
        kept_s = view.size_bytes * (price[high] - price[low])
        shares = solution.choice[:, device, :count]
        open_bytes = view.size_bytes * (shares.var(axis=0).sum(-1) + 1 - np.square(shares[best]).sum(-1))
        weight[device] = sum(part / part.sum() for part in (kept_s, open_bytes) if part.sum() > 0) + np.zeros(count)
    return Guide(tuple(plans), weight)
