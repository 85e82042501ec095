"""One run from configuration to report: build, bound, plan, check, time under jitter, write."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace

from tmojax.arena import place
from tmojax.bounds import BoundReport, BoundStatus, bound
from tmojax.build import BuiltProblem, build_problem
from tmojax.check import CheckReport, check
from tmojax.config import FileWorkload, RunConfig
from tmojax.errors import InfeasibleError, InputError, TmojaxError
from tmojax.planners.alone import COORDINATED, Alone
from tmojax.planners.base import Planner, PlanResult, Status, Stopwatch
from tmojax.planners.fluid import Oblivious
from tmojax.planners.gradient import Gradient, LocalSearch
from tmojax.planners.orders import Orders
from tmojax.planners.points import Offer, taken_over
from tmojax.planners.simple import KeepAll, OffloadAll, RecomputeAll, SqrtCheckpointing
from tmojax.problem import Action, Problem, keep_all_footprint_bytes, largest_op_bytes
from tmojax.problem.in_order import offered_orders
from tmojax.problem.io import PlanFile, plan_to_json, problem_hash, problem_to_json
from tmojax.problem.strict_json import readable_text
from tmojax.report.figures import draw, write_figures
from tmojax.report.html import write_html
from tmojax.report.interrupts import Interrupts
from tmojax.report.outcome import Jitter, Outcome, RunReport, Shortfall, device_capacities
from tmojax.report.provenance import provenance
from tmojax.report.run_folder import RunFolder
from tmojax.report.shortfall import find_shortfall
from tmojax.report.summary import json_values, summary
from tmojax.report.toml_text import toml_text
from tmojax.report.trace import write_trace
from tmojax.report.verdict import headroom_sentence, per_gpu
from tmojax.report.wording import counted
from tmojax.simulate import Simulation, simulate
from tmojax.simulate import jitter as simulate_jitter
from tmojax.units import format_bytes, format_seconds

# What people have without coordination; the fastest valid one is the baseline that a plan must beat.
BASELINES = (KeepAll, OffloadAll, RecomputeAll, SqrtCheckpointing, Oblivious)
# These start from what others found; the coordination headroom is what the others leave.
SEARCHES = (LocalSearch, Gradient)
# Steps of the search for an arena, a fraction of a second for a plan; most need none.
ARENA_EFFORT = 20_000_000


class Session:
    """State of a run. `report()` is complete at any moment, so that an interrupted run still has one."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        command_line: Sequence[str],
        interrupts: Interrupts,
        built: BuiltProblem | None = None,
        offers: Sequence[Offer] = (),
    ):
        """`built`: the problem of `config`, where it is there already. `offers`: plans of other points of a sweep."""
        self._config, self._folder, self._command_line = config, folder, command_line
        self._interrupts, self._given, self._offers = interrupts, built, offers
        self._watch = Stopwatch()
        self._built: BuiltProblem | None = None
        self._notes: tuple[str, ...] = ()
        self._outcomes: list[Outcome] = []
        self._unlimited_s = math.inf
        self._bound: BoundReport | None = None
        self._restricted_bounds: dict[frozenset[Action], float] = {}
        self._alone: Alone | None = None
        self._orders: Orders | None = None  # where the problem offers orders
        self._shortfall: Shortfall | None = None
        self._hash = ""
        self.interrupted = False

    @property
    def has_problem(self) -> bool:
        """There is something to report."""
        return self._built is not None

    @property
    def problem(self) -> Problem:
        assert self._built is not None
        return self._built.problem

    @property
    def footprint_bytes(self) -> tuple[int, ...]:
        assert self._built is not None
        return self._built.footprint_bytes

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"[{self._watch.read_s():6.1f} s] {text}", file=sys.stderr, flush=True)

    def run(self) -> None:
        """Everything up to the report. Raises InputError, and InfeasibleError when a limit is proved to be too low.

        KeyboardInterrupt passes through; what was found until then is in the report.
        """
        self._folder.write_text("config.toml", resolved_text(self._config))
        self._write_provenance()
        with self._folder.phase("build"):
            built = self._given or build_problem(self._config)
        if any(program.orders for program in built.problem.workload.programs):
            self._orders = Orders(built.problem)
        if not self._config.coordinate:
            self._alone = Alone(built.problem)
        self._hash = problem_hash(built.problem)
        self._built = built
        self._folder.write_text("problem.json", readable_text(problem_to_json(self.problem)))
        for line in facts(built):
            self.say(line)
        require_room_for_largest_op(self.problem)
        with self._folder.phase("unlimited memory") as found:
            self._time_without_limit(found)
        with self._folder.phase("lower bound") as found:
            self._find_bound(found)
        for offer in self._offers:
            self.take_over(offer)
        self._plan_all()
        self._stop_if_interrupted()
        if self.report().best is None:
            with self._folder.phase("nearest capacity"):
                self._shortfall = find_shortfall(self.problem, self.footprint_bytes, self._baseline_planners())

    def _time_without_limit(self, found: dict) -> None:
        workload = self.problem.workload
        footprint_bytes = max(
            keep_all_footprint_bytes(workload, device, order)
            for order in offered_orders(workload)
            for device in range(workload.device_count)
        )
        roomy = self.problem.with_device_capacity(2 * footprint_bytes)
        kept = KeepAll().plan(roomy) if self._orders is None else Orders(roomy).plan(KeepAll())
        if kept.schedule is not None:
            # The planner has simulated its plan, so what the second time takes less is compilation.
            watch = Stopwatch()
            self._unlimited_s = simulate(roomy, kept.schedule).step_s
            found |= {"step_s": self._unlimited_s, "compile_s": max(kept.plan_s - watch.read_s(), 0.0)}
            self.say(f"with unlimited memory a step takes {format_seconds(self._unlimited_s)}")

    def _find_bound(self, found: dict) -> None:
        self._bound = bound(self.problem)
        found |= {"bound_s": json_values(self._bound.bound_s), "status": str(self._bound.status)}
        if not math.isfinite(self._bound.bound_s):
            raise InfeasibleError(f"no schedule fits: {self._bound.message}")
        parts = ", ".join(f"{part.name} {format_seconds(part.step_s)}" for part in self._bound.parts)
        self.say(f"no plan can take less than {format_seconds(self._bound.bound_s)} a step ({parts})")

    def take_over(self, offer: Offer) -> None:
        """Add the plan of another point of a sweep, if it is valid here and faster than the best so far."""
        best = self.report().best
        with self._folder.phase("take over", planner=offer.plan.planner, point=offer.label) as found:
            result = taken_over(self.problem, offer)
            found["step_s"] = None if result is None else result.step_s
        if result is None or (best is not None and result.step_s >= best.step_s):
            return
        planner = next((p for p in self._config.planners if p.name == result.details["planner"]), None)
        if planner is None:  # nobody here to say what it may do, and so what its bound is
            return
        self._notes += (f"taken over: {result.message}, {format_seconds(result.step_s)} a step here",)
        self.say(self._notes[-1])
        self._add(planner, result, comparison=False)

    def _plan_all(self) -> None:
        """With coordination off, planners plan each GPU alone; then, for comparison, those that can coordinate do."""
        told, watch = False, Stopwatch()
        turns = [(planner, False) for planner in self._config.planners]
        if not self._config.coordinate:
            turns += [(planner, True) for planner in self._config.planners if planner.coordinates]
        for planner, comparison in turns:
            name = planner.name + (COORDINATED if comparison else "")
            self._stop_if_interrupted()
            if isinstance(planner, SEARCHES) and not told:
                told = True
                sentence = headroom_sentence(self.report())
                if sentence:
                    self.say(sentence)
            budget_s = self._config.time_budget_s
            if budget_s is not None and watch.read_s() > budget_s:
                message = f"not run: the time budget of {format_seconds(budget_s)} is used up"
                missing = PlanResult(name, Status.NOT_FOUND, message=message, time_limited=True)
                self._add(planner, missing, comparison)
                continue
            self.say(f"{name}: planning")
            with self._folder.phase("plan", planner=name) as found:
                result = replace(self._plan(planner, name, comparison), planner=name)
                found |= {"compile_s": result.compile_s, "status": str(result.status)}
            self._add(planner, result, comparison)

    def _plan(self, planner: Planner, name: str, comparison: bool) -> PlanResult:
        """What the planner returns; an error of its own is a result too, and costs the others nothing."""
        watch = Stopwatch()
        try:
            alone = self._alone is not None and not comparison
            seeds = tuple(outcome.result for outcome in self._outcomes if outcome.valid)
            if self._orders is not None:
                return self._orders.plan(planner, seed=self._config.seed, seeds=seeds, alone=alone)
            if self._alone is not None and alone:
                return self._alone.plan(planner, seed=self._config.seed)
            return planner.plan(self.problem, seed=self._config.seed, seeds=seeds)
        except TmojaxError:
            raise
        except Exception as error:
            place = f"failures/{name}.txt"
            self._folder.write_text(place, traceback.format_exc())
            message = f"{type(error).__name__}: {error} (a bug; all of it is in {place})"
            return PlanResult(name, Status.FAILED, message=message, plan_s=watch.read_s())

    def _stop_if_interrupted(self) -> None:
        if self._interrupts.seen:
            raise KeyboardInterrupt

    def _add(self, planner: Planner, result: PlanResult, comparison: bool) -> None:
        """Judge a result: check, simulate, jitter; write the plan."""
        name = result.planner
        checked: CheckReport | None = None
        simulation: Simulation | None = None
        jitter: Jitter | None = None
        arena_bytes: dict[str, int] = {}
        if result.schedule is not None:
            with self._folder.phase("check", planner=name) as found:
                checked = check(self.problem, result.schedule)
                found["valid"] = checked.valid
            if checked.valid:
                with self._folder.phase("simulate", planner=name):
                    simulation = simulate(self.problem, result.schedule, record=True)
                    if math.isfinite(simulation.step_s):
                        jitter = time_under_jitter(self.problem, result, self._config)
                with self._folder.phase("arena", planner=name):
                    arena_bytes = self._place(result)
        outcome = Outcome(
            result,
            checked,
            simulation,
            self._bound_for(planner, result),
            jitter,
            heuristic=not isinstance(planner, SEARCHES),
            arena_bytes=arena_bytes,
            uncoordinated=self._is_uncoordinated(planner, comparison),
            comparison=comparison,
        )
        self._outcomes.append(outcome)
        if result.schedule is not None:
            self._write_plan(planner, outcome)
        if math.isfinite(outcome.step_s):
            self.say(f"{name}: {format_seconds(outcome.step_s)} a step, planned in "
                     f"{format_seconds(result.plan_s)}")  # fmt: skip
        else:
            self.say(f"{name}: {outcome.status}" + (f"; {result.message}" if result.message else ""))

    def _is_uncoordinated(self, planner: Planner, comparison: bool) -> bool:
        """Each GPU planned as if the path were its own, all at once under fair sharing."""
        if not self._config.coordinate:
            return not comparison
        return isinstance(planner, Oblivious) and not planner.coordinates

    def _place(self, result: PlanResult) -> dict[str, int]:
        """Bytes of the arena of each device memory; empty, and said, where there are too many blocks to place."""
        assert result.schedule is not None
        try:
            arenas = place(self.problem, result.schedule, effort=ARENA_EFFORT)
        except InputError as error:
            self.say(f"{result.planner}: no arena: {error}")
            return {}
        return {name: arena.arena_bytes for name, arena in arenas.items()}

    def _bound_for(self, planner: Planner, result: PlanResult) -> float:
        """The lower bound for the actions that the planner may use; without a plan the one for all actions will do."""
        assert self._bound is not None
        actions = planner.actions(self.problem)
        if actions == self.problem.actions or not result.status.has_plan:
            return self._bound.bound_s
        if actions not in self._restricted_bounds:
            with self._folder.phase("lower bound", actions=sorted(actions)) as found:
                restricted_s = bound(replace(self.problem, actions=actions)).bound_s
                found["bound_s"] = json_values(restricted_s)
            # Infinite would mean that no such plan exists; that the planner has one all the same is for the checker.
            self._restricted_bounds[actions] = restricted_s if math.isfinite(restricted_s) else self._bound.bound_s
        return max(self._bound.bound_s, self._restricted_bounds[actions])

    def _write_plan(self, planner: Planner, outcome: Outcome) -> None:
        step_s = outcome.step_s if math.isfinite(outcome.step_s) else None
        plan = PlanFile(
            outcome.result.schedule, self._hash, outcome.planner, str(outcome.status), step_s,  # type: ignore[arg-type]
            outcome.bound_s or None, outcome.gap, self._config.seed, json_values(self._settings(planner.name)),
            outcome.result.time_limited or self._bound_is_time_limited(),
        )  # fmt: skip
        self._folder.write_text(f"plans/{outcome.planner}.json", readable_text(plan_to_json(plan)))

    def _bound_is_time_limited(self) -> bool:
        """The bound, which plan files hold, depends on how fast this machine is."""
        return self._bound is not None and self._bound.status is BoundStatus.TIME_LIMIT

    def _settings(self, name: str) -> dict:
        tables = self._config.document["planners"]
        return next(dict(t) for t, p in zip(tables, self._config.planners, strict=True) if p.name == name)

    def _baseline_planners(self) -> tuple[Planner, ...]:
        return tuple(p for p in self._config.planners if isinstance(p, BASELINES)) or (RecomputeAll(), OffloadAll())

    def report(self) -> RunReport:
        """Everything found so far. The fastest of the BASELINES is marked as the baseline."""
        names = {p.name for p in self._config.planners if isinstance(p, BASELINES)}
        valid = [o for o in self._outcomes if o.planner in names and math.isfinite(o.step_s)]
        baseline = min(valid, key=lambda outcome: outcome.step_s, default=None)
        return RunReport(
            problem=self.problem,
            problem_hash=self._hash,
            outcomes=tuple(replace(o, baseline=o is baseline) for o in self._outcomes),
            footprint_bytes=self.footprint_bytes,
            unlimited_s=self._unlimited_s,
            bound=self._bound,
            shortfall=self._shortfall,
            interrupted=self.interrupted,
            coordinate=self._config.coordinate,
            provenance=self._provenance(),
            notes=(self._built.notes if self._built is not None else ()) + self._notes,
        )

    def write(self) -> RunReport:
        """Write check, summary, trace, figures and page; returns the report that they show."""
        report, folder = self.report(), self._folder
        self._write_provenance()
        checks = {o.planner: o.check.as_dict() for o in report.outcomes if o.check is not None}
        folder.write_json("check.json", json_values(checks))
        folder.write_json("summary.json", summary(report))
        with folder.phase("report"):
            best = report.best
            if best is not None and best.result.schedule is not None and best.simulation is not None:
                write_trace(folder.path / "trace.json", report.problem, best.result.schedule, best.simulation)
            (folder.path / "figures").mkdir(exist_ok=True)
            write_html(folder.path / "report.html", report, write_figures(folder.path / "figures", draw(report)))
        folder.event("end", interrupted=self.interrupted)
        return report

    def _provenance(self) -> dict:
        return provenance(seed=self._config.seed, command_line=self._command_line)

    def _write_provenance(self) -> None:
        self._folder.write_json("provenance.json", self._provenance())


