"""An offered micro-batch order as a problem of its own, whose default order it is.

What plans and bounds know is the default order: one op table that every micro-batch runs from the first to the last op.
An order that takes m micro-batches through the step together, and then the next m, is the default order of another
problem: its op table has every op m times, one for each of them, as the order has them, and K / m such *rounds* are its
micro-batches. What micro-batch g m + j has in the one problem, copy j of round g has in the other; step ops and what
there is once a step stay as they are. Instructions correspond row by row, so a schedule takes the same time and breaks
the same rules in both (docs/semantics.md names nothing but these numbers).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tmojax.problem.problem import Problem
from tmojax.problem.schedule import Kind, Placement, Schedule
from tmojax.problem.workload import Lifetime, Op, Program, Tensor, Workload

DEFAULT = "default"


def offered_orders(workload: Workload) -> tuple[str, ...]:
    """Names of the orders that all devices can follow, `default` first."""
    used = [workload.program(device).orders for device in range(workload.device_count)]
    named = [name for name in used[0] if name != DEFAULT and all(name in orders for orders in used)]
    return (DEFAULT, *named)


@dataclass(frozen=True, eq=False)
class _Copies:
    """Ops or tensors of one program: what there is for every micro-batch is there m times.

    item, copy [N']: of the new table. once [N']: not one for each micro-batch. place [N, m]: the way back, of what
    there is once in the first column.
    """

    item: np.ndarray
    copy: np.ndarray
    once: np.ndarray
    place: np.ndarray

    def back(self, index: np.ndarray, round_: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(item, micro-batch) of entries of the new table in rounds; shapes [R]."""
        micro_batch = round_ * self.place.shape[1] + self.copy[index]
        return self.item[index], np.where(self.once[index], round_, micro_batch)

    def there(self, item: np.ndarray, micro_batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The other way round."""
        m = self.place.shape[1]
        once = self.once[self.place[item, 0]]
        return self.place[item, np.where(once, 0, micro_batch % m)], np.where(once, micro_batch, micro_batch // m)


@dataclass(frozen=True, eq=False)
class InOrder:
    """`original` in one of its orders: `problem` offers no other. `together`: m, the micro-batches of a round."""

    original: Problem
    order: str
    problem: Problem
    together: int
    _ops: tuple[_Copies, ...]
    _tensors: tuple[_Copies, ...]

    def back(self, schedule: Schedule) -> Schedule:
        """A schedule of `problem` as one of `original`: the same instructions, and `order` as its order."""
        return self._renumbered(schedule, self.order, "back")

    def there(self, schedule: Schedule) -> Schedule:
        """A schedule of `original` in this order as one of `problem`. Op and tensor numbers must be in range."""
        assert schedule.order == self.order
        return self._renumbered(schedule, DEFAULT, "there")

    def original_tensors(self, device: int, tensors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tensor [N], micro-batch [N]) that tensors [N] of `problem` are in its first round."""
        return self._tensors[self.original.workload.device_program[device]].back(tensors, np.zeros_like(tensors))

    def _renumbered(self, schedule: Schedule, order: str, way: str) -> Schedule:
        role = self.original.workload.device_program
        lists, initial = [], []
        for device, (rows, placements) in enumerate(zip(schedule.lists, schedule.initial, strict=True)):
            found = rows.copy()
            owner = np.where(rows["owner"] < 0, device, rows["owner"])
            runs = np.isin(rows["kind"], (Kind.COMPUTE, Kind.COLLECTIVE))
            copies = np.isin(rows["kind"], (Kind.OFFLOAD, Kind.PREFETCH, Kind.RELEASE, Kind.ENCODE, Kind.DECODE))
            for program in sorted(set(role)):
                tables = [("tensor", copies & (np.array(role)[owner] == program), self._tensors[program])]
                if program == role[device]:
                    tables.append(("op", runs, self._ops[program]))
                for name, which, table in tables:
                    numbers = getattr(table, way)(rows[name][which], rows["micro_batch"][which])
                    found[name][which], found["micro_batch"][which] = numbers
            lists.append(found)
            table = self._tensors[role[device]]
            tensors = np.array([p.tensor for p in placements], np.int64)
            numbers = getattr(table, way)(tensors, np.zeros(len(tensors), np.int64))[0].tolist()
            initial.append(tuple(Placement(t, p.memories) for t, p in zip(numbers, placements, strict=True)))
        return replace(schedule, lists=tuple(lists), initial=tuple(initial), order=order)


def in_order(problem: Problem, order: str) -> InOrder:
    """`problem` in one of the orders that it offers. Raises InputError for an unknown order.

    m is the least number of micro-batches of which the order takes one round after the other in the same way; K where
    there is no such number.
    """
    workload = problem.workload
    device_of = {program: device for device, program in enumerate(workload.device_program)}
    used = {program: workload.sequence(device, order) for program, device in device_of.items()}
    together = next(
        m for m in range(1, workload.micro_batches + 1)
        if workload.micro_batches % m == 0
        and all(_repeats(workload, workload.programs[p], runs, m) for p, runs in used.items())
    )  # fmt: skip
    # Programs that no device runs keep their numbers, and run nothing.
    written = [_Written(workload, p, used.get(index, []), together) for index, p in enumerate(workload.programs)]
    entered = {op.collective for w in written for op in w.ops}
    collectives = tuple(
        replace(collective, name=name)
        for collective in workload.collectives
        for copy in range(together)
        if (name := _copy_name(collective.name, copy, together)) in entered
    )
    unrolled = replace(
        workload,
        programs=tuple(Program(p.name, w.tensors, w.ops) for p, w in zip(workload.programs, written, strict=True)),
        micro_batches=workload.micro_batches // together,
        collectives=collectives,
    )
    tables = tuple(w.op_copies for w in written), tuple(w.tensor_copies for w in written)
    return InOrder(problem, order, replace(problem, workload=unrolled), together, *tables)


def _repeats(workload: Workload, program: Program, runs: list[tuple[int, int]], together: int) -> bool:
    """`runs` are rounds of `together` micro-batches, each like the one before; step ops come with the last of them."""
    body = np.array([run for run in runs if not program.ops[run[0]].step_op], np.int64).reshape(-1, 2)
    rounds = workload.micro_batches // together
    length = len(body) // rounds
    if not np.array_equal(body[length:], body[: len(body) - length] + np.array((0, together))):
        return False
    first_step_op = next((place for place, run in enumerate(runs) if program.ops[run[0]].step_op), len(runs))
    return first_step_op >= (rounds - 1) * length


def _copy_name(name: str, copy: int, together: int) -> str:
    return f"mb{copy}.{name}" if name and together > 1 else name


class _Written:
    """One program with the micro-batches of a round written out."""

    def __init__(self, workload: Workload, program: Program, runs: list[tuple[int, int]], together: int) -> None:
        self._program, self._together = program, together
        skipped = (workload.micro_batches // together - 1) * together * sum(not op.step_op for op in program.ops)
        first = workload.micro_batches - together
        items = [(op, 0 if program.ops[op].step_op else k - first) for op, k in runs[skipped:]]
        self.op_copies = self._copies(items, [op.step_op for op in program.ops])
        once = [tensor.lifetime is not Lifetime.MICRO_BATCH for tensor in program.tensors]
        items = [(t, j) for t in range(len(once)) for j in range(1 if once[t] else together)]
        self.tensor_copies = self._copies(items, once)
        self.tensors = tuple(
            self._tensor(program.tensors[t], j)
            for t, j in zip(self.tensor_copies.item.tolist(), self.tensor_copies.copy.tolist(), strict=True)
        )
        self.ops = tuple(
            self._op(program.ops[op], j)
            for op, j in zip(self.op_copies.item.tolist(), self.op_copies.copy.tolist(), strict=True)
        )

    def _copies(self, items: list[tuple[int, int]], once: list[bool]) -> _Copies:
        table = np.array(items, np.int64).reshape(-1, 2)
        place = np.full((len(once), self._together), -1)
        place[table[:, 0], table[:, 1]] = np.arange(len(table))
        return _Copies(table[:, 0], table[:, 1], np.array(once, bool)[table[:, 0]], place)

    def _named(self, name: str, copy: int) -> str:
        return _copy_name(name, copy, self._together)

    def _tensor(self, tensor: Tensor, copy: int) -> Tensor:
        # Storages and replicas are of one micro-batch; what there is once has number 0 (semantics 2, 5.4).
        return replace(
            tensor,
            name=tensor.name if tensor.lifetime is not Lifetime.MICRO_BATCH else self._named(tensor.name, copy),
            alias_group=self._named(tensor.alias_group, copy),
            replica_group=self._named(tensor.replica_group, copy),
        )

    def _op(self, op: Op, copy: int) -> Op:
        # A step op touches what the last micro-batch has.
        column = self._together - 1 if op.step_op else copy
        place, tensors = self.tensor_copies.place, self._program.tensors
        reads, writes, updates = (
            tuple(int(place[t, column if tensors[t].lifetime is Lifetime.MICRO_BATCH else 0]) for t in some)
            for some in (op.reads, op.writes, op.updates)
        )
        return replace(
            op,
            name=op.name if op.step_op else self._named(op.name, copy),
            reads=reads,
            writes=writes,
            updates=updates,
            collective=self._named(op.collective, copy),
            layer=op.layer if op.step_op else self._named(op.layer, copy),
        )
