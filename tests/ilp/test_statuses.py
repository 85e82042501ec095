"""What every planner with an integer programme says of its solver, and that a time limit is never told as success."""

import json
from dataclasses import replace

import pytest
from planner_cases import light, transformer

from tmojax.importers.synthetic import SyntheticTransformer
from tmojax.planners.base import Status
from tmojax.planners.ilp import IlpPlanner, SelectingPlanner
from tmojax.planners.registry import PLANNERS
from tmojax.planners.time_indexed import TimeIndexedMilp
from tmojax.planners.tmo import TmoMilp
from tmojax.problem import Action

ILP = sorted(kind for kind, planner in PLANNERS.items() if issubclass(planner, IlpPlanner))
DECODED = sorted(k for k in ILP if issubclass(PLANNERS[k], SelectingPlanner | TmoMilp | TimeIndexedMilp))
FIGURES = {
    "claimed_step_s", "model_bound_s", "model_gap", "status", "rows", "columns", "integer_columns", "build_s",
    "solve_s", "first_incumbent_s", "time_limit_s", "gap_limit", "threads", "solver",
}  # fmt: skip
OFFLOAD = frozenset({Action.OFFLOAD})


@pytest.mark.parametrize("kind", ILP)
def test_figures(kind):
    result = light(kind).plan(transformer("prototype-4gpu-12.5", factor=1.2))
    assert result.status.has_plan and result.status is not Status.TIME_LIMIT, result.message
    assert json.loads(json.dumps(dict(result.details), allow_nan=False)) == result.details
    assert result.details["solves"]
    for solve in result.details["solves"]:
        assert solve.keys() >= FIGURES
        assert solve["model_bound_s"] <= solve["claimed_step_s"] * (1 + 1e-6)
        assert solve["rows"] > 0 and solve["columns"] >= solve["integer_columns"] >= 0
        assert solve["time_limit_s"] == light(kind).time_limit_s and solve["solver"].startswith("HiGHS 1.")
        assert solve["first_incumbent_s"] is None or 0 <= solve["first_incumbent_s"] <= solve["solve_s"]


@pytest.mark.parametrize("limit_s", [1e-6, 0.02, 0.3])
@pytest.mark.parametrize("kind", DECODED)
def test_a_time_limit_is_never_success(kind, limit_s):
    spec = SyntheticTransformer(layers=6, compute_s=0.2)
    problem = transformer("prototype-4gpu-12.5", factor=1.6, micro_batches=2, actions=OFFLOAD, spec=spec)
    result = replace(PLANNERS[kind](), time_limit_s=limit_s, gap=0.0).plan(problem)
    solves = result.details.get("solves", ())
    limited = any("time limit" in (solve["status"], solve.get("selection_status")) for solve in solves)
    assert result.time_limited == limited
    if limited:
        assert result.status in (Status.TIME_LIMIT, Status.NOT_FOUND)
    else:
        assert result.status in (Status.FEASIBLE, Status.NOT_FOUND)


@pytest.mark.parametrize("kind", ILP)
def test_nobody_claims_a_proof_that_it_has_not(kind):
    """None of these models admits every schedule, so an infeasible model is no proof."""
    assert not PLANNERS[kind].model_is_relaxation
    result = light(kind).plan(transformer("prototype-4gpu-12.5", factor=20.0))
    assert result.status is Status.NOT_FOUND and result.message
