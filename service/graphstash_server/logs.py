"""What the server logs: one line per event, whatever callers sent, and no query strings."""

import logging
from typing import Final

__all__ = ["EscapingFormatter", "WithoutQuery", "printable", "set_up_logging"]

_INDENT: Final = "    "
"""Before each line of a traceback, so that none can look like an entry of its own."""


def printable(text: str) -> str:
    """The text with everything escaped that could end a line, move a cursor or turn the text round,
    as in a Python string.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


class EscapingFormatter(logging.Formatter):
    """Escapes each message and each line of a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The line of the entry."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802 - logging's name
        """The lines of a traceback."""
        lines = super().formatException(ei).split("\n")  # type: ignore[arg-type] # as it was given
        return "\n".join(_INDENT + printable(line) for line in lines)


class WithoutQuery(logging.Filter):
    """Takes the query out of uvicorn's access log: callers put secrets there by mistake."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Changes the path; `args` are address, method, path with query, version and status."""
        if isinstance(record.args, tuple) and len(record.args) == 5:
            address, method, path, *rest = record.args
            record.args = (address, method, str(path).partition("?")[0], *rest)
        return True


def set_up_logging(level: str, *, form: str) -> None:
    """Logs to standard error, from a level on; `form` is a format of `logging`."""
    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
