"""Causes of a miss, with the words of the explanation that is right: `causes/*.toml`.

Each cause is a pair of runs. The script of the first is edited, or gets a variable, and runs again
on another host. All runs of a compiler share a namespace, as in a team.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

__all__ = ["Cause", "Grade", "causes_of_compiler", "grade", "sentences_in"]

Grade: TypeAlias = Literal["right", "vague", "wrong"]

_FOLDER = Path(__file__).with_name("causes")

_NAMED = re.compile(r"\bhere, .* there\b|which was not read|^other \w+")
"""A sentence that names a cause, and does not only say that something differs."""


@dataclass(frozen=True)
class Cause:
    """One change between two runs.

    Attributes:
        script: text of the script after the change.
        variables: variables of the environment that the change adds.
        says: words of the sentence that is right.
        also: words of true sentences about what follows from the change.
        hides: words that no sentence has.
        expected: the grade: "vague" if the compiler does not reveal what has changed.
        is_light: whether `make test` also tries it.
    """

    name: str
    script: str
    variables: Mapping[str, str]
    says: Sequence[str]
    also: Sequence[str]
    hides: Sequence[str]
    expected: Grade
    is_light: bool


def causes_of_compiler(name: str) -> Iterator[Cause]:
    """Yield the causes of a compiler; the first runs the script as it is."""
    read = tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8"))
    for each in read["cause"]:
        script = read["program"]
        for old, new in each.get("edit", ()):
            assert old in script, f"{name}: {each['name']} edits text that is not there: {old}"
            script = script.replace(old, new)
        yield Cause(
            each["name"],
            script,
            each.get("variables", {}),
            each["says"],
            each.get("also", ()),
            each.get("hides", ()),
            each.get("expected", "right"),
            each.get("is_light", False),
        )


def sentences_in(text: str) -> list[str]:
    """Return the sentences in the output of `graphstash explain --json`."""
    causes: list[Any] = json.loads(text)
    return [str(each["cause"]) for each in causes]


def grade(cause: Cause, sentences: Sequence[str]) -> Grade:
    """Return how good an explanation is. One wrong sentence makes it wrong."""
    fragments = [part for sentence in sentences for part in re.split(r"; ", sentence)]
    named = [part for part in fragments if _NAMED.search(part)]
    if any(word in part for part in fragments for word in cause.hides):
        return "wrong"
    if any(not any(word in part for word in (*cause.says, *cause.also)) for part in named):
        return "wrong"
    is_said = any(all(word in sentence for word in cause.says) for sentence in sentences)
    return "right" if is_said else "vague"
