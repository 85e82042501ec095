"""The text format of placement instances: `id,lower,upper,size[,gaps][,offset]`, that of google/minimalloc.

Lifetimes are half-open. `gaps`: space-separated `start-end` pairs, half-open, ascending; the column is written only
where a block has one.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from tmojax.arena.block import Block
from tmojax.errors import InputError

_REQUIRED = ("id", "lower", "upper", "size")
_OPTIONAL = ("gaps", "offset")
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_GAP = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")


def read_blocks(path: Path) -> tuple[list[Block], list[int] | None]:
    """Read blocks, and their offsets if the file has that column. Sizes and offsets are bytes.

    Raises InputError with the line and the field for a file that is not in the format.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text ({error})") from None
    rows = [(number, row) for number, row in enumerate(csv.reader(text.splitlines()), 1) if row]
    if not rows:
        raise InputError(f"{path}: is empty; the first line must be {','.join(_REQUIRED)}")
    header = [name.strip() for name in rows[0][1]]
    known = (*_REQUIRED, *_OPTIONAL)
    if not set(_REQUIRED) <= set(header) <= set(known) or len(set(header)) != len(header):
        raise InputError(
            f"{path}, line {rows[0][0]}: the columns are {','.join(header)}; need each of {','.join(_REQUIRED)} once, "
            f"and optionally {','.join(_OPTIONAL)}"
        )
    blocks: list[Block] = []
    offsets: list[int] = []
    seen: set[str] = set()
    for number, row in rows[1:]:
        where = f"{path}, line {number}"
        if len(row) != len(header):
            raise InputError(f"{where}: has {len(row)} fields for {len(header)} columns")
        fields = dict(zip(header, (field.strip() for field in row), strict=True))
        if not fields["id"] or fields["id"] in seen:
            raise InputError(f"{where}, id: {fields['id']!r} is empty or used before; ids must be unique")
        seen.add(fields["id"])
        lower, upper, size = (_integer(where, name, fields[name]) for name in ("lower", "upper", "size"))
        if upper <= lower:
            raise InputError(f"{where}, upper: {upper} must be greater than lower {lower}; lifetimes are half-open")
        if size < 1:
            raise InputError(f"{where}, size: {size} must be positive; leave empty blocks out")
        blocks.append(Block(fields["id"], size, lower, upper, _gaps(where, fields.get("gaps", ""), lower, upper)))
        if "offset" in fields:
            offsets.append(_integer(where, "offset", fields["offset"]))
            if offsets[-1] < 0:
                raise InputError(f"{where}, offset: {offsets[-1]} must not be negative")
    return blocks, offsets if "offset" in header else None


def write_blocks(path: Path, blocks: Sequence[Block], offsets: Sequence[int] | None = None) -> None:
    """Write blocks, with a column of offsets (bytes) if they are given."""
    gaps = any(block.gaps for block in blocks)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*_REQUIRED, *(["gaps"] if gaps else []), *(["offset"] if offsets is not None else [])])
        for index, block in enumerate(blocks):
            row: list[object] = [block.id, block.lower, block.upper, block.size_bytes]
            if gaps:
                row.append(" ".join(f"{start}-{end}" for start, end in block.gaps))
            if offsets is not None:
                row.append(int(offsets[index]))
            writer.writerow(row)


def _integer(where: str, name: str, text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise InputError(f"{where}, {name}: {text!r} is not an integer of at most 18 digits")
    return int(text)


def _gaps(where: str, text: str, lower: int, upper: int) -> tuple[tuple[int, int], ...]:
    gaps = []
    last = lower
    for word in text.split():
        match = _GAP.fullmatch(word)
        if not match:
            raise InputError(f"{where}, gaps: {word!r} is not start-end; write for example 10-20 30-35")
        start, end = int(match[1]), int(match[2])
        if not last < start < end < upper:
            raise InputError(f"{where}, gaps: {word!r} must lie inside {lower}-{upper}, behind the gap before it")
        gaps.append((start, end))
        last = end
    return tuple(gaps)
