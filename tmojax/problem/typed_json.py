"""Frozen dataclasses to JSON and back, driven by their annotations, so that file formats follow the types.

Understood: bool, int, float, str, `X | None`, StrEnum, tuples, frozensets of StrEnum, dicts with string keys, and
dataclasses of these.
Reading is strict: unknown, missing and repeated keys, booleans for numbers, numbers beyond 64 bits and values that are
not finite are InputErrors that name the path of the field.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from tmojax.errors import InputError
from tmojax.problem.strict_json import RepeatedKey, shorten

INT64_MAX = 2**63 - 1
Reader = Callable[[Any, str], Any]
Writer = Callable[[Any, str], Any]


def expect_object(value: Any, path: str) -> dict[str, Any]:
    """`value` if it is an object without a repeated key; else InputError."""
    if isinstance(value, RepeatedKey):
        raise InputError(f"{path}: key {shorten(value.key)} stands twice; keep one")
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected an object, got {shorten(value)}")
    return value


def expect_keys(value: dict[str, Any], known: frozenset[str], required: frozenset[str], path: str) -> None:
    """Check the keys of an object. Raises InputError naming the unknown or missing key and the known ones."""
    if unknown := sorted(value.keys() - known):
        raise InputError(f"{path}: unknown key {shorten(unknown[0])}; known: {', '.join(sorted(known))}")
    if missing := sorted(required - value.keys()):
        raise InputError(f"{path}: key {missing[0]!r} is missing")


def expect_list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{path}: expected a list, got {shorten(value)}")
    return value


def _read_bool(value: Any, path: str) -> bool:
    if type(value) is not bool:
        raise InputError(f"{path}: expected true or false, got {shorten(value)}")
    return value


def _read_int(value: Any, path: str) -> int:
    if type(value) is not int:
        raise InputError(f"{path}: expected an integer, got {shorten(value)}")
    if not -INT64_MAX <= value <= INT64_MAX:
        raise InputError(f"{path}: {shorten(value)} does not fit in 64 bits")
    return value


def _read_float(value: Any, path: str) -> float:
    if type(value) is int and -INT64_MAX <= value <= INT64_MAX:
        return float(value)
    if type(value) is not float or not math.isfinite(value):
        raise InputError(f"{path}: expected a finite number, got {shorten(value)}")
    return value + 0.0  # -0.0 becomes 0.0: equal content has one form


def _read_str(value: Any, path: str) -> str:
    if type(value) is not str:
        raise InputError(f"{path}: expected a string, got {shorten(value)}")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise InputError(f"{path}: {shorten(value)} contains half a surrogate pair, which is no text")
    return value


def _write_int(value: Any, path: str) -> int:
    try:
        return _read_int(operator.index(value), path)
    except TypeError:
        raise InputError(f"{path}: expected an integer, got {shorten(value)}") from None


def _write_float(value: Any, path: str) -> float:
    try:
        return _read_float(float(value), path)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{path}: expected a finite number, got {shorten(value)}") from None


def _write_str(value: Any, path: str) -> str:
    return _read_str(str(value) if isinstance(value, str) else value, path)


def _write_bool(value: Any, path: str) -> bool:
    return bool(value)


@cache
def reader(annotation: Any) -> Reader:
    """A function (JSON value, path) -> value of the annotated type, raising InputError."""
    scalar = {bool: _read_bool, int: _read_int, float: _read_float, str: _read_str}.get(annotation)
    if scalar is not None:
        return scalar
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (types.UnionType, Union) and arguments[1:] == (types.NoneType,):
        inner = reader(arguments[0])
        return lambda value, path: None if value is None else inner(value, path)
    if origin is tuple:
        return _tuple_reader(arguments)
    if origin is frozenset:
        member = reader(arguments[0])

        def read_set(value: Any, path: str) -> frozenset[Any]:
            items = [member(item, f"{path}[{i}]") for i, item in enumerate(expect_list(value, path))]
            if len(set(items)) != len(items):
                raise InputError(f"{path}: lists the same value twice; keep one")
            return frozenset(items)

        return read_set
    if origin is dict:
        member = reader(arguments[1])
        return lambda value, path: {
            _read_str(key, path): member(item, f"{path}[{shorten(key)}]")
            for key, item in expect_object(value, path).items()
        }
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        members = {member.value: member for member in annotation}

        def read_enum(value: Any, path: str) -> Any:
            if type(value) is not str or value not in members:
                raise InputError(f"{path}: {shorten(value)} is not one of {', '.join(members)}")
            return members[value]

        return read_enum
    if is_dataclass(annotation):
        return _dataclass_reader(annotation)
    raise TypeError(f"no JSON form for {annotation!r}")


def _tuple_reader(arguments: tuple[Any, ...]) -> Reader:
    if arguments[-1] is Ellipsis:
        member = reader(arguments[0])
        plain_int = arguments[0] is int

        def read_many(value: Any, path: str) -> tuple[Any, ...]:
            items = expect_list(value, path)
            if plain_int and set(map(type, items)) == {int} and -INT64_MAX <= min(items) and max(items) <= INT64_MAX:
                return tuple(items)  # the common case, without one path per number
            return tuple([member(item, f"{path}[{i}]") for i, item in enumerate(items)])

        return read_many
    members = [reader(argument) for argument in arguments]

    def read_few(value: Any, path: str) -> tuple[Any, ...]:
        items = expect_list(value, path)
        if len(items) != len(members):
            raise InputError(f"{path}: expected {len(members)} values, got {len(items)}")
        return tuple([read(item, f"{path}[{i}]") for i, (read, item) in enumerate(zip(members, items, strict=True))])

    return read_few


def _dataclass_reader(annotation: Any) -> Reader:
    hints = get_type_hints(annotation)
    readers = {field.name: reader(hints[field.name]) for field in fields(annotation)}
    known = frozenset(readers)
    required = frozenset(
        field.name for field in fields(annotation) if field.default is MISSING and field.default_factory is MISSING
    )

    def read_dataclass(value: Any, path: str) -> Any:
        items = expect_object(value, path)
        if not required <= items.keys() <= known:
            expect_keys(items, known, required, path)
        prefix = f"{path}." if path else ""
        values = {key: readers[key](item, prefix + key) for key, item in items.items()}
        try:
            return annotation(**values)
        except InputError as error:  # a check of the dataclass, which does not know where it stands
            raise InputError(f"{prefix}{error}") from None

    return read_dataclass


@cache
def writer(annotation: Any) -> Writer:
    """A function (value, path) -> JSON value with every field present; the inverse of `reader`. Raises InputError."""
    scalar = {bool: _write_bool, int: _write_int, float: _write_float, str: _write_str}.get(annotation)
    if scalar is not None:
        return scalar
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (types.UnionType, Union) and arguments[1:] == (types.NoneType,):
        inner = writer(arguments[0])
        return lambda value, path: None if value is None else inner(value, path)
    if origin is tuple:
        members = writer(arguments[0])
        if arguments[-1] is not Ellipsis and len(set(arguments)) > 1:
            raise TypeError(f"no JSON form for {annotation!r}")
        return lambda value, path: [members(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if origin is frozenset:
        return lambda value, path: sorted(str(item) for item in value)
    if origin is dict:
        member = writer(arguments[1])
        return lambda value, path: {
            _write_str(key, path): member(item, f"{path}[{shorten(key)}]") for key, item in value.items()
        }
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return lambda value, path: str(annotation(value))
    if is_dataclass(annotation):
        hints = get_type_hints(annotation)
        writers = [(field.name, writer(hints[field.name])) for field in fields(annotation)]
        return lambda value, path: {
            name: write(getattr(value, name), f"{path}.{name}" if path else name) for name, write in writers
        }
    raise TypeError(f"no JSON form for {annotation!r}")
