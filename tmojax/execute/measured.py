"""Measured times of a step in the form of a simulation, so that reports, traces and comparisons read both alike."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from tmojax.errors import InputError
from tmojax.execute.lists import prepare_list
from tmojax.execute.planned_step import StepResult
from tmojax.problem import COMPUTE_STREAM, Kind, Problem, Schedule
from tmojax.problem.strict_json import write_text
from tmojax.report.activity import CATEGORIES, DeviceActivity, copy_bytes, op_label, read_activity
from tmojax.report.trace import trace
from tmojax.simulate import Simulation

_TRANSFERS = (Kind.OFFLOAD, Kind.PREFETCH)
_ON_COMPUTE = (Kind.COMPUTE, Kind.ENCODE, Kind.DECODE)


class MeasuredTimes:
    """Times of one measured step, seconds from its start; the attributes are those of `tmojax.simulate.Simulation`.

    `programs` [device]: what was dispatched; ops of one program have shares of its time, by their planned durations.
    Instructions without a stream take effect when what they wait for is complete. Rates of links are the average
    rates of the transfers on them; collectives are not among them, because nothing shows which links they took.
    """

    def __init__(self, problem: Problem, schedule: Schedule, result: StepResult) -> None:
        """Raises InputError if the step was not measured."""
        if any(len(s) and np.isnan(s).all() for s in result.start_s):
            raise InputError("result: the step was not measured; call `step(..., measure=True)`")
        self._problem, self._schedule = problem, schedule
        self.programs = result.segments
        self.start_s = tuple(start_s.copy() for start_s in result.start_s)
        self.end_s = tuple(end_s.copy() for end_s in result.end_s)
        self._meet()
        for device in range(len(schedule.lists)):
            self._fill(device)

    def _meet(self) -> None:
        """A collective starts when the last of its devices has entered it, and has ended once one has seen its end."""
        workload = self._problem.workload
        entered: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for device, rows in enumerate(self._schedule.lists):
            for index in np.flatnonzero(rows["kind"] == Kind.COLLECTIVE).tolist():
                op = workload.program(device).ops[rows["op"][index]]
                entered.setdefault((op.collective, int(rows["micro_batch"][index])), []).append((device, index))
        for places in entered.values():
            last = max(self.start_s[device][index] for device, index in places)
            first = min(self.end_s[device][index] for device, index in places)
            for device, index in places:
                self.start_s[device][index], self.end_s[device][index] = last, first

    def _fill(self, device: int) -> None:
        """Effects of waits, releases, signals and the like."""
        rows, start_s, end_s = self._schedule.lists[device], self.start_s[device], self.end_s[device]
        waits = rows["kind"] == Kind.WAIT
        start_s[waits] = end_s[waits]
        changes = prepare_list(self._problem, self._schedule, device).change_of
        for index, kind in enumerate(rows["kind"].tolist()):
            after = changes[index].after_end if index in changes else ()
            if kind in (Kind.SIGNAL, Kind.RETIRE):
                after = (int(rows["after"][index]),)
            if np.isnan(end_s[index]):
                end_s[index] = max((end_s[i] for i in after), default=0.0)

    @cached_property
    def step_s(self) -> float:
        """From the start to the last effect."""
        return float(max(end_s.max(initial=0.0) for end_s in self.end_s))

    @property
    def transfer_start_s(self) -> tuple[np.ndarray, ...]:
        """When bytes began to move: set-up is not seen apart."""
        return self.start_s

    @cached_property
    def compute_busy_s(self) -> np.ndarray:
        """Shape (device,): time in which the compute stream ran something."""
        busy = []
        for rows, start_s, end_s in zip(self._schedule.lists, self.start_s, self.end_s, strict=True):
            on_compute = np.isin(rows["kind"], _ON_COMPUTE)
            busy.append(float((end_s - start_s)[on_compute].sum()))
        return np.array(busy)

    @cached_property
    def stall_s(self) -> np.ndarray:
        """Shape (device,): time in which the compute stream had instructions left and ran none."""
        last = []
        for rows, end_s in zip(self._schedule.lists, self.end_s, strict=True):
            waits = (rows["kind"] == Kind.WAIT) & (rows["stream"] == COMPUTE_STREAM)
            last.append(end_s[np.isin(rows["kind"], _ON_COMPUTE) | waits].max(initial=0.0))
        return np.maximum(np.array(last) - self.compute_busy_s, 0.0)

    @cached_property
    def segments(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """Per link the rate as (times, bytes/s), as in `Simulation.segments`."""
        steps: list[list[tuple[float, float]]] = [[] for _ in self._problem.machine.links]
        for device, rows in enumerate(self._schedule.lists):
            for index in np.flatnonzero(np.isin(rows["kind"], _TRANSFERS)).tolist():
                row = rows[index]
                owner = device if row["owner"] == -1 else int(row["owner"])
                size = copy_bytes(self._problem, owner, *(int(row[n]) for n in ("tensor", "form", "part", "parts")))
                start_s, end_s = float(self.start_s[device][index]), float(self.end_s[device][index])
                rate = size / (end_s - start_s) if end_s > start_s else 0.0
                for link in self._problem.machine.route(int(row["memory"]), int(row["to_memory"])).links:
                    steps[link] += [(start_s, rate), (end_s, -rate)]
        found = []
        for changes in steps:
            times, places = np.unique([t for t, _ in changes], return_inverse=True)
            delta = np.zeros(len(times))
            np.add.at(delta, places, [rate for _, rate in changes])
            found.append((times, np.maximum(np.cumsum(delta), 0.0)))
        return tuple(found)


def with_measured_durations(problem: Problem, schedule: Schedule, times: MeasuredTimes) -> Problem:
    """The problem with the durations of its ops replaced by the medians that a measured step took, in seconds.

    Plan it again, or simulate with it. Every run of an op counts, on all devices of its program, recomputations too.
    """
    workload = problem.workload
    found: dict[tuple[int, int], list[float]] = {}
    for device, rows in enumerate(schedule.lists):
        for index in np.flatnonzero(rows["kind"] == Kind.COMPUTE).tolist():
            taken_s = float(times.end_s[device][index] - times.start_s[device][index])
            found.setdefault((workload.device_program[device], int(rows["op"][index])), []).append(taken_s)
    programs = []
    for number, program in enumerate(workload.programs):
        medians = [float(np.median(found[number, op])) if (number, op) in found else None
                   for op in range(len(program.ops))]  # fmt: skip
        ops = tuple(
            op if median_s is None else replace(op, duration_s=median_s)
            for op, median_s in zip(program.ops, medians, strict=True)
        )
        programs.append(replace(program, ops=ops))
    measured = replace(workload, programs=tuple(programs), duration_source="measured: medians of a step of the runtime")
    return replace(problem, workload=measured)


@dataclass(frozen=True, slots=True)
class CategoryError:
    """Seconds of one category, summed over devices. `error` = measured / predicted - 1 (NaN without a prediction)."""

    category: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.measured_s / self.predicted_s - 1 if self.predicted_s > 0 else float("nan")


def compare(
    problem: Problem, schedule: Schedule, predicted: Simulation, measured: MeasuredTimes
) -> tuple[CategoryError, ...]:
    """Prediction against measurement: every category of instruction that occurs, stalls of compute, the step."""
    ours = read_activity(problem, schedule, predicted)
    theirs = read_activity(problem, schedule, cast(Simulation, measured))
    rows = [
        CategoryError(str(category), _seconds(ours, place), _seconds(theirs, place))
        for place, category in enumerate(CATEGORIES)
        if any((activity.category == place).any() for activity in ours)
    ]
    rows.append(CategoryError("stall", float(np.sum(predicted.stall_s)), float(measured.stall_s.sum())))
    rows.append(CategoryError("step", float(predicted.step_s), measured.step_s))
    return tuple(rows)


def _seconds(activities: tuple[DeviceActivity, ...], category: int) -> float:
    return sum(float((a.end_s - a.start_s)[a.category == category].sum()) for a in activities)


def comparison_text(rows: tuple[CategoryError, ...]) -> str:
    """The comparison as a table, milliseconds; an error of ten times and more is written as measured / predicted."""
    lines = [f"{'':<12} {'predicted ms':>13} {'measured ms':>13} {'error':>12}"]
    for row in rows:
        error = f"{row.error:+.1%}" if row.error < 9 else f"{row.error + 1:.0f} x"
        error = "-" if np.isnan(row.error) else error
        lines.append(f"{row.category:<12} {row.predicted_s * 1e3:>13.3f} {row.measured_s * 1e3:>13.3f} {error:>12}")
    return "\n".join(lines)


def write_measured_trace(
    path: str | os.PathLike[str], problem: Problem, schedule: Schedule, measured: MeasuredTimes
) -> None:
    """Write the measured step in the format of `tmojax.report.trace`. Raises InputError when it cannot be written.

    Ops that ran as one program lie under one slice, which lists them and is all that was measured of them.
    """
    simulation = cast(Simulation, measured)
    found = trace(problem, schedule, simulation)
    events = found["traceEvents"]
    first = next((i for i, event in enumerate(events) if event["ph"] != "M"), len(events))
    events[first:first] = _program_slices(problem, measured)  # ahead of the ops that they contain
    write_text(path, json.dumps(found, separators=(",", ":"), allow_nan=False) + "\n")


def _program_slices(problem: Problem, measured: MeasuredTimes) -> Iterator[dict[str, Any]]:
    for device, segments in enumerate(measured.programs):
        for segment in segments:
            if len(segment.nodes) == 1:
                continue
            start = round(float(measured.start_s[device][segment.instructions[0]]) * 1e9)
            end = round(float(measured.end_s[device][segment.instructions[-1]]) * 1e9)
            labels = [op_label(problem, device, n.op, n.micro_batch, n.again) for n in segment.nodes]
            yield {
                "ph": "X", "pid": device + 1, "tid": 1 + COMPUTE_STREAM, "name": f"{len(labels)} ops", "cat": "segment",
                "ts": start / 1000, "dur": (end - start) / 1000,
                "args": {"ops": labels, "temporary_bytes": segment.compiled.workspace_bytes},
            }  # fmt: skip
