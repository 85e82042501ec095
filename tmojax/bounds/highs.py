"""Linear and mixed-integer models for HiGHS, with an answer that says what was proved and how.

Used by the lower bounds and by the integer programmes. Rows are collected as index and value arrays; columns need
finite bounds, because the certified bound below is the minimum of a Lagrangian over the box of the columns.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import highspy
import numpy as np

INFINITY = highspy.kHighsInf


class SolverStatus(StrEnum):
    """How a solve ended. The values are what people read."""

    OPTIMAL = "optimal"
    GAP_REACHED = "gap reached"
    TIME_LIMIT = "time limit"
    INFEASIBLE = "infeasible"
    FAILED = "failed"


@dataclass(frozen=True, eq=False)
class Answer:
    """values [columns]: the solution or incumbent (empty without one); objective: of it (inf without one).

    first_incumbent_s: seconds into the solve when a MILP had its first solution (inf without one).

    bound: what is proved for the minimum. Of an LP it is computed here from the row multipliers (see
    `certified_bound`), of a MILP it is HiGHS's dual bound. multipliers [rows]: of an LP (empty without them).
    """

    status: SolverStatus
    values: np.ndarray
    objective: float
    bound: float
    gap: float
    solve_s: float
    rows: int
    columns: int
    multipliers: np.ndarray
    integer_columns: int = 0
    first_incumbent_s: float = float("inf")


class _QuietHighs(highspy.Highs):
    """HiGHS that prints nothing.

    WORKAROUND(highspy<=1.16): the constructor registers a callback, which prints a banner to standard output before any
    option can be set. Only `setCallback` works without what it prepares.
    """

    def __init__(self) -> None:
        super(highspy.Highs, self).__init__()
        self.callbacks = []
        self.setOptionValue("output_flag", False)


def solver_version() -> str:
    return f"HiGHS {_QuietHighs().version()}"


class LinearModel:
    """min cost x subject to row bounds and column bounds, some columns integer."""

    def __init__(self) -> None:
        self._lower: list[np.ndarray] = []
        self._upper: list[np.ndarray] = []
        self._cost: list[np.ndarray] = []
        self._integer: list[np.ndarray] = []
        self._row: list[int] = []
        self._column: list[int] = []
        self._value: list[float] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []
        self.columns = 0
        self._solved: tuple[highspy.Highs, int, int] | None = None

    @property
    def rows(self) -> int:
        return len(self._row_lower)

    def add_columns(
        self, count: int, lower: Any = 0.0, upper: Any = 1.0, cost: Any = 0.0, integer: Any = False
    ) -> np.ndarray:
        """Indices [count] of new columns; arguments are scalars or arrays [count]."""
        for target, given, kind in (
            (self._lower, lower, float), (self._upper, upper, float), (self._cost, cost, float),
            (self._integer, integer, bool),
        ):  # fmt: skip
            target.append(np.broadcast_to(np.asarray(given, kind), (count,)).copy())
        first = self.columns
        self.columns += count
        return np.arange(first, first + count)

    def make_integer(self, columns: np.ndarray) -> None:
        """From now on these columns are integer."""
        integer = self.column_arrays()[3]
        integer[columns] = True
        self._integer = [integer]

    def add_row(self, lower: float, upper: float, *terms: tuple[Any, Any]) -> int:
        """Add lower <= sum of values * columns <= upper; `terms` are (column, value) or arrays of columns with one
        value for all or one for each."""
        row = self.rows
        for columns, values in terms:
            if isinstance(columns, np.ndarray):
                count = len(columns)
                self._column.extend(columns.tolist())
                self._value.extend(values.tolist() if isinstance(values, np.ndarray) else [values] * count)
            else:
                count = 1
                self._column.append(int(columns))
                self._value.append(float(values))
            self._row.extend([row] * count)
        self._row_lower.append(lower)
        self._row_upper.append(upper)
        return row

    def column_arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(lower, upper, cost, integer), each [columns]."""
        if not self.columns:
            return np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, bool)
        lower, upper, cost = (np.concatenate(part) for part in (self._lower, self._upper, self._cost))
        return lower, upper, cost, np.concatenate(self._integer)

    def row_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """(lower, upper), each [rows]."""
        return np.array(self._row_lower, float), np.array(self._row_upper, float)

    def entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(starts [columns + 1], rows, values) column-wise; entries of the same place are added up."""
        row, column = np.array(self._row, np.int64), np.array(self._column, np.int64)
        value = np.array(self._value, float)
        key, inverse = np.unique(column * max(self.rows, 1) + row, return_inverse=True)
        value = np.bincount(inverse, weights=value, minlength=len(key)) if len(key) else value
        nonzero = value != 0
        key, value = key[nonzero], value[nonzero]
        starts = np.searchsorted(key, np.arange(self.columns + 1) * max(self.rows, 1))
        return starts, key % max(self.rows, 1), value

    def solve(
        self, *, time_limit_s: float, threads: int = 1, gap: float = 1e-4, relax: bool = False,
        start: np.ndarray | None = None, interior_point: bool = False, most_nodes: int = 2**31 - 1,
    ) -> Answer:  # fmt: skip
        """Minimise. `relax` drops integrality; `start` [columns] offers an incumbent, with nan where HiGHS is to
        complete it (it fixes the integer columns that are given). An LP that was solved before and has only received
        rows goes on from its last basis, unless `interior_point` asks for that method, which starts afresh.
        most_nodes: of the search, after which a MILP is stopped with what is proved then."""
        lower, upper, cost, integer = self.column_arrays()
        mixed = bool(integer.any()) and not relax
        starts, rows, values = self.entries()
        row_lower, row_upper = self.row_bounds()
        highs = None if mixed or interior_point else self._with_new_rows()
        if highs is None:
            model = highspy.HighsLp()
            model.num_col_, model.num_row_ = self.columns, self.rows
            model.col_cost_, model.col_lower_, model.col_upper_ = cost, lower, upper
            model.row_lower_, model.row_upper_ = row_lower, row_upper
            model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
            model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = starts, rows, values
            if mixed:
                kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
                model.integrality_ = [kinds[int(flag)] for flag in integer]
            highs = _QuietHighs()
            highs.passModel(model)
        for name, value in (
            ("mip_rel_gap", float(gap)), ("random_seed", 0), ("solver", "ipm" if interior_point else "choose"),
            ("mip_max_nodes", int(most_nodes)),
            # The limit counts from the first solve of an instance. Threads beyond the first only help the MILP search.
            ("time_limit", highs.getRunTime() + time_limit_s),
            ("threads", int(threads)), ("parallel", "on" if threads > 1 else "off"),
        ):  # fmt: skip
            highs.setOptionValue(name, value)
        # Otherwise the number of threads stays that of the first solve of the process.
        highspy.Highs.resetGlobalScheduler(True)
        if start is not None and mixed:
            given = np.flatnonzero(np.isfinite(start)).astype(np.int32)
            highs.setSolution(len(given), given, start[given].astype(float))
        incumbents_s: list[float] = []
        if mixed:
            highs.setCallback(lambda *_: incumbents_s.append(time.perf_counter() - clock), None)
            highs.startCallback(highspy.cb.HighsCallbackType.kCallbackMipImprovingSolution)
        clock = time.perf_counter()
        highs.run()
        solve_s = time.perf_counter() - clock
        info, ended = highs.getInfo(), highs.getModelStatus()
        solution = highs.getSolution()
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        point = np.array(solution.col_value) if found else np.zeros(0)
        objective = float(cost @ point) if found else float("inf")
        dual = np.array(solution.row_dual) if solution.dual_valid and not mixed else np.zeros(0)
        if mixed:
            bound = float(info.mip_dual_bound)
        elif solution.dual_valid:
            bound = certified_bound(dual, starts, rows, values, cost, lower, upper, row_lower, row_upper)
        else:
            bound = -float("inf")
        name = highspy.HighsModelStatus
        status = {name.kOptimal: SolverStatus.OPTIMAL, name.kTimeLimit: SolverStatus.TIME_LIMIT,
                  name.kInfeasible: SolverStatus.INFEASIBLE}.get(ended, SolverStatus.FAILED)  # fmt: skip
        relative = abs(objective - bound) / max(abs(objective), 1e-12) if found else float("inf")
        if status is SolverStatus.OPTIMAL and mixed and relative > 1e-6:
            status = SolverStatus.GAP_REACHED
        if status is SolverStatus.INFEASIBLE:
            bound = float("inf")
        self._solved = None if mixed else (highs, self.rows, self.columns)
        first_s = min(incumbents_s, default=solve_s) if mixed and found else float("inf")
        return Answer(status, point, objective, bound, relative, solve_s, self.rows, self.columns, dual,
                      int(integer.sum()), first_s)  # fmt: skip

    def _with_new_rows(self) -> highspy.Highs | None:
        """The instance of the last LP with the rows that were added since, to go on from its basis; None where columns
        were added too."""
        if self._solved is None or self._solved[2] != self.columns:
            return None
        highs, first, _ = self._solved
        begin = int(np.searchsorted(np.array(self._row, np.int64), first))  # entries are in the order of their rows
        row, column = np.array(self._row[begin:], np.int64), np.array(self._column[begin:], np.int64)
        key, inverse = np.unique(row * self.columns + column, return_inverse=True)
        value = np.bincount(inverse, weights=np.array(self._value[begin:]), minlength=len(key)).astype(np.float64)
        new = np.arange(first, self.rows)
        highs.addRows(
            len(new), np.array(self._row_lower[first:]), np.array(self._row_upper[first:]), len(key),
            np.searchsorted(key, new * self.columns), key % self.columns, value,
        )  # fmt: skip
        return highs


def certified_bound(
    dual: np.ndarray, starts: np.ndarray, rows: np.ndarray, values: np.ndarray, cost: np.ndarray, lower: np.ndarray,
    upper: np.ndarray, row_lower: np.ndarray, row_upper: np.ndarray,
) -> float:  # fmt: skip
    """Lower bound of min cost x from *any* row multipliers `dual` [rows] (Neumaier and Shcherbina, 2004, section 3).

    sum over rows of the smaller of dual * row_lower and dual * row_upper plus, over columns, the minimum of the reduced
    cost over the column's bounds. Solver tolerances make it a little lower, never wrong (up to rounding).
    """
    multiplier = dual.copy()
    multiplier[(multiplier > 0) & ~np.isfinite(row_lower)] = 0.0
    multiplier[(multiplier < 0) & ~np.isfinite(row_upper)] = 0.0
    side = np.where(multiplier > 0, row_lower, row_upper)
    column = np.repeat(np.arange(len(cost)), np.diff(starts))
    reduced = cost - np.bincount(column, weights=values * multiplier[rows], minlength=len(cost))
    rest = np.where(reduced > 0, reduced * lower, reduced * upper)
    return float(np.sum(multiplier[multiplier != 0] * side[multiplier != 0]) + np.sum(rest))
