"""Server logging. Callers cannot forge entries, and query strings are not logged."""

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Mapping
from contextvars import ContextVar, copy_context
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from graphstash_schema.names import printable

__all__ = [
    "REQUEST",
    "EscapingFormatter",
    "JsonFormatter",
    "WithoutQuery",
    "ids_of",
    "in_background",
    "set_up_logging",
]

T = TypeVar("T")

REQUEST: Final[ContextVar[Mapping[str, Any] | None]] = ContextVar("request", default=None)
"""State of the current request, whose IDs its log entries carry."""

_INDENT: Final = "    "
"""Prefix of each traceback line, so that no such line can look like an entry."""


class EscapingFormatter(logging.Formatter):
    """Formats an entry as one line of text. Traceback lines follow, indented."""

    _written = (-1, "")
    """The latest second, and its text. One object, because several threads log."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        """Format the time. Build the text of a second once, which takes longer than the rest."""
        second = int(record.created)
        written, text = self._written
        if second != written:
            text = time.strftime(datefmt or self.default_time_format, self.converter(second))
            self._written = second, text
        return f"{text},{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Escape the entry's line."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802 - logging's name
        """Escape and indent the lines of a traceback."""
        lines = super().formatException(ei).split("\n")  # type: ignore[arg-type] # passed on unchanged
        return "\n".join(_INDENT + printable(line) for line in lines)


def ids_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return a request's IDs as log fields: the server's, the caller's if it sent one, and those of
    the span if tracing is on.
    """
    own, answered = state["server_request_id"], state["request_id"]
    ids = {"request": own} | ({"caller_request": answered} if own != answered else {})
    return ids | {name: state[name] for name in ("trace_id", "span_id") if name in state}


def in_background(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Start a task whose log entries carry no request IDs, because any number of requests may wait
    for it.
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
    """Removes query strings, which may contain secrets by mistake, from uvicorn's access log."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Cut the query. `args`: address, method, path with query, version, status."""
        if isinstance(record.args, tuple) and len(record.args) == 5 and "?" in str(record.args[2]):
            address, method, path, *rest = record.args
            record.args = (address, method, str(path).partition("?")[0], *rest)
        return True


def set_up_logging(level: str, *, form: str | None) -> None:
    """Log to standard error from `level` on. `form` is a `logging` format, or None for JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form is None else EscapingFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
    if logging.getLogger().level == logging.INFO:
        logging.getLogger("httpx").setLevel(logging.WARNING)  # an entry per call of an upstream
    # No entry names its line or thread, and finding them would take a quarter of an entry's CPU
    # time. See "Optimization" in Python's logging HOWTO.
    logging._srcfile = None  # noqa: SLF001 - documented there
    logging.logThreads = logging.logMultiprocessing = False
