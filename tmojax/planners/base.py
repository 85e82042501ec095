"""What every planner is and returns. A planner searches; it never judges its own plan."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from tmojax.planners.workbench import Candidate
from tmojax.problem import Action, Problem, Schedule
from tmojax.relax.decode import DoesNotFit
from tmojax.units import format_bytes


class Status(StrEnum):
    """How a planner ended. The values are what people read."""

    OPTIMAL = "optimal for its own model"
    FEASIBLE = "feasible"
    TIME_LIMIT = "time limit reached, best plan so far"
    NOT_FOUND = "no feasible plan found"
    INFEASIBLE = "proved infeasible"
    ERROR = "rejected by the checker"
    FAILED = "stopped by an error of its own"

    @property
    def has_plan(self) -> bool:
        return self in (Status.OPTIMAL, Status.FEASIBLE, Status.TIME_LIMIT)


@dataclass(frozen=True, eq=False)
class PlanResult:
    """The one result type of all planners.

    `step_s`: time of `schedule` in the exact simulator, seconds (inf without one). `plan_s` is the whole planning time,
    compilation included; `compile_s` the compilation inside it. `message`: one sentence, with the reason when there
    is no plan.
    `details`: figures of the planner's own (claimed objective, solver, gap, start, stages) with units in their
    names; JSON values only.
    `time_limited`: the plan depends on how fast the machine is. `candidate`: the decisions behind the schedule,
    where the planner makes such, so that others can start from them.
    """

    planner: str
    status: Status
    schedule: Schedule | None = None
    step_s: float = float("inf")
    plan_s: float = 0.0
    compile_s: float = 0.0
    message: str = ""
    time_limited: bool = False
    candidate: Candidate | None = None
    details: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


class Planner(ABC):
    """A planner with its settings. Settings are the fields of the concrete, frozen dataclass.

    `seeds` are results that other planners of the same run have found; a planner may start from them and says so.
    """

    name: str

    @property
    def coordinates(self) -> bool:
        """Whether plans take into account what other GPUs do; if not, planning each GPU alone changes nothing."""
        return True

    def actions(self, problem: Problem) -> frozenset[Action]:
        """The actions that this planner may use on `problem`: what its plans are bounded for."""
        return problem.actions

    @abstractmethod
    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        """Search for a schedule of `problem`. Deterministic for a seed unless the result says `time_limited`."""


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def read_s(self) -> float:
        return time.perf_counter() - self._start


def does_not_fit(name: str, problem: Problem, failure: DoesNotFit, watch: Stopwatch) -> PlanResult:
    """The result of a strategy that has no schedule in this memory, with the op and the bytes that are missing."""
    over = f"{format_bytes(failure.bytes_over)} ({failure.bytes_over} bytes) more than"
    if failure.host_memory >= 0:
        host = problem.machine.memories[failure.host_memory].name
        message = f"{over} {host} may hold, with what every GPU has there at most added up"
        return PlanResult(name, Status.NOT_FOUND, message=message, plan_s=watch.read_s())
    op = problem.workload.program(failure.device).ops[failure.op]
    memory = problem.machine.memories[problem.machine.devices[failure.device].memory]
    message = f"{over} {memory.name} has, at op {op.name!r} of micro-batch {failure.micro_batch}"
    return PlanResult(name, Status.NOT_FOUND, message=message, plan_s=watch.read_s())
