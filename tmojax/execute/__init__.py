"""Schedules that run: a traced step on real arrays, as a plan says (docs/run-a-plan.md)."""

from tmojax.execute.compiled_step import CompiledStep
from tmojax.execute.jitted_chain import explicit_step, named_chain, planner_for_chain
from tmojax.execute.jitted_names import NamedPlan, named_modules, planner_for
from tmojax.execute.jitted_scans import named_scan_inputs, scan_in_segments
from tmojax.execute.jitted_step import JittedStep, jitted_step
from tmojax.execute.joined import Segment, segments_text
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
    "JittedStep",
    "MeasuredTimes",
    "NamedPlan",
    "PlannedStep",
    "Segment",
    "StepResult",
    "compare",
    "comparison_text",
    "explicit_step",
    "jitted_step",
    "named_chain",
    "named_modules",
    "named_scan_inputs",
    "planner_for",
    "planner_for_chain",
    "scan_in_segments",
    "segments_text",
    "with_measured_durations",
    "write_measured_trace",
]
