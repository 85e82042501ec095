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

from tmojax.bounds.alike import Kinds, LinearProgram, find_kinds

# A linear program with so many columns is solved with one column of each kind, if these are this share at most.
MANY_COLUMNS, FEW_KINDS = 3_000, 0.7
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
        self._solved: tuple[highspy.Highs, int, int, Kinds | None] | None = None

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

    def most(self, column: int) -> float:
        """The upper bound of a column."""
        return float(np.concatenate(self._upper)[column])

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
        start: np.ndarray | None = None, one_of_each: bool = False, interior_point_above: float = float("inf"),
        most_nodes: int = 2**31 - 1,
    ) -> Answer:  # fmt: skip
        """Minimise. `relax` drops integrality; `start` [columns] offers an incumbent, with nan where HiGHS is to
        complete it (it fixes the integer columns that are given). An LP that was solved before and has only received
        rows goes on from its last basis. one_of_each: columns of an LP that are alike have one value (`alike`).
        interior_point_above: an LP with more columns than this, alike ones counted once, is solved by that method, from
        scratch. most_nodes: of the search, after which a MILP is stopped with what is proved then."""
        lower, upper, cost, integer = self.column_arrays()
        mixed = bool(integer.any()) and not relax
        program = LinearProgram(*self.entries(), cost, lower, upper, *self.row_bounds())
        last = None if mixed else self._with_new_rows(interior_point_above)
        if last is None:
            kinds = find_kinds(program) if one_of_each and not mixed and self.columns >= MANY_COLUMNS else None
            if kinds is not None and kinds.columns > FEW_KINDS * self.columns:
                kinds = None
            highs = _instance(program if kinds is None else kinds.one_of_each(program), integer if mixed else None)
        else:
            highs, kinds = last
        interior_point = not mixed and highs.getNumCol() > interior_point_above
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
        dual = np.array(solution.row_dual) if solution.dual_valid and not mixed else np.zeros(0)
        if kinds is not None:
            point = point[kinds.column_kind] if found else point
            dual = kinds.of_all_rows(dual) if len(dual) else dual
        objective = float(cost @ point) if found else float("inf")
        if mixed:
            bound = float(info.mip_dual_bound)
        elif solution.dual_valid:
            bound = certified_bound(dual, program)
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
        self._solved = None if mixed else (highs, self.rows, self.columns, kinds)
        first_s = min(incumbents_s, default=solve_s) if mixed and found else float("inf")
        return Answer(status, point, objective, bound, relative, solve_s, self.rows, self.columns, dual,
                      int(integer.sum()), first_s)  # fmt: skip

    def _with_new_rows(self, most_columns: float) -> tuple[highspy.Highs, Kinds | None] | None:
        """The instance of the last LP with the rows that were added since, to go on from its basis; None where columns
        were added too, or the new rows tell columns apart that were alike, or it has more columns than asked."""
        if self._solved is None or self._solved[2] != self.columns:
            return None
        highs, first, _, kinds = self._solved
        if highs.getNumCol() > most_columns:
            return None
        begin = int(np.searchsorted(np.array(self._row, np.int64), first))  # entries are in the order of their rows
        row, column = np.array(self._row[begin:], np.int64), np.array(self._column[begin:], np.int64)
        key, inverse = np.unique(row * self.columns + column, return_inverse=True)
        value = np.bincount(inverse, weights=np.array(self._value[begin:]), minlength=len(key)).astype(np.float64)
        new = np.arange(first, self.rows)
        starts = np.searchsorted(key, new * self.columns)
        column = key % self.columns
        if kinds is not None and len(new):
            rows = []
            for row in zip(np.split(column, starts[1:]), np.split(value, starts[1:]), strict=True):
                found = kinds.with_row(*row)
                if found is None:
                    return None
                rows.append(found)
            starts = np.concatenate([[0], np.cumsum([len(part[0]) for part in rows])])[:-1]
            column, value = (np.concatenate([part[i] for part in rows]) for i in (0, 1))
            kinds = Kinds(kinds.column_kind, np.append(kinds.row_kind, kinds.rows + np.arange(len(new))))
        highs.addRows(
            len(new), np.array(self._row_lower[first:]), np.array(self._row_upper[first:]), len(column),
            starts, column, value,
        )  # fmt: skip
        return highs, kinds


def _instance(program: LinearProgram, integer: np.ndarray | None) -> highspy.Highs:
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(program.cost), len(program.row_lower)
    model.col_cost_, model.col_lower_, model.col_upper_ = program.cost, program.lower, program.upper
    model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_, model.a_matrix_.index_ = program.starts, program.rows
    model.a_matrix_.value_ = program.values
    if integer is not None:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[int(flag)] for flag in integer]
    highs = _QuietHighs()
    highs.passModel(model)
    return highs


def certified_bound(dual: np.ndarray, program: LinearProgram) -> float:
    """Lower bound of min cost x from *any* row multipliers `dual` [rows] (Neumaier and Shcherbina, 2004, section 3).

    sum over rows of the smaller of dual * row_lower and dual * row_upper plus, over columns, the minimum of the reduced
    cost over the column's bounds. Solver tolerances make it a little lower, never wrong (up to rounding).
    """
    multiplier = dual.copy()
    multiplier[(multiplier > 0) & ~np.isfinite(program.row_lower)] = 0.0
    multiplier[(multiplier < 0) & ~np.isfinite(program.row_upper)] = 0.0
    side = np.where(multiplier > 0, program.row_lower, program.row_upper)
    weights = program.values * multiplier[program.rows]
    reduced = program.cost - np.bincount(program.columns, weights=weights, minlength=len(program.cost))
    rest = np.where(reduced > 0, reduced * program.lower, reduced * program.upper)
    return float(np.sum(multiplier[multiplier != 0] * side[multiplier != 0]) + np.sum(rest))
