"""Run a program until its first look-up, in this process or in a child."""

import json
import os
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

from compilers.wrong_hits.runner import AskedError, Recorder, fork, load, run

__all__ = ["Answer", "asked_by", "asked_in_child"]

Answer = tuple[str, str, str]
"""Key, reason for no key, and compiled text if the program reports one."""


def asked_by(
    recorder: Recorder, names: dict[str, Any]
) -> Callable[[CodeType, dict[str, Any]], Answer]:
    """Return a function that runs a program with these names until it asks the recorder."""
    recorder.answers_at_once = False

    def ask(program: CodeType, own: dict[str, Any]) -> Answer:
        recorder.answer = None
        own |= names
        try:
            exec(program, own)
        except AskedError as asked:
            return asked.answer["key"], asked.answer["unshared"], ""
        raise AssertionError("nothing was asked for")

    return ask


def asked_in_child(compiler: Any) -> Callable[[CodeType, dict[str, Any]], Answer]:
    """Return a function that runs a program in a forked child, as a pair's program.

    A program may change everything in its process. With `tell(compiled=...)`, it reports the text
    that it compiles.

    Args:
        compiler: Module of `wrong_hits`.
    """
    load(compiler)

    def ask(program: CodeType, own: dict[str, Any]) -> Answer:
        def execute(tell: Callable[..., None]) -> None:
            own["tell"] = tell
            exec(program, own)

        reading, writing = os.pipe()
        child = fork(partial(run, compiler, writing, execute), writing)
        os.close(writing)
        with os.fdopen(reading) as answers:
            answer = json.loads(answers.readline())
        os.waitpid(child, 0)
        if "failed" in answer:
            raise AssertionError(answer["failed"])
        return answer["key"], answer["unshared"], answer.get("compiled", "")

    return ask
