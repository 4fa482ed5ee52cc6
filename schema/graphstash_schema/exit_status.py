"""Exit statuses of all commands of client and server, and the format of their errors."""

from enum import IntEnum
from typing import Final

__all__ = ["MEANINGS", "ExitStatus", "error_line"]


class ExitStatus(IntEnum):
    """Exit status of a command. `graphstash run` passes on the status of the program it started."""

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
"""Meanings in `graphstash --help` and in the command-line reference."""


def error_line(message: str) -> str:
    """Return the line that a failing command prints to standard error."""
    return f"graphstash: error: {message}"
