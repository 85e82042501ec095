"""Faults: one change to a valid schedule. Each has a name, so that the tests can say how often each kind was tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tmojax.check import check
from tmojax.problem import PLAIN, Kind, LinkPolicyKind, MemoryKind, Problem, Schedule

Case = tuple[Problem, Schedule]
Edit = Callable[[np.random.Generator, Problem, np.ndarray, int], np.ndarray | None]


def rearranged(rows: np.ndarray, order: list[int]) -> np.ndarray:
    """Rows in another order, with some left out or doubled; `after` follows the first place of its instruction."""
    places: dict[int, int] = {}
    for place, index in enumerate(order):
        places.setdefault(index, place)
    result = rows[order].copy()
    for row in result:
        if row["after"] >= 0:
            row["after"] = places.get(int(row["after"]), len(order))
    return result


def _moved(rows: np.ndarray, index: int, target: int) -> np.ndarray:
    order = [i for i in range(len(rows)) if i != index]
    order.insert(target, index)
    return rearranged(rows, order)


def _drop(rng, problem, rows, index):
    return rearranged(rows, [i for i in range(len(rows)) if i != index])


def _double(rng, problem, rows, index):
    target = int(rng.integers(index, len(rows))) + 1
    return rearranged(rows, [*range(target), index, *range(target, len(rows))])


def _earlier(rng, problem, rows, index):
    return _moved(rows, index, max(0, index - int(rng.integers(1, 8)))) if index else None


def _later(rng, problem, rows, index):
    return _moved(rows, index, min(len(rows) - 1, index + int(rng.integers(1, 8))))


def _swap(rng, problem, rows, index):
    """Exchange it with another of its kind."""
    others = [i for i in np.flatnonzero(rows["kind"] == rows["kind"][index]).tolist() if i != index]
    if not others:
        return None
    other, order = int(rng.choice(others)), list(range(len(rows)))
    order[index], order[other] = other, index
    return rearranged(rows, order)


def _set(field: str, values: Callable[[Problem, np.ndarray, int], list[int]]) -> Edit:
    def edit(rng, problem, rows, index):
        choices = [v for v in values(problem, rows, index) if v != rows[field][index]]
        if not choices:
            return None
        changed = rows.copy()
        changed[field][index] = int(rng.choice(choices))
        return changed

    return edit


def _instances(problem: Problem, rows: np.ndarray, index: int) -> list[int]:
    return list(range(problem.workload.micro_batches))


_micro_batch = _set("micro_batch", _instances)
_tensor = _set("tensor", lambda problem, rows, i: list(range(len(problem.workload.programs[0].tensors))))
_memory = _set("memory", lambda problem, rows, i: list(range(len(problem.machine.memories))))
_to_memory = _set("to_memory", lambda problem, rows, i: list(range(len(problem.machine.memories))))
_form = _set("form", lambda problem, rows, i: [PLAIN, *range(len(problem.machine.codecs))])
_owner = _set("owner", lambda problem, rows, i: list(range(problem.workload.device_count)))
_part = _set("part", lambda problem, rows, i: list(range(int(rows["parts"][i]))))
_parts = _set("parts", lambda problem, rows, i: [n for n in (1, 2, 3) if n > rows["part"][i]])
_after = _set("after", lambda problem, rows, i: list(range(max(0, i - 6), i)))
_event = _set("event", lambda problem, rows, i: sorted({*rows["event"].tolist(), 1, 2} - {-1}))
_stream = _set("stream", lambda problem, rows, i: list(range(2 + len(problem.machine.engines))))
_bytes = _set("size_bytes", lambda problem, rows, i: [int(rows["size_bytes"][i]) - 1])
_op = _set("op", lambda problem, rows, i: sorted(set(rows["op"][rows["kind"] == rows["kind"][i]].tolist())))


def _turned(rng, problem, rows, index):
    """A transfer in the other direction."""
    changed = rows.copy()
    changed["memory"][index], changed["to_memory"][index] = rows["to_memory"][index], rows["memory"][index]
    return changed


def _released_in_flight(rng, problem, rows, index):
    """The destination (or the source) of a transfer is released directly behind it."""
    changed = np.insert(rows, index + 1, rows[index])
    changed["kind"][index + 1] = Kind.RELEASE
    changed["memory"][index + 1] = rows[str(rng.choice(["memory", "to_memory"]))][index]
    changed["to_memory"][index + 1] = -1
    changed["after"][changed["after"] > index] += 1
    return changed


_PLACES = {"dropped": _drop, "doubled": _double, "earlier": _earlier, "later": _later, "swapped": _swap}
_COPY = {"of another micro-batch": _micro_batch, "of another tensor": _tensor, "in another memory": _memory,
         "in another form": _form, "of another owner": _owner, "of another slice": _part,
         "of other slices": _parts}  # fmt: skip
_MOVE = {"to another memory": _to_memory, "turned": _turned, "released in flight": _released_in_flight}
EDITS: dict[Kind, dict[str, Edit]] = {
    Kind.COMPUTE: _PLACES | {"of another micro-batch": _micro_batch, "of another op": _op},
    Kind.COLLECTIVE: _PLACES | {"of another op": _op},
    Kind.OFFLOAD: _PLACES | _COPY | _MOVE,
    Kind.PREFETCH: _PLACES | _COPY | _MOVE,
    Kind.RELEASE: _PLACES | _COPY,
    Kind.ENCODE: _PLACES | _COPY,
    Kind.DECODE: _PLACES | _COPY,
    Kind.RETIRE: _PLACES | {"of another instruction": _after},
    Kind.SIGNAL: _PLACES | {"after another instruction": _after, "of another event": _event},
    Kind.WAIT: _PLACES | {"for another event": _event, "on another stream": _stream},
    Kind.LEND: _PLACES | {"one byte less": _bytes},
    Kind.RECLAIM: _PLACES | {"of another loan": _event},
}


def _capacity(rng: np.random.Generator, problem: Problem, schedule: Schedule) -> tuple[str, Case] | None:
    """A memory that is one byte smaller than what the schedule needs."""
    box = problem.machine
    peaks = list(check(problem, schedule).peak_bytes.values())
    memory = int(rng.integers(len(box.memories)))
    spec = box.memories[memory]
    if peaks[memory] < 1:
        return None
    smaller = replace(spec, capacity_bytes=peaks[memory] - 1 + spec.reserve_bytes)
    memories = (*box.memories[:memory], smaller, *box.memories[memory + 1 :])
    name = "device" if spec.kind is MemoryKind.DEVICE else "host"
    return f"{name} one byte too small", (replace(problem, machine=replace(box, memories=memories)), schedule)


def _placement(rng: np.random.Generator, problem: Problem, schedule: Schedule) -> tuple[str, Case] | None:
    device = int(rng.integers(len(schedule.initial)))
    places = list(schedule.initial[device])
    if not places:
        return None
    chosen = int(rng.integers(len(places)))
    places[chosen] = replace(places[chosen], memories=(int(rng.integers(len(problem.machine.memories))),))
    initial = tuple(tuple(places) if d == device else old for d, old in enumerate(schedule.initial))
    return "state starts elsewhere", (problem, replace(schedule, initial=initial))


def _sequence(rng: np.random.Generator, problem: Problem, schedule: Schedule) -> tuple[str, Case] | None:
    policies = list(schedule.link_policies)
    long = [n for n, p in enumerate(policies) if p.kind is LinkPolicyKind.ORDER and len(p.sequence) > 1]
    if not long:
        return None
    chosen = int(rng.choice(long))
    sequence = list(policies[chosen].sequence)
    a, b = rng.choice(len(sequence), 2, replace=False).tolist()
    sequence[a], sequence[b] = sequence[b], sequence[a]
    policies[chosen] = replace(policies[chosen], sequence=tuple(sequence))
    return "turns on a link swapped", (problem, replace(schedule, link_policies=tuple(policies)))


def broken(rng: np.random.Generator, problem: Problem, schedule: Schedule) -> tuple[str, Case]:
    """(name of the fault, the case with it). The change may happen to be harmless."""
    while True:
        if rng.random() < 0.15:
            found = (_capacity, _placement, _sequence)[int(rng.integers(3))](rng, problem, schedule)
            if found:
                return found
            continue
        device = int(rng.integers(len(schedule.lists)))
        rows = schedule.lists[device]
        if rng.random() < 0.5:  # kinds that are rare in lists as often as others
            kind = int(rng.choice(np.unique(rows["kind"])))
            index = int(rng.choice(np.flatnonzero(rows["kind"] == kind)))
        else:
            index = int(rng.integers(len(rows)))
        kind = Kind(int(rows["kind"][index]))
        edits = EDITS[kind]
        name = str(rng.choice(list(edits)))
        changed = edits[name](rng, problem, rows, index)
        if changed is None:
            continue
        lists = tuple(changed if d == device else old for d, old in enumerate(schedule.lists))
        policies = _follow(schedule, device, rows, changed) if schedule.link_policies else ()
        return f"{kind.name.lower()} {name}", (problem, replace(schedule, lists=lists, link_policies=policies))


def _follow(schedule: Schedule, device: int, rows: np.ndarray, changed: np.ndarray):
    """Link policies whose sequences name the transfers of a changed list by their new places, where that is clear."""

    def transfers(table: np.ndarray) -> list[int]:
        return np.flatnonzero(np.isin(table["kind"], (int(Kind.OFFLOAD), int(Kind.PREFETCH)))).tolist()

    places = dict(zip(transfers(rows), transfers(changed), strict=False))
    return tuple(
        replace(p, sequence=tuple((d, places.get(i, i) if d == device else i) for d, i in p.sequence))
        for p in schedule.link_policies
    )
