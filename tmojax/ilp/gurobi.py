"""Gurobi behind the same model and answer as HiGHS.

Gurobi is commercial and no dependency of the package. The licence that comes with `gurobipy` solves models of up to
2,000 rows and columns; the tests use it where it is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from typing import Any

import numpy as np
from scipy.sparse import csc_array

from tmojax.bounds.highs import Answer, LinearModel, SolverStatus
from tmojax.errors import InputError


def require_gurobi() -> None:
    """Raises InputError, with the remedy, when Gurobi is not installed. Does not import it."""
    if importlib.util.find_spec("gurobipy") is None:
        raise InputError("solver: 'gurobi' is not installed; `pip install gurobipy` with a licence, or use 'highs'")


def _gurobi() -> Any:
    require_gurobi()
    return importlib.import_module("gurobipy")


def gurobi_version() -> str:
    """Name and version."""
    return "Gurobi " + ".".join(str(part) for part in _gurobi().gurobi.version())


def solve_with_gurobi(
    model: LinearModel, time_limit_s: float, gap: float, threads: int, start: np.ndarray | None
) -> Answer:
    """Minimise `model`; arguments and result as of `LinearModel.solve`. Raises InputError without Gurobi or licence."""
    gurobi = _gurobi()
    code = gurobi.GRB
    lower, upper, cost, integer = model.column_arrays()
    row_lower, row_upper = model.row_bounds()
    starts, rows, values = model.entries()
    matrix = csc_array((values, rows, starts), shape=(model.rows, model.columns)).tocsr()
    incumbents_s: list[float] = []
    try:
        with gurobi.Env(params={"OutputFlag": 0}) as env, gurobi.Model(env=env) as built:
            kinds = np.where(integer, code.INTEGER, code.CONTINUOUS)
            x = built.addMVar(model.columns, lb=lower, ub=upper, obj=cost, vtype=kinds)
            equal = row_lower == row_upper
            for chosen, sense, side in (
                (equal, "=", row_lower), (~equal & np.isfinite(row_lower), ">", row_lower),
                (~equal & np.isfinite(row_upper), "<", row_upper),
            ):  # fmt: skip
                if chosen.any():
                    built.addMConstr(matrix[chosen], x, sense, side[chosen])
            for name, value in (("TimeLimit", time_limit_s), ("MIPGap", gap), ("Threads", threads), ("Seed", 0)):
                built.setParam(name, value)
            if start is not None:
                x.Start = np.where(np.isfinite(start), start, code.UNDEFINED)

            def watch(running: Any, where: int) -> None:
                if where == code.Callback.MIPSOL:
                    incumbents_s.append(running.cbGet(code.Callback.RUNTIME))

            clock = time.perf_counter()
            built.optimize(watch)
            solve_s = time.perf_counter() - clock
            found, ended = built.SolCount > 0, built.Status
            point = np.array(x.X) if found else np.zeros(0)
            bound = float(built.ObjBound)
    except gurobi.GurobiError as error:
        raise InputError(f"solver: 'gurobi' failed ({error}); check its licence, or use 'highs'") from error
    objective = float(cost @ point) if found else float("inf")
    status = {code.OPTIMAL: SolverStatus.OPTIMAL, code.TIME_LIMIT: SolverStatus.TIME_LIMIT,
              code.INFEASIBLE: SolverStatus.INFEASIBLE}.get(ended, SolverStatus.FAILED)  # fmt: skip
    relative = abs(objective - bound) / max(abs(objective), 1e-12) if found else float("inf")
    if status is SolverStatus.OPTIMAL and relative > 1e-6:
        status = SolverStatus.GAP_REACHED
    return Answer(
        status, point, objective, float("inf") if status is SolverStatus.INFEASIBLE else bound, relative, solve_s,
        model.rows, model.columns, np.zeros(0), int(integer.sum()), min(incumbents_s, default=float("inf")),
    )  # fmt: skip
