"""Estimated step time of given plans: their lists as tables for the fluid replay, many plans at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tmojax.jax_setup  # noqa: F401  (before JAX)

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
from numba import njit

from tmojax.cost.model import GB
from tmojax.cost.replay import PathModel, ReplayTables, replay
from tmojax.cost.tail import collective_s
from tmojax.errors import InputError
from tmojax.problem import COMPUTE_STREAM, Kind, Lifetime, LinkPolicyKind, Problem, Schedule
from tmojax.relax.descent import compile_and_run

UNLIMITED = 1 << 20


@dataclass(frozen=True, eq=False)
class ReplayedTime:
    """Replayed times of P plans: step_s [P]; busy_s [P, G]: compute without stalls. compile_s, run_s: seconds for all
    plans.
    """

    step_s: np.ndarray
    busy_s: np.ndarray
    compile_s: float
    run_s: float


def replay_schedules(problem: Problem, plans: Sequence[Schedule], *, dtype=jnp.float32) -> ReplayedTime:
    """Estimate the step time of plans as decode and coordination make them.

    Covers compute, host copies, releases, collectives that all devices join (their links taken as free), link
    policies except explicit orders, and starts that wait for device 0. Raises InputError for other instructions.
    """
    if not plans:
        raise InputError("plans: give at least one")
    lists: dict[bytes, RunList] = {}
    parts = []
    for plan in plans:
        read = []
        for device, rows in enumerate(plan.lists):
            key = device.to_bytes(4, "big") + rows.tobytes()
            if key not in lists:
                lists[key] = read_list(problem, device, rows)
            read.append(lists[key])
        parts.append(_join(problem, plan, read))
    shape = {name: np.max([part[name].shape for part in parts], axis=0) for name in parts[0]}
    stacked = {name: np.stack([_pad(part[name], shape[name]) for part in parts]) for name in parts[0]}
    kinds = {"f": dtype, "i": jnp.int32, "b": jnp.bool_}
    tables = ReplayTables(**{name: jnp.asarray(value, kinds[value.dtype.kind]) for name, value in stacked.items()})
    paths = _paths(problem, dtype)

    def run(paths: PathModel, tables: ReplayTables):
        return jax.vmap(lambda one: replay(paths, one))(tables)

    (step_s, busy_s), compile_s, run_s = compile_and_run(run, paths, tables)
    return ReplayedTime(np.asarray(step_s, float), np.asarray(busy_s, float), compile_s, run_s)


def _pad(values: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """Zeros behind the values, up to a shape (scalars as they are)."""
    if not values.ndim:
        return values
    return np.pad(values, [(0, int(full - own)) for full, own in zip(shape, values.shape, strict=True)])


@dataclass(frozen=True, eq=False)
class RunList:
    """One list. U runs (computes and collectives) in order; copies of both directions (0 out, 1 in) in order.

    seconds [U]. collective [U]. needs [U, 2]: copies (out, in) that must be complete before a run. copies: per
    direction [n, 4]: GB, runs that must be complete before it, copies (out, in) that must be complete before it.
    row_run [rows]: how many runs stand at or before a row. signals: event to runs before it. wait: event that holds
    back the compute stream from the start (-1: none).
    """

    seconds: np.ndarray
    collective: np.ndarray
    needs: np.ndarray
    copies: tuple[np.ndarray, np.ndarray]
    row_run: np.ndarray
    signals: dict[int, int]
    wait: int


def read_list(problem: Problem, device: int, rows: np.ndarray) -> RunList:
    """What of a device's list decides about time. Raises InputError for instructions that `replay_schedules` lacks."""
    known = (Kind.COMPUTE, Kind.COLLECTIVE, Kind.OFFLOAD, Kind.PREFETCH, Kind.RELEASE, Kind.SIGNAL, Kind.WAIT)
    for kind in np.unique(rows["kind"]):
        if kind not in known:
            raise InputError(f"device {device}: the estimate does not cover {Kind(kind).name.lower()} instructions")
    program, machine = problem.workload.program(device), problem.machine
    spec = machine.devices[device]
    waits = np.flatnonzero(rows["kind"] == Kind.WAIT)
    if len(waits) > 1 or (len(waits) and (waits[0] != 0 or rows["stream"][0] != COMPUTE_STREAM)):
        raise InputError(f"device {device}: the estimate covers one wait, of the compute stream, as first instruction")
    touched = [np.array(list(dict.fromkeys((*op.reads, *op.updates, *op.writes))), np.int64) for op in program.ops]
    reading = [np.isin(tensors, (*op.reads, *op.updates)) for tensors, op in zip(touched, program.ops, strict=True)]
    writing = [np.isin(tensors, (*op.writes, *op.updates)) for tensors, op in zip(touched, program.ops, strict=True)]
    begin = np.cumsum([0, *(len(tensors) for tensors in touched)])
    flat = [np.concatenate(parts) if parts else np.zeros(0) for parts in (touched, reading, writing)]
    per_batch = np.array([tensor.lifetime is Lifetime.MICRO_BATCH for tensor in program.tensors], bool)
    needs, out, into, row_run = _walk(
        rows["kind"].astype(np.int64), rows["op"].astype(np.int64), rows["micro_batch"].astype(np.int64),
        rows["tensor"].astype(np.int64), rows["memory"].astype(np.int64), spec.memory, begin, flat[0].astype(np.int64),
        flat[1].astype(np.bool_), flat[2].astype(np.bool_), per_batch,
        np.array([op.step_op for op in program.ops], bool), problem.workload.micro_batches, len(program.tensors),
    )  # fmt: skip
    is_run = (rows["kind"] == Kind.COMPUTE) | (rows["kind"] == Kind.COLLECTIVE)
    run_op = rows["op"][is_run]
    launch_s = machine.overheads.launch_s
    seconds = np.array(
        [collective_s(problem, op.collective) if op.collective else op.duration_s + launch_s for op in program.ops]
    )
    sizes = np.array([tensor.size_bytes for tensor in program.tensors], np.float64) / GB
    copies = []
    for kind, table in ((Kind.OFFLOAD, out), (Kind.PREFETCH, into)):
        copied = sizes[rows["tensor"][rows["kind"] == kind]]
        copies.append(np.concatenate([copied[:, None], table.astype(float)], axis=1))
    signal_rows = np.flatnonzero(rows["kind"] == Kind.SIGNAL)
    signals = {int(rows["event"][row]): int(row_run[rows["after"][row]]) for row in signal_rows}
    wait = int(rows["event"][0]) if len(waits) else -1
    collective = rows["kind"][is_run] == Kind.COLLECTIVE
    return RunList(seconds[run_op], collective, needs, (copies[0], copies[1]), row_run, signals, wait)


