"""Columns that are alike: the smaller program has the same optimum, and its multipliers prove the whole one."""

import numpy as np
import pytest

from tmojax.bounds.alike import LinearProgram, find_kinds
from tmojax.bounds.highs import INFINITY, LinearModel, SolverStatus


def repeated_model(seed: int, copies: int, parts: int, *, spoil: bool = False) -> LinearModel:
    """min cost x over `copies` equal groups of columns with rows of their own, and rows over the sums of all groups.

    spoil: one cost differs, in one copy."""
    rng = np.random.default_rng(seed)
    model = LinearModel()
    cost, sizes = rng.normal(size=parts), rng.random((parts, parts))
    groups = []
    for copy in range(copies):
        of_copy = cost + (1e-3 if spoil and copy == 0 else 0.0)
        columns = model.add_columns(parts, 0.0, 1.0, of_copy)
        for row in sizes:
            model.add_row(0.2 * row.sum(), INFINITY, (columns, row))
        groups.append(columns)
    for part in range(parts):
        weights = rng.random(2)
        terms = [(int(columns[part]), weights[0]) for columns in groups]
        terms += [(int(columns[-1]), weights[1]) for columns in groups]
        model.add_row(-INFINITY, 0.7 * copies * weights.sum(), *terms)
    return model


def program_of(model: LinearModel) -> LinearProgram:
    lower, upper, cost, _ = model.column_arrays()
    return LinearProgram(*model.entries(), cost, lower, upper, *model.row_bounds())


def test_kinds_by_hand():
    model = repeated_model(0, 5, 3)
    kinds = find_kinds(program_of(model))
    assert (kinds.columns, kinds.rows) == (3, 6)
    small = kinds.one_of_each(program_of(model))
    # The rows over all groups have five times the coefficients.
    assert len(small.cost) == 3 and len(small.row_lower) == 6
    assert small.cost.sum() == pytest.approx(program_of(model).cost.sum())
    assert small.values.sum() == pytest.approx(
        program_of(model).values[program_of(model).rows < 3].sum() + program_of(model).values[
            program_of(model).rows >= 15].sum()
    )  # fmt: skip


def test_one_column_that_differs_tells_its_group_apart():
    kinds = find_kinds(program_of(repeated_model(0, 5, 3, spoil=True)))
    assert (kinds.columns, kinds.rows) == (6, 9)


@pytest.mark.parametrize("seed", range(8))
def test_the_smaller_program_has_the_same_optimum_and_proves_it(seed, monkeypatch):
    monkeypatch.setattr("tmojax.bounds.highs.MANY_COLUMNS", 1)
    model, whole = (repeated_model(seed, 4, 5, spoil=seed % 2 == 1) for _ in range(2))
    found, expected = model.solve(time_limit_s=10.0, one_of_each=True), whole.solve(time_limit_s=10.0)
    assert found.status is expected.status is SolverStatus.OPTIMAL
    assert found.objective == pytest.approx(expected.objective, abs=1e-7)
    assert found.bound == pytest.approx(expected.objective, abs=1e-6) and found.bound <= expected.objective + 1e-9
    starts, rows, values = whole.entries()
    product = np.bincount(rows, values * found.values[np.repeat(np.arange(whole.columns), np.diff(starts))])
    lower, upper = whole.row_bounds()
    assert (product >= lower - 1e-7).all() and (product <= upper + 1e-7).all()


@pytest.mark.parametrize("alike", [True, False])
def test_rows_that_come_later(alike, monkeypatch):
    monkeypatch.setattr("tmojax.bounds.highs.MANY_COLUMNS", 1)
    model, whole = (repeated_model(3, 4, 5) for _ in range(2))
    model.solve(time_limit_s=10.0, one_of_each=True)
    for each in (model, whole):
        # A row over all columns of a kind, or one that tells the first group from the others.
        columns = np.arange(0, 20, 5) if alike else np.array([0])
        each.add_row(0.9 * len(columns), INFINITY, (columns, 1.0))
    found, expected = model.solve(time_limit_s=10.0, one_of_each=True), whole.solve(time_limit_s=10.0)
    assert found.objective == pytest.approx(expected.objective, abs=1e-7)
    assert found.bound == pytest.approx(expected.objective, abs=1e-6)
