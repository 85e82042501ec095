"""Copies in turns: the orders are complete, keep every list's own order, and come out of the decisions again."""

from itertools import pairwise

import numpy as np
import pytest
from planner_cases import cases, transformer

from tmojax.check import check
from tmojax.planners.gradient import LocalSearch
from tmojax.planners.local_search import SearchSettings
from tmojax.planners.registry import PLANNERS
from tmojax.planners.simple import offload_everything
from tmojax.planners.workbench import Workbench
from tmojax.problem import Action, Kind, LinkPolicyKind
from tmojax.relax.coordinate import Coordination, shared_links
from tmojax.relax.decode import DoesNotFit

TRANSFORMER = transformer("dual-socket-v100x4", factor=1.4, micro_batches=2, actions=frozenset({Action.OFFLOAD}))
CASES = {**cases(), "two-sockets": TRANSFORMER}


def in_turns(problem, shares):
    bench = Workbench(problem)
    decisions = tuple(offload_everything(bench.view(device)) for device in range(bench.device_count))
    return bench.evaluate(decisions, Coordination(shares, LinkPolicyKind.ORDER, (), bench.slots()))


@pytest.mark.parametrize("stagger", [0.0, 0.3])
@pytest.mark.parametrize("case", sorted(CASES))
def test_orders_hold_every_copy_once_in_the_order_of_its_list(case, stagger):
    problem = CASES[case]
    devices = range(problem.workload.device_count)
    found = in_turns(problem, tuple(stagger * device / len(devices) for device in devices))
    if isinstance(found, DoesNotFit):
        return
    schedule = found.schedule
    for link in shared_links(problem.machine):
        policy = schedule.link_policies[link]
        assert policy.kind is LinkPolicyKind.ORDER
        for device in devices:
            rows = schedule.lists[device]
            copies = [row for row in np.flatnonzero(np.isin(rows["kind"], [Kind.OFFLOAD, Kind.PREFETCH])).tolist()
                      if link in problem.machine.route(rows["memory"][row], rows["to_memory"][row]).links]  # fmt: skip
            assert [row for d, row in policy.sequence if d == device] == copies
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


def test_searches_start_from_a_plan_in_turns():
    turns = PLANNERS["tmo-ordered"]().plan(TRANSFORMER)
    assert turns.details["policy"] == "order"
    found = LocalSearch(search=SearchSettings(evaluations=30)).plan(TRANSFORMER, seeds=(turns,))
    assert found.details["start"] == "tmo-ordered" and found.step_s <= turns.step_s
    assert check(TRANSFORMER, found.schedule).valid
