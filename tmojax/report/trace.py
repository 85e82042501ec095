"""Chrome trace JSON of one simulated plan, for Perfetto (ui.perfetto.dev) and chrome://tracing.

One process per GPU with a row per stream and a counter of its memory; one process for the links that GPUs share, with
the transfers that cross them and a counter of their rate; one for the host memories. Times are microseconds, rounded
to whole nanoseconds; counters are bytes and bytes per second.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from tmojax.problem import COMMUNICATION_STREAM, COMPUTE_STREAM, Kind, Problem, Schedule
from tmojax.problem.strict_json import write_text
from tmojax.report.activity import CATEGORIES, DeviceActivity, activity_label, engine_rows, read_activity
from tmojax.report.links import LinkRate, crossings, read_link_rates, shared_links
from tmojax.report.memory_use import MemoryUse, read_memory_use
from tmojax.simulate import Simulation

Event = dict[str, Any]


def trace(problem: Problem, schedule: Schedule, simulation: Simulation) -> dict[str, Any]:
    """The trace as JSON values: `traceEvents` in Chrome's format, metadata first, then by row and time."""
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(problem, schedule, simulation))}


def write_trace(path: str | os.PathLike[str], problem: Problem, schedule: Schedule, simulation: Simulation) -> None:
    """Write the trace, one event a line (temporary name, then rename). Raises InputError when it cannot be written."""
    lines = ",\n".join(
        json.dumps(event, separators=(",", ":"), allow_nan=False) for event in _events(problem, schedule, simulation)
    )
    write_text(path, f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n')


def _events(problem: Problem, schedule: Schedule, simulation: Simulation) -> Iterator[Event]:
    devices = problem.machine.devices
    links_process = len(devices) + 1
    host_process = len(devices) + 2
    activities = read_activity(problem, schedule, simulation)
    for device, spec in enumerate(devices):
        yield from _process(device + 1, f"{spec.name} ({spec.model})" if spec.model else spec.name)
        yield from _device_rows(problem, schedule, activities, device)
    yield from _process(links_process, "shared links")
    yield from _link_rows(problem, schedule, simulation, activities, links_process)
    yield from _process(host_process, "host")
    of_memory = {spec.memory: device + 1 for device, spec in enumerate(devices) if spec.kind == "gpu"}
    for use in read_memory_use(problem, schedule, simulation):
        yield from _memory_counter(problem, use, of_memory.get(use.memory, host_process))
    for rate in read_link_rates(problem, simulation):
        if rate.link in shared_links(problem):
            yield from _rate_counter(problem, rate, links_process)


def _nanoseconds(time_s: float) -> int:
    return round(time_s * 1e9)


def _process(process: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}


def _thread(process: int, thread: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _slice(process: int, thread: int, name: str, category: str, start_s: float, end_s: float, **args: Any) -> Event:
    start, end = _nanoseconds(start_s), _nanoseconds(end_s)
    event: Event = {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": category,
                    "ts": start / 1000, "dur": (end - start) / 1000}  # fmt: skip
    if args:
        event["args"] = args
    return event


def _device_rows(
    problem: Problem, schedule: Schedule, activities: tuple[DeviceActivity, ...], device: int
) -> Iterator[Event]:
    """Compute and communication rows, and one row per copy engine of the device."""
    engines = {engine: word for engine, (owner, word) in engine_rows(problem).items() if owner == device}
    yield from _thread(device + 1, 1 + COMPUTE_STREAM, "compute")
    yield from _thread(device + 1, 1 + COMMUNICATION_STREAM, "communication")
    thread_of = {engine: 3 + place for place, engine in enumerate(sorted(engines, key=lambda e: (engines[e], e)))}
    for engine, thread in thread_of.items():
        yield from _thread(device + 1, thread, f"{engines[engine]} ({problem.machine.engines[engine]})")
    for activity in activities:
        rows = schedule.lists[activity.device][activity.instruction]
        transfers = np.isin(rows["kind"], (Kind.OFFLOAD, Kind.PREFETCH))
        thread = np.where(rows["kind"] == Kind.COLLECTIVE, 1 + COMMUNICATION_STREAM, 1 + COMPUTE_STREAM)
        for position in np.flatnonzero(~transfers & (activity.device == device)).tolist():
            yield _activity_slice(problem, schedule, activity, position, device + 1, int(thread[position]))
        # A peer copy holds engines of two devices and is shown on both.
        ends = [rows[name].tolist() for name in ("memory", "to_memory")]
        for position in np.flatnonzero(transfers).tolist():
            for engine in problem.machine.route(ends[0][position], ends[1][position]).engines:
                if engine in thread_of:
                    yield _activity_slice(problem, schedule, activity, position, device + 1, thread_of[engine])


def _activity_slice(
    problem: Problem, schedule: Schedule, activity: DeviceActivity, position: int, process: int, thread: int
) -> Event:
    args: dict[str, Any] = {"instruction": int(activity.instruction[position])}
    if activity.size_bytes[position]:
        args["size_bytes"] = int(activity.size_bytes[position])
    row = schedule.lists[activity.device][activity.instruction[position]]
    if row["op"] >= 0:
        layer = problem.workload.program(activity.device).ops[row["op"]].layer
        args.update({"layer": layer} if layer else {})
    return _slice(process, thread, activity_label(problem, schedule, activity, position),
                  str(CATEGORIES[activity.category[position]]), float(activity.start_s[position]),
                  float(activity.end_s[position]), **args)  # fmt: skip


def _link_rows(
    problem: Problem,
    schedule: Schedule,
    simulation: Simulation,
    activities: tuple[DeviceActivity, ...],
    process: int,
) -> Iterator[Event]:
    """Transfers that overlap on a link go to further rows of it, so that slices of a row never overlap."""
    thread = 0
    for link in shared_links(problem):
        name = problem.machine.links[link].name
        busy_until: list[tuple[int, int]] = []  # (end, thread) of the rows in use
        free: list[int] = []
        rows: list[int] = []
        for crossing in crossings(problem, schedule, simulation, activities, link):
            start, end = _nanoseconds(crossing.start_s), _nanoseconds(crossing.end_s)
            while busy_until and busy_until[0][0] <= start:
                heapq.heappush(free, heapq.heappop(busy_until)[1])
            if not free:
                thread += 1
                rows.append(thread)
                yield from _thread(process, thread, name if len(rows) == 1 else f"{name} ({len(rows)})")
                heapq.heappush(free, thread)
            row = heapq.heappop(free)
            heapq.heappush(busy_until, (end, row))
            activity = activities[crossing.device]
            label = activity_label(problem, schedule, activity, crossing.position)
            yield _slice(process, row, f"{problem.machine.devices[crossing.device].name} {label}",
                         str(CATEGORIES[activity.category[crossing.position]]), crossing.start_s, crossing.end_s,
                         size_bytes=crossing.size_bytes)  # fmt: skip


def _counter(
    process: int, name: str, time_s: np.ndarray, values: np.ndarray, series: str, limit: Event
) -> Iterator[Event]:
    """Counter samples; of several samples in one nanosecond the last one holds, and repeated values are left out."""
    times = np.round(time_s * 1e9)
    keep = np.diff(times, append=np.inf) != 0
    previous = None
    for time, value in zip(times[keep].tolist(), values[keep].tolist(), strict=True):
        if value != previous:
            yield {"ph": "C", "pid": process, "tid": 0, "name": name, "ts": time / 1000,
                   "args": {series: value, **limit}}  # fmt: skip
        previous = value


def _memory_counter(problem: Problem, use: MemoryUse, process: int) -> Iterator[Event]:
    memory = problem.machine.memories[use.memory]
    limit = {"capacity_bytes": memory.capacity_bytes - memory.reserve_bytes}
    yield from _counter(process, f"memory {memory.name}", use.time_s, use.total_bytes, "used_bytes", limit)


def _rate_counter(problem: Problem, rate: LinkRate, process: int) -> Iterator[Event]:
    link = problem.machine.links[rate.link]
    limit = {"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s}
    yield from _counter(process, f"rate {link.name}", rate.time_s, rate.bytes_per_s, "rate_bytes_per_s", limit)
