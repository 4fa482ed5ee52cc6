"""The fields that docs/json-output.md names, for tests that compare them with real output."""

import re
from pathlib import Path

__all__ = ["fields_of"]

_PAGE = Path(__file__).parents[2] / "docs" / "json-output.md"


def fields_of(command: str) -> set[str]:
    """Return the fields that the page names for a command."""
    (section,) = re.findall(
        rf"^## `{command}`\n(.*?)(?=^## |\Z)", _PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
