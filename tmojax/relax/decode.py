"""From a decision to the instruction list of one device.

Given which tensors leave, every tensor is released as late and prefetched as early as the static memory profile
allows, in linear time; or there is no list with that decision in this capacity, and the first place where it
fails is returned (design section 6, point 8). What never has to leave that way is not moved at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from tmojax.errors import InputError
from tmojax.problem import COMPUTE_STREAM, INSTRUCTION, Kind, Machine, Placement, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.decisions import DeviceDecision, Rest
from tmojax.relax.fit import END, WRITTEN, fit, rows_of, share_clean_copies
from tmojax.relax.host_memory import host_peak_bytes, row_bytes
from tmojax.relax.template import build_template
from tmojax.relax.unroll import unroll
from tmojax.relax.unrolled_step import UnrolledStep

NEVER = np.iinfo(np.int64).max // 4


@dataclass(frozen=True, eq=False)
class DeviceList:
    """The list of one device, before it is coordinated with the others.

    rows: dtype INSTRUCTION. compute_row [U]: row of every run of the step, in order. progress_s [U]: compute seconds
    (of the whole step) when that run ends, stalls not counted. moved_bytes: (out, in) over the device's host path.
    host_peak_bytes: what the list charges the host memory with. borrowed_bytes: what it has in the memory of device
    `lender` at most; the loan itself is not in the list yet (`tmojax.relax.loans`).
    """

    rows: np.ndarray
    compute_row: np.ndarray
    progress_s: np.ndarray
    moved_bytes: tuple[int, int]
    initial: tuple[Placement, ...]
    host_peak_bytes: int
    lender: int = -1
    borrowed_bytes: int = 0


@dataclass(frozen=True)
class DoesNotFit:
    """No list exists with the decision: the memory is exceeded at an op even with everything away that may be away.

    `host_memory`: the host memory that the lists of several devices exceed together (then `device` takes most of it,
    and `op` and `micro_batch` are -1); -1: the device's own memory. `wanted_by`: of a recomputation, the op before
    whose first run in the micro-batch it stands; else `op`.
    """

    device: int
    op: int
    micro_batch: int
    bytes_over: int
    host_memory: int = -1
    wanted_by: int = field(default=-1, compare=False)


def decode(problem: Problem, view: StepView, decision: DeviceDecision, *, capacity_bytes: int | None = None,
           lookahead_runs: int = NEVER, release_at_once: bool = False,
           device: int | None = None) -> DeviceList | DoesNotFit:  # fmt: skip
    """Build the list of one device.

    `capacity_bytes` defaults to the device's; `lookahead_runs` limits how many runs ahead of its use a tensor may be
    prefetched; `release_at_once` lets nothing stay longer than its last use, whether or not memory is short. `device`:
    whose memories the list names, if another one than the view's runs the same. Raises InputError for a lender that
    cannot be one, or a codec that the machine does not have.
    """
    device = view.device if device is None else device
    check_ways(problem.machine, device, decision)
    capacity = problem.capacity_bytes(device) if capacity_bytes is None else capacity_bytes
    template = build_template(problem, view, decision)
    first, last = (build_template(problem, view, decision, **{which: True}) for which in ("first", "last"))
    step = unroll(problem, view, decision, template, last, first)
    release, prefetch, load, failed = fit(step.profile_bytes, step.gaps, capacity, lookahead_runs, release_at_once)
    if failed >= 0:
        over = int(step.profile_bytes[failed]) - capacity
        runs = step.kind[: failed + 1]  # of an op that is encoded for or decoded for, the op before
        at = int(np.flatnonzero((runs != Kind.ENCODE) & (runs != Kind.DECODE)).max(initial=0))
        op, micro_batch = int(step.op[at]), int(step.micro_batch[at])
        return DoesNotFit(view.device, op, micro_batch, over, wanted_by=_wanted_by(step, at))
    share_clean_copies(step.gaps, release, prefetch)
    return _emit(problem, view, decision, step, release, prefetch, capacity - load, device)


def _wanted_by(step: UnrolledStep, at: int) -> int:
    """The op of the first run from `at` on, in the same micro-batch, that is not a recomputation."""
    same = (step.micro_batch == step.micro_batch[at]) & (step.kind != Kind.ENCODE) & (step.kind != Kind.DECODE)
    before, later = step.op[:at][same[:at]], step.op[at:][same[at:]]
    first = np.flatnonzero(~np.isin(later, before))
    return int(later[first[0]]) if len(first) else int(step.op[at])


def check_ways(machine: Machine, device: int, decision: DeviceDecision) -> None:
    """Raises InputError for a lender or codec that `decision` uses and that does not exist."""
    if decision.encodes and not 0 <= decision.codec < len(machine.codecs):
        raise InputError(f"codec: {decision.codec}; machine {machine.name!r} has {len(machine.codecs)} codecs")
    if decision.borrows:
        there = 0 <= decision.lender < len(machine.devices) and decision.lender != device
        ends = (machine.devices[device].memory, machine.devices[decision.lender].memory) if there else (-1, -1)
        if not there or not machine.has_route(*ends) or not machine.has_route(*ends[::-1]):
            raise InputError(
                f"lender: {decision.lender} cannot lend to device {device}; give another device with routes to and "
                f"from it"
            )


def _emit(problem, view, decision, step: UnrolledStep, release, prefetch, spare_bytes, number: int) -> DeviceList:
    program = problem.workload.program(view.device)
    machine, device = problem.machine, problem.machine.devices[number]
    lender = machine.devices[decision.lender].memory if decision.borrows else -1
    gaps = step.gaps
    by_release = np.lexsort((gaps[:, WRITTEN], release))
    by_prefetch = np.lexsort((gaps[:, END], prefetch))
    by_end = np.argsort(gaps[:, END], kind="stable")
    table, compute_row = rows_of(
        step.kind, step.op, step.micro_batch, decision.codec, step.freed, gaps, release, prefetch,
        spare_bytes, by_release, by_prefetch, by_end, device.memory, np.array([device.host_memory, lender]),
    )  # fmt: skip
    rows = blank_rows(len(table))
    names = ("kind", "op", "micro_batch", "tensor", "form", "memory", "to_memory")
    for column, name in enumerate(names):
        rows[name] = table[:, column]
    sizes = np.array([tensor.size_bytes for tensor in program.tensors], np.int64)
    copied = np.where((rows["memory"] == lender) | (rows["to_memory"] == lender), 0, row_bytes(machine, sizes, rows))
    moved = tuple(int(copied[rows["kind"] == kind].sum()) for kind in (Kind.OFFLOAD, Kind.PREFETCH))
    memory = np.where(decision.state_out == Rest.ON_HOST, device.host_memory, device.memory).tolist()
    initial = tuple(Placement(tensor, (at,)) for tensor, at in zip(view.state_tensor.tolist(), memory, strict=True))
    host_bytes = host_peak_bytes(problem, number, rows, initial)
    found = DeviceList(rows, compute_row, _progress_s(problem, view, decision, step, sizes), moved, initial, host_bytes)  # type: ignore[arg-type]
    if decision.borrows:
        found = replace(found, lender=decision.lender, borrowed_bytes=_peak_bytes(rows, sizes, lender))
    return found


def _progress_s(problem: Problem, view: StepView, decision: DeviceDecision, step: UnrolledStep,
                sizes: np.ndarray) -> np.ndarray:  # fmt: skip
    ops, launch_s = problem.workload.program(view.device).ops, problem.machine.overheads.launch_s
    seconds = np.array([0.0 if op.collective else op.duration_s + launch_s for op in ops])
    if not decision.encodes:
        return np.cumsum(seconds[step.op])
    codec = problem.machine.codecs[decision.codec]
    rate = np.where(step.kind == Kind.ENCODE, codec.encode_bytes_per_s, codec.decode_bytes_per_s)
    coding = (step.kind == Kind.ENCODE) | (step.kind == Kind.DECODE)
    coding_s = sizes[np.where(coding, step.op, 0)] / rate + launch_s
    return np.cumsum(np.where(coding, coding_s, seconds[np.where(coding, 0, step.op)]))


def _peak_bytes(rows: np.ndarray, sizes: np.ndarray, memory: int) -> int:
    """The most that plain copies of a decoded list take in a memory where nothing is at first."""
    size = sizes[rows["tensor"]]
    change = np.where(rows["to_memory"] == memory, size, 0)
    change -= np.where((rows["kind"] == Kind.RELEASE) & (rows["memory"] == memory), size, 0)
    return max(0, int(np.cumsum(change).max(initial=0)))


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
