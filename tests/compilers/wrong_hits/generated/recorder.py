"""A cache that notes what a program asks for, and ends the program with an exception."""

from collections.abc import Callable
from types import CodeType
from typing import Any

from compilers.wrong_hits.runner import AskedError, Recorder

__all__ = ["asked_by"]


def asked_by(
    recorder: Recorder, names: dict[str, Any]
) -> Callable[[CodeType, dict[str, Any]], tuple[str, str]]:
    """Return a function that runs a program with these names, until it asks the recorder."""
    recorder.answers_at_once = False

    def ask(program: CodeType, own: dict[str, Any]) -> tuple[str, str]:
        recorder.answer = None
        own |= names
        try:
            exec(program, own)
        except AskedError as asked:
            return asked.answer["key"], asked.answer["unshared"]
        raise AssertionError("nothing was asked for")

    return ask
