"""The time-indexed MILP: right where memory is no matter, too good to be true where it is, and its plans are valid."""

import pytest
from chains import chain

from tmojax.bounds import bound
from tmojax.check import check
from tmojax.errors import InputError
from tmojax.planners.base import Status
from tmojax.planners.time_indexed import TimeIndexedMilp
from tmojax.problem import Action

BOTH = (Action.OFFLOAD, Action.RECOMPUTE)


def test_with_enough_memory_the_claim_is_the_simulated_time():
    """No tensor has to leave: buckets of compute add up to the step, in any number of them."""
    problem = chain(2, 5, factor=1.0, seconds=(1.0, 0.5))
    for buckets in (1, 7):
        result = TimeIndexedMilp(buckets=buckets, gap=0.0).plan(problem)
        (solve,) = result.details["solves"]
        assert solve["claimed_step_s"] == pytest.approx(result.step_s, rel=1e-6)


def test_fractions_average_memory_away():
    """Two GPUs that must send more than half of their activations over a slow path: fractional progress claims that
    nothing takes any time, below what is proved for every schedule. Whole steps claim no less than is proved."""
    problem = chain(2, 4, factor=1.6, rate=20.0)
    proved_s = bound(problem).bound_s
    result = TimeIndexedMilp(gap=0.0).plan(problem)
    (solve,) = result.details["solves"]
    assert solve["status"] == "optimal" and solve["claimed_step_s"] < 0.9 * proved_s
    assert result.status is Status.FEASIBLE and result.step_s >= proved_s * (1 - 1e-6)
    assert check(problem, result.schedule).valid
    whole = TimeIndexedMilp(whole_steps=True, gap=1e9).plan(problem)  # any solution does
    assert whole.details["solves"][0]["claimed_step_s"] > solve["claimed_step_s"]
    assert whole.details["solves"][0]["integer_columns"] > solve["integer_columns"]


@pytest.mark.parametrize("actions", [BOTH, (Action.RECOMPUTE,), (Action.OFFLOAD,)])
def test_actions(actions):
    problem = chain(2, 6, factor=1.5, actions=actions, micro_batches=2)
    result = TimeIndexedMilp(buckets=10).plan(problem)
    assert result.status.has_plan, result.message
    assert check(problem, result.schedule).valid


def test_a_limit_that_leaves_nothing_is_told():
    result = TimeIndexedMilp(time_limit_s=1e-9).plan(chain(2, 4, factor=1.6))
    assert result.status is not Status.INFEASIBLE
    if not result.status.has_plan:
        assert "time limit" in result.message and result.time_limited


def test_settings_out_of_range():
    with pytest.raises(InputError, match="buckets: 0"):
        TimeIndexedMilp(buckets=0)
