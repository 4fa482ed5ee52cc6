"""Validation rules for settings: convert a value, or raise `ValueError` that states valid values.

pydantic could do this, but importing it takes longer than the rest of a process's start, and most
processes of a job compile nothing.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from graphstash_schema.option import Option

__all__ = [
    "Rule",
    "Secret",
    "choice",
    "flag",
    "listed",
    "number",
    "path",
    "secret",
    "setting",
    "size",
    "text",
    "whole",
]

_SIZE: Final = re.compile(
    r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(?:([kmgtpe])(i?)b?|b)?\s*", re.ASCII | re.IGNORECASE
)

_TRUTH: Final = dict.fromkeys(("true", "1", "yes", "on", "t", "y"), True) | dict.fromkeys(
    ("false", "0", "no", "off", "f", "n"), False
)


class Secret:
    """A string that logs, `repr` and tracebacks do not show."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return "Secret('***')"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def reveal(self) -> str:
        return self._text


@dataclass(frozen=True)
class Rule:
    """Valid values of one setting.

    Attributes:
        read: converts a value from the environment or a caller, or raises `ValueError`.
        words: valid words to show, such as `true` and `false`. Empty if the value is not a word.
        limits: limits of a number, a size or a list to show, such as `above 0 to 60`.
        is_secret: whether messages must not show the value.
        is_size: whether the value is a number of bytes.
    """

    read: Callable[[Any], Any]
    words: tuple[str, ...] = ()
    limits: str = ""
    is_secret: bool = False
    is_size: bool = False


def setting(default: Any, rule: Rule, option: Option | None = None) -> Any:
    """Return a dataclass field with a rule. A callable default becomes the default factory.

    With an option, the setting is also an option of `graphstash run`.
    """
    arguments: dict[str, Any] = {"default_factory" if callable(default) else "default": default}
    return field(**arguments, metadata={"rule": rule, "option": option})


def number(*, above: float | None = None, least: float = 0, most: float) -> Rule:
    """Accept a finite number within limits."""
    return _bounded("a number", float, above=above, least=least, most=most)


def whole(*, least: int, most: int) -> Rule:
    return _bounded("a whole number", _whole, least=least, most=most)


def size(*, above: float | None = None) -> Rule:
    """Accept a number of bytes: `10GiB`, `500MB`, `4096`."""
    rule = _bounded("a size such as 500MB or 10GiB", _bytes, above=above)
    return replace(rule, is_size=True)


def flag(*others: str) -> Rule:
    """Accept true or false, a synonym such as `1`, `yes` or `off`, or one of other words."""
    known = _TRUTH | {word: word for word in others}
    return _one_of(("true", "false", *others), lambda value: known[str(value).strip().lower()])


def choice(kind: Callable[[str], str], words: Iterable[str]) -> Rule:
    words = tuple(words)

    def read(value: Any) -> str:
        return kind({word: word for word in words}[str(value)])

    return _one_of(words, read)


def text(read: Callable[[str], str]) -> Rule:
    """Accept a string for which `read` does not raise `ValueError`."""
    return Rule(lambda value: read(str(value)))


def secret(read: Callable[[str], str]) -> Rule:
    """Accept a string like `text`, and convert it to a `Secret`."""

    def read_secret(value: Any) -> Secret:
        return Secret(read(value.reveal() if isinstance(value, Secret) else str(value)))

    return Rule(read_secret, is_secret=True)


def path() -> Rule:
    """Accept a path, expand `~`, and make the path absolute."""

    def read(value: Any) -> Path:
        try:
            return Path(value).expanduser().absolute()
        except RuntimeError as error:  # a container user without a home directory
            raise ValueError(str(error)) from None

    return Rule(read)


def listed(each: Callable[[str], str] = str, *, most: int | None = None) -> Rule:
    """Accept strings as a sequence, or as one comma-separated string."""

    def read(value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            value = [name.strip() for name in value.split(",") if name.strip()]
        if most is not None and len(value) > most:
            raise ValueError(f"it takes at most {most}, and these are {len(value)}")
        return tuple(map(each, value))

    return Rule(read, limits="" if most is None else f"at most {most}")


def _bounded(
    what: str,
    convert: Callable[[Any], float],
    *,
    above: float | None = None,
    least: float = 0,
    most: float | None = None,
) -> Rule:
    limits = f"above {above:,.9g}" if above is not None else f"{least:,.9g}"
    if most is not None:
        limits += f" to {most:,.9g}"
    elif above is None:
        limits += " or more"

    def read(value: Any) -> float:
        try:
            converted = convert(value)
            if not math.isfinite(converted):
                converted = math.nan
        except (TypeError, ValueError, OverflowError):
            converted = math.nan
        is_low = converted <= above if above is not None else converted < least
        if math.isnan(converted) or is_low or (most is not None and converted > most):
            raise ValueError(f"it takes {what} ({limits})")
        return converted

    return Rule(read, limits=limits)


def _one_of(words: tuple[str, ...], read: Callable[[Any], Any]) -> Rule:
    def read_word(value: Any) -> Any:
        try:
            return read(value)
        except KeyError:
            raise ValueError(f"it takes {', '.join(words[:-1])} or {words[-1]}") from None

    return Rule(read_word, words=words)


def _whole(value: Any) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise ValueError
    return int(value)


def _bytes(value: Any) -> int:
    match = _SIZE.fullmatch(str(value))
    if match is None:
        raise ValueError
    amount, prefix, binary = match.groups()
    power = " kmgtpe".index((prefix or " ").lower())
    return int(float(amount) * (1024 if binary else 1000) ** power) if power else int(amount)
