"""summary.json: all figures of a run for other programs. Keys carry units; a figure that does not exist is null."""

from __future__ import annotations

import math
from typing import Any

from tmojax.report.outcome import Outcome, RunReport, device_capacities
from tmojax.report.verdict import contention_sentence, headroom_sentence, verdict

SUMMARY_SCHEMA = "tmojax-summary-1"


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def summary(report: RunReport) -> dict[str, Any]:
    """The content of summary.json as JSON values."""
    best, baseline = report.best, report.baseline
    return {
        "schema": SUMMARY_SCHEMA,
        "problem": report.problem.name,
        "problem_hash": report.problem_hash,
        "verdict": verdict(report),
        "headroom": report.headroom,
        "headroom_sentence": headroom_sentence(report),
        "coordinate": report.coordinate,
        "contention": _contention(report),
        "contention_sentence": contention_sentence(report),
        "interrupted": report.interrupted,
        "best": best.planner if best else None,
        "baseline": baseline.planner if baseline else None,
        "step_s": _finite(best.step_s) if best else None,
        "unlimited_step_s": _finite(report.unlimited_s),
        "bound_s": best.bound_s if best and best.bound_s > 0 else None,
        "bound_parts_s": {part.name: _finite(part.step_s) for part in report.bound.parts} if report.bound else {},
        "gap": best.gap if best else None,
        "micro_batches": report.problem.workload.micro_batches,
        "capacity_bytes": list(device_capacities(report.problem)),
        "footprint_bytes": list(report.footprint_bytes),
        "planners": [_planner(report, outcome) for outcome in report.outcomes],
        "shortfall": _shortfall(report),
    }


def _planner(report: RunReport, outcome: Outcome) -> dict[str, Any]:
    result, links = outcome.result, report.problem.machine.links
    usable = outcome.valid and outcome.simulation is not None
    moved = outcome.simulation.moved_bytes if usable and outcome.simulation is not None else ()
    return {
        "planner": outcome.planner,
        "status": str(outcome.status),
        "valid": outcome.valid,
        "baseline": outcome.baseline,
        "heuristic": outcome.heuristic,
        "uncoordinated": outcome.uncoordinated,
        "comparison": outcome.comparison,
        "step_s": _finite(outcome.step_s),
        "bound_s": outcome.bound_s or None,
        "gap": outcome.gap,
        "peak_bytes": dict(outcome.check.peak_bytes) if outcome.check else {},
        "arena_bytes": dict(outcome.arena_bytes),
        "arena_over_peak": outcome.arena_overhead,
        "moved_bytes": {link.name: round(float(size)) for link, size in zip(links, moved, strict=False)},
        "stall_s": [float(value) for value in outcome.simulation.stall_s] if usable and outcome.simulation else [],
        "plan_s": result.plan_s,
        "compile_s": result.compile_s,
        "time_limited": result.time_limited,
        "jitter": {"median_s": _finite(outcome.jitter.median_s), "p95_s": _finite(outcome.jitter.p95_s),
                   "spread": outcome.jitter.spread, "samples": outcome.jitter.samples} if outcome.jitter else None,
        "violations": dict(outcome.check.counts()) if outcome.check else {},
        "message": result.message,
        "details": json_values(result.details),
    }  # fmt: skip


def _contention(report: RunReport) -> dict[str, Any] | None:
    found = report.contention
    if found is None:
        return None
    return {
        "uncoordinated_planner": found.without.planner,
        "uncoordinated_step_s": found.without.step_s,
        "coordinated_planner": found.coordinated.planner,
        "coordinated_step_s": found.coordinated.step_s,
        "avoided_s": found.avoided_s,
        "avoided_share": found.avoided_share,
    }


def _shortfall(report: RunReport) -> dict[str, Any] | None:
    short = report.shortfall
    if short is None:
        return None
    return {
        "memory": short.memory,
        "bytes_over": short.bytes_over,
        "where": short.where,
        "largest": [{"name": name, "size_bytes": size} for name, size in short.largest],
        "fitting_planner": short.fitting_planner or None,
        "fitting_capacity_bytes": short.fitting_capacity_bytes or None,
        "fitting_step_s": _finite(short.fitting_step_s),
    }


def json_values(value: Any) -> Any:
    """Mappings, sequences and NumPy numbers as plain JSON values; what is not finite becomes null."""
    if hasattr(value, "items"):
        return {str(key): json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    if hasattr(value, "tolist"):
        return json_values(value.tolist())
    if isinstance(value, float):
        return _finite(value)
    return value if value is None or isinstance(value, bool | int) else str(value)
