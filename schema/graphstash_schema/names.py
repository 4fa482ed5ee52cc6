"""The base of every word on the wire: a string that was checked once, where it came in.

A subclass states its form; afterwards its type says that it was checked. Words are plain strings to
everything else (SQL, URLs, JSON), and pydantic accepts them as field types.
"""

import re
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from graphstash_schema.errors import ErrorCode, InvalidValueError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

__all__ = ["LINE", "ManifestName", "Namespace", "Word", "line_of", "printable", "star_matcher"]


LINE: Final = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""What people are shown of what others sent: one line without control characters. They move a
terminal's cursor, and PostgreSQL stores no NUL."""


class Word(str):
    """A string of one fixed form.

    Raises:
        InvalidValueError: on construction, when the text does not match `form`.
    """

    __slots__ = ()

    form: ClassVar[re.Pattern[str]]
    """What the whole string must match. Forms are ASCII, so a character is a byte."""

    what: ClassVar[str]
    """How an error message calls the value."""

    code: ClassVar[ErrorCode]
    """The error code of a value that does not match."""

    def __new__(cls, text: str) -> Self:
        """Checks the text: the only way to make a word."""
        if cls.form.fullmatch(text) is None:
            raise InvalidValueError(
                code=cls.code, what=cls.what, value=text, expected=cls.form.pattern
            )
        return str.__new__(cls, text)

    @classmethod
    def all_of(cls, texts: Sequence[str]) -> list[Self]:
        """Checks many texts in a third of the time that each by itself takes.

        Raises:
            InvalidValueError: for the first that does not match `form`.
        """
        if not all(map(cls.form.fullmatch, texts)):
            return [cls(text) for text in texts]  # raises
        return list(map(partial(str.__new__, cls), texts))

    @classmethod
    def __get_pydantic_core_schema__(
        cls, _source: Any, _handler: "GetCoreSchemaHandler"
    ) -> "CoreSchema":
        """Lets pydantic check a field of this type, and describe it as a string with a pattern."""
        from pydantic_core import core_schema  # words are also used where no pydantic is loaded

        return core_schema.no_info_after_validator_function(
            cls,
            core_schema.str_schema(),
            serialization=core_schema.to_string_ser_schema(),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, _schema: "CoreSchema", _handler: Any) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{cls.form.pattern}$"}


class Namespace(Word):
    """The unit of isolation, trust and quota: 1 to 64 characters, lower case."""

    __slots__ = ()
    form = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
    what = "namespace"
    code = ErrorCode.INVALID_NAMESPACE


class ManifestName(Word):
    """What a job calls its manifest: 1 to 128 characters, safe in a path."""

    __slots__ = ()
    form = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
    what = "manifest name"
    code = ErrorCode.INVALID_NAME


def line_of(text: str, *, most: int) -> str:
    """Makes text fit `LINE`: control characters become spaces, and the end is cut.

    `most` is the maximum length of the result, in characters.
    """
    return _CONTROL.sub(" ", text)[:most]


def printable(text: str, *, most: int) -> str:
    """Makes text of a stranger fit to be logged or shown: one line, at most `most` characters.

    What is not printable is escaped: control characters, and those that reorder a line.
    """
    if len(text) > most:
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
    """The regular expression of a pattern in which `*` stands for any characters.

    Not fnmatch's: `[` and `?` are ordinary characters in the name of a branch or a repository.
    """
    # The text between two stars is searched once, where it comes first: going back to later places
    # would find nothing more, and a long claim would stop the server.
    first, *others = map(re.escape, re.split(r"\*+", pattern))
    if not others:
        return re.compile(first)
    *between, last = others
    found = "".join(f"(?>.*?{each})" for each in between)
    return re.compile(first + found + ".*" + last, re.DOTALL)
