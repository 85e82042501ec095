"""Plans that follow an offered order of micro-batches run, with the same numbers."""

from dataclasses import replace

import pytest
from steps import identical, largest_difference, perceptron, plan, planned

from tmojax.check import check
from tmojax.importers.micro_batch_orders import BreadthFirst, offer_orders
from tmojax.planners.registry import PLANNERS
from tmojax.problem.in_order import in_order


@pytest.mark.parametrize("name", ["offload-all", "recompute-all"])
def test_breadth_first_gives_the_bits_of_the_default_order(name):
    case = perceptron()
    problem = case.problem(2.0)
    kept = planned(case, problem, plan(problem, "keep-all"))
    expected = kept.step(case.batches(), gradients=True)
    problem = replace(problem, workload=offer_orders(problem.workload, (BreadthFirst(),)))
    written = in_order(problem, "breadth-first")
    schedule = PLANNERS[name]().plan(written.problem).schedule
    assert schedule is not None
    schedule = written.back(schedule)
    assert check(problem, schedule).valid
    step = planned(case, problem, schedule)
    found = step.step(case.batches(), gradients=True)
    assert all(identical(found.gradients[device], expected.gradients[0]) for device in range(4))
    assert found.loss == expected.loss and identical(step.state(), kept.state())
    joined = planned(case, problem, schedule, "joined")
    joined.step(case.batches())
    assert largest_difference(joined.state()[:2], kept.state()[:2]) < 2e-5
    assert len(joined.segments[0]) < len(step.segments[0])