def resolved_text(config: RunConfig) -> str:
    """The whole configuration as TOML: presets, overrides and defaults filled in, so that it runs from anywhere."""
    document = dict(config.document)
    if isinstance(config.workload, FileWorkload):
        document["workload"] = document["workload"] | {"path": str((config.folder / config.workload.path).resolve())}
    return toml_text(document)


def facts(built: BuiltProblem) -> list[str]:
    """What is known before any planning: footprint against capacity, and the least that any plan needs."""
    problem = built.problem
    workload = problem.workload
    capacity = device_capacities(problem)
    needs = tuple(largest_op_bytes(workload, d)[1] for d in range(workload.device_count))
    lines = [f"note: {note}" for note in built.notes]
    lines.append(
        f"{problem.name}: {workload.device_count} GPUs, {counted(workload.micro_batches, 'micro-batch')} a step; "
        f"keeping everything takes {per_gpu(built.footprint_bytes)}, plans may use {per_gpu(capacity)}, "
        f"the largest op alone needs {format_bytes(max(needs))}"
    )
    return lines


def require_room_for_largest_op(problem: Problem) -> None:
    """Raises InfeasibleError if some op needs more than its device has: then no schedule exists."""
    for device, spec in enumerate(problem.machine.devices):
        op, needed = largest_op_bytes(problem.workload, device)
        capacity = problem.capacity_bytes(device)
        if needed > capacity:
            name = problem.workload.program(device).ops[op].name
            raise InfeasibleError(
                f"no schedule fits: op {name!r} alone needs {needed} bytes ({format_bytes(needed)}) in {spec.name}, "
                f"{needed - capacity} more than the {capacity} bytes ({format_bytes(capacity)}) that plans may use; "
                f"give at least {needed} bytes, or a smaller micro-batch"
            )


def time_under_jitter(problem: Problem, result: PlanResult, config: RunConfig) -> Jitter | None:
    """Step times with every op and link changed by a factor drawn evenly from 1 +- jitter; None if switched off."""
    samples, spread = config.output.jitter_samples, config.output.jitter
    if not samples or not spread or result.schedule is None:
        return None
    median_s, p95_s = simulate_jitter(problem, result.schedule, percent=100 * spread, samples=samples, seed=config.seed)
    return Jitter(median_s, p95_s, spread, samples)
