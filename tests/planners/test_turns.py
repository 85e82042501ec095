"""Copies in turns: the orders are complete, keep every list's own order, and come out of the decisions again."""

from itertools import pairwise

import numpy as np
import pytest
from planner_cases import cases, transformer

from tmojax.check import check
from tmojax.planners.gradient import LocalSearch
from tmojax.planners.local_search import SearchSettings, local_search
from tmojax.planners.registry import PLANNERS
from tmojax.planners.seeding import candidate_of
from tmojax.planners.simple import offload_everything
from tmojax.planners.sweep import POLICIES, sweep
from tmojax.planners.workbench import Workbench
from tmojax.problem import Action, Kind, LinkPolicyKind
from tmojax.relax.coordinate import Coordination, Timetable, shared_links
from tmojax.relax.decisions import DeviceDecision
from tmojax.relax.decode import DoesNotFit
from tmojax.relax.turns import copy_keys, timetable_of
from tmojax.simulate import simulate

TRANSFORMER = transformer("dual-socket-v100x4", factor=1.4, micro_batches=2, actions=frozenset({Action.OFFLOAD}))
COPIES = [Kind.OFFLOAD, Kind.PREFETCH]
CASES = {**cases(), "two-sockets": TRANSFORMER}


def in_turns(problem, shares, **order):
    bench = Workbench(problem)
    decisions = tuple(offload_everything(bench.view(device)) for device in range(bench.device_count))
    slots = bench.slots() + order.pop("more_slots", 0)
    return bench.evaluate(decisions, Coordination(shares, LinkPolicyKind.ORDER, slots=slots, **order))


@pytest.mark.parametrize(
    ("stagger", "turns", "backwards", "more_slots"), [(0.0, 0, False, 0), (0.3, 4, True, 0), (0.3, 16, False, 1)]
)
@pytest.mark.parametrize("case", sorted(CASES))
def test_orders_hold_every_copy_once_in_the_order_of_its_engine(case, stagger, turns, backwards, more_slots):
    problem = CASES[case]
    devices = range(problem.workload.device_count)
    shares = tuple(stagger * device / len(devices) for device in devices)
    rank = tuple(reversed(devices)) if backwards else ()
    found = in_turns(problem, shares, turns=turns, device_rank=rank, more_slots=more_slots)
    if not isinstance(found, DoesNotFit):
        orders_are_complete(problem, found)


def orders_are_complete(problem, found):
    schedule, devices = found.schedule, range(problem.workload.device_count)
    for link in shared_links(problem.machine):
        policy = schedule.link_policies[link]
        assert policy.kind is LinkPolicyKind.ORDER
        for device in devices:
            rows = schedule.lists[device]
            copies = [row for row in np.flatnonzero(np.isin(rows["kind"], COPIES)).tolist()
                      if link in problem.machine.route(rows["memory"][row], rows["to_memory"][row]).links]  # fmt: skip
            mine = [row for d, row in policy.sequence if d == device]
            assert sorted(mine) == copies
            for kind in COPIES:  # each way has an engine of its own, which follows the list
                assert [row for row in mine if rows["kind"][row] == kind] == [
                    row for row in copies if rows["kind"][row] == kind
                ]
    if np.isfinite(found.step_s):
        report = check(problem, schedule)
        assert report.valid, report.text()


def test_forward_of_one_gpu_before_forward_of_the_next_before_backward_of_the_first():
    found = in_turns(TRANSFORMER, (0.0,) * 4)
    link = next(k for k, spec in enumerate(TRANSFORMER.machine.links) if spec.name == "switch0.to_host")
    devices = [device for device, _ in found.schedule.link_policies[link].sequence]
    changes = 1 + sum(a != b for a, b in pairwise(devices))
    # Activations leave in forward only: two micro-batches of two GPUs are four turns.
    assert changes == 4 and devices[0] == 0


def users(found):
    """The devices of the copies out on the uplink of devices 0 and 1, in order."""
    link = next(k for k, spec in enumerate(TRANSFORMER.machine.links) if spec.name == "switch0.to_host")
    return [device for device, _ in found.schedule.link_policies[link].sequence]


