"""The table of a sweep: the best plan of every point, and where it is from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tmojax.report.run_folder import RunFolder
from tmojax.report.table import Table
from tmojax.report.verdict import per_gpu
from tmojax.report.wording import percent
from tmojax.units import format_seconds

SWEEP_SCHEMA = "tmojax-sweep-1"


@dataclass(frozen=True)
class PointRow:
    """The best plan of one point. value: of the key. folder: of its run. failure: why there is no plan, else empty.
    taken_over_from: label of the point that found the plan, empty where it was found here. step_s: inf without a plan.
    bound_s: 0 if unknown. p95_s: under jitter, None if switched off."""

    value: str
    capacity_bytes: tuple[int, ...]
    folder: str
    failure: str
    planner: str
    taken_over_from: str
    step_s: float
    bound_s: float
    p95_s: float | None

    @property
    def gap(self) -> float | None:
        return self.step_s / self.bound_s - 1 if self.bound_s > 0 and math.isfinite(self.step_s) else None


def points_table(key: str, rows: Sequence[PointRow]) -> Table:
    """One row for every point, in the order of the values."""
    lines = []
    for row in rows:
        if row.failure:
            lines.append((row.value, per_gpu(row.capacity_bytes), "-", "-", "-", row.failure.partition(":")[0], ""))
            continue
        lines.append(
            (
                row.value,
                per_gpu(row.capacity_bytes),
                format_seconds(row.step_s),
                "-" if row.gap is None else percent(row.gap),
                "-" if row.p95_s is None else format_seconds(row.p95_s),
                row.planner,
                f"taken over from {row.taken_over_from}" if row.taken_over_from else "found here",
            )
        )
    return Table(
        "The best plan of every point; what is taken over was checked and simulated again",
        (key, "memory", "step", "gap to bound", "jitter p95", "planner", "plan"),
        tuple(lines),
        frozenset({2, 3, 4}),
    )


def write_points(folder: RunFolder, key: str, rows: Sequence[PointRow]) -> None:
    """sweep.json (seconds, bytes; what does not exist is null) and sweep.txt, the table."""
    points = [
        {
            "value": row.value,
            "run": row.folder or None,
            "capacity_bytes": list(row.capacity_bytes),
            "planner": row.planner or None,
            "taken_over_from": row.taken_over_from or None,
            "step_s": row.step_s if math.isfinite(row.step_s) else None,
            "bound_s": row.bound_s or None,
            "gap": row.gap,
            "p95_s": row.p95_s if row.p95_s is not None and math.isfinite(row.p95_s) else None,
            "failure": row.failure or None,
        }
        for row in rows
    ]
    folder.write_json("sweep.json", {"schema": SWEEP_SCHEMA, "key": key, "points": points})
    folder.write_text("sweep.txt", points_table(key, rows).plain() + "\n")
