"""What holds for every simulation, on random schedules."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from building import chain_problem, random_case, random_policies, random_schedule, transfers_of_link
from hypothesis import given, settings
from hypothesis import strategies as st

from tmojax.errors import InputError
from tmojax.problem import (
    Action,
    Interference,
    Kind,
    Lifetime,
    LinkPolicyKind,
    ListBuilder,
    Op,
    Overheads,
    Phase,
    Placement,
    Problem,
    Program,
    Schedule,
    Tensor,
    TensorKind,
    Workload,
)
from tmojax.simulate import lower, prepare, simulate
from tmojax.simulate.tables import table_of

seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=40, deadline=None)

COMPUTE_KINDS = (Kind.COMPUTE, Kind.ENCODE, Kind.DECODE)


def size_of(problem, device, row):
    size = problem.workload.program(device).tensors[row["tensor"]].size_bytes
    part, parts = int(row["part"]), int(row["parts"])
    size = size * (part + 1) // parts - size * part // parts
    return problem.machine.codecs[row["form"]].encoded_bytes(size) if row["form"] >= 0 else size


def collective_bytes(problem, schedule, link):
    workload = problem.workload
    return sum(
        problem.machine.collective_loads(c.kind, c.devices).get(link, 0) * c.size_bytes for c in workload.collectives
    )


@few
@given(seeds)
def test_bytes_moved_are_the_bytes_scheduled(seed):
    problem, schedule, policies, steps = random_case(seed)
    result = simulate(problem, schedule, link_policies=policies, steps=steps)
    for link in range(len(problem.machine.links)):
        expected = sum(size_of(problem, d, schedule.lists[d][i]) for d, i in transfers_of_link(problem, schedule, link))
        expected += collective_bytes(problem, schedule, link)
        np.testing.assert_allclose(result.moved_bytes[link], steps * expected)


@few
@given(seeds)
def test_recorded_rates_stay_below_capacity_and_add_up_to_the_bytes(seed):
    problem, schedule, policies, steps = random_case(seed, interference=False)
    result = simulate(problem, schedule, link_policies=policies, steps=steps, record=True)
    assert result.segments is not None
    for link, (times, rates) in enumerate(result.segments):
        assert (np.diff(times) > 0).all()
        assert (rates <= problem.machine.links[link].bandwidth_bytes_per_s * (1 + 1e-9)).all()
        if times.size:
            assert rates[-1] == 0
            np.testing.assert_allclose((rates[:-1] * np.diff(times)).sum(), result.moved_bytes[link], rtol=1e-9)
            np.testing.assert_allclose(np.diff(times)[rates[:-1] > 0].sum(), result.busy_s[link], rtol=1e-9)
        else:
            assert result.moved_bytes[link] == 0


@few
@given(seeds)
def test_streams_run_one_at_a_time_in_list_order(seed):
    problem, schedule, policies, steps = random_case(seed)
    result = simulate(problem, schedule, link_policies=policies, steps=steps)
    engines: dict[int, list[tuple[float, float]]] = {}
    for d, rows in enumerate(schedule.lists):
        rows = np.tile(rows, steps)
        streams: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            if row["kind"] in COMPUTE_KINDS:
                streams.setdefault(0, []).append(i)
            elif row["kind"] == Kind.COLLECTIVE:
                streams.setdefault(1, []).append(i)
            elif row["kind"] == Kind.WAIT:
                streams.setdefault(int(row["stream"]), []).append(i)
            elif row["kind"] in (Kind.OFFLOAD, Kind.PREFETCH):
                for engine in problem.machine.route(int(row["memory"]), int(row["to_memory"])).engines:
                    streams.setdefault(2 + engine, []).append(i)
                    engines.setdefault(engine, []).append((result.start_s[d][i], result.end_s[d][i]))
        for places in streams.values():
            assert (result.start_s[d][places[1:]] >= result.end_s[d][places[:-1]]).all()
            assert (np.diff(result.end_s[d][places]) >= 0).all()
    for spans in engines.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


@few
@given(seeds)
def test_slots_are_respected(seed):
    rng = np.random.default_rng(seed)
    problem = chain_problem(rng, 3)
    schedule = random_schedule(problem, rng)
    policies = random_policies(problem, rng)
    result = simulate(problem, schedule, link_policies=policies)
    for link, policy in enumerate(policies):
        if policy.kind is LinkPolicyKind.FAIR:
            continue
        spans = [
            (result.transfer_start_s[d][i], result.end_s[d][i]) for d, i in transfers_of_link(problem, schedule, link)
        ]
        for start_s, _ in spans:
            assert sum(a <= start_s < b for a, b in spans) <= policy.slots


@few
@given(seeds)
def test_busy_and_stall_add_up_to_the_end_of_the_compute_stream(seed):
    problem, schedule, policies, _ = random_case(seed)
    result = simulate(problem, schedule, link_policies=policies)
    for d, rows in enumerate(schedule.lists):
        computes = np.isin(rows["kind"], COMPUTE_KINDS)
        last = result.end_s[d][computes | ((rows["kind"] == Kind.WAIT) & (rows["stream"] == 0))].max(initial=0)
        np.testing.assert_allclose(result.compute_busy_s[d] + result.stall_s[d], last)
        np.testing.assert_allclose(result.compute_busy_s[d], (result.end_s[d] - result.start_s[d])[computes].sum())
    assert result.step_s == max(end_s.max(initial=0) for end_s in result.end_s)


@few
@given(seeds)
def test_time_scales_with_durations_and_rates(seed):
    """Everything twice as long, links half as fast: twice the time. Powers of two keep it exact."""
    problem, schedule, policies, steps = random_case(seed, overheads=Overheads())
    if any(link.latency_s for link in problem.machine.links):
        return
    prepared = prepare(problem, schedule)
    base = prepared.run(link_policies=policies, steps=steps)
    scaled = prepared.run(
        link_policies=policies, steps=steps, op_scale=[np.full(len(rows), 2.0) for rows in schedule.lists],
        link_scale=np.full(len(problem.machine.links), 0.5),
    )  # fmt: skip
    for a, b in zip(base.end_s, scaled.end_s, strict=True):
        np.testing.assert_allclose(2 * a, b, rtol=1e-9)


@few
@given(seeds)
def test_same_result_every_time_and_batch_equals_single_runs(seed):
    problem, schedule, policies, steps = random_case(seed)
    rng = np.random.default_rng(seed)
    prepared = prepare(problem, schedule)
    link_scale = rng.uniform(0.5, 2, (3, len(problem.machine.links)))
    op_scale = [rng.uniform(0.5, 2, (3, len(rows))) for rows in schedule.lists]
    op_scale[0] = None
    batch = prepared.run_batch(
        link_policies=[policies, (), policies], op_scale=op_scale, link_scale=link_scale, steps=steps
    )
    for sample, chosen in enumerate([policies, (), policies]):
        ops = [None if scale is None else scale[sample] for scale in op_scale]
        run = prepared.run(link_policies=chosen, op_scale=ops, link_scale=link_scale[sample], steps=steps)
        again = simulate(
            problem, schedule, link_policies=chosen, op_scale=ops, link_scale=link_scale[sample], steps=steps
        )
        assert batch[sample] == run.step_s == again.step_s


def test_neutral_interference_changes_nothing():
    for seed in range(10):
        problem, schedule, policies, steps = random_case(seed, interference=False)
        assert problem.machine.interference == Interference()
        prepared = prepare(problem, schedule)
        scale = [np.ones(len(rows)) for rows in schedule.lists]
        one = prepared.run(link_policies=policies, steps=steps)
        other = prepared.run(link_policies=policies, steps=steps, op_scale=scale, record=True)
        for a, b in zip(one.end_s, other.end_s, strict=True):
            assert a.tolist() == b.tolist()


@few
@given(seeds, seeds)
def test_a_list_that_was_seen_before_is_simulated_as_if_it_were_new(seed, other):
    problem, schedule, policies, steps = random_case(seed)
    second = random_schedule(problem, np.random.default_rng(other))
    at_host = tuple(tuple(replace(p, memories=(0, *p.memories)) for p in placed) for placed in schedule.initial)
    for one in (schedule, second, schedule, replace(schedule, initial=at_host)):
        again = replace(problem)  # another object: nothing is known of it
        known, new = (simulate(which, one, link_policies=policies, steps=steps) for which in (problem, again))
        assert known.step_s == new.step_s
        for mine, others in zip(known.end_s, new.end_s, strict=True):
            np.testing.assert_array_equal(mine, others)


def test_lists_are_kept_by_what_they_say_and_only_so_many_of_them(monkeypatch):
    """A list that is changed after the call is another one, and so is one that has more dimensions; what is kept is
    counted in instructions and problems."""
    problem, schedule, *_ = random_case(3)
    step_s = simulate(problem, schedule).step_s
    changed = replace(schedule, lists=tuple(rows.copy() for rows in schedule.lists))
    assert simulate(problem, changed).step_s == step_s
    for rows in changed.lists:
        rows["kind"], rows["after"] = Kind.SIGNAL, len(rows)  # no instruction
    with pytest.raises(InputError, match="after"):
        simulate(problem, changed)
    with pytest.raises(InputError, match="dimensions"):
        simulate(problem, replace(schedule, lists=tuple(rows[None] for rows in schedule.lists)))
    assert simulate(problem, schedule).step_s == step_s

    most = 5 * max(len(rows) for rows in schedule.lists)
    monkeypatch.setattr(lower, "MOST_ROWS_KEPT", most)
    for number in range(20):
        lists = [rows.copy() for rows in schedule.lists]
        for rows in lists:
            rows["size_bytes"] = number  # which only loans have
        simulate(problem, replace(schedule, lists=tuple(lists)))
    kept = lower._parts[table_of(problem)]
    assert kept.rows == sum(part.columns.work_s.size for part in kept.known.values()) <= most
    others = [replace(problem) for _ in range(10)]
    assert {simulate(other, schedule).step_s for other in others} == {step_s}
    assert len(lower._parts) <= lower.MOST_PROBLEMS_KEPT


def test_placements_of_one_device_are_not_those_of_another():
    """A copy into gpu0 of what gpu1 owns allocates behind a release there, and so waits for it, unless gpu1 starts with
    that tensor in the same place."""
    machine = chain_problem(np.random.default_rng(0), 2).machine
    memory, host = machine.devices[0].memory, machine.devices[0].host_memory
    tensors = (Tensor("w", 100, TensorKind.WEIGHT, Lifetime.STATE), Tensor("a", 100, TensorKind.ACTIVATION))
    program = Program("both", tensors, (Op("f", Phase.FORWARD, 1.0, (), (1,)),))
    workload = Workload("two", (program,), (0, 0), 1, "synthetic")
    problem = Problem("two", workload, machine, frozenset({Action.OFFLOAD}))
    first, second = ListBuilder(), ListBuilder()
    first.compute(0, 0)
    first.release(1, 0, memory)
    copy = first.prefetch(0, 0, host, memory, owner=1)
    second.compute(0, 0)
    placed = (Placement(0, (memory,)),)
    for initial, least_s in (((placed, ()), 1.0), (((), placed), 0.0)):
        found = simulate(problem, Schedule((first.build(), second.build()), initial))
        assert found.start_s[0][copy] == pytest.approx(least_s + machine.overheads.launch_s * least_s)
