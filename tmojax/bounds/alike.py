"""Columns and rows of a linear program that are alike, and the smaller program that has one of each kind.

Layers of a network between the same two moments have columns that no row tells apart. A program has a solution in which
columns that are alike have one value (the mean over them of any solution is one), and multipliers likewise. Which are
alike is found by colour refinement (Grohe, Kersting, Mladenov and Selman, "Dimension reduction via colour refinement",
ESA 2014, section 5): rows are split by what their columns are, columns by what their rows are, until nothing splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class LinearProgram:
    """min cost x subject to row and column bounds. Entries column-wise: those of column c are starts[c] to
    starts[c + 1] of `rows` and `values`, in the order of their rows."""

    starts: np.ndarray
    rows: np.ndarray
    values: np.ndarray
    cost: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    row_lower: np.ndarray
    row_upper: np.ndarray

    @property
    def columns(self) -> np.ndarray:
        """Of every entry."""
        return np.repeat(np.arange(len(self.cost)), np.diff(self.starts))


@dataclass(frozen=True, eq=False)
class Kinds:
    """column_kind [columns], row_kind [rows]: kinds, counted from 0."""

    column_kind: np.ndarray
    row_kind: np.ndarray

    @property
    def columns(self) -> int:
        return int(self.column_kind.max(initial=-1)) + 1

    @property
    def rows(self) -> int:
        return int(self.row_kind.max(initial=-1)) + 1

    def one_of_each(self, program: LinearProgram) -> LinearProgram:
        """A column stands for the common value of its kind, a row for any of its kind."""
        first_row = np.unique(self.row_kind, return_index=True)[1]
        first_column, count = np.unique(self.column_kind, return_index=True, return_counts=True)[1:]
        kept = first_row[self.row_kind[program.rows]] == program.rows
        key = self.column_kind[program.columns[kept]] * max(self.rows, 1) + self.row_kind[program.rows[kept]]
        key, place = np.unique(key, return_inverse=True)
        return LinearProgram(
            np.searchsorted(key, np.arange(self.columns + 1) * max(self.rows, 1)), key % max(self.rows, 1),
            np.bincount(place, weights=program.values[kept], minlength=len(key)), program.cost[first_column] * count,
            program.lower[first_column], program.upper[first_column], program.row_lower[first_row],
            program.row_upper[first_row],
        )  # fmt: skip

    def of_all_rows(self, multipliers: np.ndarray) -> np.ndarray:
        """[rows]: every row has its share of the multiplier of its kind [kinds of rows]."""
        return (multipliers / np.bincount(self.row_kind, minlength=self.rows))[self.row_kind]

    def with_row(self, columns: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """(kinds of columns, values) of a further row, or None if it tells columns of one kind apart. `columns` are
        distinct."""
        kinds, first, place, found = np.unique(
            self.column_kind[columns], return_index=True, return_inverse=True, return_counts=True
        )
        members = np.bincount(self.column_kind, minlength=self.columns)[kinds]
        if (found < members).any() or (values != values[first][place]).any():
            return None
        return kinds, values[first] * members


def find_kinds(program: LinearProgram) -> Kinds:
    """The coarsest kinds that the program allows. (Numbers are compared bit by bit, sets of numbers by 64-bit sums of
    mixed bits. If two differ and have one sum, the smaller program is another one. No bound relies on it: that is
    computed from multipliers and the whole program.)"""
    entry_column, entry = program.columns, _mixed(_bits(program.values))
    column = _mixed(_bits(program.cost), _bits(program.lower), _bits(program.upper))
    row = _mixed(_bits(program.row_lower), _bits(program.row_upper))
    count = (0, 0)
    while True:
        row = _mixed(row, _sums(program.rows, _mixed(entry, column[entry_column]), len(row)))
        column = _mixed(column, _sums(entry_column, _mixed(entry, row[program.rows]), len(column)))
        kinds = Kinds(np.unique(column, return_inverse=True)[1], np.unique(row, return_inverse=True)[1])
        if (kinds.columns, kinds.rows) == count:
            return kinds
        count = (kinds.columns, kinds.rows)


def _bits(numbers: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(numbers + 0.0, np.float64).view(np.uint64)


def _sums(place: np.ndarray, numbers: np.ndarray, count: int) -> np.ndarray:
    sums = np.zeros(count, np.uint64)
    np.add.at(sums, place, numbers)
    return sums


def _mixed(*parts: np.ndarray) -> np.ndarray:
    """Bits of several arrays mixed into one array (SplitMix64: Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = np.zeros(parts[0].shape, np.uint64)
    for part in parts:
        mixed = (mixed ^ part) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed
