"""One way to solve a MILP: HiGHS, or Gurobi where it is installed and asked for by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tmojax.bounds.highs import Answer, LinearModel, solver_version
from tmojax.errors import InputError
from tmojax.ilp.gurobi import gurobi_version, require_gurobi, solve_with_gurobi

SOLVERS = ("highs", "gurobi")
MOST_THREADS = 256  # HiGHS ends the process when it cannot start as many as it is told


@dataclass(frozen=True)
class SolverSettings:
    """time_limit_s of one solve; gap: relative, at which it stops; threads; solver: `highs` or `gurobi`.

    Raises InputError for values out of range, and for Gurobi where it is not installed.
    """

    time_limit_s: float = 12.0
    gap: float = 5e-3
    threads: int = 1
    solver: str = "highs"

    def __post_init__(self) -> None:
        if not 0 < self.time_limit_s < math.inf:
            raise InputError(f"time_limit_s: {self.time_limit_s} must be positive and finite")
        if not 0 <= self.gap < math.inf:
            raise InputError(f"gap: {self.gap} must be finite and not negative")
        if not 1 <= self.threads <= MOST_THREADS:
            raise InputError(f"threads: {self.threads} must be between 1 and {MOST_THREADS}")
        if self.solver not in SOLVERS:
            raise InputError(f"solver: {self.solver!r} is unknown; choose one of {', '.join(SOLVERS)}")
        if self.solver == "gurobi":
            require_gurobi()

    def version(self) -> str:
        """Name and version of the solver."""
        return gurobi_version() if self.solver == "gurobi" else solver_version()


def solve_milp(model: LinearModel, settings: SolverSettings, start: np.ndarray | None = None) -> Answer:
    """Minimise. `start` [columns]: values of an incumbent, nan where the solver is to find them."""
    if settings.solver == "gurobi":
        return solve_with_gurobi(model, settings.time_limit_s, settings.gap, settings.threads, start)
    return model.solve(time_limit_s=settings.time_limit_s, threads=settings.threads, gap=settings.gap, start=start)


def solve_figures(answer: Answer, settings: SolverSettings, *, unit_s: float, build_s: float) -> dict[str, Any]:
    """What every planner reports of a solve, as JSON values (None where there is no such number).

    claimed_step_s: objective of the incumbent, in the model; model_bound_s: proved for the model, which is no bound of
    the problem unless the planner says so; unit_s: seconds per unit of the objective.
    """

    def finite(value: float) -> float | None:
        return float(value) if math.isfinite(value) else None

    return {
        "claimed_step_s": finite(answer.objective * unit_s),
        "model_bound_s": finite(answer.bound * unit_s),
        "model_gap": finite(answer.gap),
        "status": answer.status.value,
        "rows": answer.rows,
        "columns": answer.columns,
        "integer_columns": answer.integer_columns,
        "build_s": build_s,
        "solve_s": answer.solve_s,
        "first_incumbent_s": finite(answer.first_incumbent_s),
        "time_limit_s": settings.time_limit_s,
        "gap_limit": settings.gap,
        "threads": settings.threads,
        "solver": settings.version(),
    }
