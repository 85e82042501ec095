"""Plan files: versioned JSON of a schedule with what its planner claims about it (docs/instance-format.md)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from tmojax.errors import InputError
from tmojax.problem.schedule import FIELDS, INSTRUCTION, Kind, LinkPolicy, Placement, Schedule
from tmojax.problem.strict_json import parse_json, read_file, readable_text, shorten, write_text
from tmojax.problem.typed_json import INT64_MAX, expect_keys, expect_list, expect_object, reader, writer

PLAN_SCHEMA = "tmojax-plan-1"
MAX_SETTINGS_DEPTH = 20

_NAMES = {kind.name.lower(): kind for kind in Kind}
_SMALLEST = {"owner": -1, "form": -1, "parts": 1}  # of the other fields: 0
_EMPTY_ROW = (-1, -1, -1, -1, -1, -1, 0, 1, -1, -1, -1, -1, -1, -1, 0)  # unused fields, as ListBuilder leaves them


@dataclass(frozen=True, eq=False)
class PlanFile:
    """A schedule and what its planner says about it; nothing of that is trusted by the checker.

    `problem_hash` names the problem (`tmojax.problem.io.problem_hash`). `step_s`: simulated step time; `bound_s`: a
    proven lower bound for the actions that the planner may use; `gap` = step_s / bound_s - 1; None where unknown.
    `status` is the planner's word for how it ended. `time_limited`: the result depends on the speed of the computer, so
    that another run with the same seed may give another plan. `settings` are JSON values.
    """

    schedule: Schedule
    problem_hash: str
    planner: str
    status: str
    step_s: float | None = None
    bound_s: float | None = None
    gap: float | None = None
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    time_limited: bool = False


_HEADER = {
    "problem_hash": str, "planner": str, "status": str, "step_s": float | None, "bound_s": float | None,
    "gap": float | None, "seed": int, "time_limited": bool,
}  # fmt: skip
_SCHEDULE = {
    "order": str,
    "initial": tuple[tuple[Placement, ...], ...],
    "link_policies": tuple[LinkPolicy, ...],
}
_KEYS = frozenset({"schema", "settings", "lists", *_HEADER, *_SCHEDULE})


def plan_to_json(plan: PlanFile) -> dict[str, Any]:
    """A plan as JSON values. Fields that an instruction's kind does not use are not written. Raises InputError."""
    schedule = plan.schedule
    return {
        "schema": PLAN_SCHEMA,
        **{name: writer(kind)(getattr(plan, name), name) for name, kind in _HEADER.items()},
        "settings": _json_value(dict(plan.settings), "settings", 0),
        **{name: writer(kind)(getattr(schedule, name), name) for name, kind in _SCHEDULE.items()},
        "lists": [_rows(instructions, f"lists[{device}]") for device, instructions in enumerate(schedule.lists)],
    }


def plan_from_json(value: Any) -> PlanFile:
    """A plan from parsed JSON; the checker says whether it fits its problem. Raises InputError with the path."""
    content = expect_object(value, "plan")
    schema = content.get("schema")
    if schema != PLAN_SCHEMA:
        raise InputError(f"schema: expected {PLAN_SCHEMA!r}, got {shorten(schema)}; is this a plan file?")
    expect_keys(content, _KEYS, _KEYS, "plan")
    header = {name: reader(kind)(content[name], name) for name, kind in _HEADER.items()}
    if not re.fullmatch("[0-9a-f]{64}", header["problem_hash"]):
        raise InputError(f"problem_hash: {shorten(header['problem_hash'])} is not 64 lower-case hexadecimal digits")
    lists = expect_list(content["lists"], "lists")
    schedule = Schedule(
        lists=tuple(_instructions(rows, f"lists[{device}]") for device, rows in enumerate(lists)),
        **{name: reader(kind)(content[name], name) for name, kind in _SCHEDULE.items()},
    )
    settings = _json_value(expect_object(content["settings"], "settings"), "settings", 0)
    return PlanFile(schedule=schedule, settings=settings, **header)


def write_plan(path: str | os.PathLike[str], plan: PlanFile) -> None:
    """Write a plan file (temporary name, then rename); equal plans give equal bytes. Raises InputError."""
    write_text(path, readable_text(plan_to_json(plan)))


