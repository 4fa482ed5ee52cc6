"""Find misspelled settings: environment variables with our prefix that resemble a setting."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["unknown_variables", "warning_of"]

_MIN_SIMILARITY: Final = 0.85
"""Minimum similarity for a variable to count as a misspelled setting. It must exceed 0.815, because
settings of a server and of a job, which share the prefix, have at most this similarity."""


def unknown_variables(
    environ: Mapping[str, str], *, prefix: str, settings: Iterable[str]
) -> dict[str, str | None]:
    """Return the variables that have the prefix but are no setting, with the most similar setting.

    The value is None if no setting is similar: other programs may read such a variable.
    """
    bare = {name.upper(): f"{prefix}{name.upper()}" for name in settings}
    known = set(bare.values())
    unknown = {}
    for variable in sorted(environ):
        if variable.startswith(prefix) and variable not in known:
            name = variable.removeprefix(prefix).upper()
            found = difflib.get_close_matches(name, bare, n=1, cutoff=_MIN_SIMILARITY)
            unknown[variable] = bare[found[0]] if found else None
    return unknown


def warning_of(unknown: Mapping[str, str | None]) -> str:
    """Return a line about the variables that resemble a setting, or "" if none does."""
    suggestions = (
        f"{name} (did you mean {nearest}?)" for name, nearest in unknown.items() if nearest
    )
    joined = ", ".join(suggestions)
    return f"ignored, because there are no such settings: {joined}" if joined else ""
