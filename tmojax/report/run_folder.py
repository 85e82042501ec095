"""The folder of a run: named by configuration, time and hash; files appear whole, events line by line."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tmojax.errors import InputError
from tmojax.problem.strict_json import write_text


class RunFolder:
    """A new folder `PARENT/NAME-UTCTIME-HASH`. Raises InputError when it cannot be made."""

    def __init__(self, parent: str | os.PathLike[str], name: str, digest: str, now: datetime | None = None) -> None:
        stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
        base = Path(parent) / f"{stem}-{stamp}-{digest[:8]}"
        self._start = time.perf_counter()
        try:
            self.path = _make(base)
            self._events = open(self.path / "events.jsonl", "a", encoding="utf-8", newline="\n")
        except OSError as error:
            raise InputError(
                f"--out {str(parent)!r}: {base.name} cannot be made there ({error.strerror}); name a writable folder"
            ) from None

    def elapsed_s(self) -> float:
        """Seconds since the folder was made."""
        return time.perf_counter() - self._start

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file (temporary name, then rename)."""
        self.write_text(name, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a text file (temporary name, then rename); folders in `name` are made."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, text)

    def event(self, event: str, **fields: Any) -> None:
        """Append one line to events.jsonl; it is on its way to disk when this returns."""
        line = {"time_s": round(self.elapsed_s(), 6), "event": event, **fields}
        self._events.write(json.dumps(line, allow_nan=False) + "\n")
        self._events.flush()

    @contextmanager
    def phase(self, name: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Two events around a phase. What the body adds to the yielded dictionary is written with the end.

        Compilation inside it is told apart as `compile_s`. A phase that raises ends with `failed`, the error's type.
        """
        self.event("phase_start", phase=name, **fields)
        start, found = time.perf_counter(), dict[str, Any]()
        try:
            yield found
        except BaseException as error:
            found["failed"] = type(error).__name__
            raise
        finally:
            self.event("phase_end", phase=name, duration_s=round(time.perf_counter() - start, 6), **fields, **found)

    def close(self) -> None:
        """Close events.jsonl."""
        self._events.close()


def _make(base: Path) -> Path:
    """Make the folder; runs of the same second and configuration get -2, -3 and so on."""
    for number in range(1, 1000):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(17, "too many runs of the same name in one second", str(base))