def read_plan(path: str | os.PathLike[str]) -> PlanFile:
    """Read a plan file. Raises InputError starting with the file's name."""
    data = read_file(path)
    try:
        return plan_from_json(parse_json(data))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except RecursionError:
        raise InputError(f"{path}: nested too deeply to be a plan file") from None


def _json_value(value: Any, path: str, depth: int) -> Any:
    if depth > MAX_SETTINGS_DEPTH:
        raise InputError(f"{path}: nested more than {MAX_SETTINGS_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, dict):
        return {
            reader(str)(key, path): _json_value(item, f"{path}.{key}", depth + 1)
            for key, item in expect_object(value, path).items()
        }
    if isinstance(value, list | tuple):
        return [_json_value(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    for kind in (int, float, str):
        if isinstance(value, kind):
            return writer(kind)(value, path)
    raise InputError(f"{path}: {shorten(value)} is not a JSON value; use numbers, text, true, false, lists or objects")


def _rows(instructions: np.ndarray, path: str) -> list[list[Any]]:
    """Instruction rows `[kind, *FIELDS[kind]]`."""
    if instructions.dtype != INSTRUCTION or instructions.ndim != 1:
        raise InputError(f"{path}: expected a one-dimensional array of dtype INSTRUCTION")
    rows: list[list[Any]] = [[]] * len(instructions)
    kinds = instructions["kind"]
    written = 0
    for kind, names in FIELDS.items():
        places = np.flatnonzero(kinds == kind)
        columns = [instructions[name][places].tolist() for name in names]
        label = kind.name.lower()
        for place, *values in zip(places.tolist(), *columns, strict=True):
            rows[place] = [label, *values]
        written += len(places)
    if written != len(rows):
        bad = int(np.flatnonzero(~np.isin(kinds, list(FIELDS)))[0])
        raise InputError(f"{path}[{bad}]: unknown instruction kind {int(kinds[bad])}")
    return rows


def _instructions(value: Any, path: str) -> np.ndarray:
    rows = expect_list(value, path)
    places: dict[Kind, list[int]] = {}
    for place, row in enumerate(rows):
        kind = _NAMES.get(row[0]) if type(row) is list and row and type(row[0]) is str else None
        if kind is None or len(row) != len(FIELDS[kind]) + 1:
            raise InputError(f"{path}[{place}]: {_row_mistake(row, kind)}")
        places.setdefault(kind, []).append(place)
    instructions = np.full(len(rows), np.array(_EMPTY_ROW, dtype=INSTRUCTION))
    for kind, where in places.items():
        names = FIELDS[kind]
        values = [rows[place][1:] for place in where]
        # Whole columns at C speed; only a mistake is worth a search for the row that made it.
        if set(map(type, chain.from_iterable(values))) - {int}:
            _raise_bad_value(values, where, names, path)
        try:
            table = np.array(values, dtype=np.int64).reshape(len(where), len(names))
        except OverflowError:
            _raise_bad_value(values, where, names, path)
        instructions["kind"][where] = kind
        for column, name in enumerate(names):
            smallest, largest = _limits(name)
            if table[:, column].min() < smallest or table[:, column].max() > largest:
                _raise_bad_value(values, where, names, path)
            instructions[name][where] = table[:, column]
    return instructions


def _limits(name: str) -> tuple[int, int]:
    return _SMALLEST.get(name, 0), INT64_MAX if INSTRUCTION[name] == np.int64 else 2**31 - 1


def _row_mistake(row: Any, kind: Kind | None) -> str:
    if type(row) is not list or not row:
        return f'expected an instruction such as ["compute", 0, 0], got {shorten(row)}'
    if kind is None:
        return f"unknown instruction {shorten(row[0])}; known: {', '.join(_NAMES)}"
    return f"{row[0]} takes {len(FIELDS[kind])} value(s) ({', '.join(FIELDS[kind])}), got {len(row) - 1}"


def _raise_bad_value(values: list[list[Any]], where: list[int], names: tuple[str, ...], path: str) -> None:
    for place, row in zip(where, values, strict=True):
        for name, item in zip(names, row, strict=True):
            smallest, largest = _limits(name)
            if type(item) is not int or not smallest <= item <= largest:
                raise InputError(
                    f"{path}[{place}].{name}: expected an integer in {smallest}..{largest}, got {shorten(item)}"
                )
