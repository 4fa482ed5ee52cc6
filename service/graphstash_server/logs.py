"""What the server logs: one line per event, whatever callers sent, and no query strings."""

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
"""The state of the request that is being answered: what is logged meanwhile has its ids."""

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


def ids_of(state: Mapping[str, Any]) -> dict[str, str]:
    """The ids of a request as fields of an entry: the server's own, the caller's where there is
    one, and those of its span where traces are made.
    """
    own, answered = state["server_request_id"], state["request_id"]
    ids = {"request": own} | ({"caller_request": answered} if own != answered else {})
    return ids | {name: state[name] for name in ("trace_id", "span_id") if name in state}


def in_background(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """A task that belongs to no request, although one begins it: several wait for it, or none. What
    it logs has no ids of a request.
    """
    context = copy_context()
    context.run(REQUEST.set, None)
    return asyncio.create_task(work, context=context)


class JsonFormatter(logging.Formatter):
    """An object a line: `time`, `level`, `logger`, `process`, `message`, for what belongs to a
    request also `request`, `caller_request`, `trace_id` and `span_id`, and `traceback`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One line of ASCII without control characters."""
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
        return json.dumps(entry).replace("\x7f", "\\u007f")  # the only one that JSON lets be


class WithoutQuery(logging.Filter):
    """Takes the query out of uvicorn's access log: callers put secrets there by mistake."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Changes the path; `args` are address, method, path with query, version and status."""
        if isinstance(record.args, tuple) and len(record.args) == 5:
            address, method, path, *rest = record.args
            record.args = (address, method, str(path).partition("?")[0], *rest)
        return True


def set_up_logging(level: str, *, form: str | None) -> None:
    """Logs to standard error, from a level on; `form` is a format of `logging`, None for JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form is None else EscapingFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
