"""The TMO-type MILP: what it claims is what the simulator measures where its assumptions hold, disjoint sets, turns."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from chains import chain
from hypothesis import given, settings
from hypothesis import strategies as st

from tmojax.bounds import bound
from tmojax.check import check
from tmojax.errors import InputError
from tmojax.ilp.steps import group_candidates, steps_between, worst_bytes
from tmojax.importers.machine_build import load_machine
from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
from tmojax.planners.base import Status
from tmojax.planners.local_search import SearchSettings
from tmojax.planners.registry import PLANNERS
from tmojax.planners.tmo import TmoMilp
from tmojax.problem import Action, Kind, LinkPolicyKind, Problem, keep_all_footprint_bytes
from tmojax.problem.step_view import view_step
from tmojax.simulate import simulate

EXACT = TmoMilp(groups=1000, gap=0.0, time_limit_s=60.0)
CHAINS = {
    "one GPU": chain(1, 6, factor=1.6, sizes=(40, 25, 60), rate=20.0),
    "two, disjoint": chain(2, 6, factor=1.3, sizes=(40, 25, 60), rate=20.0),
    "two, tight": chain(2, 6, factor=1.6, rate=20.0),
    "two, half-duplex": chain(2, 4, factor=1.6, rate=20.0, half_duplex=True),
    "three": chain(3, 6, factor=1.3, sizes=(40, 25, 60), rate=20.0),
    "three, tight": chain(3, 4, factor=1.6, sizes=(40, 25, 60), rate=20.0),
}


@pytest.mark.parametrize("name", CHAINS)
def test_the_claim_is_the_simulated_time(name):
    """One tensor in every group, every op a step of its own, one micro-batch, no set-up or latency: then the decode in
    the order of the model does what the model says. The tolerance is that of the solver's constraints, 1e-6."""
    result = EXACT.plan(CHAINS[name])
    (solve,) = result.details["solves"]
    assert result.status is Status.FEASIBLE and solve["status"] == "optimal"
    assert solve["most_tensors_in_a_group"] == 1 and not result.details["repaired"]
    assert result.details["model_order_step_s"] == pytest.approx(solve["claimed_step_s"], rel=1e-6)
    assert result.step_s <= result.details["model_order_step_s"]
    assert check(CHAINS[name], result.schedule).valid
    assert result.step_s >= bound(CHAINS[name]).bound_s * (1 - 1e-6)


@settings(max_examples=6, deadline=None)
@given(
    st.integers(1, 3), st.lists(st.integers(5, 80), min_size=2, max_size=4),
    st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.75]), min_size=1, max_size=3), st.sampled_from([1.2, 1.4, 1.6]),
    st.sampled_from([15.0, 40.0, 120.0]), st.booleans(),
)  # fmt: skip
def test_on_random_chains(gpus, sizes, seconds, factor, rate, half_duplex):
    problem = chain(gpus, 4, factor=factor, sizes=sizes, seconds=seconds, rate=rate, half_duplex=half_duplex)
    result = TmoMilp(groups=1000, gap=0.0, time_limit_s=1.0).plan(problem)
    if not result.status.has_plan:
        return
    assert check(problem, result.schedule).valid
    (solve,) = result.details["solves"]
    claimed_s, ordered_s = solve["claimed_step_s"], result.details["model_order_step_s"]
    assert ordered_s <= claimed_s * (1 + 1e-6)
    if solve["status"] == "optimal":
        assert ordered_s == pytest.approx(claimed_s, rel=1e-6)


def moved(problem: Problem, schedule) -> list[set[int]]:
    return [set(rows["tensor"][rows["kind"] == Kind.OFFLOAD].tolist()) for rows in schedule.lists]


def test_others_go_on_from_its_plans():
    """Whether or not an order won: local search finds a start, a warm start reads the schedule."""
    for name in ("three", "two, tight"):
        result = EXACT.plan(CHAINS[name])
        assert result.candidate is not None and result.candidate.schedule is result.schedule
        earlier = (PLANNERS["offload-all"]().plan(CHAINS[name]), result)
        search = replace(PLANNERS["local-search"](), search=SearchSettings(evaluations=20))
        assert search.plan(CHAINS[name], seeds=earlier).status.has_plan
        warm = PLANNERS["lockstep-milp"](warm_start=True).plan(CHAINS[name], seeds=earlier)
        assert warm.details["warm_start_from"] == "tmo-milp"


