"""Markdown for reports that users paste into pages of other programs."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from graphstash._cli.output import shown

__all__ = ["plain", "table"]

_SPECIAL: Final = re.compile(r"([\\`*_\[\]<>|~&]|:(?=//))")
"""Characters with a meaning in a Markdown table cell, and the colon of a bare URL."""


def plain(text: Any) -> str:
    """Escape untrusted text so that Markdown shows it literally."""
    return _SPECIAL.sub(r"\\\1", shown(str(text), most=128))


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: str) -> list[str]:
    """Return the lines of a table, and an empty line. Cells may contain Markdown.

    `numbers` has a character for each column: `:` for numbers, aligned right, or `-` for text.
    """
    rules = ["---:" if each == ":" else "---" for each in numbers]
    lines = [titles, rules, *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]
