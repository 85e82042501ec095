"""Stretches of ops that may be joined: nothing in the list waits inside of one, and its bytes are counted again."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from planner_cases import cases

from tmojax.execute.joining import Joining
from tmojax.execute.lists import prepare_list
from tmojax.planners.registry import PLANNERS
from tmojax.problem import Interference, Kind, Phase
from tmojax.simulate import simulate

PLANS = ("keep-all", "offload-all", "recompute-all", pytest.param("ratio-sweep", marks=pytest.mark.long))


@cache
def planned(name):
    """(problem, schedule) of every case that the planner has a plan for, with durations that are all different."""
    found = []
    for number, problem in enumerate(cases().values()):
        problem = problem.with_device_capacity(10**15) if name == "keep-all" else problem
        schedule = PLANNERS[name]().plan(problem).schedule
        if schedule is None:
            continue
        rng = np.random.default_rng(number)

        def other(op, rng=rng):
            return replace(op, duration_s=float(rng.uniform(0.3, 2)) * (op.duration_s + 1e-5))

        programs = tuple(replace(p, ops=tuple(map(other, p.ops))) for p in problem.workload.programs)
        workload = replace(problem.workload, programs=programs)
        machine = replace(problem.machine, interference=Interference())
        found.append((replace(problem, machine=machine, workload=workload), schedule))
    assert len(found) > 3
    return found


def stretches(problem, schedule):
    for device in range(problem.workload.device_count):
        prepared = prepare_list(problem, schedule, device)
        joining = Joining(problem, prepared)
        yield device, prepared, joining, list(joining.stretches())


@pytest.mark.parametrize("name", PLANS)
def test_every_compute_instruction_is_in_one_stretch_in_list_order(name):
    for problem, schedule in planned(name):
        for device, _, _, found in stretches(problem, schedule):
            rows = schedule.lists[device]
            assert [n.index for own in found for n in own] == np.flatnonzero(rows["kind"] == Kind.COMPUTE).tolist()
            ops = problem.workload.program(device).ops
            for own in found:
                assert len({ops[node.op].phase is Phase.OPTIMIZER for node in own}) == 1


@pytest.mark.parametrize("name", PLANS)
def test_nothing_waits_inside_of_a_stretch(name):
    """By the simulator: its ops run without a pause, and nothing else starts when one of them but the last ends."""
    longest = 0
    for problem, schedule in planned(name):
        times = simulate(problem, schedule)
        for device, prepared, _, found in stretches(problem, schedule):
            start_s, end_s = times.start_s[device], times.end_s[device]
            beside = np.isin(schedule.lists[device]["kind"], (Kind.OFFLOAD, Kind.PREFETCH, Kind.COLLECTIVE))
            others = set(start_s[beside].tolist())
            for own in found:
                longest = max(longest, len(own))
                indices = [node.index for node in own]
                assert (start_s[indices[1:]] == end_s[indices[:-1]]).all()
                assert not others & set(end_s[indices[:-1]].tolist()), (problem.name, device)
            assert prepared.nodes
    assert longest > 2


@pytest.mark.parametrize("name", PLANS)
def test_limits_are_what_the_plan_has_allocated_less_what_is_still_held(name):
    """Counted again from the rows of the list, position by position."""
    for problem, schedule in planned(name):
        for device, prepared, joining, found in stretches(problem, schedule):
            memory = problem.machine.devices[device].memory
            sizes = [t.size_bytes for t in problem.workload.program(device).tensors]
            for own in found:
                for extent in joining.extents(own):
                    nodes = own[: extent.count]
                    indices = {node.index for node in nodes}
                    # With what was there before the first, the program must fit into what the plan counts.
                    before = prepared.planned_bytes[memory][nodes[0].index] - sum(
                        sizes[c[1]] for c in nodes[0].creates
                    ) - joining.scratch_bytes(nodes[0].index)  # fmt: skip
                    free = others = 0
                    for node in prepared.nodes.values():
                        if nodes[0].index < node.index <= extent.position and node.index not in indices:
                            others += sum(sizes[c[1]] for c in node.creates if c[3] == memory)
                    for change in prepared.changes[memory]:
                        if nodes[0].index <= change.position < extent.position and not indices & set(change.after_end):
                            free += sizes[change.copy[1]] if change.copy else 0
                    planned_bytes = prepared.planned_bytes[memory][extent.position]
                    assert before - free + others + extent.limit_bytes <= planned_bytes
                    assert extent.position in indices
                    kept = joining.kept(nodes)
                    assert sum(sizes[c[1]] for c in kept) <= extent.limit_bytes


@pytest.mark.parametrize("name", PLANS)
def test_what_others_use_is_kept(name):
    """Read from the list: who uses a copy between the instruction that makes it and its release."""
    inside = 0
    for problem, schedule in planned(name):
        for device, prepared, joining, found in stretches(problem, schedule):
            frees = [
                (change.position, change.copy) for changes in prepared.changes for change in changes if change.copy
            ]
            for own in found:
                indices = {node.index for node in own}
                kept = joining.kept(own)
                for node in own:
                    for copy in node.creates:
                        end = min((at for at, freed in frees if freed == copy and at > node.index), default=None)
                        users = {
                            other.index for other in prepared.nodes.values()
                            if end is not None and node.index < other.index < end
                            and copy in (*other.reads, *other.writes, *other.updates)
                        }  # fmt: skip
                        assert (copy in kept) == (end is None or not users <= indices), (problem.name, device)
                        inside += copy not in kept
    assert inside > 0
