"""One HTML file that opens from disk: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tmojax.problem import Problem
from tmojax.problem.machine import MemoryKind
from tmojax.problem.strict_json import write_text
from tmojax.report.figure_style import inline_svg
from tmojax.report.links import shared_links
from tmojax.report.outcome import RunReport, device_capacities
from tmojax.report.table import (
    Table,
    bound_table,
    decision_table,
    memory_table,
    planner_table,
    shortfall_table,
    without_plan,
)
from tmojax.report.verdict import contention_sentence, describe_coordination, headroom_sentence, per_gpu, verdict
from tmojax.report.wording import counted, percent
from tmojax.units import format_bytes, format_seconds

# Kinds of decisions that the page shows at once; the others open on demand.
MOST_DECISIONS = 30

# True of every plan, whatever the machine; a machine adds its own assumptions.
LEFT_OUT = (
    "Memory that is neither a tensor of the step nor workspace of an op: the CUDA context, libraries, communication "
    "buffers. Set the reserve of a memory to account for it.",
    "An allocator that places blocks when they are asked for may need more than the arena, whose offsets are fixed.",
    "Op times are those of the workload's source above; clocks, temperature and input-dependent work vary.",
    "Copies and compute slow each other down only by the factors of the machine (none where they are 1).",
    "Data loading fills the inputs in host memory before the step and takes neither time nor bandwidth here.",
)


def report_html(report: RunReport, figures: Mapping[str, str]) -> str:
    """The page. `figures`: SVG text by name (`planners`, `plan`, `memory`, `links`), as far as there are any."""
    environment = Environment(
        loader=PackageLoader("tmojax", "report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    best = report.best
    coordination = ""
    if best is not None and best.result.schedule is not None and best.simulation is not None:
        coordination = describe_coordination(report.problem, best.result.schedule, best.simulation)
    return environment.get_template("report.html.jinja").render(
        title=f"tmojax: {report.problem.name}",
        fits=best is not None,
        best=best.planner if best is not None else "",
        verdict=verdict(report),
        headroom=headroom_sentence(report),
        contention=contention_sentence(report),
        tiles=_tiles(report),
        shortfall=shortfall_table(report),
        planners=planner_table(report),
        without_plan=without_plan(report),
        bounds=bound_table(report),
        bound_status=f"{report.bound.status} ({report.bound.solver})" if report.bound else "",
        coordination=coordination[:1].upper() + coordination[1:],
        memory=memory_table(report),
        decisions=decision_table(report, MOST_DECISIONS),
        all_decisions=decision_table(report),
        figures={name: Markup(inline_svg(figures[name], name)) if name in figures else ""
                 for name in ("planners", "plan", "memory", "links")},
        workload=_workload_facts(report),
        notes=report.notes,
        machine=_machine_facts(report.problem),
        links=_link_table(report.problem),
        assumptions=report.problem.machine.assumptions,
        left_out=LEFT_OUT,
        provenance=_provenance_facts(report),
    )  # fmt: skip


def write_html(path: str | os.PathLike[str], report: RunReport, figures: Mapping[str, str]) -> None:
    """Write the page (temporary name, then rename). Raises InputError when it cannot be written."""
    write_text(path, report_html(report, figures))


def _tiles(report: RunReport) -> list[tuple[str, str, str]]:
    best = report.best
    if best is None:
        return []
    tiles = [("step time", format_seconds(best.step_s), f"found by {best.planner}")]
    if 0 < report.unlimited_s < math.inf:
        extra = best.step_s / report.unlimited_s - 1
        tiles.append(("cost of the memory limit", f"+{percent(extra)}", "against unlimited memory"))
    if best.gap is not None:
        tiles.append(("gap to the lower bound", percent(best.gap), "no plan can save more"))
    baseline = report.baseline
    if baseline is not None and baseline is not best and 0 < baseline.step_s < math.inf:
        saved = 1 - best.step_s / baseline.step_s
        takes = f"it takes {format_seconds(baseline.step_s)}"
        tiles.append((f"against {baseline.planner}", f"-{percent(saved)}", takes))
    footprint = max(report.footprint_bytes)
    share = min(device_capacities(report.problem)) / footprint
    tiles.append(("memory", percent(share), f"of the {format_bytes(footprint)} that keeping all takes"))
    return tiles


def _workload_facts(report: RunReport) -> list[tuple[str, str]]:
    workload = report.problem.workload
    programs = "; ".join(
        f"{program.name}: {counted(len(program.ops), 'op')}, {counted(len(program.tensors), 'tensor')}"
        for program in workload.programs
    )
    facts = [
        ("workload", workload.name),
        ("micro-batches a step", str(workload.micro_batches)),
        ("programs", programs),
        ("op times", workload.duration_source),
        ("keeping everything takes", per_gpu(report.footprint_bytes)),
        ("actions allowed", ", ".join(sorted(report.problem.actions)) or "none"),
    ]
    joined: dict[tuple[str, int], list[int]] = {}
    for collective in workload.collectives:
        joined.setdefault((str(collective.kind), len(collective.devices)), []).append(collective.size_bytes)
    for (kind, members), sizes in joined.items():
        total = format_bytes(sum(sizes))
        facts.append(("collectives", f"{len(sizes)} x {kind} over {members} GPUs, payload {total} together"))
    return facts


def _machine_facts(problem: Problem) -> list[tuple[str, str]]:
    machine = problem.machine
    models = sorted({device.model for device in machine.devices if device.model})
    facts = [
        ("machine", machine.name),
        ("devices", f"{len(machine.devices)} ({', '.join(models)})" if models else str(len(machine.devices))),
        ("device memory for plans", per_gpu(device_capacities(problem))),
    ]
    for memory in machine.memories:
        if memory.kind is not MemoryKind.DEVICE:
            text = format_bytes(memory.capacity_bytes - memory.reserve_bytes)
            if memory.pinned_limit_bytes >= 0:
                text += f", of which {format_bytes(memory.pinned_limit_bytes)} may be pinned"
            if memory.pinned_power_of_two:
                text += ", pinned blocks rounded up to powers of two"
            facts.append((memory.name, text))
    overheads = machine.overheads
    facts.append(
        ("overheads", f"launch {format_seconds(overheads.launch_s)}, transfer set-up "
         f"{format_seconds(overheads.transfer_setup_s)}, hand-over {format_seconds(overheads.handover_s)}")
    )  # fmt: skip
    return facts


def _link_table(problem: Problem) -> Table:
    machine = problem.machine
    shared = set(shared_links(problem))
    rows = tuple(
        (link.name, f"{link.bandwidth_bytes_per_s / 1e9:.4g} GB/s", format_seconds(link.latency_s),
         "several GPUs" if index in shared else "one GPU or pair")
        for index, link in enumerate(machine.links)
    )  # fmt: skip
    return Table("Links, one direction each", ("link", "bandwidth", "latency", "used by"), rows, frozenset({1, 2}))


def _provenance_facts(report: RunReport) -> list[tuple[str, str]]:
    facts = [("problem", report.problem_hash)]
    for name, value in report.provenance.items():
        if isinstance(value, Mapping):
            text = ", ".join(f"{key} {item}" for key, item in value.items())
        else:
            text = value if isinstance(value, str) else json.dumps(value)
        facts.append((name.replace("_", " "), text))
    return facts
