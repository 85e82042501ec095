"""Prepared lists agree with the checker about bytes, and wait for nothing that comes later."""

import sys
from functools import cache
from pathlib import Path

import pytest
from planner_cases import cases

sys.path.insert(0, str(Path(__file__).parent))
from checker_bytes import checker_bytes

from tmojax.execute.lists import prepare_list
from tmojax.planners.registry import PLANNERS
from tmojax.problem import Kind

PLANS = ("offload-all", "ratio-sweep")


@cache
def planned(name):
    """(problem, schedule) of every case that the planner has a plan for."""
    found = [(problem, PLANNERS[name]().plan(problem).schedule) for problem in cases().values()]
    return [(problem, schedule) for problem, schedule in found if schedule is not None]


@pytest.mark.parametrize("name", PLANS)
def test_bytes_are_those_of_the_checker_at_every_position(name):
    assert len(planned(name)) > 3
    for problem, schedule in planned(name):
        for device in range(problem.workload.device_count):
            prepared = prepare_list(problem, schedule, device)
            for ours, theirs in zip(prepared.planned_bytes, checker_bytes(problem, schedule, device), strict=True):
                assert ours.items() >= theirs.items()
                assert max(ours.values()) == max(theirs.values())


@pytest.mark.parametrize("name", PLANS)
def test_instructions_wait_for_earlier_ones_only_and_each_has_one_worker(name):
    for problem, schedule in planned(name):
        prepared = prepare_list(problem, schedule, 0)
        streams = (Kind.COMPUTE, Kind.COLLECTIVE, Kind.OFFLOAD, Kind.PREFETCH, Kind.WAIT)
        on_streams = [i for i, kind in enumerate(schedule.lists[0]["kind"].tolist()) if kind in streams]
        assert sorted(n.index for nodes in prepared.workers().values() for n in nodes) == on_streams
        for node in prepared.nodes.values():
            assert all(0 <= i < node.index for i in (*node.after_start, *node.after_end))
        for changes in prepared.changes:
            positions = [change.position for change in changes]
            assert positions == sorted(positions)
            assert all(i <= change.position for change in changes for i in change.after_end)