def test_sets_are_disjoint_where_memory_allows():
    problem = CHAINS["two, disjoint"]
    result = EXACT.plan(problem)
    assert result.details["solves"][0]["sharing"] == 1
    first, second = moved(problem, result.schedule)
    assert first and second and not first & second


def test_tight_memory_is_shared_by_as_few_as_possible():
    result = EXACT.plan(CHAINS["two, tight"])
    assert result.details["solves"][0]["sharing"] == 2  # each GPU has to send more than half of the activations
    free = TmoMilp(groups=1000, gap=0.0, disjoint=False).plan(CHAINS["two, disjoint"])
    assert free.details["solves"][0]["sharing"] == 2


def test_transfers_take_turns_on_the_shared_path():
    problem = CHAINS["three"]
    result = EXACT.plan(problem)
    assert LinkPolicyKind.ORDER in {policy.kind for policy in result.schedule.link_policies}
    times = simulate(problem, result.schedule)
    for kind in (Kind.OFFLOAD, Kind.PREFETCH):
        spans = sorted(
            (float(times.transfer_start_s[d][i]), float(times.end_s[d][i]))
            for d, rows in enumerate(result.schedule.lists) for i in np.flatnonzero(rows["kind"] == kind)
        )  # fmt: skip
        assert len(spans) > 2
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans))


@pytest.mark.parametrize("preset", ["prototype-4gpu-12.5", "dual-socket-v100x4", "uneven-risers-x6"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_layers_on_presets(preset, micro_batches):
    machine = load_machine(preset)
    workload = synthetic_transformer(SyntheticTransformer(layers=4), len(machine.devices), micro_batches)
    problem = Problem("transformer", workload, machine, frozenset({Action.OFFLOAD}))
    problem = problem.with_device_capacity(int(keep_all_footprint_bytes(workload, 0) / 1.33))
    result = TmoMilp(groups=4, gap=1.0, time_limit_s=30.0).plan(problem)
    (solve,) = result.details["solves"]
    assert result.status.has_plan and solve["groups"] <= 4 and solve["most_tensors_in_a_group"] > 1
    assert solve["first_incumbent_s"] is not None and solve["model_bound_s"] <= solve["claimed_step_s"] * (1 + 1e-6)
    assert check(problem, result.schedule).valid


def test_groups_keep_layers_together():
    problem = chain(1, 9, factor=1.5)
    view = view_step(problem, 0)
    movable = view.needed & view.may_offload
    alone = group_candidates(problem, view, movable, 100)
    assert [len(members) for members in alone.members] == [1] * int(movable.sum()) and not alone.merged
    few = group_candidates(problem, view, movable, 3)
    assert len(few.members) == 3 and few.merged
    assert sorted(np.concatenate(few.members).tolist()) == np.flatnonzero(movable).tolist()
    assert (few.idle_to - few.idle_from > 1).all() and (np.diff(few.written) >= 0).all()
    assert few.size_bytes.sum() == view.size_bytes[movable].sum()


def test_worst_bytes_of_steps():
    problem = chain(2, 5, factor=1.5)
    view = view_step(problem, 0)
    nowhere = np.zeros(len(view.tensor), np.int64)
    every = steps_between(len(view.slot_s), range(len(view.slot_s)))
    assert np.array_equal(worst_bytes(view, every, nowhere, nowhere), view.keep_bytes)
    begin, stop = every.whole(view.idle_from, view.idle_to)
    assert np.array_equal(worst_bytes(view, every, begin, np.where(view.needed, stop, begin)), view.base_bytes)
    halves = steps_between(len(view.slot_s), [5])
    worst = worst_bytes(view, halves, nowhere, nowhere).tolist()
    assert worst == [view.keep_bytes[:5].max(), view.keep_bytes[5:].max()]


def test_without_offload_or_memory():
    only = TmoMilp().plan(chain(2, 4, factor=1.2, actions=(Action.RECOMPUTE,)))
    assert only.status is Status.NOT_FOUND and "needs action 'offload'" in only.message
    nothing = TmoMilp().plan(chain(2, 6, factor=5.0))
    assert nothing.status is Status.NOT_FOUND and "no solution in this memory" in nothing.message
    with pytest.raises(InputError, match="groups: 0"):
        TmoMilp(groups=0)
