"""Pipeline parallelism: the layers of a one-GPU training step divided over the GPUs of a machine.

A tensor that one stage makes and another reads is sent by a collective of those two GPUs (a broadcast from the one to
the other): the sender reads it, the receiver writes its own copy. So activations go forward and their gradients back
over the links between the GPUs, or through the host where the machine has no peer access.

The derived order of a workload runs one micro-batch after the other, in which a pipeline would never overlap. So the
micro-batches are written out: the result has one micro-batch in the sense of the problem, in which every op stands once
for each micro-batch of the pipeline, in the order that GPipe (Huang et al., 2019) or 1F1B (PipeDream-Flush, Narayanan
et al., 2021) prescribes. What is not covered: weights that several stages use (tied embeddings), several pipelines side
by side, several stages on one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from tmojax.errors import InputError
from tmojax.importers.pipeline_order import Send, stage_orders
from tmojax.problem import (
    Collective,
    CollectiveKind,
    Lifetime,
    Op,
    Phase,
    Program,
    Tensor,
    Workload,
)


@dataclass(frozen=True)
class _Cut:
    """stage [ops]: of each op of the source; -1 for step ops that every stage runs. home [tensors]: stage of the op
    that makes a micro-batch tensor, -1 for others. sends: what one stage makes and another one reads."""

    stage: list[int]
    home: list[int]
    sends: list[Send]


def pipeline_workload(source: Workload, stages: int, order: str) -> Workload:
    """`source`, a step of one GPU with K micro-batches, on `stages` GPUs; `order` is "gpipe" or "1f1b".

    Layers go to stages in the order of forward, so that the busiest stage has as little compute as possible. Raises
    InputError for a source that has collectives or several GPUs, for fewer layers than stages, for weights that several
    stages use, and for in-place updates across stages.
    """
    if source.device_count != 1 or source.collectives:
        raise InputError("pipeline: the step to divide must be that of one GPU, without collectives")
    program, count = source.program(0), source.micro_batches
    cut = _divide(program, stages)
    seconds = [
        tuple(
            sum(op.duration_s for op, s in zip(program.ops, cut.stage, strict=True) if s == stage and not op.step_op
                and (op.phase is Phase.FORWARD) is forward)
            for forward in (True, False)
        )
        for stage in range(stages)
    ]  # fmt: skip
    orders = stage_orders(order, seconds, cut.sends, count)
    collectives = tuple(
        Collective(_send_name(program, send, k), CollectiveKind.BROADCAST, program.tensors[send.tensor].size_bytes,
                   (send.source, send.destination))
        for send in cut.sends
        for k in range(count)
    )  # fmt: skip
    return Workload(
        f"{source.name}, {stages} pipeline stages ({order}, {count} micro-batches)",
        tuple(_Stage(program, cut, stage, count).program(orders[stage]) for stage in range(stages)),
        tuple(range(stages)),
        1,
        source.duration_source,
        collectives,
    )


def _send_name(program: Program, send: Send, k: int) -> str:
    return f"{program.tensors[send.tensor].name}.mb{k}.to{send.destination}"


def balanced_cuts(seconds: list[float], parts: int) -> list[int]:
    """First item of each of `parts` contiguous, non-empty parts whose largest sum is least. [parts] positions."""
    total = [0.0]
    for value in seconds:
        total.append(total[-1] + value)
    best: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (0.0, 0)}
    for part in range(1, parts + 1):
        for end in range(part, len(seconds) + 1):
            best[part, end] = min(
                (max(best[part - 1, begin][0], total[end] - total[begin]), begin)
                for begin in range(part - 1, end)
                if (part - 1, begin) in best
            )
    cuts, end = [], len(seconds)
    for part in range(parts, 0, -1):
        end = best[part, end][1]
        cuts.append(end)
    return cuts[::-1]


def _divide(program: Program, stages: int) -> _Cut:
    forward = [op for op in program.ops if op.phase is Phase.FORWARD and not op.step_op]
    layers = list(dict.fromkeys(op.layer for op in forward))
    if len(layers) < stages:
        raise InputError(f"pipeline: {len(layers)} layers cannot be divided over {stages} GPUs; use fewer GPUs")
    of_layer = [sum(op.duration_s for op in program.ops if op.layer == layer and not op.step_op) for layer in layers]
    bounds = [*balanced_cuts(of_layer, stages), len(layers)]
    stage_of_layer = {layer: s for s, (a, b) in enumerate(pairwise(bounds)) for layer in layers[a:b]}

    stage: list[int] = []
    home = [-1] * len(program.tensors)
    users: list[set[int]] = [set() for _ in program.tensors]
    for op in program.ops:
        if op.step_op:
            stage.append(-1)
            continue
        # What has no layer in forward, as a loss, belongs where the latest of what it reads was made.
        made = max((home[t] for t in op.reads), default=-1)
        here = stage_of_layer.get(op.layer, made if made >= 0 else stages - 1)
        stage.append(here)
        for tensor in (*op.reads, *op.writes, *op.updates):
            users[tensor].add(here)
        for tensor in op.writes:
            home[tensor] = here
    changed = {tensor for op in program.ops for tensor in op.updates}
    for tensor, spec in enumerate(program.tensors):
        if tensor in changed and len(users[tensor]) > 1:
            raise InputError(
                f"pipeline: tensor {spec.name!r} changes and is used on stages {sorted(users[tensor])}; a tensor that "
                f"changes must belong to one stage (weights must not be tied across stages)"
            )
    for position, op in enumerate(program.ops):
        if op.step_op:
            where = {s for t in (*op.reads, *op.writes, *op.updates) for s in users[t]}
            if len(where) > 1:
                raise InputError(f"pipeline: step op {op.name!r} needs tensors of stages {sorted(where)}; divide it")
            stage[position] = min(where, default=-1)
    sends = [
        Send(tensor, home[tensor], there, program.ops[program.producer[tensor]].phase is Phase.FORWARD)
        for tensor in range(len(program.tensors))
        if home[tensor] >= 0
        for there in sorted(users[tensor] - {home[tensor]})
    ]
    return _Cut(stage, home, sorted(sends, key=lambda send: program.producer[send.tensor]))


class _Stage:
    """The program of one stage, its micro-batches written out."""

    def __init__(self, source: Program, cut: _Cut, stage: int, micro_batches: int) -> None:
        self.source, self.cut, self.stage, self.last = source, cut, stage, micro_batches - 1
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.index: dict[tuple[int, int], int] = {}

    def program(self, order: list[tuple[bool, int] | tuple[Send, int]]) -> Program:
        """`order`: (is forward, micro-batch) of compute, (send, micro-batch) of transfers that the stage joins."""
        for what, k in order:
            if isinstance(what, Send):
                self._send(what, k)
            else:
                for op, where in zip(self.source.ops, self.cut.stage, strict=True):
                    if where == self.stage and not op.step_op and (op.phase is Phase.FORWARD) is what:
                        self._compute(op, k, f"mb{k}.")
        for op, where in zip(self.source.ops, self.cut.stage, strict=True):
            if op.step_op and where in (self.stage, -1):
                self._compute(op, self.last, "")
        return Program(f"stage {self.stage}", tuple(self.tensors), tuple(self.ops))

    def _tensor(self, tensor: int, k: int) -> int:
        spec = self.source.tensors[tensor]
        per_micro_batch = spec.lifetime is Lifetime.MICRO_BATCH
        key = (tensor, k if per_micro_batch else 0)
        if key not in self.index:
            self.index[key] = len(self.tensors)
            if per_micro_batch:
                # What arrives from another stage is memory of its own.
                local = self.cut.home[tensor] in (self.stage, -1)
                group = f"{spec.alias_group}.mb{k}" if spec.alias_group and local else ""
                spec = replace(spec, name=f"mb{k}.{spec.name}", alias_group=group)
            self.tensors.append(spec)
        return self.index[key]

    def _compute(self, op: Op, k: int, prefix: str) -> None:
        reads, writes, updates = (tuple(self._tensor(t, k) for t in some) for some in (op.reads, op.writes, op.updates))
        layer = f"{prefix}{op.layer}"
        self.ops.append(
            replace(op, name=f"{prefix}{op.name}", reads=reads, writes=writes, updates=updates, layer=layer)
        )

    def _send(self, send: Send, k: int) -> None:
        touched = (self._tensor(send.tensor, k),)
        sends = send.source == self.stage
        name = _send_name(self.source, send, k)
        self.ops.append(
            Op(
                f"{'send' if sends else 'receive'}.{name}",
                Phase.FORWARD if send.forward else Phase.BACKWARD,
                0.0,
                reads=touched if sends else (),
                writes=() if sends else touched,
                recomputable=False,
                collective=name,
                layer=f"mb{k}.transfer",
            )
        )
