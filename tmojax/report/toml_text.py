"""Plain values as TOML text that `tomllib` reads back equal (None is left out: a missing key means its default)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def toml_text(document: Mapping[str, Any]) -> str:
    """A document of strings, numbers, booleans, lists and mappings as TOML; keys in the given order."""
    lines: list[str] = []
    _table((), document, lines)
    return "\n".join(lines) + "\n"


def _table(path: tuple[str, ...], table: Mapping[str, Any], lines: list[str]) -> None:
    """Plain values of a table first, then its tables, each under a header of its own."""
    later = []
    for key, value in table.items():
        if isinstance(value, Mapping) or _is_list_of_tables(value):
            later.append((key, value))
        elif value is not None:
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, value in later:
        name = ".".join(_key(part) for part in (*path, key))
        for item in [value] if isinstance(value, Mapping) else value:
            lines += ["", f"[{name}]" if isinstance(value, Mapping) else f"[[{name}]]"]
            _table((*path, key), item, lines)


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value if item is not None)}]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
        return f"{{{inner}}}"
    return repr(value)
