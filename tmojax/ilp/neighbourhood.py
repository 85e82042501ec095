"""Which part of a solution is decided anew while the rest keeps its place: neighbourhoods of a large-neighbourhood
search (Shaw, "Using constraint programming and local search methods to solve vehicle routing problems", CP 1998).
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from tmojax.ilp.cp_sat_links import IN, OUT
from tmojax.ilp.cp_sat_step import StoreKind
from tmojax.ilp.cp_sat_times import DeviceTimes, Model, step_ticks

Times = tuple[DeviceTimes, ...]
Part = frozenset[tuple[int, int]]  # (device, gap)

# Part of the step that a window in time spans, at least and at most.
SPANS = (0.05, 0.35)


class Neighbourhood(StrEnum):
    """One GPU in a window of time; a layer on all GPUs; all GPUs where a GPU waits longest; persistent state of one
    GPU."""

    WINDOW = "window"
    LAYER = "layer"
    CONGESTED = "congested"
    STATE = "state"


def offered(model: Model) -> tuple[Neighbourhood, ...]:
    """The kinds that have something to decide in this problem."""
    gaps = [(step, gap) for step in model.steps for gap in step.gaps if not gap.always]
    state = [gap for step, gap in gaps if step.stores[gap.store].kind is StoreKind.STATE]
    found = [kind for kind in Neighbourhood if kind is not Neighbourhood.STATE] if len(gaps) > len(state) else []
    return (*found, Neighbourhood.STATE) if state else tuple(found)


def choose(model: Model, times: Times, kind: Neighbourhood, most: int, rng: np.random.Generator) -> Part:
    """At most `most` gaps of one neighbourhood, the larger tensors first; empty if it has none."""
    if kind is Neighbourhood.WINDOW:
        device = int(rng.integers(len(model.steps)))
        begin, end = _window(model, times, rng)
        found = [(device, gap) for gap in _in_window(model, device, times[device], begin, end)]
    elif kind is Neighbourhood.LAYER:
        found = _layer(model, rng)
    elif kind is Neighbourhood.CONGESTED:
        begin, end = _congested(model, times, rng)
        found = [
            (device, gap) for device, mine in enumerate(times) for gap in _in_window(model, device, mine, begin, end)
        ]
    else:
        device = int(rng.integers(len(model.steps)))
        step = model.steps[device]
        found = [
            (device, gap)
            for gap, spec in enumerate(step.gaps)
            if step.stores[spec.store].kind is StoreKind.STATE and not spec.always
        ]
    return _with_siblings(model, _largest(model, found, most, rng))


def _largest(model: Model, found: list[tuple[int, int]], most: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Sizes are blurred by chance, so that small ones have their turn."""
    if len(found) <= most:
        return found
    sizes = [model.steps[device].stores[model.steps[device].gaps[gap].store].size_bytes for device, gap in found]
    key = np.array(sizes, float) * rng.uniform(0.3, 1.0, len(found))
    return [found[index] for index in sorted(np.argsort(-key, kind="stable")[:most].tolist())]


def _with_siblings(model: Model, found: list[tuple[int, int]]) -> Part:
    """All gaps of a state tensor are decided together: whether it rests concerns all of them."""
    part = set(found)
    for device, gap in found:
        store = model.steps[device].stores[model.steps[device].gaps[gap].store]
        if store.may_rest:
            part |= {(device, other) for other in store.gaps}
    return frozenset(part)


def _window(model: Model, times: Times, rng: np.random.Generator) -> tuple[int, int]:
    total = step_ticks(model, times)
    span = int(total * rng.uniform(*SPANS))
    begin = int(rng.integers(0, max(1, total - span + 1)))
    return begin, begin + span


def _in_window(model: Model, device: int, times: DeviceTimes, begin: int, end: int) -> list[int]:
    """Gaps that begin or end in the window, or whose copies run in it."""
    step, found = model.steps[device], []
    for gap, spec in enumerate(step.gaps):
        if spec.always:
            continue
        edges = []
        if spec.before >= 0:
            edges.append((model.run_end(device, spec.before, times.runs[spec.before]),) * 2)
        if spec.after < len(step.runs):
            edges.append((times.runs[spec.after],) * 2)
        for way, starts in ((OUT, times.out), (IN, times.into)):
            if gap in starts:
                edges.append((starts[gap], model.copy_end(device, gap, way, starts[gap])))
        if any(start <= end and stop >= begin for start, stop in edges):
            found.append(gap)
    return found


def _layer(model: Model, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Tensors that one layer writes in one micro-batch, on every device that has this layer."""
    programs = [model.problem.workload.program(device) for device in range(len(model.steps))]

    def label(device: int, gap: int) -> tuple[str, int]:
        step = model.steps[device]
        written = step.gaps[gap].written
        run = step.runs[written if written >= 0 else 0]
        return programs[device].ops[run.op].layer, run.micro_batch

    labelled = [
        (label(device, gap), (device, gap))
        for device, step in enumerate(model.steps)
        for gap, spec in enumerate(step.gaps)
        if step.stores[spec.store].kind is StoreKind.MADE
    ]
    labels = sorted({name for name, _ in labelled})
    if not labels:
        return []
    chosen = labels[int(rng.integers(len(labels)))]
    return [place for name, place in labelled if name == chosen]


def _congested(model: Model, times: Times, rng: np.random.Generator) -> tuple[int, int]:
    """A window around one of the waits of a compute stream, long ones more often."""
    waits: list[tuple[int, int]] = []
    for device, mine in enumerate(times):
        step = model.steps[device]
        busy = [(mine.runs[i], mine.runs[i] + run.ticks) for i, run in enumerate(step.runs) if not run.collective]
        busy += [(start, model.rerun_end(device, number, start)) for number, start in mine.reruns.items()]
        busy.sort()
        last = 0
        for start, end in busy:
            if start > last:
                waits.append((last, start))
            last = max(last, end)
    if not waits:
        return _window(model, times, rng)
    lengths = np.array([end - begin for begin, end in waits], float)
    begin, end = waits[int(rng.choice(len(waits), p=lengths / lengths.sum()))]
    around = int(step_ticks(model, times) * rng.uniform(*SPANS) / 2)
    return begin - around, end + around
