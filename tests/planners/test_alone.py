"""Planning each GPU alone: what a GPU sees, what all of them do with it, and that every planner can be asked."""

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import cases, light, transformer

from tmojax.check import check
from tmojax.importers.synthetic import SyntheticTransformer
from tmojax.planners.alone import Alone, alone_problem
from tmojax.planners.base import Planner, Status
from tmojax.planners.fluid import Oblivious, path_rates
from tmojax.planners.registry import PLANNERS
from tmojax.planners.simple import OffloadAll
from tmojax.planners.workbench import Workbench
from tmojax.problem import COMPUTE_STREAM, Action, Kind, LinkPolicyKind, ListBuilder, validate_problem
from tmojax.relax.decode import DoesNotFit
from tmojax.simulate import simulate

CASES = cases()
QUICK = [kind for kind in PLANNERS if kind not in ("gradient", "exhaustive", "poet", "cp-sat", "improve")]


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_gpu_alone_has_its_own_memory_path_and_share_of_the_host(case):
    problem = CASES[case]
    for device in range(problem.workload.device_count):
        alone = alone_problem(problem, device)
        validate_problem(alone)
        assert alone.capacity_bytes(0) == problem.capacity_bytes(device)
        assert path_rates(alone, 0, shared=True) == path_rates(problem, device, shared=False)
        assert all(collective.devices == (0,) for collective in alone.workload.collectives)
    for host in {spec.host_memory for spec in problem.machine.devices}:
        users = [d for d, spec in enumerate(problem.machine.devices) if spec.host_memory == host]
        shares = [alone_problem(problem, d).machine.memories[host] for d in users]
        memory = problem.machine.memories[host]
        usable = memory.capacity_bytes - memory.reserve_bytes
        assert sum(share.capacity_bytes - share.reserve_bytes for share in shares) <= usable


@pytest.mark.parametrize("kind", QUICK)
@pytest.mark.parametrize("case", ["random-1", "shared-path", "uneven"])
def test_plans_of_all_gpus_are_valid_exactly_timed_and_uncoordinated(kind, case):
    problem = CASES[case]
    result = Alone(problem).plan(light(kind), seed=5)
    assert result.planner == PLANNERS[kind]().name
    if not result.status.has_plan:
        assert result.status is Status.NOT_FOUND and " alone: " in result.message and result.schedule is None
        return
    assert result.schedule is not None and result.status in (Status.FEASIBLE, Status.TIME_LIMIT)
    report = check(problem, result.schedule)
    assert report.valid, report.text()
    assert result.step_s == simulate(problem, result.schedule).step_s
    assert {policy.kind for policy in result.schedule.link_policies} <= {LinkPolicyKind.FAIR}
    assert max(result.details["alone_step_s"].values()) <= result.step_s * (1 + 1e-9)
    same = [rows["op"][rows["kind"] == Kind.COMPUTE] for rows in result.schedule.lists]
    if case == "shared-path":  # equal GPUs, equal lists
        assert all(np.array_equal(same[0], other) for other in same)
        assert len(result.details["alone_step_s"]) == 1


@pytest.mark.parametrize("kind", ["ratio-sweep", "tmo", "oblivious"])
def test_decisions_can_be_started_from(kind):
    """The candidate is the schedule: decoded and simulated again, it takes the same time."""
    problem = CASES["shared-path"]
    candidate = Alone(problem).plan(light(kind)).candidate
    bench = Workbench(problem)
    again = bench.evaluate(candidate.decisions, candidate.coordination, candidate.lookahead_runs)
    assert not isinstance(again, DoesNotFit) and again.step_s == candidate.step_s


def test_oblivious_planning_is_what_it_says():
    """Alone, `oblivious` finds what it finds anyway; with a policy of its own it is no longer coordinated."""
    problem = CASES["shared-path"]
    plain = Oblivious().plan(problem)
    assert Alone(problem).plan(Oblivious()).step_s == plain.step_s
    assert Alone(problem).plan(Oblivious(policy="fcfs", stagger_share=1.0)).step_s == plain.step_s
    assert not Oblivious().coordinates and Oblivious(policy="fcfs").coordinates
    assert Oblivious(stagger_share=0.5).coordinates


def test_earlier_plans_are_seeds_of_later_ones():
    problem = CASES["shared-path"]
    alone = Alone(problem)
    first = alone.plan(light("ratio-sweep"))
    later = alone.plan(light("local-search"))
    (details,) = later.details["alone"].values()
    assert details["start"] == "ratio-sweep"
    assert later.details["alone_step_s"]["gpu0"] <= first.details["alone_step_s"]["gpu0"]


def test_contention_costs_half_of_the_step_on_a_shared_path():
    """Four GPUs, one path, offload only (design: what the physics says): alone 0.82 s, coordinated 0.43 s at K = 8."""
    problem = transformer("prototype-4gpu-12.5", factor=1.33, micro_batches=8,
                          actions=frozenset({Action.OFFLOAD}), spec=SyntheticTransformer())  # fmt: skip
    without = Alone(problem).plan(Oblivious())
    assert without.step_s / 8 == pytest.approx(0.81, abs=0.02)
    assert PLANNERS["budget-milp"]().plan(problem).step_s < 0.6 * without.step_s


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gradient", "cp-sat", "improve", "poet"])
def test_searches_alone(kind):
    problem = CASES["shared-path"]
    alone = Alone(problem)
    alone.plan(light("ratio-sweep"))
    result = alone.plan(light(kind), seed=5)
    if result.schedule is not None:
        assert check(problem, result.schedule).valid
    else:
        assert kind == "poet" and " alone: " in result.message


class _WithEvents(Planner):
    """Of every further GPU the plan of `offload-all` with fewer events of its own."""

    name = "with events"

    def __init__(self):
        self.events = 5

    def plan(self, problem, *, seed=0, seeds=()):
        found = OffloadAll().plan(problem, seed=seed, seeds=seeds)
        assert found.schedule is not None
        self.events -= 1
        more = ListBuilder()
        for event in range(self.events):
            more.wait(event, COMPUTE_STREAM)
        more = more.build()
        signals = ListBuilder()
        row = int(np.flatnonzero(found.schedule.lists[0]["kind"] == Kind.COMPUTE)[0])
        for event in range(self.events):
            signals.signal(event, row)
        rows = np.concatenate([found.schedule.lists[0], signals.build(), more])
        return replace(found, schedule=replace(found.schedule, lists=(rows,)))


def test_events_of_lists_that_differ_stay_apart():
    problem = CASES["uneven"]
    result = Alone(problem).plan(_WithEvents())
    assert result.schedule is not None and len(result.details["alone"]) > 1
    report = check(problem, result.schedule)
    assert report.valid, report.text()
