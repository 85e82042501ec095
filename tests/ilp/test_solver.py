"""The one solver interface: knapsacks with known optima, starts, statuses, what is reported, what is refused."""

import importlib.util
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tmojax.bounds.highs import INFINITY, LinearModel, SolverStatus
from tmojax.errors import InputError
from tmojax.ilp.solver import SolverSettings, solve_figures, solve_milp
from tmojax.planners.registry import PLANNERS

EXACT = SolverSettings(time_limit_s=60.0, gap=0.0)


def knapsack(values, weights, limit) -> LinearModel:
    model = LinearModel()
    columns = model.add_columns(len(values), cost=-np.asarray(values, float), integer=True)
    model.add_row(-INFINITY, limit, (columns, np.asarray(weights, float)))
    return model


def hard(count=60, rows=30) -> LinearModel:
    """Many dense knapsack rows: HiGHS finds solutions at once and proves nothing for long."""
    rng = np.random.default_rng(0)
    model = LinearModel()
    columns = model.add_columns(count, cost=-rng.integers(1, 100, count).astype(float), integer=True)
    for _ in range(rows):
        weights = rng.integers(0, 50, count).astype(float)
        model.add_row(-INFINITY, 0.4 * weights.sum(), (columns, weights))
    return model


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=8), st.integers(0, 60))
def test_small_knapsacks_against_enumeration(items, limit):
    values, weights = (np.array(part) for part in zip(*items, strict=True))
    masks = (np.arange(2 ** len(items))[:, None] >> np.arange(len(items))) & 1
    best = int((masks @ values)[masks @ weights <= limit].max())
    answer = solve_milp(knapsack(values, weights, limit), EXACT)
    assert answer.status is SolverStatus.OPTIMAL
    assert answer.objective == pytest.approx(-best) and answer.bound == pytest.approx(-best)
    assert answer.integer_columns == len(items)
    assert 0 <= answer.first_incumbent_s <= answer.solve_s


def test_infeasible_is_a_status():
    model = LinearModel()
    columns = model.add_columns(2, integer=True)
    model.add_row(3.0, INFINITY, (columns, 1.0))
    answer = solve_milp(model, EXACT)
    assert answer.status is SolverStatus.INFEASIBLE and not len(answer.values)
    figures = solve_figures(answer, EXACT, unit_s=1.0, build_s=0.0)
    assert figures["claimed_step_s"] is None and figures["model_gap"] is None and figures["first_incumbent_s"] is None


def test_a_limit_before_the_end_is_told_and_its_bound_holds():
    model = hard()
    cut = solve_milp(model, SolverSettings(time_limit_s=0.3, gap=0.0))
    assert cut.status is SolverStatus.TIME_LIMIT or cut.gap <= 1e-6
    if len(cut.values):
        assert cut.bound <= cut.objective and cut.first_incumbent_s <= cut.solve_s


def test_a_complete_start_is_the_first_incumbent():
    model = hard()
    known = solve_milp(model, SolverSettings(time_limit_s=60.0, gap=0.05))
    again = solve_milp(model, SolverSettings(time_limit_s=60.0, gap=0.5), start=known.values)
    assert again.objective <= known.objective + 1e-6
    assert solve_milp(model, SolverSettings(time_limit_s=60.0, gap=0.5)).objective > again.objective


def test_integer_columns_alone_are_a_start():
    """Minimise |sum - 10.5| of chosen numbers: the continuous column follows from the choice."""
    model = LinearModel()
    chosen = model.add_columns(3, integer=True)
    error = int(model.add_columns(1, 0.0, 100.0, cost=1.0)[0])
    sizes = np.array([4.0, 5.0, 6.0])
    model.add_row(-10.5, INFINITY, (error, 1.0), (chosen, -sizes))
    model.add_row(10.5, INFINITY, (error, 1.0), (chosen, sizes))
    answer = solve_milp(model, EXACT, start=np.array([1.0, 1.0, 0.0, math.nan]))
    assert answer.objective == pytest.approx(0.5)


def test_figures_name_solver_limit_and_size():
    answer = solve_milp(knapsack([3, 4], [1, 2], 2), EXACT)
    figures = solve_figures(answer, EXACT, unit_s=0.5, build_s=0.25)
    assert figures["claimed_step_s"] == pytest.approx(-2.0) and figures["model_bound_s"] == pytest.approx(-2.0)
    assert figures["solver"].startswith("HiGHS 1.") and figures["threads"] == 1 and figures["time_limit_s"] == 60.0
    assert (figures["rows"], figures["columns"], figures["integer_columns"]) == (1, 2, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("time_limit_s", 0.0), ("time_limit_s", math.inf), ("gap", -1e-3), ("gap", math.nan), ("threads", 0),
     ("threads", 1000), ("solver", "cplex")],
)  # fmt: skip
def test_settings_out_of_range(field, value):
    with pytest.raises(InputError, match=f"{field}: .*{value}"):
        SolverSettings(**{field: value})


@pytest.mark.skipif(importlib.util.find_spec("gurobipy") is not None, reason="Gurobi is installed")
def test_a_missing_gurobi_is_told_with_the_remedy():
    with pytest.raises(InputError, match="'gurobi' is not installed; `pip install gurobipy`"):
        SolverSettings(solver="gurobi")
    with pytest.raises(InputError, match="'gurobi' is not installed"):
        PLANNERS["lockstep-milp"](solver="gurobi")
