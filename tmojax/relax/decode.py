"""From a decision to the instruction list of one device.

Given which tensors leave, every tensor is released as late and prefetched as early as the static memory profile
allows, in linear time; or there is no list with that decision in this capacity, and the first place where it
fails is returned (design section 6, point 8). What never has to leave that way is not moved at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.problem import COMPUTE_STREAM, INSTRUCTION, Kind, Placement, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import DeviceDecision, Rest
from tmojax.relax.fit import END, WRITTEN, fit, rows_of, share_clean_copies
from tmojax.relax.host_memory import host_peak_bytes
from tmojax.relax.template import build_template
from tmojax.relax.unroll import UnrolledStep, unroll

NEVER = np.iinfo(np.int64).max // 4


@dataclass(frozen=True, eq=False)
class DeviceList:
    """The list of one device, before it is coordinated with the others.

    rows: dtype INSTRUCTION. compute_row [U]: row of every run of the step, in order. progress_s [U]: compute seconds
    (of the whole step) when that run ends, stalls not counted. moved_bytes: (out, in) over the device's host path.
    host_peak_bytes: what the list charges the host memory with.
    """

    rows: np.ndarray
    compute_row: np.ndarray
    progress_s: np.ndarray
    moved_bytes: tuple[int, int]
    initial: tuple[Placement, ...]
    host_peak_bytes: int


@dataclass(frozen=True)
class DoesNotFit:
    """No list exists with the decision: the memory is exceeded at an op even with everything away that may be away.

    `host_memory`: the host memory that the lists of several devices exceed together (then `device` takes most of it,
    and `op` and `micro_batch` are -1); -1: the device's own memory.
    """

    device: int
    op: int
    micro_batch: int
    bytes_over: int
    host_memory: int = -1


def decode(problem: Problem, view: StepView, decision: DeviceDecision, *, capacity_bytes: int | None = None,
           lookahead_runs: int = NEVER, release_at_once: bool = False) -> DeviceList | DoesNotFit:  # fmt: skip
    """Build the list of one device.

    `capacity_bytes` defaults to the device's; `lookahead_runs` limits how many runs ahead of its use a tensor may be
    prefetched; `release_at_once` lets nothing stay longer than its last use, whether or not memory is short.
    """
    capacity = problem.capacity_bytes(view.device) if capacity_bytes is None else capacity_bytes
    template = build_template(problem, view, decision)
    first, last = (build_template(problem, view, decision, **{which: True}) for which in ("first", "last"))
    step = unroll(problem, view, decision, template, last, first)
    release, prefetch, failed = fit(step.profile_bytes, step.gaps, capacity, lookahead_runs, release_at_once)
    if failed >= 0:
        over = int(step.profile_bytes[failed]) - capacity
        return DoesNotFit(view.device, int(step.op[failed]), int(step.micro_batch[failed]), over)
    share_clean_copies(step.gaps, release, prefetch)
    return _emit(problem, view, decision, step, release, prefetch)


def _emit(problem, view, decision, step: UnrolledStep, release, prefetch) -> DeviceList:
    program = problem.workload.program(view.device)
    device = problem.machine.devices[view.device]
    gaps = step.gaps
    by_release = np.lexsort((gaps[:, WRITTEN], release))
    by_prefetch = np.lexsort((gaps[:, END], prefetch))
    by_end = np.argsort(gaps[:, END], kind="stable")
    table, compute_row = rows_of(
        step.op, step.micro_batch, step.is_collective, step.freed, gaps, release, prefetch, by_release, by_prefetch,
        by_end, device.memory, device.host_memory,
    )  # fmt: skip
    rows = blank_rows(len(table))
    for name, column in (("kind", 0), ("op", 1), ("micro_batch", 2), ("tensor", 3), ("memory", 5), ("to_memory", 6)):
        rows[name] = table[:, column]
    launch_s = problem.machine.overheads.launch_s
    seconds = np.array([0.0 if op.collective else op.duration_s + launch_s for op in program.ops])
    sizes = np.array([tensor.size_bytes for tensor in program.tensors], np.int64)
    moved = tuple(int(sizes[rows["tensor"][rows["kind"] == kind]].sum()) for kind in (Kind.OFFLOAD, Kind.PREFETCH))
    initial = tuple(
        Placement(tensor, (device.host_memory if rest == Rest.ON_HOST else device.memory,))
        for tensor, rest in zip(view.state_tensor.tolist(), decision.state_out.tolist(), strict=True)
    )
    host_bytes = host_peak_bytes(problem, view.device, rows, initial)
    return DeviceList(rows, compute_row, np.cumsum(seconds[step.op]), moved, initial, host_bytes)  # type: ignore[arg-type]


def blank_rows(count: int) -> np.ndarray:
    """`count` instructions with every field at its unused value."""
    rows = np.full(count, -1, dtype=INSTRUCTION)
    rows["part"], rows["parts"], rows["size_bytes"] = 0, 1, 0
    return rows


def wait_row(event: int) -> np.ndarray:
    """One instruction that holds back the compute stream until `event`."""
    row = blank_rows(1)
    row["kind"], row["event"], row["stream"] = Kind.WAIT, event, COMPUTE_STREAM
    return row
