"""How the processes of one `graphstash run` know each other; imports nothing heavy."""

import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Final

__all__ = [
    "COMMAND_VARIABLE",
    "RUN_VARIABLE",
    "command_of_run",
    "is_run",
    "joined",
    "new_run",
    "this_run",
]

RUN_VARIABLE: Final = "_GRAPHSTASH_RUN"
"""Names the run in the environment of all its processes."""

COMMAND_VARIABLE: Final = "_GRAPHSTASH_COMMAND"
"""Holds what `graphstash run` was given to run, in the environment of all its processes."""

_MAX_COMMAND_BYTES: Final = 32 * 1024
"""A variable of the environment takes four times that; longer commands are cut."""

_RUN: Final = re.compile(r"[0-9]{20}-[0-9]{1,20}")


def this_run() -> str:
    """The run that this process is part of: that of `graphstash run`, or one of its own."""
    given = os.environ.get(RUN_VARIABLE, "")
    return given if is_run(given) else new_run()


def joined(command: Sequence[str]) -> str:
    """A command as one variable, from which `command_of_run` gets its words back."""
    return "\x1f".join(word.replace("\x1f", " ") for word in command)[:_MAX_COMMAND_BYTES]


def command_of_run() -> list[str]:
    """The command that began the run; what this process was started with where that is unknown."""
    given = os.environ.get(COMMAND_VARIABLE)
    return given.split("\x1f") if given else [sys.executable, *sys.argv]


def is_run(name: str) -> bool:
    """Whether `new_run` may have made this name."""
    return _RUN.fullmatch(name) is not None


def new_run() -> str:
    """A name for a run that begins now; later ones sort behind earlier ones."""
    return f"{time.time_ns():020d}-{os.getpid()}"
