"""The fluid models claim what the simulator measures where their assumptions hold: lock-step, copies as fluids."""

import pytest
from chains import chain

from tmojax.planners.fluid import BudgetMilp, LockstepMilp
from tmojax.problem import Action

BOTH = (Action.OFFLOAD, Action.RECOMPUTE)
SHARE = 50.0  # bytes per second and GPU


def fine_chain(gpus: int, layers: int, share: float, actions):
    """The same bytes and seconds in any number of layers: 4800 bytes, 24 s forward, 48 s backward a GPU; each slot is
    a fluid step, and no tensor is small."""
    return chain(gpus, layers, factor=1.5, sizes=(4800 // layers,), seconds=(24 / layers,), rate=share * gpus,
                 actions=actions)  # fmt: skip


def claim_and_time(planner, problem) -> tuple[float, float]:
    result = planner(gap=0.0, time_limit_s=60.0).plan(problem)
    (solve,) = result.details["solves"]
    assert solve["status"] == "optimal" and solve["fixed_candidates"] == 0
    assert solve["fluid_steps"] == len(problem.workload.programs[0].ops)
    return solve["claimed_step_s"], result.step_s


@pytest.mark.parametrize("actions", [(Action.OFFLOAD,), BOTH])
@pytest.mark.parametrize("gpus", [1, 4])
def test_lock_step_claims_the_simulated_time(gpus, actions):
    """GPUs that are equal and start together under fair sharing do stay in lock-step. A fluid may use the bytes of a
    tensor that has crossed in part, a schedule has to wait for the whole tensor: so the claim is below the simulated
    time, by one copy at the share of the link at most, and the finer the tensors the less."""
    before = float("inf")
    for layers in (6, 12, 24):
        claimed_s, step_s = claim_and_time(LockstepMilp, fine_chain(gpus, layers, SHARE, actions))
        copy_s = 4800 / layers / SHARE
        assert -1e-6 <= step_s - claimed_s <= copy_s
        assert step_s - claimed_s < before
        before = step_s - claimed_s
    assert before < 0.03 * step_s


@pytest.mark.parametrize("planner", [LockstepMilp, BudgetMilp])
@pytest.mark.parametrize("gpus", [1, 4])
def test_claims_are_exact_where_copies_hide(planner, gpus):
    claimed_s, step_s = claim_and_time(planner, fine_chain(gpus, 12, 4 * SHARE, (Action.OFFLOAD,)))
    assert step_s == pytest.approx(claimed_s, rel=1e-6)


def test_the_budget_of_one_gpu_is_lock_step():
    """Alone, the whole rate is its share. With others the budget only adds up bytes: it claims less than any order of
    the copies reaches, which is why its selection is swept over policies and staggers."""
    alone = fine_chain(1, 12, SHARE, (Action.OFFLOAD,))
    assert claim_and_time(BudgetMilp, alone) == pytest.approx(claim_and_time(LockstepMilp, alone), rel=1e-6)
    claimed_s, step_s = claim_and_time(BudgetMilp, fine_chain(4, 12, SHARE, (Action.OFFLOAD,)))
    assert claimed_s < 0.9 * step_s
