"""Units of time and memory, numbers and names as people read them: in tables, pictures and error messages."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_CEILING, Context

TIME_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}
"""The units of time that costs and timelines may name, and how many of each make a second."""

MEMORY_UNITS = ("bytes",)
"""The units of memory that costs and timelines may name."""


def number(value: float) -> str:
    """Four significant digits, or the whole number where that has a few more.

    >>> number(3.14159), number(123456.7)
    ('3.142', '123457')
    """
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e8 else f"{value:.4g}"


def some(names: Sequence[str], limit: int = 5) -> str:
    """The first few of them, quoted, and how many more there are.

    >>> some(["a", "b", "c"], 2), some([])
    ("'a', 'b' and 1 more", 'none')
    """
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(map(repr, names[:limit])) or "none") + more


def duration(time: float, unit: str | None) -> str:
    """A time with its unit, where that is known.

    >>> duration(15, "ms"), duration(15, None)
    ('15 ms', '15')
    """
    return f"{number(time)} {unit}" if unit else number(time)


def amount(memory: float, unit: str | None) -> str:
    """An amount of memory: bytes as kB, MB, GB or TB, and a plain number where the unit is not known.

    >>> amount(24.5e9, "bytes"), amount(24.5e9, None)
    ('24.5 GB', '2.45e+10')
    """
    if unit != "bytes":
        return number(memory)
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(memory) >= size:
            return f"{number(memory / size)} {prefix}B"
    return f"{number(memory)} bytes"


def enough(memory: float, unit: str | None) -> str:
    """An amount of memory, rounded up: whoever takes it for a limit has enough.

    >>> enough(4 / 3, None), enough(24.561e9, "bytes"), enough(24.5e9, "bytes")
    ('1.334', '24.57 GB', '24.5 GB')
    """
    digits = Context(prec=4, rounding=ROUND_CEILING).create_decimal(
        f"{memory:.10g}"
    )  # of 10 digits: without rounding errors
    return amount(float(digits), unit)
