"""What lists need in host memory, by the decode and by the checker."""

from dataclasses import replace

import pytest
from planner_cases import light
from random_steps import random_problem

from tmojax.check import check
from tmojax.planners.registry import PLANNERS
from tmojax.planners.simple import offload_everything
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import MemoryKind, Problem
from tmojax.relax.coordinate import together
from tmojax.relax.decisions import keep_everything
from tmojax.relax.decode import DoesNotFit
from tmojax.relax.host_memory import host_limit_bytes


def with_host(problem: Problem, **changes) -> Problem:
    memories = tuple(replace(m, **changes) if m.kind is MemoryKind.HOST else m for m in problem.machine.memories)
    return replace(problem, machine=replace(problem.machine, memories=memories))


def candidate(problem: Problem, decide=offload_everything) -> Candidate | DoesNotFit:
    bench = Workbench(problem)
    decisions = tuple(decide(bench.view(device)) for device in range(bench.device_count))
    return bench.evaluate(decisions, together(problem))


def host_bytes(problem: Problem) -> tuple[int, int]:
    """(by the decode, by the checker) of everything offloaded."""
    bench = Workbench(problem)
    decisions = tuple(offload_everything(bench.view(device)) for device in range(bench.device_count))
    built = bench.lists(decisions)
    assert not isinstance(built, DoesNotFit)  # the seeds used here all fit
    report = check(problem, bench.evaluate(decisions, together(problem)).schedule)
    assert report.valid
    return sum(item.host_peak_bytes for item in built), dict(report.peak_bytes)["host"]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rounded", [False, True])
def test_the_checker_counts_the_same_bytes(seed, rounded):
    problem = with_host(random_problem(seed, factor=1.2), pinned_power_of_two=rounded)
    decoded, checked = host_bytes(problem)
    assert decoded == checked > 0


@pytest.mark.parametrize("limit", ["capacity_bytes", "pinned_limit_bytes"])
def test_one_byte_decides(limit):
    problem = random_problem(3, factor=1.2)
    needed, _ = host_bytes(problem)
    enough, short = (with_host(problem, **{limit: needed - missing}) for missing in (0, 1))
    assert isinstance(candidate(enough), Candidate)
    failure = candidate(short)
    assert isinstance(failure, DoesNotFit) and failure.bytes_over == 1
    assert short.machine.memories[failure.host_memory].name == "host"


def test_the_reserve_is_kept_back():
    problem = with_host(random_problem(3), capacity_bytes=1000, reserve_bytes=300, pinned_limit_bytes=600)
    host = len(problem.machine.memories) - 1
    assert host_limit_bytes(problem.machine, host) == 600
    problem = with_host(problem, pinned_limit_bytes=800)
    assert host_limit_bytes(problem.machine, host) == 700


@pytest.mark.parametrize("kind", sorted(PLANNERS.keys() - {"gradient"}))
def test_no_planner_uses_more_host_memory_than_there_is(kind):
    roomy = random_problem(3, factor=1.2)
    inputs = candidate(replace(roomy, actions=frozenset()).with_device_capacity(10**9), keep_everything)
    least = dict(check(roomy.with_device_capacity(10**9), inputs.schedule).peak_bytes)["host"]
    for spare in (0, 5, 50):
        problem = with_host(roomy, capacity_bytes=least + spare)
        result = light(kind).plan(problem)
        if result.schedule is None:
            assert result.message
        else:
            assert check(problem, result.schedule).valid
    with_nothing = light(kind).plan(with_host(roomy, capacity_bytes=max(least - 1, 1)))
    assert with_nothing.schedule is None and with_nothing.message
