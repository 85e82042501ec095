"""Optional coarsening: the ops of one layer and phase become one op, tensors inside it become its workspace."""

from __future__ import annotations

from dataclasses import replace

from tmojax.problem.workload import Lifetime, Op, Program


def layer_runs(program: Program) -> list[list[int]]:
    """Runs of neighbouring ops with equal layer, phase and `step_op`, as op indices."""
    runs: list[list[int]] = []
    for index, op in enumerate(program.ops):
        last = program.ops[runs[-1][-1]] if runs else None
        if last and (last.layer, last.phase, last.step_op) == (op.layer, op.phase, op.step_op) and not op.collective:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def coarsen_layers(program: Program) -> Program:
    """Merge runs of neighbouring ops with equal layer, phase and `step_op`; what only the run uses is its workspace.

    The workspace of a merged op is the peak of its inner tensors in the order in which they ran. Durations, FLOPs and
    traffic add up. A merged op is recomputable only if every part is.
    """
    runs = layer_runs(program)
    run_of = {index: number for number, run in enumerate(runs) for index in run}
    users: list[set[int]] = [set() for _ in program.tensors]
    for index, op in enumerate(program.ops):
        for tensor in (*op.reads, *op.writes, *op.updates):
            users[tensor].add(run_of[index])
    inner = {
        tensor
        for tensor, spec in enumerate(program.tensors)
        if program.producer[tensor] != -1 and len(users[tensor]) == 1 and spec.lifetime is not Lifetime.STATE
    }
    kept = [tensor for tensor in range(len(program.tensors)) if tensor not in inner]
    renumbered = {tensor: index for index, tensor in enumerate(kept)}
    ops = tuple(_merge(program, [program.ops[i] for i in run], inner, renumbered) for run in runs)
    return Program(program.name, tuple(program.tensors[t] for t in kept), _distinct(ops))


def _merge(program: Program, parts: list[Op], inner: set[int], renumbered: dict[int, int]) -> Op:
    first = parts[0]
    written = {t for op in parts for t in op.writes}
    updates = dict.fromkeys(t for op in parts for t in op.updates if t not in written)
    reads = dict.fromkeys(t for op in parts for t in op.reads if t not in written and t not in updates)
    name = first.name if len(parts) == 1 else f"{first.layer or 'step'}.{first.phase}"
    return replace(
        first,
        name=name,
        duration_s=sum(op.duration_s for op in parts),
        reads=tuple(renumbered[t] for t in reads),
        writes=tuple(renumbered[t] for t in dict.fromkeys(t for op in parts for t in op.writes) if t not in inner),
        updates=tuple(renumbered[t] for t in updates),
        workspace_bytes=_inner_peak(program, parts, inner),
        recomputable=all(op.recomputable for op in parts),
        flops=sum(op.flops for op in parts),
        memory_traffic_bytes=sum(op.memory_traffic_bytes for op in parts),
    )


def _inner_peak(program: Program, parts: list[Op], inner: set[int]) -> int:
    """Peak bytes of inner tensors and part workspace while the parts run one after another."""
    last = {t: i for i, op in enumerate(parts) for t in (*op.reads, *op.writes, *op.updates) if t in inner}
    live = peak = 0
    for index, op in enumerate(parts):
        live += sum(program.tensors[t].size_bytes for t in op.writes if t in inner)
        peak = max(peak, live + op.workspace_bytes)
        live -= sum(program.tensors[t].size_bytes for t, end in last.items() if end == index)
    return peak


def _distinct(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    taken: set[str] = set()
    result = []
    for op in ops:
        name, number = op.name, 1
        while name in taken:
            number += 1
            name = f"{op.name}.{number}"
        taken.add(name)
        result.append(replace(op, name=name))
    return tuple(result)
