"""Server logging: one line per event regardless of the caller's input, and no query strings."""

import asyncio
import json
import logging
from collections.abc import Coroutine, Mapping
from contextvars import ContextVar, copy_context
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

__all__ = [
    "REQUEST",
    "EscapingFormatter",
    "JsonFormatter",
    "WithoutQuery",
    "ids_of",
    "in_background",
    "printable",
    "set_up_logging",
]

T = TypeVar("T")

REQUEST: Final[ContextVar[Mapping[str, Any] | None]] = ContextVar("request", default=None)
"""State of the current request. Log entries made during the request carry its IDs."""

_INDENT: Final = "    "
"""Prefix of each traceback line, so that no such line can look like an entry."""


def printable(text: str) -> str:
    """Escape all characters that could end a line, move a cursor or reverse the text direction. The
    escapes are those of a Python string.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


class EscapingFormatter(logging.Formatter):
    """Escapes each message and each line of a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the escaped line of the entry."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802 - logging's name
        """Return the escaped and indented lines of a traceback."""
        lines = super().formatException(ei).split("\n")  # type: ignore[arg-type] # passed on unchanged
        return "\n".join(_INDENT + printable(line) for line in lines)


def ids_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the IDs of a request as log fields: the server's ID, the caller's ID if it differs,
    and those of the span if tracing is on.
    """
    own, answered = state["server_request_id"], state["request_id"]
    ids = {"request": own} | ({"caller_request": answered} if own != answered else {})
    return ids | {name: state[name] for name in ("trace_id", "span_id") if name in state}


def in_background(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Start a task that belongs to no request, even if a request starts it. Several requests or
    none may wait for it. Its log entries carry no request IDs.
    """
    context = copy_context()
    context.run(REQUEST.set, None)
    return asyncio.create_task(work, context=context)


class JsonFormatter(logging.Formatter):
    """Formats an entry as one JSON object per line.

    The fields are `time`, `level`, `logger`, `process` and `message`. Entries of a request also
    have `request`, `caller_request`, `trace_id` and `span_id`. Errors have `traceback`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one line of ASCII without control characters."""
        state = getattr(record, "state", None) or REQUEST.get()
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
            **(ids_of(state) if state is not None else {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry).replace("\x7f", "\\u007f")  # JSON does not escape it


class WithoutQuery(logging.Filter):
    """Removes the query from uvicorn's access log, because callers put secrets there by mistake."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Cut the query. `args` are address, method, path with query, version and status."""
        if isinstance(record.args, tuple) and len(record.args) == 5:
            address, method, path, *rest = record.args
            record.args = (address, method, str(path).partition("?")[0], *rest)
        return True


def set_up_logging(level: str, *, form: str | None) -> None:
    """Log to standard error from `level` on. `form` is a `logging` format, or None for JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form is None else EscapingFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
