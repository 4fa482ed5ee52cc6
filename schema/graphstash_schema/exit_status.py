"""Exit statuses of every command, on both sides, and how a command says that it failed.

`graphstash --help` and the reference of the command line show what each means.
"""

from enum import IntEnum
from typing import Final

__all__ = ["MEANINGS", "ExitStatus", "error_line"]


class ExitStatus(IntEnum):
    """What the status of a command means; `graphstash run` ends with that of its command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    CANNOT_RUN = 126
    NOT_FOUND = 127
    INTERRUPTED = 130


MEANINGS: Final[dict[ExitStatus, str]] = {
    ExitStatus.OK: "Done.",
    ExitStatus.FAILED: "The command could not do its work, or a check found a problem.",
    ExitStatus.USAGE: "An option, an argument or a setting cannot be used; nothing was done.",
    ExitStatus.REFUSED: "A bundle does not verify; nothing was imported.",
    ExitStatus.CANNOT_RUN: "`graphstash run` may not start the program.",
    ExitStatus.NOT_FOUND: "`graphstash run` does not find the program.",
    ExitStatus.INTERRUPTED: "Ctrl-C ended the command.",
}


def error_line(message: str) -> str:
    """What a command prints on standard error when it fails."""
    return f"graphstash: error: {message}"
