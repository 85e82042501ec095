"""Tables as data, and their text: aligned plain text, or rich on a terminal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.table import Table as RichTable

from tmojax.planners.base import Status
from tmojax.problem.in_order import DEFAULT
from tmojax.problem.machine import MemoryKind
from tmojax.report.decisions import read_decisions
from tmojax.report.memory_use import BYTE_KINDS, peak_by_kind
from tmojax.report.outcome import Outcome, RunReport, moved_bytes
from tmojax.report.verdict import contention_sentence, headroom_sentence, short_reasons, verdict
from tmojax.report.wording import percent, ranges
from tmojax.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Table:
    """Texts in rows; `right` says which columns are numbers; `marked` rows stand out."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
    marked: frozenset[int] = frozenset()

    def plain(self) -> str:
        """The table as aligned text; marked rows have a `*` in front."""
        cells = [self.columns, *self.rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.columns))]
        lines = [self.title] if self.title else []
        for number, row in enumerate(cells):
            texts = [
                cell.rjust(width) if column in self.right else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append(("* " if number - 1 in self.marked else "  ") + "  ".join(texts).rstrip())
            if number == 0:
                lines.append("  " + "  ".join("-" * width for width in widths))
        return "\n".join(lines)

    def rich(self) -> RichTable:
        """The table for a terminal."""
        table = RichTable(title=self.title or None, title_justify="left", header_style="bold", pad_edge=False)
        for column, name in enumerate(self.columns):
            table.add_column(name, justify="right" if column in self.right else "left")
        for number, row in enumerate(self.rows):
            table.add_row(*row, style="bold" if number in self.marked else None)
        return table


_STATUS_WORD = {
    Status.OPTIMAL: "optimal (own model)",
    Status.FEASIBLE: "feasible",
    Status.TIME_LIMIT: "time limit",
    Status.NOT_FOUND: "none found",
    Status.INFEASIBLE: "infeasible",
    Status.ERROR: "rejected",
    Status.FAILED: "failed",
}


def _or_dash(text: str, known: bool) -> str:
    return text if known else "-"


def _planner_row(report: RunReport, outcome: Outcome) -> tuple[str, ...]:
    name = outcome.planner + (" (baseline)" if outcome.baseline else "")
    if not math.isfinite(outcome.step_s):
        return (name, _STATUS_WORD[outcome.status], *("-",) * 7, format_seconds(outcome.result.plan_s), "-")
    problem, check = report.problem, outcome.check
    peaks = check.peak_bytes if check is not None else {}
    by_kind = {
        kind: max((peaks.get(m.name, 0) for m in problem.machine.memories if m.kind is kind), default=0)
        for kind in MemoryKind
    }
    out, inward, peer = moved_bytes(problem, outcome)
    jitter = outcome.jitter
    both = f"{format_seconds(jitter.median_s)} / {format_seconds(jitter.p95_s)}" if jitter else "-"
    return (
        name,
        _STATUS_WORD[outcome.status],
        format_seconds(outcome.step_s),
        format_seconds(outcome.step_s / problem.workload.micro_batches),
        _or_dash(percent(outcome.gap or 0.0), outcome.gap is not None),
        format_bytes(by_kind[MemoryKind.DEVICE]),
        format_bytes(by_kind[MemoryKind.HOST]),
        format_bytes(out) + (f" + {format_bytes(peer)} peer" if peer else ""),
        format_bytes(inward),
        format_seconds(outcome.result.plan_s),
        both,
    )


def planner_table(report: RunReport) -> Table:
    """All planners, the fastest first, with the baseline beside the best; those without a plan last."""
    best = report.best
    order = sorted(report.outcomes, key=lambda o: (o is not best, not o.baseline, o.step_s))
    return Table(
        "Planners (step of all micro-batches; peaks are exact bytes that the plan may need)",
        ("planner", "status", "step", "per micro-batch", "gap to bound", "GPU peak", "host peak", "moved out",
         "moved in", "planning", "jitter median / p95"),
        tuple(_planner_row(report, outcome) for outcome in order),
        frozenset(range(2, 11)),
        frozenset({0} if best is not None else ()),
    )  # fmt: skip


def without_plan(report: RunReport) -> tuple[str, ...]:
    """One line for every planner that has no valid plan: why."""
    lines = []
    for outcome in report.outcomes:
        if math.isfinite(outcome.step_s):
            continue
        reason = outcome.result.message or str(outcome.status)
        if outcome.check is not None and not outcome.check.valid:
            first = str(outcome.check.violations[0]).split("; largest:")[0]
            reason = f"rejected by the checker: {short_reasons(outcome.check.counts())}; first {first}"
        lines.append(f"{outcome.planner}: {reason}")
    return tuple(lines)


def memory_table(report: RunReport) -> Table | None:
    """What fills every memory at its fullest position in the best plan; None without a plan."""
    best = report.best
    if best is None or best.result.schedule is None:
        return None
    found = peak_by_kind(report.problem, best.result.schedule)
    kinds = [kind for kind in range(len(BYTE_KINDS)) if found[:, kind].any()]
    arenas = best.arena_bytes
    rows: dict[tuple[str, ...], list[str]] = {}
    for memory, spec in enumerate(report.problem.machine.memories):
        total = int(found[memory].sum())
        if total:
            limit = spec.capacity_bytes - spec.reserve_bytes
            arena = arenas.get(spec.name)
            placed = ("-", "-") if arena is None else (format_bytes(arena), percent(arena / total - 1))
            cells = (*(format_bytes(int(found[memory, kind])) for kind in kinds), format_bytes(total),
                     format_bytes(limit), percent(total / limit), *placed)  # fmt: skip
            rows.setdefault(cells, []).append(spec.name)
    return Table(
        f"Memory at its fullest ({best.planner}; by position in the lists, whatever the times)",
        ("memory", *(BYTE_KINDS[kind] for kind in kinds), "together", "capacity", "used", "arena", "over peak"),
        tuple((ranges(names), *cells) for cells, names in rows.items()),
        frozenset(range(1, len(kinds) + 6)),
    )


def decision_table(report: RunReport, most: int | None = None) -> Table | None:
    """What the best plan does with every tensor, equal layers merged; None without a plan. `most`: rows to show."""
    best = report.best
    if best is None or best.result.schedule is None:
        return None
    found = read_decisions(report.problem, best.result.schedule)
    same_devices = all(row.devices == "all" for row in found)
    rows = []
    for row in found:
        share = "" if row.share == 1 else f" ({percent(row.share)} of micro-batches)"
        number = str(row.most) if row.fewest == row.most else f"{row.fewest}-{row.most}"
        sizes = (number, format_bytes(row.size_bytes), format_bytes(row.total_bytes))
        times = (_short_time(time_s) for time_s in (row.idle_s, row.copy_s, row.again_s))
        cells = (row.action + share, row.name, row.layers, *sizes, *times)
        rows.append((*cells, row.reason) if same_devices else (*cells, row.devices, row.reason))
    order = best.result.schedule.order
    plan = best.planner if order == DEFAULT else f"{best.planner}, micro-batches in the order {order}"
    title = f"Decisions ({plan}; number and bytes per GPU and micro-batch; a copy when all GPUs copy)"
    if most is not None and len(rows) > most:
        rows, title = _shortened(rows, most), f"{title}, the largest {most} of {len(rows)} kinds"
    columns = ["decision", "tensor", "layers", "number", "size", "together", "idle", "a copy", "again"]
    return Table(title, (*columns, "why") if same_devices else (*columns, "GPUs", "why"), tuple(rows),
                 frozenset(range(3, 9)))  # fmt: skip


def _short_time(time_s: float | None) -> str:
    """Three significant digits, `-` for None."""
    if time_s is None:
        return "-"
    return format_seconds(float(f"{time_s:.3g}")) if time_s == 0 or time_s >= 1e-6 else "< 1 us"


def _shortened(rows: list, most: int) -> list:
    """The first rows of every decision in turn, in the given order, so that none is missing."""
    places: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row[0], []).append(place)
    turns = sorted((turn, place) for group in places.values() for turn, place in enumerate(group))
    return [rows[place] for place in sorted(place for _, place in turns[:most])]


