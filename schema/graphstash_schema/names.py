"""Strings on the wire that are validated once, on receipt: the type proves the check.

SQL, URLs and JSON treat them as plain strings, and pydantic accepts them as field types.
"""

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from graphstash_schema.errors import ErrorCode, InvalidValueError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

__all__ = [
    "LINE",
    "LIST_START",
    "ListPosition",
    "ManifestName",
    "Namespace",
    "Word",
    "line_of",
    "printable",
    "star_matcher",
]


LINE: Final = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""Pattern of untrusted text that is shown to people. Control characters would move a terminal's
cursor, and PostgreSQL cannot store NUL."""


class Word(str):
    """A string with a fixed form. Raises InvalidValueError for other strings."""

    __slots__ = ()

    form: ClassVar[re.Pattern[str]]
    """Pattern of the whole string, ASCII only."""

    what: ClassVar[str]
    """Name of the value in error messages."""

    code: ClassVar[ErrorCode]
    """Error code of a value that does not match."""

    def __new__(cls, text: str) -> Self:
        """Check the text."""
        if cls.form.fullmatch(text) is None:
            raise InvalidValueError(
                code=cls.code, what=cls.what, value=text, expected=cls.form.pattern
            )
        return str.__new__(cls, text)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, _source: Any, _handler: "GetCoreSchemaHandler"
    ) -> "CoreSchema":
        """Let pydantic validate fields of this type."""
        from pydantic_core import core_schema  # words also work without pydantic

        return core_schema.no_info_after_validator_function(
            cls,
            core_schema.str_schema(),
            serialization=core_schema.to_string_ser_schema(),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, _schema: "CoreSchema", _handler: Any) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{cls.form.pattern}$"}


class Namespace(Word):
    """Unit of isolation, trust and quota: 1 to 64 characters, lower case."""

    __slots__ = ()
    form = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
    what = "namespace"
    code = ErrorCode.INVALID_NAMESPACE


class ManifestName(Word):
    """Name of a job's manifest: 1 to 128 characters, safe in a path."""

    __slots__ = ()
    form = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
    what = "job name"
    code = ErrorCode.INVALID_NAME


class ListPosition(Word):
    """Position in a namespace's list of withdrawals: `0` at the start, else `<number>-<16 hex>` of
    the withdrawal before it. A restored database repeats numbers, but not the random hex digits.
    """

    __slots__ = ()
    form = re.compile(r"0|[1-9][0-9]{0,17}-[0-9a-f]{16}")
    what = "position in the list of withdrawals"
    code = ErrorCode.INVALID_REQUEST

    @property
    def number(self) -> int:
        """Number of the withdrawal before this position, or 0."""
        return int(self.partition("-")[0])


LIST_START: Final = ListPosition("0")


def line_of(text: str, *, most: int) -> str:
    """Make text fit `LINE`: truncate to `most` characters, with spaces for control characters."""
    return _CONTROL.sub(" ", text)[:most]


def printable(text: str, *, most: int | None = None) -> str:
    """Make untrusted text safe to show: one line of its first `most` characters, or of all, with
    escapes for control characters, characters that reorder a line, and other unprintable ones.
    """
    if most is not None and len(text) > most:
        text = f"{text[:most]}..."
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "replace").decode()
        for each in text
    )


_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@lru_cache(maxsize=1024)
def star_matcher(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern in which only `*` is special: any characters. For
    fnmatch, `[` and `?` are special, which occur in branch and repository names.
    """
    # Match the text between two stars at its first occurrence only. Later occurrences cannot give
    # more matches, and backtracking to them would let a long claim block the server.
    first, *others = map(re.escape, re.split(r"\*+", pattern))
    if not others:
        return re.compile(first)
    *between, last = others
    found = "".join(f"(?>.*?{each})" for each in between)
    return re.compile(first + found + ".*" + last, re.DOTALL)
