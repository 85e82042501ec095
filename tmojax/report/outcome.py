"""What a run found: one outcome per planner, and what all of them are compared with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tmojax.bounds import BoundReport
from tmojax.check import CheckReport
from tmojax.planners.base import PlanResult, Status
from tmojax.problem import Problem
from tmojax.problem.machine import MemoryKind
from tmojax.report.activity import Category, read_activity
from tmojax.simulate import Simulation


@dataclass(frozen=True, slots=True)
class Jitter:
    """Step times, in seconds, of one schedule under random op and transfer times: median and 95th percentile.

    `spread`: largest relative change of an op's duration; `samples`: how many simulations.
    """

    median_s: float
    p95_s: float
    spread: float
    samples: int


@dataclass(frozen=True, eq=False)
class Outcome:
    """One planner's result with what simulator and checker say about it.

    `arena_bytes`: per device memory, the size of an arena in which everything that a list allocates has a fixed offset
    (`tmojax.arena`); empty without a valid plan.

    `bound_s`: proven lower bound of the step time for the actions that this planner may use (0: unknown). `baseline`:
    the one that others are compared with. `heuristic`: counts for the coordination headroom. `uncoordinated`: every GPU
    planned as if the path were its own. `comparison`: planned only to say what coordination is worth; never the plan of
    the run.
    """

    result: PlanResult
    check: CheckReport | None = None
    simulation: Simulation | None = None
    bound_s: float = 0.0
    jitter: Jitter | None = None
    baseline: bool = False
    heuristic: bool = False
    arena_bytes: Mapping[str, int] = field(default_factory=dict)
    uncoordinated: bool = False
    comparison: bool = False

    @property
    def planner(self) -> str:
        return self.result.planner

    @property
    def valid(self) -> bool:
        """The checker accepts the plan. Only such plans count."""
        return self.check is not None and self.check.valid

    @property
    def status(self) -> Status:
        return Status.ERROR if self.check is not None and not self.check.valid else self.result.status

    @property
    def step_s(self) -> float:
        """Simulated step time of a valid plan, seconds; inf without one."""
        return self.simulation.step_s if self.valid and self.simulation is not None else math.inf

    @property
    def arena_overhead(self) -> float | None:
        """Largest share by which the arena of a device memory exceeds its peak; None without arenas."""
        peaks = self.check.peak_bytes if self.check is not None else {}
        shares = [size / peaks[name] - 1 for name, size in self.arena_bytes.items() if peaks.get(name)]
        return max(shares, default=None)

    @property
    def gap(self) -> float | None:
        """step_s / bound_s - 1, None without a plan or a bound."""
        return self.step_s / self.bound_s - 1 if self.bound_s > 0 and math.isfinite(self.step_s) else None


@dataclass(frozen=True, eq=False)
class Contention:
    """What contention costs where nobody coordinates: the fastest plan without coordination, and the fastest of all."""

    without: Outcome
    coordinated: Outcome

    @property
    def avoided_s(self) -> float:
        """Seconds of a step that coordination saves."""
        return self.without.step_s - self.coordinated.step_s

    @property
    def avoided_share(self) -> float:
        """The same as a share of the step without coordination."""
        return self.avoided_s / self.without.step_s if self.without.step_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Why nothing fits. `memory`, `bytes_over` and `where` of the least demanding plan that was found; `largest`: the
    tensors there; `fitting_capacity_bytes` (0: none found): device memory with which it fits, and `fitting_step_s`."""

    memory: str
    bytes_over: int
    where: str
    largest: tuple[tuple[str, int], ...] = ()
    fitting_planner: str = ""
    fitting_capacity_bytes: int = 0
    fitting_step_s: float = math.inf