def shortfall_table(report: RunReport) -> Table | None:
    """The largest tensors where the least demanding plan is too large; None if something fits."""
    short = report.shortfall
    if short is None or report.best is not None:
        return None
    rows = tuple((name, format_bytes(size), f"{size}") for name, size in short.largest)
    return Table(f"Largest in {short.memory} at {short.where}", ("tensor", "size", "bytes"), rows, frozenset((1, 2)))


def print_report(report: RunReport, stream: TextIO) -> None:
    """Headroom, verdict, contention and tables on a stream: rich on a terminal, aligned plain text otherwise."""
    sentences = [text for text in (headroom_sentence(report), verdict(report), contention_sentence(report)) if text]
    tables = [planner_table(report), memory_table(report), decision_table(report, 16), shortfall_table(report)]
    reasons = without_plan(report)
    if not stream.isatty():
        blocks = ["\n".join(sentences), *(table.plain() for table in tables if table is not None)]
        if reasons:
            blocks.insert(2, "\n".join(("Without a plan:", *(f"  {line}" for line in reasons))))
        stream.write("\n\n".join(blocks) + "\n")
        return
    console = Console(file=stream, highlight=False)
    for sentence in sentences:
        console.print(sentence, style="bold", markup=False)
    for number, table in enumerate(table for table in tables if table is not None):
        console.print(table.rich())
        if number == 0:
            for line in reasons:
                console.print(f"  {line}", markup=False)


def bound_table(report: RunReport) -> Table | None:
    """The parts of the lower bound, the one that counts first; None without any."""
    if report.bound is None:
        return None
    parts = sorted(report.bound.parts, key=lambda part: -part.step_s)
    rows = tuple((part.name, format_seconds(part.step_s), part.binds, part.explanation) for part in parts)
    return Table("", ("lower bound", "step", "what binds", "how"), rows, frozenset({1}), frozenset({0}))
