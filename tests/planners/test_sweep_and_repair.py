"""Coordination by sweep, and making a decision fit."""

import math
from dataclasses import replace

import numpy as np
import pytest
from planner_cases import transformer
from random_steps import random_problem

from tmojax.planners.repair import repair
from tmojax.planners.simple import offload_everything, recompute_segments
from tmojax.planners.sweep import POLICIES, SHARES, even_starts, sweep
from tmojax.planners.workbench import Workbench
from tmojax.problem import Action, LinkPolicyKind
from tmojax.relax.coordinate import Coordination
from tmojax.relax.decisions import Choice, DeviceDecision, Rest, keep_everything
from tmojax.relax.decode import DeviceList, DoesNotFit

OFFLOAD = frozenset({Action.OFFLOAD})


@pytest.fixture
def bench():
    return Workbench(transformer("prototype-4gpu-12.5", factor=1.4))


def everywhere(bench, decide):
    return tuple(decide(bench.view(device)) for device in range(bench.device_count))


def test_sweep_is_the_minimum_over_its_grid(bench):
    decisions = everywhere(bench, offload_everything)
    best = sweep(bench, decisions)
    assert not isinstance(best, DoesNotFit)
    times = [
        bench.evaluate(decisions, Coordination(even_starts(bench, share), kind, ranks, bench.slots())).step_s
        for share in SHARES
        for kind in POLICIES
        for ranks in [tuple(range(4)) if kind is LinkPolicyKind.PRIORITY else ()]
    ]
    assert best.step_s == min(times) < max(times)


def test_further_starts_are_tried_and_can_win(bench):
    decisions = everywhere(bench, offload_everything)
    starts = (0.0, 0.6, 0.3, 0.9)
    only = sweep(bench, decisions, shares=(), starts=(starts,))
    both = sweep(bench, decisions, starts=(starts,))
    assert only.coordination.start_share == starts
    assert both.step_s <= min(only.step_s, sweep(bench, decisions).step_s)


def test_sweep_of_one_device_has_nothing_to_choose():
    bench = Workbench(transformer("gh200", factor=1.4))
    decisions = everywhere(bench, offload_everything)
    before = bench.simulations
    best = sweep(bench, decisions)
    assert not isinstance(best, DoesNotFit) and best.coordination.start_share == (0.0,)
    assert bench.simulations - before == 1


def test_sweep_passes_on_that_nothing_fits(bench):
    found = sweep(bench, everywhere(bench, keep_everything))
    assert isinstance(found, DoesNotFit) and found.bytes_over > 0


def test_exclusive_use_of_a_wide_link_admits_as_many_as_fill_it():
    assert Workbench(transformer("prototype-4gpu-12.5", factor=1.2)).slots() == 1
    wide = Workbench(transformer("rtxpro6000x8-two-roots", factor=1.2))  # lanes of 55, a shared 57.05 GB/s
    assert wide.slots() == 2


def test_equal_devices_share_decoded_lists_and_address_their_own_memory(bench):
    decision = offload_everything(bench.view(0))
    lists = [bench.decode(device, decision) for device in range(4)]
    assert bench.device_class == (0, 0, 0, 0)
    for device, found in enumerate(lists):
        assert isinstance(found, DeviceList)
        own = bench.problem.machine.devices[device]
        touched = set(found.rows["memory"].tolist()) | set(found.rows["to_memory"].tolist())
        assert touched == {-1, own.memory, own.host_memory}
        assert np.array_equal(found.rows["tensor"], lists[0].rows["tensor"])


def test_a_device_with_less_memory_is_a_class_of_its_own():
    problem = transformer("prototype-4gpu-12.5", factor=1.4)
    machine = problem.machine
    memories = list(machine.memories)
    memory = machine.devices[2].memory
    memories[memory] = replace(memories[memory], capacity_bytes=memories[memory].capacity_bytes - 1000)
    bench = Workbench(replace(problem, machine=replace(machine, memories=tuple(memories))))
    assert bench.device_class == (0, 0, 2, 0)


def test_repair_leaves_alone_what_fits(bench):
    decision = offload_everything(bench.view(0))
    assert repair(bench, 0, decision) is decision


@pytest.mark.parametrize(
    ("actions", "moved"),
    [(OFFLOAD, Choice.OFFLOAD), (frozenset({Action.RECOMPUTE}), Choice.RECOMPUTE)],
    ids=["offload", "recompute"],
)
def test_repair_sends_away_what_is_missing_and_no_more(actions, moved):
    bench = Workbench(transformer("prototype-4gpu-12.5", factor=1.2, actions=actions))
    kept = keep_everything(bench.view(0))
    failed = bench.decode(0, kept)
    assert isinstance(failed, DoesNotFit)
    fitted = repair(bench, 0, kept)
    assert isinstance(fitted, DeviceDecision) and isinstance(bench.decode(0, fitted), DeviceList)
    changed = fitted.choice != kept.choice
    assert changed.any() and (fitted.choice[changed] == moved).all()
    assert not changed.all()
    assert not fitted.state_out.any()


def test_repair_lets_resting_state_leave_when_activations_are_not_enough():
    for seed in range(40):
        problem = random_problem(seed, factor=1.0, actions=(Action.OFFLOAD,))
        bench = Workbench(problem)
        everything_away = offload_everything(bench.view(0))
        start = DeviceDecision(everything_away.choice, np.zeros(len(everything_away.state_out), np.int8))
        lacking = bench.decode(0, start)
        # The least memory in which the activations alone are enough, less one byte.
        low, high = 1, problem.capacity_bytes(0)
        if isinstance(lacking, DoesNotFit):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            fits = isinstance(Workbench(problem.with_device_capacity(middle)).decode(0, start), DeviceList)
            low, high = (low, middle) if fits else (middle, high)
        tight = Workbench(problem.with_device_capacity(high - 1))
        assert isinstance(tight.decode(0, start), DoesNotFit)
        fitted = repair(tight, 0, start)
        if isinstance(fitted, DeviceDecision):
            assert (fitted.state_out == Rest.AWAY).any()
            assert isinstance(tight.decode(0, fitted), DeviceList)
            return
    pytest.fail("no problem in which state has to leave")


def test_repair_gives_the_last_failure_where_nothing_helps():
    bench = Workbench(transformer("prototype-4gpu-12.5", factor=30.0))
    found = repair(bench, 0, keep_everything(bench.view(0)))
    assert isinstance(found, DoesNotFit) and 0 < found.bytes_over < math.inf


def test_repair_after_recomputation_counts_recomputed_bytes(bench):
    """Recompute-all holds a layer's tensors at once in backward; what does not fit even so is sent away."""
    tight = Workbench(transformer("prototype-4gpu-12.5", factor=2.0))
    start = recompute_segments(tight.problem, tight.view(0), 1)
    fitted = repair(tight, 0, start)
    assert isinstance(fitted, DeviceDecision)
    assert isinstance(tight.decode(0, fitted), DeviceList)
    assert isinstance(bench.decode(0, start), DeviceList)
