"""How numbers, names and lists are written for people."""

from __future__ import annotations

from collections.abc import Sequence


def percent(fraction: float) -> str:
    """A fraction in per cent: one decimal below 10 %, none above, for example `3.1 %` and `42 %`; never `-0.0 %`."""
    value = fraction * 100
    if abs(value) < 0.05:
        return "0 %"
    return f"{value:.1f} %" if abs(value) < 9.95 else f"{value:.0f} %"


def listing(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def counted(count: int, singular: str) -> str:
    """`1 activation`, `12 activations`, `2 micro-batches`."""
    plural = "es" if singular.endswith(("ch", "sh", "s", "x")) else "s"
    return f"{count} {singular}" if count == 1 else f"{count} {singular}{plural}"


def ranges(labels: Sequence[str]) -> str:
    """Labels that end in a number, joined where consecutive: `h0-h3, h5`. Others stand for themselves, each once."""
    numbered: dict[str, list[int]] = {}
    plain: list[str] = []
    for label in dict.fromkeys(labels):
        digits = label[len(label.rstrip("0123456789")) :]
        if digits:
            numbered.setdefault(label[: -len(digits)], []).append(int(digits))
        elif label:
            plain.append(label)
    parts: list[str] = []
    for stem, numbers in numbered.items():
        numbers.sort()
        start = 0
        for place in range(1, len(numbers) + 1):
            if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
                first, last = numbers[start], numbers[place - 1]
                parts.append(f"{stem}{first}" if first == last else f"{stem}{first}-{stem}{last}")
                start = place
    return ", ".join([*parts, *plain])
