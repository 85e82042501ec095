"""POET's programme: against every plan of tiny graphs."""

from dataclasses import replace

import numpy as np
import pytest
from stage_graphs import every_plan, peak_bytes, random_graph

from tmojax.bounds.highs import SolverStatus
from tmojax.ilp.checkmate_model import unit_s
from tmojax.ilp.poet_model import Paging, poet_model, read_paging_plan, stage_periods_s

PAGING = (Paging(2.0, 3.0, out_copy_s=0.5), Paging(1.0, 1.0, joint_bytes_per_s=1.5), Paging(0.25, 0.25))


@pytest.mark.parametrize("paging", PAGING, ids=["full duplex", "half duplex", "slow"])
@pytest.mark.parametrize(("seed", "stages", "rerun"), [(0, 4, False), (5, 4, False), (2, 3, True), (3, 3, True)])
def test_least_time_of_every_plan(seed, stages, rerun, paging):
    """For every capacity between two memory peaks: the programme finds what trying everything finds."""
    graph = random_graph(seed, stages)
    graph = replace(graph, may_rerun=graph.may_rerun & rerun)
    best: dict[int, float] = {}
    for plan in every_plan(graph, paging=True):
        peak = peak_bytes(graph, plan)
        if peak is not None:
            best[peak] = min(best.get(peak, np.inf), float(stage_periods_s(graph, plan, paging).sum()))
    least = min(best)
    for capacity in sorted({least - 1, *best}):
        expected = min((seconds for peak, seconds in best.items() if peak <= capacity), default=None)
        model, columns = poet_model(graph, capacity, paging)
        answer = model.solve(time_limit_s=20, gap=0.0)
        if expected is None:
            assert answer.status is SolverStatus.INFEASIBLE
            continue
        assert answer.status is SolverStatus.OPTIMAL
        assert answer.objective * unit_s(graph) == pytest.approx(expected)
        plan = read_paging_plan(graph, columns, answer.values)
        assert stage_periods_s(graph, plan, paging).sum() == pytest.approx(expected)
        peak = peak_bytes(graph, plan)
        assert peak is not None and peak <= capacity
