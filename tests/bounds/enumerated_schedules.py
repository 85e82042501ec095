"""All schedules of a tiny step in a simple family, built here from scratch and judged by checker and simulator only.

Per tensor: it stays, or it leaves for part of one idle interval (every pair of release and prefetch positions), or it
is dropped and recomputed just before its next use. STATE stays, or rests on the host and comes in for every use or
for the whole step. The same choice on every micro-batch; link policies and a few staggers between devices.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from tmojax.problem import (
    COMPUTE_STREAM,
    Action,
    Lifetime,
    LinkPolicy,
    LinkPolicyKind,
    ListBuilder,
    Placement,
    Problem,
    Schedule,
)

HOST = 0
KEEP = ("keep",)
Choice = tuple


def micro_batch_uses(problem: Problem) -> dict[int, list[int]]:
    """Tensor -> positions in one micro-batch's op order that touch it (MICRO_BATCH tensors only)."""
    program = problem.workload.programs[0]
    body = [op for op in program.ops if not op.step_op]
    uses: dict[int, list[int]] = {}
    for place, op in enumerate(body):
        for tensor in dict.fromkeys((*op.reads, *op.writes, *op.updates)):
            if program.tensors[tensor].lifetime is Lifetime.MICRO_BATCH:
                uses.setdefault(tensor, []).append(place)
    return uses


def options(problem: Problem) -> dict[int, list[Choice]]:
    """Choices of every tensor that has one besides keeping."""
    program = problem.workload.programs[0]
    found: dict[int, list[Choice]] = {}
    for tensor, uses in micro_batch_uses(problem).items():
        choices: list[Choice] = [KEEP]
        for a, b in itertools.pairwise(uses):
            if b - a < 2:
                continue
            if Action.OFFLOAD in problem.actions and program.tensors[tensor].size_bytes:
                choices += [("off", a, b, q, p) for q in range(a, b - 1) for p in range(q + 2, b + 1)]
            producer = program.producer[tensor]
            if Action.RECOMPUTE in problem.actions and program.ops[producer].recomputable:
                choices += [("rec", a, b, q) for q in range(a, b - 1)]
        if len(choices) > 1:
            found[tensor] = choices
    for tensor, spec in enumerate(program.tensors):
        if spec.lifetime is Lifetime.STATE and Action.OFFLOAD in problem.actions:
            found[tensor] = [KEEP, ("rest",), ("visit",)]
    return found


class _Places:
    """Instructions to insert before and after positions of the run sequence."""

    def __init__(self) -> None:
        self.before: dict[int, list[tuple]] = {}
        self.after: dict[int, list[tuple]] = {}

    def put(self, where: dict[int, list[tuple]], run: int, *instruction) -> None:
        where.setdefault(run, []).append(instruction)


