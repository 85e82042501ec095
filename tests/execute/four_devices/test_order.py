"""Events, turns on links, loans: what lists demand of each other is kept, and changes no number."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from steps import identical, largest_difference, perceptron, plan, planned

from tmojax.check import check
from tmojax.execute import (
    MeasuredTimes,
    compare,
    comparison_text,
    with_measured_durations,
    write_measured_trace,
)
from tmojax.execute.measured import CategoryError
from tmojax.execute.tokens import Stopped
from tmojax.problem import INSTRUCTION, Kind, LinkPolicy, LinkPolicyKind, ListBuilder, Schedule
from tmojax.report.links import shared_links
from tmojax.simulate import simulate


@pytest.fixture(scope="module")
def case():
    return perceptron()


@pytest.fixture(scope="module")
def offloading(case):
    problem = case.problem()
    schedule = plan(problem, "offload-all")
    step = planned(case, problem, schedule)
    step.step(case.batches())
    return problem, schedule, step.state()


def rows(*parts) -> np.ndarray:
    return np.concatenate(parts).astype(INSTRUCTION)


def built(fill) -> np.ndarray:
    builder = ListBuilder()
    fill(builder)
    return builder.build()


def run(case, problem, schedule, state):
    report = check(problem, schedule)
    assert report.valid, report.text()
    for segments in ("joined", "ops"):
        step = planned(case, problem, schedule, segments)
        result = step.step(case.batches(), measure=True)
        assert largest_difference(step.state()[:2], state[:2]) < 2e-5
        for counts in result.memory:
            for count in counts:
                assert all(size <= count.planned_bytes[at] for at, size in count.counted_bytes.items())
    assert identical(step.state(), state)
    return MeasuredTimes(problem, schedule, result)


def test_a_wait_holds_its_stream_until_the_signal(case, offloading):
    """GPU 1 starts when GPU 0 has run a few ops, GPU 2 when GPU 1 has: start offsets."""
    problem, schedule, state = offloading
    lists = list(schedule.lists)
    after = {}
    for device in (0, 1):
        shift = int(device > 0)  # of the wait that stands in front
        after[device] = int(np.flatnonzero(lists[device]["kind"] == Kind.COMPUTE)[5])
        lists[device] = rows(lists[device], built(lambda b, d=device, s=shift: b.signal(d, after[d] + s)))
    for device in (1, 2):
        lists[device] = rows(built(lambda b, d=device: b.wait(d - 1, 0)), lists[device])
    times = run(case, problem, replace(schedule, lists=tuple(lists)), state)
    for device in (1, 2):
        first = np.nanmin(times.start_s[device][lists[device]["kind"] == Kind.COMPUTE])
        assert first >= times.end_s[device - 1][after[device - 1] + int(device == 2)]


@pytest.mark.parametrize("slots", [1, 2])
def test_transfers_take_their_turns_on_an_ordered_link(case, offloading, slots):
    problem, schedule, state = offloading
    simulation = simulate(problem, schedule)
    moves = [
        (float(simulation.start_s[device][index]), device, index)
        for device, own in enumerate(schedule.lists)
        for index in np.flatnonzero(np.isin(own["kind"], (Kind.OFFLOAD, Kind.PREFETCH))).tolist()
    ]
    policies = [LinkPolicy()] * len(problem.machine.links)
    for link in shared_links(problem):
        crossing = [
            (device, index) for _, device, index in sorted(moves)
            if link in problem.machine.route(*map(int, schedule.lists[device][["memory", "to_memory"]][index])).links
        ]  # fmt: skip
        policies[link] = LinkPolicy(LinkPolicyKind.ORDER, slots, (), tuple(crossing))
    ordered = replace(schedule, link_policies=tuple(policies))
    times = run(case, problem, ordered, state)
    for link in shared_links(problem):
        sequence = policies[link].sequence
        starts = [times.start_s[device][index] for device, index in sequence]
        ends = [times.end_s[device][index] for device, index in sequence]
        # At most `slots` at once; with one slot that is one after the other.
        assert all(start >= end for start, end in zip(starts[slots:], ends, strict=False)) or slots > 1
        assert len(sequence) > 20


@pytest.mark.parametrize("kind", [LinkPolicyKind.FCFS, LinkPolicyKind.PRIORITY])
def test_one_slot_lets_one_transfer_through_at_a_time(case, offloading, kind):
    problem, schedule, state = offloading
    shared = shared_links(problem)
    policies = tuple(
        LinkPolicy(kind, 1, (3, 1, 0, 2) if kind is LinkPolicyKind.PRIORITY else ()) if link in shared else LinkPolicy()
        for link in range(len(problem.machine.links))
    )
    times = run(case, problem, replace(schedule, link_policies=policies), state)
    for link in shared:
        spans = sorted(
            (float(times.start_s[d][i]), float(times.end_s[d][i]))
            for d, own in enumerate(schedule.lists)
            for i in np.flatnonzero(np.isin(own["kind"], (Kind.OFFLOAD, Kind.PREFETCH))).tolist()
            if link in problem.machine.route(int(own["memory"][i]), int(own["to_memory"][i])).links
        )
        assert all(later[0] >= earlier[1] for earlier, later in itertools.pairwise(spans))


def test_a_tensor_rests_in_the_memory_of_a_peer(case, offloading):
    """GPU 1 lends room to GPU 0 for one activation of micro-batch 0."""
    problem, _, state = offloading
    problem = case.problem(1.5)
    schedule = plan(problem, "keep-all")
    own = schedule.lists[0]
    program = problem.workload.program(0)
    idle = []
    for op in range(len(program.ops)):
        for t in program.ops[op].writes:
            uses = [i for i in range(len(own)) if own["kind"][i] == Kind.COMPUTE and own["micro_batch"][i] == 0
                    and t in (*program.ops[own["op"][i]].reads, *program.ops[own["op"][i]].writes)]  # fmt: skip
            if program.tensors[t].kind == "activation":
                idle += [(b - a, t, a + 1, b) for a, b in itertools.pairwise(uses)]
    length, tensor, gone, back = max(idle)
    assert length > 5
    size = program.tensors[tensor].size_bytes
    here, there = (problem.machine.devices[d].memory for d in (0, 1))
    out_engine = 2 + problem.machine.route(here, there).engines[0]

    def away(b):
        b.wait(0, out_engine)
        b.offload(tensor, 0, here, there)
        b.release(tensor, 0, here)

    def home(b):
        b.prefetch(tensor, 0, there, here)
        b.release(tensor, 0, there)

    borrower = rows(own[:gone], built(away), own[gone:back], built(home), own[back:])
    borrower = rows(borrower, built(lambda b: b.signal(1, back + 3 + 1)))

    def lends(b):
        b.lend(size, 0, 0)
        b.signal(0, 0)

    lender = rows(built(lends), schedule.lists[1], built(lambda b: (b.wait(1, 0), b.reclaim(0))))
    lists = (borrower, lender, *schedule.lists[2:])
    times = run(case, problem, Schedule(lists, schedule.initial), state)
    assert times.step_s > 0


def test_a_measured_step_is_compared_and_traced(case, offloading, tmp_path):
    problem, schedule, state = offloading
    times = run(case, problem, schedule, state)
    problem = with_measured_durations(problem, schedule, times)
    simulation = simulate(problem, schedule, record=True)
    runs = [
        times.end_s[d][i] - times.start_s[d][i] for d, own in enumerate(schedule.lists)
        for i in np.flatnonzero((own["kind"] == Kind.COMPUTE) & (own["op"] == 0)).tolist()
    ]  # fmt: skip
    assert problem.workload.programs[0].ops[0].duration_s == pytest.approx(float(np.median(runs)))
    assert problem.workload.duration_source.startswith("measured:")
    table = compare(problem, schedule, simulation, times)
    found = {row.category: row for row in table}
    assert {"forward", "backward", "optimizer", "collective", "copy out", "copy in", "stall", "step"} <= set(found)
    assert all(row.measured_s >= 0 and np.isfinite(row.measured_s) for row in table)
    assert found["step"].predicted_s == simulation.step_s and found["step"].error == pytest.approx(
        times.step_s / simulation.step_s - 1
    )
    assert len(comparison_text(table).splitlines()) == len(table) + 1
    shown = comparison_text((CategoryError("forward", 1.0, 1.5), CategoryError("copy in", 1.0, 12.0)))
    assert "+50.0%" in shown.splitlines()[1] and "12 x" in shown.splitlines()[2]
    assert comparison_text((CategoryError("stall", 0.0, 1.0),)).endswith(" -")
    write_measured_trace(tmp_path / "measured.json", problem, schedule, times)
    assert (tmp_path / "measured.json").stat().st_size > 1000
    for device, own in enumerate(schedule.lists):
        busy = np.flatnonzero(own["kind"] == Kind.COMPUTE)
        starts, ends = times.start_s[device][busy], times.end_s[device][busy]
        assert (ends >= starts).all() and (starts[1:] >= ends[:-1]).all()
        assert times.stall_s[device] >= 0


def test_a_failure_in_one_worker_ends_the_step(case, offloading, monkeypatch):
    problem, schedule, _ = offloading
    step = planned(case, problem, schedule)

    def broken(*_):
        raise ValueError("no such kernel")

    segments = [list(own) for own in step.segments]
    segments[2][0] = replace(segments[2][0], compiled=replace(segments[2][0].compiled, executable=broken))
    monkeypatch.setattr(step, "_prepared", replace(step._prepared, segments=segments))
    with pytest.raises(ValueError, match="no such kernel"):
        step.step(case.batches())
    assert not issubclass(Stopped, ValueError)