def test_shorter_turns_change_more_often_and_a_rank_says_who_is_first():
    whole, short = (in_turns(TRANSFORMER, (0.0,) * 4, turns=turns) for turns in (0, 16))
    changes = [sum(a != b for a, b in pairwise(users(found))) for found in (whole, short)]
    assert changes == [3, 7]
    backwards = in_turns(TRANSFORMER, (0.0,) * 4, device_rank=(3, 2, 1, 0))
    assert (users(whole)[0], users(backwards)[0]) == (0, 1)
    # Who starts later has its copies in later turns, whoever is first within one.
    late = in_turns(TRANSFORMER, (0.0, 0.25, 0.0, 0.25), turns=16, device_rank=(3, 2, 1, 0))
    assert users(late)[0] == 0


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_timetable_repeats_the_order_of_the_schedule_that_it_is_of(case):
    """Also for other decisions every copy has its place, once, whatever the table knows."""
    problem = CASES[case]
    bench = Workbench(problem)
    devices = range(bench.device_count)
    decisions = tuple(offload_everything(bench.view(device)) for device in devices)
    at_once = (0.0,) * len(devices)
    turns = bench.evaluate(decisions, Coordination(at_once, LinkPolicyKind.ORDER, (), bench.slots()))
    if isinstance(turns, DoesNotFit) or not np.isfinite(turns.step_s):
        return
    table = timetable_of(turns.schedule, simulate(problem, turns.schedule))
    timed = Coordination(at_once, LinkPolicyKind.ORDER, (), bench.slots(), timetable=table)
    again = bench.evaluate(decisions, timed)
    assert again.step_s == pytest.approx(turns.step_s, rel=1e-9)
    orders_are_complete(problem, again)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        fewer = tuple(
            DeviceDecision(np.where(rng.random(len(d.choice)) < 0.2, 0, d.choice).astype(np.int8), d.state_out)
            for d in decisions
        )
        found = bench.evaluate(fewer, timed)
        if not isinstance(found, DoesNotFit):
            orders_are_complete(problem, found)


def test_an_order_that_no_list_allows_is_infinitely_slow_and_never_chosen():
    bench = Workbench(CASES["half-duplex"])
    decisions = tuple(offload_everything(bench.view(device)) for device in range(4))
    plain = Coordination((0.0,) * 4, LinkPolicyKind.FCFS, (), bench.slots())
    first = bench.evaluate(decisions, plain)
    # Everything that comes in before anything goes out, on links that carry both ways: that needs a time machine.
    copies = [
        (copy_keys(rows), np.where(rows["kind"][np.isin(rows["kind"], COPIES)] == Kind.PREFETCH, 0.0, 1.0))
        for rows in first.schedule.lists
    ]
    stuck = Coordination((0.0,) * 4, LinkPolicyKind.ORDER, (), bench.slots(), timetable=Timetable.of(copies))
    assert bench.evaluate(decisions, stuck).step_s == np.inf
    best = bench.best_of(decisions, [stuck, plain])
    assert best.coordination is plain and best.step_s == first.step_s


def test_sweeps_and_searches_try_orders():
    bench = Workbench(TRANSFORMER)
    decisions = tuple(offload_everything(bench.view(device)) for device in range(4))
    without = sweep(bench, decisions, policies=tuple(kind for kind in POLICIES if kind is not LinkPolicyKind.ORDER))
    found = sweep(bench, decisions)
    assert found.coordination.policy is LinkPolicyKind.ORDER and found.step_s < without.step_s
    assert check(TRANSFORMER, found.schedule).valid
    fair = bench.evaluate(decisions, Coordination((0.0,) * 4))
    searched = [local_search(bench, fair, SearchSettings(evaluations=80), seed)[0] for seed in range(4)]
    ordered = [plan for plan in searched if plan.coordination.policy is LinkPolicyKind.ORDER]
    assert ordered and all(check(TRANSFORMER, plan.schedule).valid for plan in ordered)


def test_searches_start_from_a_plan_in_turns():
    turns = PLANNERS["tmo-ordered"]().plan(TRANSFORMER)
    assert turns.details["policy"] == "order"
    found = LocalSearch(search=SearchSettings(evaluations=30)).plan(TRANSFORMER, seeds=(turns,))
    assert found.details["start"] == "tmo-ordered" and found.step_s <= turns.step_s
    assert check(TRANSFORMER, found.schedule).valid


@pytest.mark.parametrize("case", ["two-sockets", "shared-path", "random-4"])
def test_a_schedule_alone_is_a_start_with_the_order_of_its_copies(case):
    problem = CASES[case]
    bench = Workbench(problem)
    decisions = tuple(offload_everything(bench.view(device)) for device in range(bench.device_count))
    rank = tuple(reversed(range(bench.device_count)))
    at_once = (0.0,) * bench.device_count
    turns = bench.evaluate(decisions, Coordination(at_once, LinkPolicyKind.ORDER, rank, bench.slots(), turns=3))
    found = candidate_of(bench, turns.schedule)
    assert found.step_s <= turns.step_s * (1 + 1e-9)
    assert check(problem, found.schedule).valid