@dataclass(frozen=True, eq=False)
class RunReport:
    """Everything that a report shows.

    `unlimited_s`: step time with memory for everything (inf: unknown). `footprint_bytes`: per device, what keeping
    everything takes. `problem_hash` names the problem in plan files. `interrupted`: planners were stopped before they
    had finished. `coordinate`: False where GPUs were to plan alone. `notes`: what was decided on the way to the
    problem.
    """

    problem: Problem
    problem_hash: str
    outcomes: tuple[Outcome, ...]
    footprint_bytes: tuple[int, ...]
    unlimited_s: float = math.inf
    bound: BoundReport | None = None
    shortfall: Shortfall | None = None
    interrupted: bool = False
    provenance: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    coordinate: bool = True

    @property
    def best(self) -> Outcome | None:
        """The fastest valid plan, the earlier one of two equally fast ones (but those found here before those of other
        points of a sweep); None without any."""
        return _fastest(o for o in self.outcomes if not o.comparison)

    @property
    def contention(self) -> Contention | None:
        """None with one GPU, without a plan in which nobody coordinates, and without one in which somebody may."""
        without = _fastest(o for o in self.outcomes if o.uncoordinated)
        able = [o for o in self.outcomes if not o.uncoordinated and math.isfinite(o.step_s)]
        fastest = _fastest(self.outcomes)
        if self.problem.workload.device_count == 1 or without is None or fastest is None or not able:
            return None
        return Contention(without, fastest)

    @property
    def baseline(self) -> Outcome | None:
        return next((outcome for outcome in self.outcomes if outcome.baseline), None)

    @property
    def best_heuristic(self) -> Outcome | None:
        return _fastest(o for o in self.outcomes if o.heuristic and not o.comparison)

    @property
    def headroom(self) -> float | None:
        """Coordination headroom: step time of the best heuristic divided by the lower bound, less one."""
        return None if self.best_heuristic is None else self.best_heuristic.gap

    @property
    def rejected(self) -> tuple[Outcome, ...]:
        """Planners that claim a plan which the checker rejects: errors of the planner."""
        return tuple(outcome for outcome in self.outcomes if outcome.status is Status.ERROR)

    @property
    def failed(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.status is Status.FAILED)


def _fastest(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The fastest valid plan, of two equally fast ones that found here, or the earlier one; None without any."""
    valid = [outcome for outcome in outcomes if math.isfinite(outcome.step_s)]
    return min(valid, key=lambda o: (o.step_s, "taken_over_from" in o.result.details), default=None)


def device_capacities(problem: Problem) -> tuple[int, ...]:
    """Bytes that plans may use in the memory of every GPU."""
    return tuple(problem.capacity_bytes(d) for d, spec in enumerate(problem.machine.devices) if spec.kind == "gpu")


def compute_and_recompute_s(problem: Problem, outcome: Outcome) -> tuple[float, float]:
    """Seconds of first executions and of recomputations in a step, means over the devices."""
    if outcome.result.schedule is None or outcome.simulation is None:
        return 0.0, 0.0
    activities = read_activity(problem, outcome.result.schedule, outcome.simulation)
    times = [(a.end_s - a.start_s, a) for a in activities]
    again = np.mean([took[a.of(Category.RECOMPUTE)].sum() for took, a in times])
    first = np.mean(
        [took[a.of(Category.FORWARD, Category.BACKWARD, Category.OPTIMIZER, Category.CODEC)].sum() for took, a in times]
    )
    return float(first), float(again)


def moved_bytes(problem: Problem, outcome: Outcome) -> tuple[int, int, int]:
    """Bytes of one step that copies move (out of GPUs to hosts, from hosts into GPUs, between GPUs), all GPUs."""
    out = inward = peer = 0
    if outcome.result.schedule is None or outcome.simulation is None:
        return out, inward, peer
    kinds = [memory.kind for memory in problem.machine.memories]
    for activity in read_activity(problem, outcome.result.schedule, outcome.simulation):
        rows = outcome.result.schedule.lists[activity.device][activity.instruction]
        for position in np.flatnonzero(activity.size_bytes).tolist():
            source, destination = (kinds[int(rows[name][position])] for name in ("memory", "to_memory"))
            size = int(activity.size_bytes[position])
            if source is MemoryKind.DEVICE and destination is MemoryKind.DEVICE:
                peer += size
            elif source is MemoryKind.DEVICE:
                out += size
            elif destination is MemoryKind.DEVICE:
                inward += size
    return out, inward, peer
