"""The gradient planner: relaxation, descent, rounding, exact sweep, local search; and the same without gradient.

Both start from the best plans of other planners, or from strategies of their own when there are none, and are never
slower. `local-search` spends as many simulations, without gradient and selections (`tmojax.planners.whole_step`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from tmojax.errors import InputError
from tmojax.planners.base import Planner, PlanResult, Status, Stopwatch
from tmojax.planners.local_search import SearchLog, SearchSettings, budget_of, robust_choice, search_from_two
from tmojax.planners.peers_and_codecs import find_lenders, further_starts, lend_less
from tmojax.planners.ratio import RatioSweep
from tmojax.planners.repair import repair
from tmojax.planners.seeding import candidate_of
from tmojax.planners.simple import layer_count, offload_everything, recompute_segments
from tmojax.planners.state_choice import StateSettings, improve_state, state_share
from tmojax.planners.sweep import POLICIES, SHARES, sweep
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import Choice, DeviceDecision, keep_everything
from tmojax.relax.decode import DeviceList, DoesNotFit
from tmojax.relax.rounding import Rounding

if TYPE_CHECKING:
    from tmojax.cost.model import PeriodicModel

# step_s, index, decisions, start shares of a rounding.
Tried = tuple[float, int, tuple[DeviceDecision, ...], tuple[float, ...]]
MOST_TAKEN_OVER = 12  # roundings of which local search takes over parts
MOST_ENTRIES, LEAST_STEPS = 700_000, 600  # of a model that gets all steps; and what any other gets
LEAST_STATE_SHARE = 0.1  # of the step that copies of state take: below, where state rests hardly matters
REPAIR_ROUNDS = 12  # of a rounding that does not fit; each decodes once more


@dataclass(frozen=True)
class Start:
    """A plan to start from, with the name of what made it."""

    name: str
    candidate: Candidate


def own_starts(bench: Workbench) -> Iterator[tuple[str, tuple[DeviceDecision, ...]]]:
    """Decisions to start from when no other planner has run: keep, recompute per layer, offload, and both."""
    problem, views = bench.problem, [bench.view(d) for d in range(bench.device_count)]
    yield "keep-all", tuple(keep_everything(view) for view in views)
    if Action.OFFLOAD in problem.actions:
        yield "offload-all", tuple(offload_everything(view) for view in views)
    if Action.RECOMPUTE not in problem.actions:
        return
    recompute = {id(view): recompute_segments(problem, view, 1) for view in views}
    yield "recompute-all", tuple(recompute[id(view)] for view in views)
    if Action.OFFLOAD in problem.actions:
        mixed = []
        for view in views:
            choice = recompute[id(view)].choice.copy()
            choice[(choice == Choice.KEEP) & view.needed & view.may_offload] = Choice.OFFLOAD
            mixed.append(DeviceDecision(choice, offload_everything(view).state_out))
        yield f"recompute in {layer_count(problem, views[0])} layers, offload the rest", tuple(mixed)


def find_starts(bench: Workbench, seeds: tuple[PlanResult, ...], most: int = 3) -> list[Start]:
    """The best distinct plans to start from, fastest first: those of other planners, or else own simple strategies, or
    a ratio sweep.

    Of a plan that is more than decisions, its decisions are taken, and coordinated anew (`candidate_of`). Where the
    problem allows peers or codecs, the fastest is also tried with a part of it there.
    """
    found = []
    for seed in seeds:
        if not seed.status.has_plan:
            continue
        if seed.candidate is not None:
            found.append(Start(seed.planner, seed.candidate))
        elif seed.schedule is not None and isinstance(candidate := candidate_of(bench, seed.schedule), Candidate):
            found.append(Start(f"decisions of {seed.planner}", candidate))
    if not found:
        tried = [(name, sweep(bench, decisions)) for name, decisions in own_starts(bench)]
        found = [Start(name, plan) for name, plan in tried if isinstance(plan, Candidate)]
    if not found:
        swept = RatioSweep().plan(bench.problem)
        found += [Start(swept.planner, swept.candidate)] if swept.candidate is not None else []
    known = min((start.candidate for start in found), key=lambda candidate: candidate.step_s, default=None)
    found += [Start(name, candidate) for name, candidate in further_starts(bench, known)]
    found.sort(key=lambda start: start.candidate.step_s)
    distinct: list[Start] = []
    for start in found:
        if not any(_same(start.candidate, other.candidate) for other in distinct):
            distinct.append(start)
    return distinct[:most]


def state_moved(bench: Workbench, starts: list[Start], search: SearchSettings, seed: int) -> list[Start]:
    """`starts`; where copies of state are much of the fastest, ahead of it that plan with state somewhere else.

    Takes as many simulations again as `search`, of a fifth as many instructions.
    """
    if not starts or state_share(bench, starts[0].candidate) < LEAST_STATE_SHARE:
        return starts
    settings = StateSettings(evaluations=search.evaluations, decodes=2 * search.evaluations,
                             instructions=max(1, search.instructions // 5))  # fmt: skip
    found = improve_state(bench, starts[0].candidate, settings, seed)
    if found.step_s >= starts[0].candidate.step_s:
        return starts
    return [Start(f"{starts[0].name}, state elsewhere", found), *starts]


def _no_slower(found: PlanResult, seeds: tuple[PlanResult, ...]) -> PlanResult:
    """`found`, or the schedule of a faster seed: a plan that is more than decisions may be out of reach of a search."""
    best = min((seed for seed in seeds if seed.status.has_plan), key=lambda seed: seed.step_s, default=None)
    if best is None or best.step_s >= found.step_s:
        return found
    return replace(
        found, status=Status.FEASIBLE, schedule=best.schedule, step_s=best.step_s, candidate=best.candidate,
        time_limited=best.time_limited, message=f"the plan of {best.planner}, which the search did not reach",
        details={**found.details, "own_step_s": found.step_s if found.status.has_plan else None},
    )  # fmt: skip


def _limit_s(starts: list[Start], seeds: tuple[PlanResult, ...]) -> float:
    """Step time of the fastest plan that was there before."""
    known = [start.candidate.step_s for start in starts] + [seed.step_s for seed in seeds if seed.status.has_plan]
    return min(known, default=float("inf"))


def _same(a: Candidate, b: Candidate) -> bool:
    return all(x.same_as(y) for x, y in zip(a.decisions, b.decisions, strict=True))


@dataclass(frozen=True)
class LocalSearch(Planner):
    """Local search on the exact simulator from the best plan so far, without gradient."""

    name: str = "local-search"
    search: SearchSettings = field(default_factory=SearchSettings)

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        watch = Stopwatch()
        bench = Workbench(problem)
        starts = state_moved(bench, find_starts(bench, seeds), self.search, seed)
        if not starts:
            none = PlanResult(self.name, Status.NOT_FOUND, message="no start fits in memory", plan_s=watch.read_s())
            return _no_slower(none, seeds)
        fastest, log = search_from_two(bench, starts[0].candidate, starts[:2][-1].candidate, self.search, seed)
        best, robust = robust_choice(bench, log, self.search, _limit_s(starts, seeds), seed)
        details = {
            "start": starts[0].name,
            "start_step_s": starts[0].candidate.step_s,
            "after_local_search_step_s": fastest.step_s,
            "robust": robust,
            "evaluations": log.evaluations,
            "improvements": log.improvements,
            "improvements_over_time": improvements_over_time(watch, [(0.0, 0, starts[0].candidate.step_s)], log),
        }
        found = PlanResult(self.name, Status.FEASIBLE, best.schedule, best.step_s, watch.read_s(), candidate=best,
                           details=details)  # fmt: skip
        return _no_slower(found, seeds)


@dataclass(frozen=True)
class Gradient(Planner):
    """Gradient descent through the relaxed cost model (docs/cost-model.md), then rounding and local search.

    restarts: relaxations optimised side by side; steps: optimiser steps of each (large models take fewer: `steps_for`).
    roundings: rounded decisions decoded and simulated, besides exact selections (`tmojax.planners.selection`); the best
    `finalists` of them get the full sweep of policies and staggers. As many of those that do not fit are repaired.
    A step without a relaxation (a micro-batch of one op, or without compute time) gets local search only.
    """

    name: str = "gradient"
    restarts: int = 4
    steps: int = 1500
    roundings: int = 32
    finalists: int = 4
    search: SearchSettings = field(default_factory=SearchSettings)

    def __post_init__(self) -> None:
        for setting, least in (("restarts", 1), ("steps", 20), ("roundings", 1), ("finalists", 1)):
            if getattr(self, setting) < least:
                raise InputError(f"{setting}: {getattr(self, setting)} must be at least {least}")

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        from tmojax.cost import can_relax, relax_problem
        from tmojax.planners.selection import guide_of, selections
        from tmojax.planners.whole_step import selected_plans
        from tmojax.relax.optimise import optimise
        from tmojax.relax.rounding import round_solution

        watch = Stopwatch()
        bench = Workbench(problem)
        views = [bench.view(d) for d in range(bench.device_count)]
        if not all(can_relax(view) for view in views):
            found = LocalSearch(self.name, self.search).plan(problem, seed=seed, seeds=seeds)
            return replace(found, details={**found.details, "relaxed_step_s": None})
        starts = find_starts(bench, seeds)
        faster = selected_plans(bench, _limit_s(starts, ()))
        starts = state_moved(bench, [*(Start("whole step", plan) for plan in faster), *starts], self.search, seed)
        known = starts[0].candidate if starts else None
        model = relax_problem(problem, views, lenders=find_lenders(bench))
        warm = [
            (start.candidate.decisions, start.candidate.coordination.start_share) for start in starts[: self.restarts]
        ]
        steps = steps_for(model, self.steps)
        solution = optimise(model, restarts=self.restarts, steps=steps, seed=seed, warm_starts=warm)
        relaxed_s = watch.read_s()
        selected, limited = selections(bench, model, solution, known)
        selected_s = watch.read_s()
        rounded = alternating(selected, round_solution(model, solution, views, most=self.roundings))
        tried = self.simulate(bench, rounded, known)
        gradient_best = self.sweep_best(bench, tried, known)
        rounded_s = watch.read_s()
        entries = [*starts] + ([Start("gradient", gradient_best)] if gradient_best is not None else [])
        if not entries:
            none = PlanResult(
                self.name, Status.NOT_FOUND, plan_s=watch.read_s(), compile_s=solution.compile_s,
                message="neither a simple strategy nor a rounded relaxation fits in memory", time_limited=limited,
            )  # fmt: skip
            return _no_slower(none, seeds)
        entries.sort(key=lambda start: start.candidate.step_s)
        first, second = entries[0].candidate, gradient_best
        if second is None or second is first:
            second = entries[min(1, len(entries) - 1)].candidate
        before = [(rounded_s, bench.simulations, first.step_s)]
        guide = guide_of(bench, model, solution, [decisions for _, _, decisions, _ in tried[:MOST_TAKEN_OVER]])
        fastest, log = search_from_two(bench, first, second, self.search, seed, guide)
        best, robust = robust_choice(bench, log, self.search, _limit_s(starts, seeds), seed)
        details = {
            "start": starts[0].name if starts else "none",
            "start_step_s": starts[0].candidate.step_s if starts else None,
            "steps": steps,
            "relaxed_step_s": float(np.min(solution.step_s)),
            "after_gradient_step_s": gradient_best.step_s if gradient_best is not None else None,
            "before_local_search_step_s": entries[0].candidate.step_s,
            "after_local_search_step_s": fastest.step_s,
            "robust": robust,
            "roundings": len(rounded),
            "selections": len(selected),
            "evaluations": log.evaluations,
            "improvements": log.improvements,
            "improvements_over_time": improvements_over_time(watch, before, log),
            "relaxation_s": relaxed_s,
            "selection_s": selected_s - relaxed_s,
            "rounding_s": rounded_s - relaxed_s,
            "local_search_s": watch.read_s() - rounded_s,
        }
        found = PlanResult(self.name, Status.FEASIBLE, best.schedule, best.step_s, watch.read_s(), solution.compile_s,
                           candidate=best, details=details, time_limited=limited)  # fmt: skip
        return _no_slower(found, seeds)

    def simulate(self, bench: Workbench, rounded: list[Rounding], known: Candidate | None) -> list[Tried]:
        """All rounded decisions with the phases of the relaxation, repaired where they do not fit; fastest first."""
        tried: list[Tried] = []
        roundings, repaired = len(rounded), 0
        for index, (wished, start_share) in enumerate(rounded):
            if index >= roundings:
                break
            decisions = wished
            found = sweep(bench, decisions, shares=(), starts=(start_share,))
            if isinstance(found, DoesNotFit) and repaired < self.finalists:
                repaired += 1
                decisions = made_to_fit(bench, wished, known)
                found = sweep(bench, decisions, shares=(), starts=(start_share,))
            if isinstance(found, DoesNotFit):
                continue
            if not tried:  # of huge steps fewer are simulated than the search that follows simulates
                half = budget_of(found, self.search) // 2
                roundings = min(roundings, index + max(4, half // len(POLICIES)))
            tried.append((found.step_s, index, decisions, start_share))
        return sorted(tried, key=lambda item: item[:2])

    def sweep_best(self, bench: Workbench, tried: list[Tried], known: Candidate | None) -> Candidate | None:
        """The best ones and their variants, with all policies and staggers."""
        best: Candidate | None = None
        finalists = self.finalists
        for place, (step_s, _, decisions, start_share) in enumerate(tried):
            if place >= finalists:
                break
            for other in variants(bench, decisions, known):
                found = sweep(bench, other, shares=(), starts=(start_share,))
                if not isinstance(found, DoesNotFit) and found.step_s < step_s:
                    step_s, decisions = found.step_s, other
            found = sweep(bench, decisions, starts=(start_share,))
            if isinstance(found, DoesNotFit):
                continue
            if best is None:  # of huge steps fewer are swept than the search that follows simulates
                finalists = min(finalists, max(1, budget_of(found, self.search) // (2 * len(POLICIES) * len(SHARES))))
            if best is None or found.step_s < best.step_s:
                best = found
        return best


def steps_for(model: PeriodicModel, most: int) -> int:
    """Optimiser steps, `most` for small models. A step on a large one takes as much longer as it has more entries
    (GPU x slot x candidate), and its selections need the relaxed plan's use of the links only."""
    entries = model.gpus * model.slots * model.size_gb.shape[1]
    return min(most, max(LEAST_STEPS, most * MOST_ENTRIES // entries)) if entries else most


def alternating(first: list[Rounding], second: list[Rounding]) -> list[Rounding]:
    """One of each in turn, then what is left."""
    both = [item for pair in zip(first, second, strict=False) for item in pair]
    short = min(len(first), len(second))
    return both + first[short:] + second[short:]


def improvements_over_time(
    watch: Stopwatch, before: list[tuple[float, int, float]], log: SearchLog
) -> list[list[float]]:
    """[seconds since the plan was begun, simulations until then, step_s] of every plan faster than those before."""
    begun_s = time.perf_counter() - watch.read_s()
    curve = [list(moment) for moment in before]
    for moment, simulations, step_s in log.moments:
        if step_s < curve[-1][2]:
            curve.append([moment - begun_s, simulations, step_s])
    return curve


def made_to_fit(
    bench: Workbench, decisions: tuple[DeviceDecision, ...], known: Candidate | None
) -> tuple[DeviceDecision, ...]:
    """`decisions`; where a GPU's do not fit, repaired or moved towards a known plan, if that fits."""
    fitted: dict[tuple, DeviceDecision] = {}
    chosen = list(decisions)
    lent = [0] * bench.device_count
    for device in sorted(range(bench.device_count), key=lambda d: not decisions[d].borrows):  # who borrows first
        decision = decisions[device]
        key = (bench.device_class[device], decision.key, lent[device])
        if key not in fitted:
            found = repair(bench, device, decision, REPAIR_ROUNDS, lent[device])
            if isinstance(found, DoesNotFit) and known is not None:
                found = _towards(bench, device, decision, known.decisions[device])
            fitted[key] = decision if isinstance(found, DoesNotFit) else found
        chosen[device] = fitted[key]
        if fitted[key].borrows and isinstance(built := bench.decode(device, fitted[key]), DeviceList):
            lent[built.lender] += built.borrowed_bytes
    return lend_less(bench, tuple(chosen))


def _towards(bench: Workbench, device: int, wished: DeviceDecision, known: DeviceDecision) -> DeviceDecision:
    """State as in `known`, and its choices for what is made or wanted near an op that does not fit, in ever wider
    surroundings until everything fits."""
    view = bench.view(device)
    slot_of = {int(op): slot for slot, op in enumerate(view.slot_op)}
    decision, near = replace(wished, state_out=known.state_out), max(1, len(view.slot_op) // 64)
    same_lender = not known.borrows or known.lender == wished.lender
    safe = (known if same_lender else known.by_host()).choice
    for _ in range(REPAIR_ROUNDS):
        found = bench.decode(device, decision)
        if not isinstance(found, DoesNotFit) or found.op not in slot_of:
            break
        apart = [np.abs(edge - slot_of[found.op]) for edge in (view.producer_slot, view.idle_to)]
        decision = replace(decision, choice=np.where(np.minimum(*apart) <= near, safe, decision.choice))
        near += near // 2 + 1
    return decision


def variants(
    bench: Workbench, decisions: tuple[DeviceDecision, ...], known: Candidate | None
) -> Iterator[tuple[DeviceDecision, ...]]:
    """What the relaxation does not tell apart, tried on its decisions: state where a known plan has it, and a last
    micro-batch whose copies do not meet the gradient synchronisation.
    """
    if known is not None:
        yield tuple(
            replace(decision, state_out=other.state_out)
            for decision, other in zip(decisions, known.decisions, strict=True)
        )
    if Action.OFFLOAD in bench.problem.actions and any(one.borrows or one.encodes for one in decisions):
        yield tuple(decision.by_host() for decision in decisions)
    views = [bench.view(device) for device in range(bench.device_count)]
    if bench.problem.workload.micro_batches > 1 and any(len(view.collective_op) for view in views):
        if known is not None:
            yield tuple(
                replace(decision, last_choice=other.in_last)
                for decision, other in zip(decisions, known.decisions, strict=True)
            )
        for instead in (Choice.KEEP, Choice.RECOMPUTE):
            if instead is Choice.KEEP or Action.RECOMPUTE in bench.problem.actions:
                yield tuple(
                    replace(decision, last_choice=_instead_of_offload(view, decision, instead))
                    for view, decision in zip(views, decisions, strict=True)
                )


def _instead_of_offload(view: StepView, decision: DeviceDecision, instead: Choice) -> np.ndarray:
    leaves = decision.choice == Choice.OFFLOAD
    possible = view.may_recompute if instead is Choice.RECOMPUTE else np.ones(len(leaves), bool)
    return np.where(leaves & possible, instead, decision.choice).astype(np.int8)
