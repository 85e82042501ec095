import pytest
from small_plans import VALID

from tmojax.check import check


@pytest.mark.parametrize("name", VALID)
def test_valid_plans_are_valid(name):
    plan = VALID[name]
    report = check(plan.problem, plan.schedule())
    assert report.valid, report.text()
