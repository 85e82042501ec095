"""Checkmate's programme: against every plan of tiny graphs."""

import numpy as np
import pytest
from stage_graphs import every_plan, peak_bytes, random_graph

from tmojax.bounds.highs import SolverStatus
from tmojax.ilp.checkmate_model import checkmate_model, read_plan, unit_s


@pytest.mark.parametrize("two_outputs", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_least_compute_of_every_plan(seed, two_outputs):
    """For every capacity between two memory peaks: the programme finds what trying everything finds."""
    graph = random_graph(seed, 4, two_outputs=two_outputs)
    best: dict[int, float] = {}
    for plan in every_plan(graph):
        peak = peak_bytes(graph, plan)
        if peak is not None:
            best[peak] = min(best.get(peak, np.inf), plan.compute_s(graph))
    least = min(best)
    for capacity in sorted({least - 1, *best}):
        expected = min((seconds for peak, seconds in best.items() if peak <= capacity), default=None)
        model, columns = checkmate_model(graph, capacity)
        answer = model.solve(time_limit_s=20, gap=0.0)
        if expected is None:
            assert answer.status is SolverStatus.INFEASIBLE
            continue
        assert answer.status is SolverStatus.OPTIMAL
        assert answer.objective * unit_s(graph) == pytest.approx(expected)
        plan = read_plan(graph, columns, answer.values)
        assert plan.compute_s(graph) == pytest.approx(expected)
        peak = peak_bytes(graph, plan)
        assert peak is not None and peak <= capacity
