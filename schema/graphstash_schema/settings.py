"""Describe valid values of a setting, for error messages and for the reference."""

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import ByteSize
from pydantic.fields import FieldInfo

__all__ = ["accepted_range", "accepted_words", "why_refused"]

_GENERAL: Final = re.compile(
    "byte_size.*|(int|float|bool)_.*|(greater|less)_than.*|finite_number|enum|literal_error"
    "|string_pattern_mismatch"
)
"""Types of pydantic's own errors. All other messages come from our validators."""


def accepted_words(field: FieldInfo) -> tuple[str, ...]:
    """Return the valid words of a setting, such as `true`, or () if other values are valid."""
    return tuple(_words(field))


def accepted_range(field: FieldInfo) -> str:
    """Return the limits of a number, a size or a list, such as `above 0 to 60`, or ""."""
    bounds = {
        name: getattr(rule, name)
        for rule in field.metadata
        for name in ("gt", "ge", "le", "max_length")
        if getattr(rule, name, None) is not None
    }
    if "max_length" in bounds:
        return f"at most {bounds['max_length']}"
    least = f"above {bounds['gt']:,.9g}" if "gt" in bounds else f"{bounds.get('ge', 0):,.9g}"
    if "le" in bounds:
        return f"{least} to {bounds['le']:,.9g}"
    if "gt" in bounds:
        return least
    return f"{least} or more" if "ge" in bounds else ""


def why_refused(problem: Any, field: FieldInfo | None) -> str:
    """Return a sentence that says which values are valid.

    Args:
        problem: one of pydantic's error details.
        field: the setting, or None if it does not exist.
    """
    said = str(problem["msg"]).removeprefix("Value error, ")
    if field is None or _GENERAL.fullmatch(problem["type"]) is None:
        return said
    if words := accepted_words(field):
        return f"it takes {' or '.join([', '.join(words[:-1]), words[-1]])}"
    types = {get_origin(field.annotation) or field.annotation, *get_args(field.annotation)}
    kinds = {
        ByteSize: "a size such as 500MB or 10GiB",
        int: "a whole number",
        float: "a number",
    }
    kind = next((text for kind, text in kinds.items() if kind in types), "")
    if not kind:
        return said
    limits = accepted_range(field)
    return f"it takes {kind}" + (f" ({limits})" if limits else "")


def _words(field: FieldInfo) -> Iterator[str]:
    kind: Any = field.annotation
    kinds = [each for each in get_args(kind) if each is not type(None)]
    if kinds and get_origin(kind) not in (Literal, tuple, dict):
        kind = kinds[0]  # of `X | None`
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    elif kind is bool:
        yield from ("true", "false")
    elif isinstance(kind, type) and issubclass(kind, StrEnum):
        yield from kind
    for rule in field.metadata:
        if words := re.fullmatch(r"\^\(([\w|]+)\)\$", getattr(rule, "pattern", None) or ""):
            yield from words[1].split("|")
