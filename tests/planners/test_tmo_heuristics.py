"""TMO's two mechanisms: who contends, how tensors are dealt out, and what ordering and dealing are worth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import BOTH, cases, transformer

from tmojax.check import check
from tmojax.errors import InputError
from tmojax.importers.machine_build import load_machine
from tmojax.importers.synthetic import SyntheticTransformer
from tmojax.planners.base import Status
from tmojax.planners.fluid import Oblivious
from tmojax.planners.tmo_heuristics import Tmo, TmoDisjoint, TmoOrdered, contending_groups, deal
from tmojax.planners.workbench import Workbench
from tmojax.problem import Action, Kind, LinkPolicyKind

OFFLOAD = frozenset({Action.OFFLOAD})
EVERY = [TmoDisjoint, TmoOrdered, Tmo]
DUAL = transformer("dual-socket-v100x4", factor=1.33, micro_batches=4, actions=OFFLOAD,
                   spec=SyntheticTransformer(layers=6, parameters=10**7))  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "groups"),
    [
        ("dual-socket-v100x4", [[0, 1], [2, 3]]),  # two GPUs behind each uplink
        ("prototype-4gpu-12.5", [[0, 1, 2, 3]]),
        ("gh200", [[0]]),
    ],
)
def test_who_contends(preset, groups):
    assert contending_groups(load_machine(preset)) == groups


@given(
    members=st.integers(1, 5),
    eighths=st.integers(8, 40),
    block_share=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    case=st.sampled_from(sorted(cases())),
)
def test_every_tensor_is_dealt_and_none_more_often_than_asked(members, eighths, block_share, case):
    problem = cases()[case]
    view = Workbench(problem).view(0)
    movers = min(eighths / 8, members)
    sets = deal(view, members, movers, block_share)
    pool = view.needed & view.may_offload
    times = sets.sum(axis=0)
    assert not times[~pool].any()
    assert set(times[pool].tolist()) <= {int(movers), int(np.ceil(movers))}
    if movers == members:
        assert (times[pool] == members).all()
    if movers == 1 and block_share == 0 and pool.any():
        # Nobody is ahead by more than the largest tensor.
        shares = sets @ view.size_bytes
        assert shares.max() - shares.min() <= view.size_bytes[pool].max()


def moved(problem, schedule, device):
    rows = schedule.lists[device]
    return set(rows["tensor"][rows["kind"] == Kind.OFFLOAD].tolist())


def test_gpus_on_one_uplink_swap_disjoint_sets():
    result = TmoDisjoint().plan(DUAL)
    assert result.status is Status.FEASIBLE and result.details["movers"] == 1
    sets = [moved(DUAL, result.schedule, device) for device in range(4)]
    assert all(sets) and not sets[0] & sets[1] and not sets[2] & sets[3]
    # The other socket has a path of its own and swaps the same.
    assert sets[0] == sets[2] and sets[1] == sets[3]
    assert {policy.kind for policy in result.schedule.link_policies} == {LinkPolicyKind.FAIR}


def test_sets_overlap_only_where_memory_is_too_short():
    """At three times too little, half of what may leave is not enough for a GPU."""
    problem = DUAL.with_device_capacity(DUAL.capacity_bytes(0) * 133 // 300)
    result = TmoDisjoint().plan(problem)
    assert result.status.has_plan and 1 < result.details["movers"] <= 2
    assert moved(problem, result.schedule, 0) & moved(problem, result.schedule, 1)


def test_ordered_commands_move_what_the_oblivious_plan_moves():
    oblivious = Oblivious().plan(DUAL)
    ordered = TmoOrdered().plan(DUAL, seeds=(oblivious,))
    assert ordered.details["selection_from"] == oblivious.planner
    for a, b in zip(oblivious.schedule.lists, ordered.schedule.lists, strict=True):
        assert np.array_equal(a, b)
    assert ordered.details["policy"] in ("fcfs", "priority", "order")
    assert {policy.kind for policy in ordered.schedule.link_policies} == {
        LinkPolicyKind.FAIR,
        ordered.details["policy"],
    }
    # Others take no selection over that was made for other actions.
    assert "oblivious_selection" not in ordered.details


def test_a_selection_with_recomputation_is_not_taken_over():
    problem = transformer("prototype-4gpu-12.5", factor=1.3, actions=BOTH)
    mixed = Oblivious().plan(problem)
    ordered = TmoOrdered().plan(problem, seeds=(mixed,))
    assert "selection_from" not in ordered.details
    for device, rows in enumerate(ordered.schedule.lists):
        program = problem.workload.program(device)
        expected = [run for run in problem.workload.sequence(device) if not program.ops[run[0]].collective]
        assert sum(rows["kind"] == Kind.COMPUTE) == len(expected)


def test_both_mechanisms_beat_oblivious_planning_on_a_shared_path():
    """Eight micro-batches on one path for four GPUs: half of the time is contention (design: what the physics says)."""
    problem = transformer("prototype-4gpu-12.5", factor=1.33, micro_batches=8, actions=OFFLOAD,
                          spec=SyntheticTransformer())  # fmt: skip
    oblivious = Oblivious().plan(problem)
    times = {planner: planner().plan(problem, seeds=(oblivious,)).step_s for planner in EVERY}
    assert max(times.values()) < oblivious.step_s / 1.2
    assert times[Tmo] < times[TmoDisjoint]


@pytest.mark.parametrize("planner", EVERY)
@pytest.mark.parametrize("case", sorted(cases()))
def test_only_offload_is_used(planner, case):
    problem = cases()[case]
    result = planner().plan(problem)
    assert planner().actions(problem) == problem.actions & OFFLOAD
    if Action.OFFLOAD not in problem.actions:
        assert result.message == "needs action 'offload', which the problem does not allow"
    if result.schedule is not None:
        assert check(problem, result.schedule).valid
        for device, rows in enumerate(result.schedule.lists):
            program = problem.workload.program(device)
            expected = [run for run in problem.workload.sequence(device) if not program.ops[run[0]].collective]
            assert sum(rows["kind"] == Kind.COMPUTE) == len(expected)


@pytest.mark.parametrize("shares", [(), (1.5,), (0.0, -0.1)])
def test_block_shares_out_of_range(shares):
    with pytest.raises(InputError, match="block_shares"):
        TmoDisjoint(block_shares=shares)
