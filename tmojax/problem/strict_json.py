"""JSON text of problem and plan files: read strictly, in bounded memory; written so that equal is equal bytes."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from tmojax.errors import InputError

MAX_FILE_BYTES = 512 * 10**6
# A parsed value takes up to about 130 bytes per JSON token, so this bounds a hostile file to about 2.5 GB.
MAX_VALUES = 20_000_000


class RepeatedKey(dict):
    """An object in which a key stands twice; kept until a reader that knows its path reports it."""

    key: str


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    repeated = RepeatedKey(result)
    seen: set[str] = set()
    repeated.key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    return repeated


def _reject_constant(name: str) -> None:
    raise InputError(f"{name} is not a JSON number; write a finite one")


def shorten(value: object) -> str:
    """`repr` of a value for a message, cut to 80 characters."""
    if isinstance(value, dict):
        return f"an object with {len(value)} key(s)"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    # Converting a huge integer to decimal is quadratic, and Python refuses it beyond 4300 digits.
    if isinstance(value, int) and abs(value) > 10**40:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        value = value[:100]
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def parse_json(data: bytes) -> Any:
    """Parse UTF-8 JSON without NaN, Infinity or excessive size. Objects with a repeated key come back as `RepeatedKey`.

    Raises InputError with line and column for text that is not JSON.
    """
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"more than {MAX_FILE_BYTES} bytes; files of this format are smaller")
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > MAX_VALUES:
        raise InputError(f"about {values} JSON values; at most {MAX_VALUES} are read")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_reject_constant)
    except UnicodeDecodeError as error:
        raise InputError(f"byte {error.start} is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise InputError(f"line {error.lineno}, column {error.colno}: not JSON ({error.msg}); is it cut off?") from None
    except RecursionError:
        raise InputError("nested too deeply to be a file of this format") from None
    except ValueError as error:  # an integer of more than 4300 digits
        raise InputError(f"a number is too long ({error})") from None


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Read a regular file of at most MAX_FILE_BYTES. Raises InputError (missing, no file, too large, unreadable)."""
    try:
        # Without O_NONBLOCK a named pipe would be waited for before it is found to be one.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InputError(f"{path}: not a regular file")
            if status.st_size > MAX_FILE_BYTES:
                raise InputError(f"{path}: {status.st_size} bytes; at most {MAX_FILE_BYTES} are read")
            return file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:  # a NUL character in the name
        raise InputError(f"{path!r}: not a file name") from None


def canonical_text(value: Any) -> str:
    """The one-line form that hashes are taken of: sorted keys, no spaces, ASCII, shortest round-trip floats."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def readable_text(value: Any) -> str:
    """The form that files have: sorted keys, one tensor, op, link, route or instruction a line."""
    lines: list[str] = []
    _append(value, "", "", lines)
    return "\n".join(lines) + "\n"


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list)


def _append(value: Any, indent: str, label: str, lines: list[str]) -> None:
    if isinstance(value, list):
        broken = any(_is_container(item) for item in value)
    elif isinstance(value, dict):
        broken = any(
            _is_container(inner)
            for item in value.values()
            if _is_container(item)
            for inner in (item.values() if isinstance(item, dict) else item)
        )
    else:
        broken = False
    if not broken:
        lines.append(f"{indent}{label}{json.dumps(value, sort_keys=True, allow_nan=False)}")
        return
    items = [("", item) for item in value]
    if isinstance(value, dict):
        items = [(f"{json.dumps(key)}: ", value[key]) for key in sorted(value)]
    lines.append(f"{indent}{label}{'{' if isinstance(value, dict) else '['}")
    for name, item in items:
        _append(item, indent + " ", name, lines)
        lines[-1] += ","
    lines[-1] = lines[-1][:-1]
    lines.append(f"{indent}{'}' if isinstance(value, dict) else ']'}")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file under a temporary name beside `path` and rename it, so that no reader sees half of it.

    Raises InputError when the folder is missing or not writable.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written ({error.strerror}); check that its folder exists") from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
