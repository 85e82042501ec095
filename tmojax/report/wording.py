"""How numbers, names and lists are written for people."""

from __future__ import annotations

from collections.abc import Sequence


def percent(fraction: float) -> str:
    """A fraction in per cent: one decimal below 10 %, none above, for example `3.1 %` and `42 %`."""
    value = fraction * 100
    return f"{value:.1f} %" if abs(value) < 9.95 else f"{value:.0f} %"


def listing(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def counted(count: int, singular: str) -> str:
    """`1 activation`, `12 activations`."""
    return f"{count} {singular}" if count == 1 else f"{count} {singular}s"
