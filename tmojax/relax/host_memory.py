"""What the list of one device needs in its host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tmojax.problem import Kind, Lifetime, Machine, MemoryKind, Placement, Problem


def host_limit_bytes(machine: Machine, memory: int) -> int:
    """Bytes that copies of all devices together may take in a host memory: capacity less reserve, or what may be
    pinned."""
    spec = machine.memories[memory]
    usable = spec.capacity_bytes - spec.reserve_bytes
    return usable if spec.pinned_limit_bytes < 0 else min(usable, spec.pinned_limit_bytes)


def row_bytes(machine: Machine, sizes: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[N] bytes of the copies that instructions name, `sizes` being the plain bytes of the tensors (rows without a
    tensor: any)."""
    plain = sizes[rows["tensor"]]
    for form, codec in enumerate(machine.codecs):
        encoded = -(-plain * codec.numerator // codec.denominator)
        plain = np.where(rows["form"] == form, encoded, plain)
    return plain


def host_peak_bytes(problem: Problem, device: int, rows: np.ndarray, initial: Sequence[Placement]) -> int:
    """The most that a list has in the device's host memory at any of its positions, inputs included (semantics 5.3).

    `rows` [N] is a decoded list: whole copies of the device's own tensors, each in one form. Members of an alias group
    count one by one, so with such state the result may be too large, never too small.
    """
    machine, workload = problem.machine, problem.workload
    host = machine.devices[device].host_memory
    tensors, count = workload.program(device).tensors, workload.micro_batches
    sizes = np.array([tensor.size_bytes for tensor in tensors], np.int64)
    charged = _charged(machine, host, sizes)
    # Copies have the number tensor * K + instance.
    there = np.zeros(len(tensors) * count, bool)
    for tensor in workload.program(device).inputs:
        instances = count if tensors[tensor].lifetime is Lifetime.MICRO_BATCH else 1
        there[tensor * count : tensor * count + instances] = True
    there[[placement.tensor * count for placement in initial if host in placement.memories]] = True
    arrives = (rows["kind"] == Kind.OFFLOAD) & (rows["to_memory"] == host)
    touched = np.flatnonzero(arrives | ((rows["kind"] == Kind.RELEASE) & (rows["memory"] == host)))
    arrives, tensor = arrives[touched], rows["tensor"][touched].astype(np.int64)
    copy = tensor * count + rows["micro_batch"][touched]
    order = np.argsort(copy, kind="stable")
    follows = np.concatenate([[False], copy[order][1:] == copy[order][:-1]]) if len(order) else np.zeros(0, bool)
    resident = np.empty(len(order), bool)
    resident[order] = np.where(follows, np.roll(arrives[order], 1), there[copy[order]])
    moved = charged[tensor]
    if (rows["form"][touched] >= 0).any():
        moved = _charged(machine, host, row_bytes(machine, sizes, rows[touched]))
    change = np.where(arrives, np.where(resident, 0, moved), -moved)
    start = int(charged[np.flatnonzero(there) // count].sum())
    return start + max(0, int(np.cumsum(change).max(initial=0)))


def _charged(machine: Machine, host: int, sizes: np.ndarray) -> np.ndarray:
    """Bytes that blocks of `sizes` take in a host memory."""
    if machine.memories[host].kind is not MemoryKind.HOST or not machine.memories[host].pinned_power_of_two:
        return sizes
    return np.array([1 << (size - 1).bit_length() if size else 0 for size in sizes.tolist()], np.int64)
