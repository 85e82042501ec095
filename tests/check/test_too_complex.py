"""Short plans whose check would grow with the square of their length: they are refused, or cost little after all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_plans import HOST, KEEP, X, layer, machine, problem

from tmojax.check import Rule, check
from tmojax.check.rules import MOST_CHARACTERS
from tmojax.problem import Device, ListBuilder, Machine, Memory, MemoryKind, Placement, Problem, Route, Schedule

GPU0, GPU1, W = 1, 2, 1
ON_GPU = ((Placement(W, (GPU0,)),), (Placement(W, (GPU1,)),))


def slices_of_x(count: int, parts: int) -> ListBuilder:
    builder = ListBuilder()
    for part in range(count):
        builder.prefetch(X, 0, HOST, GPU0, part=part, parts=parts)
    builder.release(X, 0, HOST)
    return builder


def released_one_by_one(count: int) -> tuple[Problem, Schedule]:
    builder = slices_of_x(count, count)
    for part in range(count):
        builder.release(X, 0, GPU0, part=part, parts=count)
    return layer(), Schedule((builder.build(),), ON_GPU[:1])


def joined_again_and_again(count: int) -> tuple[Problem, Schedule]:
    builder = slices_of_x(count, count)
    for _ in range(count):
        builder.offload(X, 0, GPU0, HOST)
    return layer(), Schedule((builder.build(),), ON_GPU[:1])


def one_slice_lacks(count: int) -> tuple[Problem, Schedule]:
    builder = slices_of_x(count - 1, count)
    for _ in range(count):
        builder.offload(X, 0, GPU0, HOST)
    return layer(), Schedule((builder.build(),), ON_GPU[:1])


def reclaims_behind_waits(count: int) -> tuple[Problem, Schedule]:
    builder = ListBuilder()
    for loan in range(count):
        builder.lend(1, 1, loan)
    for _ in range(count):
        builder.wait(0, 0)
    for loan in range(count):
        builder.reclaim(loan)
    return layer(gpus=2), Schedule((builder.build(), ListBuilder().build()), ON_GPU)


def copies_without_a_stream(count: int) -> tuple[Problem, Schedule]:
    """There is no route from a memory to itself; the other list copies what the first one owns."""
    builder, other = ListBuilder(), ListBuilder()
    for _ in range(count):
        builder.offload(W, 0, GPU0, GPU0)
    other.prefetch(W, 0, GPU0, GPU1, owner=0)
    return layer(gpus=2), Schedule((builder.build(), other.build()), ON_GPU)


REFUSED = {
    "released one by one": (released_one_by_one, 3000),
    "joined again and again": (joined_again_and_again, 3000),
    "one slice lacks": (one_slice_lacks, 3000),
    "reclaims behind waits": (reclaims_behind_waits, 4000),
    "copies without a stream": (copies_without_a_stream, 15_000),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_take_for_ever_is_refused(name):
    make, count = REFUSED[name]
    violation = check(*make(count)).violations[-1]
    assert violation.rule is Rule.MALFORMED and "too complex" in violation.message


@pytest.mark.parametrize("name", REFUSED)
def test_a_smaller_one_of_the_kind_is_checked(name):
    make, _ = REFUSED[name]
    assert "too complex" not in check(*make(60)).text()


def test_a_message_names_few_of_many_copies():
    texts = [v.message for v in check(*one_slice_lacks(300)).violations if v.rule is Rule.DATA_NOT_THERE]
    assert texts and all("and 294 more" in text or "and 295 more" in text for text in texts)


def test_a_message_is_short_however_long_the_names_are():
    small = layer()
    program = small.workload.programs[0]
    tensors = (replace(program.tensors[X], name="x" * 10**6), *program.tensors[1:])
    workload = replace(small.workload, programs=(replace(program, tensors=tensors),))
    builder = ListBuilder()
    for _ in range(10):
        builder.release(X, 0, GPU0)
    report = check(replace(small, workload=workload), Schedule((builder.build(),), ON_GPU[:1]))
    assert len(report.violations) >= 10
    assert all(len(violation.message) < MOST_CHARACTERS + 100 for violation in report.violations)


def test_many_devices_take_no_square_of_the_memories_each():
    """400 GPUs with a memory each: every list looks only at the ways that it uses."""
    count = 400
    box = machine(1)
    memories = (box.memories[HOST], *(Memory(f"gpu{d}", MemoryKind.DEVICE, 10_000) for d in range(count)))
    ways = [Route(1 + d, HOST, (0,), ()) for d in range(count)] + [Route(HOST, 1 + d, (1,), ()) for d in range(count)]
    devices = tuple(Device(f"gpu{d}", "gpu", 1 + d, HOST) for d in range(count))
    large = Machine("many", memories, box.links, (), tuple(ways), devices)
    workload = replace(layer().workload, device_program=(0,) * count)
    found = problem(workload, large)
    calls = 0
    real = Machine.has_route

    def counted(self, source, target):
        nonlocal calls
        calls += 1
        return real(self, source, target)

    rows = KEEP.schedule().lists[0]
    lists = []
    for device in range(count):
        moved = rows.copy()
        for name in ("memory", "to_memory"):
            moved[name][moved[name] == GPU0] = 1 + device
        lists.append(moved)
    initial = tuple((Placement(W, (1 + device,)),) for device in range(count))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "has_route", counted)
        report = check(found, Schedule(tuple(lists), initial))
    assert report.valid, report
    assert calls < 10 * count