def device_list(problem: Problem, device: int, choice: dict[int, Choice]) -> tuple | None:
    """(instructions, placements, row of every run) of a device; None where choices contradict each other."""
    workload, program = problem.workload, problem.workload.program(device)
    memory = problem.machine.devices[device].memory
    count = workload.micro_batches
    body = [i for i, op in enumerate(program.ops) if not op.step_op]
    runs: list[tuple[int, int]] = []
    position: dict[tuple[int, int], int] = {}  # (place in the body, micro-batch) -> run
    for k in range(count):
        for place, op in enumerate(body):
            dropped = [t for t, c in choice.items() if c[0] == "rec" and c[2] == place]
            for tensor in sorted(dropped, key=lambda t: program.producer[t]):
                runs.append((program.producer[tensor], k))
            position[place, k] = len(runs)
            runs.append((op, k))
    runs += [(i, 0) for i, op in enumerate(program.ops) if op.step_op]

    touched: dict[tuple[int, int], list[int]] = {}
    changed: dict[tuple[int, int], list[int]] = {}
    first: set[tuple[int, int]] = set()
    for run, (op, k) in enumerate(runs):
        spec = program.ops[op]
        again = (op, k) in first
        first.add((op, k))
        for tensor in dict.fromkeys((*spec.reads, *spec.writes, *spec.updates)):
            key = (tensor, workload.instance(device, tensor, op, k))
            if again and tensor in spec.writes and choice.get(tensor, KEEP)[0] != "rec":
                continue  # the resident output is untouched, a missing one is scratch that is released at once
            touched.setdefault(key, []).append(run)
        for tensor in (*spec.writes, *spec.updates):
            changed.setdefault((tensor, workload.instance(device, tensor, op, k)), []).append(run)

    at = _Places()
    placements = []
    for (tensor, instance), uses in touched.items():
        spec, picked = program.tensors[tensor], choice.get(tensor, KEEP)
        if spec.lifetime is Lifetime.STATE:
            updates = changed.get((tensor, 0), [])
            at_home = picked[0] == "keep"
            placements.append(Placement(tensor, (memory if at_home else HOST,)))
            if at_home:
                continue
            spans = [(uses[0], uses[-1])] if picked[0] == "rest" else [(u, u) for u in uses]
            for begin, end in spans:
                at.put(at.before, begin, "prefetch", tensor, 0, memory)
                if any(begin <= u <= end for u in updates):
                    at.put(at.after, end, "offload", tensor, 0, memory)
                at.put(at.after, end, "release", tensor, 0, memory)
            continue
        if picked[0] == "off":
            _, a, b, q, p = picked
            start, stop = position[a, instance], position[b, instance]
            if any(start < u < stop for u in uses):
                return None  # a recomputation needs it in between
            made = max(u for u in changed[tensor, instance] if u <= start)
            at.put(at.after, made, "offload", tensor, instance, memory)
            at.put(at.after, position[q, instance], "release", tensor, instance, memory)
            at.put(at.before, position[p, instance], "prefetch", tensor, instance, memory)
            at.put(at.after, position[b, instance], "release", tensor, instance, HOST)
        elif picked[0] == "rec":
            _, a, b, q = picked
            start = position[a, instance]
            here = [u for u in uses if position[q, instance] < u < position[b, instance]]
            if start > position[q, instance] or len([u for u in here if u not in changed[tensor, instance]]):
                return None
            at.put(at.after, position[q, instance], "release", tensor, instance, memory)
        at.put(at.after, uses[-1], "release", tensor, instance, memory)

    placements += [Placement(t, (memory,)) for t, spec in enumerate(program.tensors)
                   if spec.lifetime is Lifetime.STATE and (t, 0) not in touched]  # fmt: skip
    build = ListBuilder()
    rows: list[int] = []
    order = {"offload": 0, "release": 1, "prefetch": 2}

    def emit(items: list[tuple]) -> None:
        for kind, tensor, instance, where in sorted(items, key=lambda i: order[i[0]]):
            if kind == "offload":
                build.offload(tensor, instance, where, HOST)
            elif kind == "prefetch":
                build.prefetch(tensor, instance, HOST, where)
            else:
                build.release(tensor, instance, where)

    for run, (op, k) in enumerate(runs):
        emit(at.before.get(run, []))
        rows.append(build.compute(op, k))
        emit(at.after.get(run, []))
    return build.build(), tuple(sorted(placements, key=lambda p: p.tensor)), rows


def policies(problem: Problem) -> Iterator[tuple[LinkPolicy, ...]]:
    """All links fair; first come first served; priority in device order."""
    links = len(problem.machine.links)
    ranks = tuple(range(problem.workload.device_count))
    yield (LinkPolicy(),) * links
    if problem.workload.device_count > 1:
        yield (LinkPolicy(LinkPolicyKind.FCFS),) * links
        yield (LinkPolicy(LinkPolicyKind.PRIORITY, device_rank=ranks),) * links


def schedules(
    problem: Problem, choices: list[dict[int, Choice]], staggers: tuple[int, ...] = (0,)
) -> Iterator[Schedule]:
    """Schedules with one choice per device; device d > 0 starts after run `stagger` of device d - 1 (0: at once)."""
    for stagger in staggers:
        lists, initial = [], []
        for device, choice in enumerate(choices):
            built = device_list(problem, device, choice)
            if built is None:
                return
            rows, placements, places = built
            lists.append(_staggered(rows, places, device, stagger, device + 1 < len(choices)) if stagger else rows)
            initial.append(placements)
        for policy in policies(problem):
            yield Schedule(tuple(lists), tuple(initial), policy)


def _staggered(rows: np.ndarray, places: list[int], device: int, run: int, signals: bool) -> np.ndarray:
    """The list with a wait for its predecessor's event at its head and, if `signals`, an event after `run` of its
    own."""
    head, event = ListBuilder(), ListBuilder()
    if device:
        head.wait(device - 1, COMPUTE_STREAM)
    where = places[min(run, len(places)) - 1]
    if signals:
        event.signal(device, where + len(head))
    return np.concatenate([part.build() for part in (head,) if len(part)] + [rows[: where + 1]]
                          + [part.build() for part in (event,) if len(part)] + [rows[where + 1 :]])  # fmt: skip
