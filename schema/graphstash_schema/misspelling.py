"""Misspelled settings: environment variables that have our prefix, and resemble a setting."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["unknown_variables", "warning_of"]

_ALIKE: Final = 0.85
"""Minimum similarity for a variable to count as a misspelled setting. The settings of a server and
of a job share the prefix. The most similar pair of the two has a similarity of 0.815."""


def unknown_variables(
    environ: Mapping[str, str], *, prefix: str, settings: Iterable[str]
) -> dict[str, str | None]:
    """Return the variables with a prefix that are no settings, each with the most similar setting.

    The value is None for a variable without a similar setting, which other parts may read.
    """
    bare = {name.upper(): f"{prefix}{name.upper()}" for name in settings}
    known = set(bare.values())
    unknown = {}
    for variable in sorted(environ):
        if variable.startswith(prefix) and variable not in known:
            name = variable.removeprefix(prefix).upper()
            found = difflib.get_close_matches(name, bare, n=1, cutoff=_ALIKE)
            unknown[variable] = bare[found[0]] if found else None
    return unknown


def warning_of(unknown: Mapping[str, str | None]) -> str:
    """Return a line about the variables that resemble a setting, or "" if none does."""
    told = (f"{name} (did you mean {nearest}?)" for name, nearest in unknown.items() if nearest)
    joined = ", ".join(told)
    return f"ignored, because there are no such settings: {joined}" if joined else ""