@njit(cache=True)
def _walk(kind, op, batch, tensor, memory, device_memory, begin, touched, reading, writing, per_batch, step_op,
          batches, tensors):  # fmt: skip  # pragma: no cover - compiled
    """(needs [U, 2], out [n, 3], in [m, 3], row_run): per copy the runs and copies (out, in) that must be complete
    before it.
    """
    rows = kind.shape[0]
    written = np.zeros((tensors, batches), np.int64)
    out_place = np.zeros((tensors, batches), np.int64)
    in_place = np.zeros((tensors, batches), np.int64)
    needs = np.zeros((rows, 2), np.int64)
    out = np.zeros((rows, 3), np.int64)
    into = np.zeros((rows, 3), np.int64)
    row_run = np.zeros(rows, np.int64)
    runs, outs, ins, released = 0, 0, 0, 0
    for row in range(rows):
        if kind[row] == 0 or kind[row] == 6:
            needs[runs, 0] = released
            for at in range(begin[op[row]], begin[op[row] + 1]):
                which = touched[at]
                instance = 0
                if per_batch[which]:
                    instance = batches - 1 if step_op[op[row]] else batch[row]
                if reading[at]:
                    needs[runs, 1] = max(needs[runs, 1], in_place[which, instance])
                if writing[at]:
                    needs[runs, 0] = max(needs[runs, 0], out_place[which, instance])
                    written[which, instance] = runs + 1
            runs += 1
        elif kind[row] == 1:
            out[outs] = (written[tensor[row], batch[row]], 0, in_place[tensor[row], batch[row]])
            outs += 1
            out_place[tensor[row], batch[row]] = outs
        elif kind[row] == 2:
            into[ins] = (runs, max(released, out_place[tensor[row], batch[row]]), 0)
            ins += 1
            in_place[tensor[row], batch[row]] = ins
        elif kind[row] == 3 and memory[row] == device_memory:
            released = max(released, out_place[tensor[row], batch[row]])
        row_run[row] = runs
    return needs[:runs], out[:outs], into[:ins], row_run


