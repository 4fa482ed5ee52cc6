"""The fields in docs/json-output.md, which tests compare with real output."""

import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "json-output.md"


def fields_of(command: str) -> set[str]:
    (section,) = re.findall(
        rf"^## `{command}`\n(.*?)(?=^## |\Z)", _PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
