"""One line of the table, and what all ways out share: the capacities that are tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from tmojax.importers.machine_build import load_machine
from tmojax.planners.base import Planner
from tmojax.problem import Kind, Machine, Problem, Schedule

# Percent of the footprint; a planner gets the least of these in which it has a plan.
SHARES = range(40, 101, 5)
FINE_SHARES = range(40, 101, 2)

ONE_BY_ONE, JOINED, WITH_ROOM = "runtime, op by op", "runtime", "runtime, room"  # ways out by the JAX runtime
JOINED_HEAD = """\
| network | plan | ops | programs | different | compiling | step | temporaries |
|---|---|---|---|---|---|---|---|"""
HEAD = """\
| network | way out | plan | memory | gradients | planned | counted | host planned | host counted |
|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Row:
    """A network by a plan. `share`: of the footprint, that a device has. `same_bits`: as the step that keeps everything
    (None: not compared bit for bit). `difference`: largest of a gradient to the ordinary step, relative to its largest
    number. Bytes: the most at any time on a device and on its host; 0 counted where nothing could be counted.
    `refused`: why the way out takes no plan of this network. Of the runtime also: ops that run in a step, programs that
    run them, how many of these are different, the most bytes of temporaries that one of them has, CPU seconds of
    compilation (of the ops, and what joining adds to that) and of a step."""

    network: str
    way: str
    plan: str
    share: float
    same_bits: bool | None
    difference: float
    planned_bytes: int
    counted_bytes: int
    host_planned_bytes: int
    host_counted_bytes: int
    within_plan: bool
    refused: str = ""
    ops: int = 0
    programs: int = 0
    different: int = 0
    temporary_bytes: int = 0
    compile_s: float = 0.0
    step_s: float = 0.0

    def text(self) -> str:
        if self.refused:
            return f"| {self.network} | {self.way} | {self.plan} | | refused: {self.refused} | | | | |"
        bits = {True: "same bits", False: "OTHER BITS", None: ""}[self.same_bits]
        if self.difference or self.same_bits is None:
            number = f"{self.difference:.0e}" if self.difference else "0"
            bits = f"{bits}, {number}".removeprefix(", ")
        counted = f"{self.counted_bytes:,}" if self.counted_bytes else ""
        over = "" if self.within_plan else " OVER"
        return (
            f"| {self.network} | {self.way} | {self.plan} | {self.share:g} | {bits} | {self.planned_bytes:,} | "
            f"{counted}{over} | {self.host_planned_bytes:,} | {self.host_counted_bytes:,} |"
        )

    def joined_text(self, single: Row) -> str:
        """What joining the ops makes of a plan, beside the same plan op by op."""
        plan = f"{self.plan}, room" if self.way == WITH_ROOM else self.plan
        cells = (
            self.network, plan, self.ops, f"{single.programs} to {self.programs}",
            f"{single.different} to {self.different}", f"+ {self.compile_s / single.compile_s:.1f}",
            f"{self.step_s / single.step_s:.2f}", f"{single.temporary_bytes:,} to {self.temporary_bytes:,}",
        )  # fmt: skip
        return "| " + " | ".join(map(str, cells)) + " |"

    def record(self) -> dict[str, Any]:
        return asdict(self)


def machine_of(name: str, gpus: int) -> Machine:
    """The first GPUs of a preset."""
    machine = load_machine(name)
    gone = {device.memory for device in machine.devices[gpus:]}
    routes = tuple(r for r in machine.routes if not {r.source, r.destination} & gone)
    return replace(machine, devices=machine.devices[:gpus], routes=routes)


def least(
    problem_of: Callable[[float], Problem], planner: Planner, offloading: bool = False, percent: range = SHARES
) -> tuple[Problem, Schedule, float]:
    """(problem, plan, share) for the least share of the footprint that has a plan.

    `offloading`: that has a plan which offloads something, if any has.
    """
    found = None
    for share in (number / 100 for number in percent):
        problem = problem_of(share)
        schedule = planner.plan(problem).schedule
        if schedule is not None:
            found = found or (problem, schedule, share)
            if not offloading or any((rows["kind"] == Kind.OFFLOAD).any() for rows in schedule.lists):
                return problem, schedule, share
    if found is None:
        raise SystemExit(f"{planner.name} has no plan in the whole footprint")
    return found