def _join(problem: Problem, plan: Schedule, lists: Sequence[RunList]) -> dict[str, np.ndarray]:
    """Tables of one plan; runs between which nothing can change are one segment."""
    starts = [0] * len(lists)
    for device, one in enumerate(lists):
        if one.wait >= 0:
            if one.wait not in lists[0].signals:
                raise InputError(f"device {device}: the estimate covers starts that wait for device 0 only")
            starts[device] = lists[0].signals[one.wait]
    parts = [_segments(one, starts if device == 0 else []) for device, one in enumerate(lists)]
    place = parts[0].pop("place")
    for part in parts[1:]:
        part.pop("place")
    shape = {name: np.max([part[name].shape for part in parts], axis=0) for name in parts[0]}
    tables = {name: np.stack([_pad(part[name], shape[name]) for part in parts]) for name in parts[0]}
    links, slots, rank = _path_links(problem), [], np.zeros(len(lists), np.int64)
    for link in links:
        policy = plan.link_policies[link] if plan.link_policies else None
        if policy is None or policy.kind is LinkPolicyKind.FAIR:
            slots.append(UNLIMITED)
        elif policy.kind is LinkPolicyKind.ORDER:
            raise InputError(f"link {problem.machine.links[link].name!r}: the estimate does not cover explicit orders")
        else:
            slots.append(policy.slots)
            if policy.kind is LinkPolicyKind.PRIORITY:
                rank = np.maximum(rank, np.argsort(policy.device_rank))
    return {**tables, "start_after": place[starts], "slots": np.array(slots), "rank": rank}


def _segments(one: RunList, marks: Sequence[int]) -> dict[str, np.ndarray]:
    runs = len(one.seconds)
    new = np.zeros(runs + 1, bool)
    new[[0, runs]] = True
    higher = np.maximum.accumulate(one.needs, axis=0)
    new[1:runs] |= (np.diff(higher, axis=0) > 0).any(axis=1)
    new[:runs] |= one.collective
    new[1:] |= one.collective
    for table in one.copies:
        new[table[:, 1].astype(np.int64)] = True
    new[list(marks)] = True
    starts = np.flatnonzero(new[:runs])
    place = np.cumsum(new) - 1  # of a number of finished runs: finished segments
    width = max(1, *(len(table) for table in one.copies))
    copies = [np.pad(table, ((0, width - len(table)), (0, 0))) for table in one.copies]
    return {
        "segment_s": np.add.reduceat(one.seconds, starts),
        "segments": np.array(len(starts)),
        "needs": higher[starts],
        "joined": one.collective[starts],
        "copy_gb": np.stack([table[:, 0] for table in copies]),
        "copies": np.array([len(table) for table in one.copies]),
        "copy_after": np.stack([place[table[:, 1].astype(np.int64)] for table in copies]),
        "copy_needs": np.stack([table[:, 2:].astype(np.int64) for table in copies]),
        "place": place,
    }


def _path_links(problem: Problem) -> list[int]:
    """Links that the host copies of any device use."""
    machine = problem.machine
    used: set[int] = set()
    for device in machine.devices:
        used.update(machine.route(device.memory, device.host_memory).links)
        used.update(machine.route(device.host_memory, device.memory).links)
    return sorted(used)


def _paths(problem: Problem, dtype) -> PathModel:
    machine, links = problem.machine, _path_links(problem)
    gpus = len(machine.devices)
    use = np.zeros((len(links), gpus, 2))
    setup = np.zeros((gpus, 2))
    for g, device in enumerate(machine.devices):
        for direction, way in enumerate(((device.memory, device.host_memory), (device.host_memory, device.memory))):
            route = machine.route(*way)
            use[[links.index(link) for link in route.links], g, direction] = 1
            latency_s = sum(machine.links[link].latency_s for link in route.links)
            setup[g, direction] = machine.overheads.transfer_setup_s + latency_s
    slow = machine.interference
    return PathModel(
        link_gb_per_s=jnp.asarray([machine.links[link].bandwidth_bytes_per_s / GB for link in links], dtype),
        use=jnp.asarray(use, dtype),
        setup_s=jnp.asarray(setup, dtype),
        compute_slowdown=jnp.asarray([slow.compute_during_copy_out, slow.compute_during_copy_in], dtype),
        copy_slowdown=jnp.asarray(slow.copy_during_compute, dtype),
        shares=min(len(links), 2 * gpus) if len({link.bandwidth_bytes_per_s for link in machine.links}) > 1 else 3,
    )
