"""Gurobi behind the solver interface: the same optima, statuses and figures as HiGHS.

Runs where `gurobipy` is installed. Without a licence of one's own it solves up to 2,000 rows and columns, which the
models here keep to.
"""

import importlib.util
import math

import numpy as np
import pytest
from random_steps import random_problem

from tmojax.bounds.highs import INFINITY, LinearModel, SolverStatus
from tmojax.check import check
from tmojax.errors import InputError
from tmojax.ilp.solver import SolverSettings, solve_figures, solve_milp
from tmojax.planners.registry import PLANNERS

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("gurobipy") is None, reason="gurobipy is not installed"),
]
HIGHS = SolverSettings(time_limit_s=60.0, gap=0.0)


@pytest.fixture(scope="module")
def gurobi() -> SolverSettings:
    """Settings; skips where the licence that comes with the package has ended."""
    settings = SolverSettings(time_limit_s=60.0, gap=0.0, solver="gurobi")
    model = LinearModel()
    model.add_columns(1)
    try:
        solve_milp(model, settings)
    except InputError as error:
        pytest.skip(str(error))
    return settings


def random_model(seed: int) -> LinearModel:
    """Mixed, with rows of every kind: equal, at least, at most, between."""
    rng = np.random.default_rng(seed)
    model = LinearModel()
    whole = model.add_columns(8, 0.0, 3.0, cost=rng.integers(-9, 10, 8).astype(float), integer=True)
    real = model.add_columns(4, -2.0, 5.0, cost=rng.integers(-9, 10, 4).astype(float))
    for _ in range(4):
        low = float(rng.integers(-5, 5))
        sides = [(-INFINITY, low + 9), (low, INFINITY), (low, low + 6)]
        model.add_row(*sides[int(rng.integers(3))], (whole, rng.integers(-3, 4, 8).astype(float)),
                      (real, rng.integers(-3, 4, 4).astype(float)))  # fmt: skip
    model.add_row(4.0, 4.0, (real, 1.0))
    return model


@pytest.mark.parametrize("seed", range(12))
def test_the_same_optima_as_highs(gurobi, seed):
    model = random_model(seed)
    ours, theirs = solve_milp(model, HIGHS), solve_milp(model, gurobi)
    assert theirs.status is ours.status
    if ours.status is SolverStatus.OPTIMAL:
        assert theirs.objective == pytest.approx(ours.objective, abs=1e-6)
        assert theirs.bound == pytest.approx(ours.bound, abs=1e-6)
    assert (theirs.rows, theirs.columns, theirs.integer_columns) == (ours.rows, ours.columns, ours.integer_columns)


def test_infeasible_is_a_status(gurobi):
    model = LinearModel()
    columns = model.add_columns(2, integer=True)
    model.add_row(3.0, INFINITY, (columns, 1.0))
    answer = solve_milp(model, gurobi)
    assert answer.status is SolverStatus.INFEASIBLE and not len(answer.values) and answer.bound == INFINITY


def test_figures_name_it(gurobi):
    figures = solve_figures(solve_milp(random_model(0), gurobi), gurobi, unit_s=1.0, build_s=0.0)
    assert figures["solver"].startswith("Gurobi ") and figures["status"] == "optimal"
    assert 0 <= figures["first_incumbent_s"] <= figures["solve_s"]


def test_integer_columns_alone_are_a_start(gurobi):
    model = LinearModel()
    chosen = model.add_columns(3, integer=True)
    error = int(model.add_columns(1, 0.0, 100.0, cost=1.0)[0])
    sizes = np.array([4.0, 5.0, 6.0])
    model.add_row(-10.5, INFINITY, (error, 1.0), (chosen, -sizes))
    model.add_row(10.5, INFINITY, (error, 1.0), (chosen, sizes))
    answer = solve_milp(model, gurobi, start=np.array([1.0, 1.0, 0.0, math.nan]))
    assert answer.objective == pytest.approx(0.5)


def test_a_model_beyond_the_licence_is_told(gurobi):
    model = LinearModel()
    columns = model.add_columns(30_000, cost=-1.0, integer=True)
    model.add_row(-INFINITY, 5.0, (columns, 1.0))
    try:
        answer = solve_milp(model, gurobi)
    except InputError as error:
        assert "'gurobi' failed" in str(error) and "licence" in str(error)
    else:  # a full licence
        assert answer.objective == pytest.approx(-5.0)


@pytest.mark.parametrize("kind", ["lockstep-milp", "budget-milp", "checkmate"])
def test_planners_claim_the_same_as_with_highs(gurobi, kind):
    """Optima of the models, so not only plans that are valid."""
    problem = random_problem(1, factor=1.15)
    limits = {"time_limit_s": 60.0, "gap": 1e-6}
    theirs = PLANNERS[kind](solver="gurobi", **limits).plan(problem)
    ours = PLANNERS[kind](**limits).plan(problem)
    assert theirs.status is ours.status
    for mine, other in zip(ours.details["solves"], theirs.details["solves"], strict=True):
        assert other["solver"].startswith("Gurobi") and other["status"] == mine["status"]
        assert other["claimed_step_s"] == pytest.approx(mine["claimed_step_s"], rel=1e-5)
    if theirs.schedule is not None:
        assert check(problem, theirs.schedule).valid
