"""Breadth-first micro-batch orders: a layer for several micro-batches before the next layer.

The default order runs micro-batch after micro-batch, so what a layer needs (weights, gradients that accumulate) is used
once for each of them, a whole forward and backward apart. Breadth-first, all uses of a layer come one after the other,
once in forward and once in backward: weights that do not stay in device memory cross once for all micro-batches instead
of once for each, and activations of all of them wait for backward instead of those of one. Harmony (VLDB 2022) groups
micro-batches like this, L2L (Pudipeddi et al., 2020) runs whole batches layer by layer, and breadth-first pipelines
(Lamy-Poirier, 2023) order stages so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tmojax.errors import InputError
from tmojax.problem import Phase, Program, Segment, Workload


@dataclass(frozen=True)
class BreadthFirst:
    """An order to offer. `group`: micro-batches that run a block one after the other before the next block, both in
    forward and in backward; then the next group follows (0: all micro-batches). `layers`: layers of a block."""

    group: int = 0
    layers: int = 1

    def __post_init__(self) -> None:
        """Raises InputError naming the field, its value and its range."""
        if self.group < 0 or self.group == 1:
            raise InputError(f"group: {self.group} must be at least 2, or 0 for all; 1 would be the default order")
        if self.layers < 1:
            raise InputError(f"layers: {self.layers} must be at least 1")

    @property
    def name(self) -> str:
        """What schedules and reports call it: `breadth-first`, `breadth-first-2`, `breadth-first-2-layers-3`."""
        group = f"-{self.group}" if self.group else ""
        return f"breadth-first{group}" + (f"-layers-{self.layers}" if self.layers > 1 else "")


def offer_orders(workload: Workload, orders: tuple[BreadthFirst, ...]) -> Workload:
    """`workload`, which offers `orders` besides those that it has.

    Raises InputError for a group that does not divide the micro-batches, for an order that is there already, and for
    programs with fewer layers than a block is to have.
    """
    for position, order in enumerate(orders):
        where, count = f"micro_batch_orders.{position}", workload.micro_batches
        if count < 2:
            raise InputError(f"{where}: a step of one micro-batch has one order; set micro_batches, or leave it out")
        if count % (order.group or count):
            divisors = [m for m in range(2, count + 1) if count % m == 0]
            raise InputError(f"{where}.group: {order.group} does not divide {count} micro-batches; use {divisors}")
        programs = []
        for program in workload.programs:
            if order.name in program.orders:
                raise InputError(f"{where}: order {order.name!r} is offered twice; leave one of them out")
            segments = _segments(program, count, order, where)
            programs.append(replace(program, orders={**program.orders, order.name: segments}))
        workload = replace(workload, programs=tuple(programs))
    return workload


def _segments(program: Program, micro_batches: int, order: BreadthFirst, where: str) -> tuple[Segment, ...]:
    """Groups in turn, of each group blocks in turn, of each block its micro-batches. Step ops of a block run at their
    places in the last micro-batch, as in the default order."""
    blocks = _blocks(program, order, where)
    group = order.group or micro_batches
    segments: list[Segment] = []
    for first in range(0, micro_batches, group):
        for begin, end in blocks:
            for k in range(first, first + group):
                if k == micro_batches - 1:
                    segments += _with_step_ops(program, begin, end, k)
                else:
                    segments.append(Segment(begin, end, k))
    return tuple(segments)


def _with_step_ops(program: Program, begin: int, end: int, micro_batch: int) -> list[Segment]:
    """Ops `begin` to `end` of a micro-batch with the step ops among them."""
    found: list[Segment] = []
    for op in range(begin, end):
        step_op = program.ops[op].step_op
        if found and found[-1].step_ops == step_op:
            found[-1] = replace(found[-1], end_op=op + 1)
        else:
            found.append(Segment(op, op + 1, 0 if step_op else micro_batch, step_op))
    return found


def _blocks(program: Program, order: BreadthFirst, where: str) -> list[tuple[int, int]]:
    """Ranges of ops: `layers` layers of forward, or the backward of the same; of the last ones, both. So what only the
    turn needs, such as logits, does not wait for other micro-batches. What has no layer of forward (a loss), and step
    ops, belong to the block before them."""
    layers = dict.fromkeys(
        op.layer for op in program.ops if op.layer and op.phase is Phase.FORWARD and not op.step_op
    )  # fmt: skip
    if len(layers) <= order.layers:
        raise InputError(
            f"{where}.layers: {order.layers} in a block, of {len(layers)} in program {program.name!r}; blocks must be "
            f"fewer layers than all, or it is the default order"
        )
    block_of = {layer: place // order.layers for place, layer in enumerate(layers)}
    cuts, current = [0], -1
    for place, op in enumerate(program.ops):
        block = current if op.step_op else block_of.get(op.layer, current)
        if block != current and current >= 0:
            cuts.append(place)
        current = block
    return list(zip(cuts, [*cuts[1:], len(program.ops)], strict=True))
