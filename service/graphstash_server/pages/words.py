"""Format numbers, times and descriptions for people."""

import re
from datetime import datetime
from typing import Final

from markupsafe import Markup, escape

__all__ = ["ago", "count", "duration", "many", "prose", "share", "size"]

_SIZES: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_CODE: Final = re.compile(r"`([^`]+)`")


def duration(seconds: float) -> str:
    """Format a duration in at most two units: `820 ms`, `38.2 s`, `4 h 12 min`, `9 d 3 h`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms" if seconds else "0 s"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    for small, large, in_small, in_large in (
        ("s", "min", 1, 60),
        ("min", "h", 60, 3600),
        ("h", "d", 3600, 86_400),
    ):
        whole, rest = divmod(round(seconds / in_small), in_large // in_small)
        if large == "d" or whole < {"min": 60, "h": 48}[large]:
            return f"{whole:,} {large} {rest} {small}" if rest else f"{whole:,} {large}"
    raise AssertionError("days have no end")


def size(count_bytes: float) -> str:
    """Format a size: `4.1 GiB`."""
    for unit in _SIZES:
        if abs(count_bytes) < 1023.95 or unit == _SIZES[-1]:
            break
        count_bytes /= 1024
    return f"{count_bytes:,.0f} {unit}" if unit == "bytes" else f"{count_bytes:,.1f} {unit}"


def count(number: int) -> str:
    """Format a number: `12,345`."""
    return f"{number:,}"


def many(number: int, one: str, several: str = "") -> str:
    """Format a number with its noun: `1 hit`, `2 hits`. `several` is an irregular plural."""
    return f"{count(number)} {one if number == 1 else several or one + 's'}"


def share(part: float, whole: float) -> str:
    """Format a share: `97.4 %`, or a dash if `whole` is 0. Does not round to 0 % or 100 %."""
    if not whole:
        return "\N{EN DASH}"
    percent = 100 * part / whole
    if 0 < percent < 0.1 or 99.9 < percent < 100:
        return "< 0.1 %" if percent < 1 else "> 99.9 %"
    return f"{percent:.1f} %" if percent < 100 else "100 %"


def ago(at: datetime, now: datetime) -> str:
    """Format the time since or until `at` in one unit: `4 min ago`, or `in 4 min`."""
    seconds = round((now - at).total_seconds())
    if not seconds:
        return "just now"
    value, unit = duration(abs(seconds)).split(" ")[:2]
    text = f"{float(value):.0f} {unit}" if unit == "s" else f"{value} {unit}"
    return f"in {text}" if seconds < 0 else f"{text} ago"


def prose(text: str) -> Markup:
    """Render a plain text as HTML, with the parts in backticks as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))  # noqa: S704 - escaped before
