"""Identify the processes of one `graphstash run`. Imports only light modules."""

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
    "encode_command",
    "is_run",
    "new_run",
    "started_at",
    "this_run",
]

RUN_VARIABLE: Final = "_GRAPHSTASH_RUN"
"""Variable with the run's name, set in all its processes."""

COMMAND_VARIABLE: Final = "_GRAPHSTASH_COMMAND"
"""Variable with the command that `graphstash run` was given, set in all its processes."""

_MAX_COMMAND_BYTES: Final = 32 * 1024
"""Maximum characters of a stored command, each of up to four bytes in UTF-8."""

_RUN: Final = re.compile(r"[0-9]{20}-[0-9]{1,20}")


def this_run() -> str:
    """Return the name of the `graphstash run` that started this process, or else a new name."""
    given = os.environ.get(RUN_VARIABLE, "")
    return given if is_run(given) else new_run()


def encode_command(command: Sequence[str]) -> str:
    """Encode a command for `COMMAND_VARIABLE`. `command_of_run` decodes it."""
    return "\x1f".join(word.replace("\x1f", " ") for word in command)[:_MAX_COMMAND_BYTES]


def command_of_run() -> list[str]:
    """Return the command that started the run, or else this process's command line."""
    given = os.environ.get(COMMAND_VARIABLE)
    return given.split("\x1f") if given else [sys.executable, *sys.argv]


def is_run(name: str) -> bool:
    """Return whether a name has the format of `new_run`."""
    return _RUN.fullmatch(name) is not None


def new_run(*, after_seconds: float = 0.0) -> str:
    """Return a name for a run that starts after `after_seconds`. Names sort by start time."""
    return f"{time.time_ns() + int(after_seconds * 1e9):020d}-{os.getpid()}"


def started_at(run: str) -> float:
    """Return the start time in a run's name, in seconds since 1970."""
    return int(run.partition("-")[0]) / 1e9
