"""Parsing and printing of quantities. Bytes are integers; GB is 10^9 bytes and GiB is 2^30 bytes."""

import re
from fractions import Fraction

from tmojax.errors import InputError

BYTE_UNITS = {
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
TIME_UNITS = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6), "ns": Fraction(1, 10**9)}

# Beyond these, sums over a step leave the range in which integers and nanoseconds are exact.
MOST_BYTES, MOST_BYTES_PER_S, MOST_SECONDS = 10**18, 10**18, 10**6

_QUANTITY = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?)\s*([A-Za-z/]+)\s*$")


def _split(text: object, field: str, example: str) -> tuple[Fraction, str]:
    match = _QUANTITY.match(text) if isinstance(text, str) and len(text) < 64 else None
    if match is None:
        raise InputError(f"{field}: {text!r} is not a quantity with a unit; write for example {example!r}")
    return Fraction(match.group(1)), match.group(2)


def _at_most(value: Fraction, most: int, what: str, text: object, field: str) -> Fraction:
    if value > most:
        raise InputError(f"{field}: {text!r} is more than the {most} {what} that are possible; check the unit")
    return value


def parse_bytes(text: object, field: str = "size") -> int:
    """Read a size such as `"24 GiB"` as integer bytes (rounded down). Raises InputError for anything else."""
    number, unit = _split(text, field, "24 GiB")
    if unit not in BYTE_UNITS:
        raise InputError(f"{field}: unknown unit {unit!r} in {text!r}; use one of {', '.join(BYTE_UNITS)}")
    return int(_at_most(number * BYTE_UNITS[unit], MOST_BYTES, "bytes", text, field))


def parse_bandwidth(text: object, field: str = "bandwidth") -> float:
    """Read a rate such as `"25 GB/s"` as bytes per second. Raises InputError for anything else."""
    number, unit = _split(text, field, "25 GB/s")
    if not unit.endswith("/s") or unit[:-2] not in BYTE_UNITS:
        raise InputError(f"{field}: unknown unit {unit!r} in {text!r}; use a byte unit with /s, such as GB/s or GiB/s")
    rate = _at_most(number * BYTE_UNITS[unit[:-2]], MOST_BYTES_PER_S, "bytes per second", text, field)
    if 0 < rate < 1:
        raise InputError(f"{field}: {text!r} is less than one byte per second; write for example '25 GB/s'")
    return float(rate)


def parse_seconds(text: object, field: str = "time") -> float:
    """Read a time such as `"5 us"` as seconds. Raises InputError for anything else."""
    number, unit = _split(text, field, "5 us")
    if unit not in TIME_UNITS:
        raise InputError(f"{field}: unknown unit {unit!r} in {text!r}; use one of {', '.join(TIME_UNITS)}")
    return float(_at_most(number * TIME_UNITS[unit], MOST_SECONDS, "seconds", text, field))


def format_bytes(size_bytes: float) -> str:
    """Print bytes in decimal units with three significant digits, for example `12.7 GB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size_bytes) >= 0.9995 * factor:  # what rounds to 1000 of a unit is 1 of the next
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes:.0f} B"


def format_seconds(time_s: float) -> str:
    """Print a time in s, ms or us with four significant digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(time_s) >= 0.99995 * factor:
            return f"{time_s / factor:.4g} {unit}"
    return f"{time_s:.3g} s"
