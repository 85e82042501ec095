"""Schedules that run: a traced step on real arrays, as a plan says (docs/run-a-plan.md)."""

from tmojax.execute.compiled_step import CompiledStep
from tmojax.execute.measured import (
    MeasuredTimes,
    compare,
    comparison_text,
    with_measured_durations,
    write_measured_trace,
)
from tmojax.execute.planned_step import PlannedStep, StepResult

__all__ = [
    "CompiledStep",
    "MeasuredTimes",
    "PlannedStep",
    "StepResult",
    "compare",
    "comparison_text",
    "with_measured_durations",
    "write_measured_trace",
]
