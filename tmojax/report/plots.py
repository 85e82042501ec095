"""Figures of a run: pure functions from data to matplotlib figures. Every title says what the figure shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tmojax.problem import Kind, Problem, Schedule
from tmojax.problem.machine import MemoryKind
from tmojax.report.activity import COMPUTE_CATEGORIES, Category, DeviceActivity, read_activity
from tmojax.report.figure_style import (
    BLUE,
    BYTE_KIND_COLOUR,
    CATEGORY_COLOUR,
    DEVICE_COLOUR,
    GREY,
    INK,
    ORANGE,
    STALL,
    VERMILLION,
    figure_settings,
)
from tmojax.report.links import crossings, read_link_rates, shared_links
from tmojax.report.memory_use import BYTE_KINDS, read_memory_use
from tmojax.report.sampling import highest_in_bins, mean_over_bins, rate_of_intervals
from tmojax.report.wording import percent
from tmojax.simulate import Simulation
from tmojax.units import format_bytes, format_seconds

WIDTH_IN = 9.6
# Columns of time of a whole figure's panels together: keeps vector figures well below a megabyte.
_VECTOR_COLUMNS = 1200
_IMAGE_COLUMNS = 2000
# Times the fastest step that the comparison of planners shows.
_LONGEST_BAR = 3.0


def _time_axis(axes: Axes, first_s: float, last_s: float) -> None:
    axes.set_xlim(first_s * 1e3, last_s * 1e3)
    axes.set_xlabel("time (ms)")


def _finding(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left", fontweight="bold", fontsize=11)


def plot_memory(problem: Problem, schedule: Schedule, simulation: Simulation, footprint_bytes: int = 0) -> Figure:
    """Bytes in every memory over time, stacked by kind, with its capacity.

    `footprint_bytes`: what one GPU would need to keep everything (0: not shown). Memories that stay empty are left out.
    """
    uses = [use for use in read_memory_use(problem, schedule, simulation) if use.total_bytes.max() > 0]
    memories = problem.machine.memories
    columns = max(200, _VECTOR_COLUMNS // max(len(uses), 1))
    edges = np.linspace(0.0, simulation.step_s, columns + 1)
    shown = [kind for kind in range(len(BYTE_KINDS)) if any(use.bytes_by_kind[:, kind].any() for use in uses)]
    with figure_settings():
        figure = Figure(figsize=(WIDTH_IN, 0.9 + 1.35 * len(uses)))
        grid = figure.subplots(len(uses), 1, sharex=True, squeeze=False)[:, 0]
        for axes, use in zip(grid, uses, strict=True):
            memory = memories[use.memory]
            total = use.total_bytes
            if len(use.time_s) <= columns:
                time_s, rows = use.time_s, np.arange(len(total))
            else:
                # The moment of the highest total stands for its column: no peak is lost.
                rows = highest_in_bins(use.time_s, total, edges)
                time_s = edges[:-1]
            stack = use.bytes_by_kind[np.append(rows, rows[-1])][:, shown].T / 1e9
            axes.stackplot(
                np.append(time_s, simulation.step_s) * 1e3, stack, step="post", lw=0,
                colors=[BYTE_KIND_COLOUR[kind] for kind in shown],
            )  # fmt: skip
            capacity = memory.capacity_bytes - memory.reserve_bytes
            peak = int(total.max())
            if memory.kind is MemoryKind.DEVICE or peak > capacity / 3:
                axes.axhline(capacity / 1e9, color=VERMILLION, lw=1.4)
                axes.set_ylim(0, max(capacity, peak) * 1.08 / 1e9)
            else:
                axes.set_ylim(0, peak * 1.15 / 1e9)
            axes.set_ylabel(f"{memory.name}\n(GB)")
            axes.set_title(
                f"peak {format_bytes(peak)}, {percent(peak / capacity)} of {format_bytes(capacity)}",
                loc="right", fontsize=8.5, fontweight="normal", pad=2,
            )  # fmt: skip
            axes.grid(axis="y")
        _time_axis(grid[-1], 0.0, simulation.step_s)
        handles: list = [Patch(color=BYTE_KIND_COLOUR[kind], label=BYTE_KINDS[kind]) for kind in shown]
        handles.append(Line2D([], [], color=VERMILLION, lw=1.4, label="capacity"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
        _finding(figure, _memory_title(problem, uses, footprint_bytes))
    return figure


def _memory_title(problem: Problem, uses, footprint_bytes: int) -> str:
    memories = problem.machine.memories
    shares = [
        (int(use.total_bytes.max()), memories[use.memory].capacity_bytes - memories[use.memory].reserve_bytes)
        for use in uses
        if memories[use.memory].kind is MemoryKind.DEVICE
    ]
    if not shares:
        return "Memory in use over time"
    peak, capacity = max(shares, key=lambda share: share[0] / share[1])
    title = f"The fullest GPU holds {format_bytes(peak)} of {format_bytes(capacity)}"
    if footprint_bytes > capacity:
        title += f"; keeping everything would take {format_bytes(footprint_bytes)}"
    return title


def plot_links(problem: Problem, schedule: Schedule, simulation: Simulation) -> Figure:
    """Rate over time on every link that GPUs share and use, by the GPU that moves the bytes, with the link's bandwidth.

    Heights are exact means per column of time; the shares of GPUs inside one assume an even rate over each transfer.
    """
    links = [link for link in shared_links(problem) if simulation.moved_bytes[link] > 0] or list(shared_links(problem))
    rates = read_link_rates(problem, simulation)
    activities = read_activity(problem, schedule, simulation)
    edges = np.linspace(0.0, simulation.step_s, max(200, _VECTOR_COLUMNS // max(len(links), 1)) + 1)
    devices = problem.machine.devices
    collective_seen = False
    with figure_settings():
        figure = Figure(figsize=(WIDTH_IN, 0.9 + 1.45 * len(links)))
        grid = figure.subplots(len(links), 1, sharex=True, squeeze=False)[:, 0]
        shares_busy = []
        for axes, link in zip(grid, links, strict=True):
            spec = problem.machine.links[link]
            mean = mean_over_bins(rates[link].time_s, rates[link].bytes_per_s, edges)
            parts = np.zeros((len(devices) + 1, len(mean)))
            found = crossings(problem, schedule, simulation, activities, link)
            for group in range(len(devices) + 1):
                mine = [c for c in found if _group(schedule, activities, c, len(devices)) == group]
                parts[group] = rate_of_intervals(
                    np.array([c.start_s for c in mine]), np.array([c.end_s for c in mine]),
                    np.array([c.size_bytes for c in mine], float), edges,
                )  # fmt: skip
            collective_seen |= bool(parts[-1].any())
            total = parts.sum(axis=0)
            parts *= np.divide(mean, total, out=np.zeros_like(mean), where=total > 0)
            axes.stackplot(
                edges * 1e3, np.append(parts, parts[:, -1:], axis=1) / 1e9, step="post", lw=0,
                colors=[*(_device_colour(d) for d in range(len(devices))), GREY],
            )  # fmt: skip
            axes.axhline(spec.bandwidth_bytes_per_s / 1e9, color=VERMILLION, lw=1.4)
            axes.set_ylim(0, spec.bandwidth_bytes_per_s * 1.1 / 1e9)
            used = float(simulation.moved_bytes[link]) / spec.bandwidth_bytes_per_s / simulation.step_s
            shares_busy.append((used, spec.name))
            axes.set_ylabel(f"{spec.name}\n(GB/s)")
            axes.set_title(
                f"{format_bytes(float(simulation.moved_bytes[link]))} a step, {percent(used)} of what it could move",
                loc="right", fontsize=8.5, fontweight="normal", pad=2,
            )  # fmt: skip
            axes.grid(axis="y")
        _time_axis(grid[-1], 0.0, simulation.step_s)
        handles: list = [Patch(color=_device_colour(d), label=spec.name) for d, spec in enumerate(devices)]
        if collective_seen:
            handles.append(Patch(color=GREY, label="collectives"))
        handles.append(Line2D([], [], color=VERMILLION, lw=1.4, label="bandwidth"))
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 8))
        used, name = max(shares_busy)
        _finding(figure, f"The busiest shared link, {name}, carries {percent(used)} of what it could")
    return figure


def _group(schedule: Schedule, activities: tuple[DeviceActivity, ...], crossing, devices: int) -> int:
    index = activities[crossing.device].instruction[crossing.position]
    return devices if schedule.lists[crossing.device]["kind"][index] == Kind.COLLECTIVE else crossing.device


def _device_colour(device: int) -> str:
    return DEVICE_COLOUR[device % len(DEVICE_COLOUR)]


def plot_plan(problem: Problem, schedule: Schedule, simulation: Simulation) -> Figure:
    """What the streams of every GPU do: the whole step above, one micro-batch enlarged below (where there are several).

    Columns of time show the exact mix of what happens in them, so any number of instructions gives a small image.
    """
    activities = read_activity(problem, schedule, simulation)
    windows = [(0.0, simulation.step_s, "whole step")]
    period = _micro_batch_window(problem, schedule, activities[0])
    if period is not None:
        windows.append(period)
    streams = [("compute", COMPUTE_CATEGORIES), ("copy out", (Category.COPY_OUT,)), ("copy in", (Category.COPY_IN,)),
               ("comm.", (Category.COLLECTIVE,))]  # fmt: skip
    streams = [s for s in streams if any(activity.of(*s[1]).any() for activity in activities)]
    names = [f"{problem.machine.devices[a.device].name} {label}" for a in activities for label, _ in streams]
    with figure_settings():
        figure = Figure(figsize=(WIDTH_IN, 1.0 + len(windows) * (0.55 + 0.19 * len(names))))
        grid = figure.subplots(len(windows), 1, squeeze=False)[:, 0]
        for axes, (first_s, last_s, title) in zip(grid, windows, strict=True):
            edges = np.linspace(first_s, last_s, _IMAGE_COLUMNS + 1)
            image = np.concatenate([_stream_rows(activity, streams, edges) for activity in activities])
            axes.imshow(
                image, aspect="auto", interpolation="nearest",
                extent=(first_s * 1e3, last_s * 1e3, len(names) - 0.5, -0.5),
            )  # fmt: skip
            axes.set_yticks(range(len(names)), names, fontsize=7.5)
            axes.tick_params(axis="y", length=0)
            for row in range(1, len(names)):
                edge = row % len(streams) == 0
                axes.axhline(row - 0.5, color=INK if edge else GREY, lw=0.8 if edge else 0.25)
            axes.set_title(title, fontsize=9)
            _time_axis(axes, first_s, last_s)
        used = {Category(c) for c in Category if any(activity.of(c).any() for activity in activities)}
        handles = [Patch(color=CATEGORY_COLOUR[c], label=str(c)) for c in Category if c in used]
        handles.append(Patch(color=STALL, label="compute stalls"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
        stall = float(np.mean(np.asarray(simulation.stall_s))) / simulation.step_s
        recompute = float(np.mean([(a.end_s - a.start_s)[a.of(Category.RECOMPUTE)].sum() for a in activities]))
        _finding(
            figure,
            f"A step takes {format_seconds(simulation.step_s)}: {percent(recompute / simulation.step_s)} of it "
            f"recomputes, {percent(stall)} waits (mean of the GPUs)",
        )
    return figure


def _micro_batch_window(
    problem: Problem, schedule: Schedule, activity: DeviceActivity
) -> tuple[float, float, str] | None:
    """The span of a micro-batch in the middle of the step on one device, by its first executions."""
    count = problem.workload.micro_batches
    if count < 3:
        return None
    rows = schedule.lists[activity.device][activity.instruction]
    work = activity.of(Category.FORWARD, Category.BACKWARD) & (rows["micro_batch"] == count // 2)
    if not work.any():
        return None
    return (
        float(activity.start_s[work].min()), float(activity.end_s[work].max()),
        f"micro-batch {count // 2} of {problem.machine.devices[activity.device].name}, enlarged",
    )  # fmt: skip


def _stream_rows(activity: DeviceActivity, streams, edges_s: np.ndarray) -> np.ndarray:
    """One image row [columns, RGBA] per stream: colours weighted with the fraction of the column that they cover."""
    rows = []
    for label, categories in streams:
        image = np.zeros((len(edges_s) - 1, 4))
        covered = np.zeros(len(edges_s) - 1)
        for category in categories:
            mask = activity.of(category)
            start, end = activity.start_s[mask], activity.end_s[mask]
            part = np.clip(rate_of_intervals(start, end, end - start, edges_s), 0.0, 1.0)
            image[:, :3] += part[:, None] * np.array(to_rgb(CATEGORY_COLOUR[category]))
            covered += part
        compute = activity.of(*COMPUTE_CATEGORIES)
        if label == "compute" and compute.any():
            last_s = activity.end_s[compute].max(keepdims=True)
            ended = rate_of_intervals(np.zeros(1), last_s, last_s, edges_s)
            stall = np.clip(ended - covered, 0.0, 1.0)
            image[:, :3] += stall[:, None] * np.array(to_rgb(STALL))
            covered += stall
        image[:, 3] = np.clip(covered, 0.0, 1.0)
        image[:, :3] = np.divide(image[:, :3], covered[:, None], out=image[:, :3], where=covered[:, None] > 0)
        rows.append(np.clip(image, 0.0, 1.0))
    return np.stack(rows)


@dataclass(frozen=True, slots=True)
class PlannerBar:
    """One planner in the comparison, in seconds of the mean GPU. Without a plan `step_s` is inf and `note` says why."""

    name: str
    step_s: float
    compute_s: float = 0.0
    recompute_s: float = 0.0
    bound_s: float = 0.0
    baseline: bool = False
    best: bool = False
    note: str = ""


def plot_planners(bars: Sequence[PlannerBar], unlimited_s: float, title: str) -> Figure:
    """Step time of every planner, split in compute, recomputation and waiting, with lower bound and unlimited memory.

    `unlimited_s`: step time with enough memory to keep everything (inf: unknown).
    """
    with_plan = sorted((bar for bar in bars if np.isfinite(bar.step_s)), key=lambda bar: bar.step_s)
    ordered = [*with_plan, *(bar for bar in bars if not np.isfinite(bar.step_s))]
    longest = max([bar.step_s for bar in with_plan] + [bar.bound_s for bar in bars], default=1.0) or 1.0
    if with_plan:
        # One very slow planner must not flatten all others: its bar is cut, its label says how long it takes.
        longest = min(longest, _LONGEST_BAR * with_plan[0].step_s)
    with figure_settings():
        figure = Figure(figsize=(WIDTH_IN, 1.1 + 0.32 * len(ordered)))
        axes = figure.subplots()
        for place, bar in enumerate(ordered):
            if not np.isfinite(bar.step_s):
                axes.text(longest * 0.01, place, bar.note or "no plan", va="center", fontsize=8.5, style="italic")
                continue
            waiting = bar.step_s - bar.compute_s - bar.recompute_s
            left = 0.0
            for value, colour in ((bar.compute_s, BLUE), (bar.recompute_s, ORANGE), (waiting, STALL)):
                axes.barh(place, min(value, max(longest - left, 0.0)), left=left, color=colour, height=0.62)
                left += value
            gap = f"  (+{percent(bar.step_s / bar.bound_s - 1)})" if bar.bound_s > 0 else ""
            cut = "\u2026 " if bar.step_s > longest else ""
            axes.text(min(bar.step_s, longest) + longest * 0.008, place, f"{cut}{format_seconds(bar.step_s)}{gap}",
                      va="center", fontsize=8.5, fontweight="bold" if bar.best else "normal")  # fmt: skip
            if bar.bound_s > 0:
                axes.plot([bar.bound_s] * 2, [place - 0.45, place + 0.45], color=INK, lw=2.0)
        if np.isfinite(unlimited_s):
            axes.axvline(unlimited_s, color=GREY, ls="--", lw=1.2)
        labels = [bar.name + (" (baseline)" if bar.baseline else "") for bar in ordered]
        axes.set_yticks(range(len(ordered)), labels)
        for text, bar in zip(axes.get_yticklabels(), ordered, strict=True):
            text.set_fontweight("bold" if bar.best else "normal")
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(ordered) - 0.4, -0.6)
        axes.set_xlim(0, longest * 1.2 or 1.0)
        axes.set_xlabel("step time (s), with the gap to the lower bound of the planner's actions")
        axes.grid(axis="x")
        handles: list = [
            Patch(color=colour, label=label)
            for colour, label in ((BLUE, "compute"), (ORANGE, "recompute"), (STALL, "waiting"))
        ]
        handles.append(Line2D([], [], color=INK, lw=2, label="lower bound"))
        if np.isfinite(unlimited_s):
            handles.append(Line2D([], [], color=GREY, ls="--", lw=1.2, label="unlimited memory"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
        _finding(figure, title)
    return figure
