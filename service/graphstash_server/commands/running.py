"""Shared parts of the commands: start, output, errors and common options."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer

from graphstash_schema import InvalidValueError
from graphstash_schema.display import format_bytes, plural
from graphstash_schema.exit_status import error_line
from graphstash_schema.names import printable
from graphstash_server.logs import set_up_logging

if TYPE_CHECKING:
    from graphstash_server.context import ProcessContext
    from graphstash_server.settings import Settings

__all__ = [
    "Json",
    "JsonLines",
    "NamespaceFilter",
    "OrphanAge",
    "fail",
    "format_bytes",
    "load",
    "parse",
    "parse_age",
    "plural",
    "print_result",
    "print_table",
    "progress_bar",
    "reason_of",
    "run_with_services",
]

T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
JsonLines = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per line, for scripts.")
]
NamespaceFilter = Annotated[str | None, typer.Option(help="Only this namespace.")]
OrphanAge = Annotated[
    str,
    typer.Option(
        help="Minimum age of orphaned blobs to report or delete; younger ones may belong to an "
        "upload."
    ),
]

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

_MAX_AGE = timedelta(days=365_000)
"""A thousand years: `datetime` can add this to the current time and subtract it."""


def run_with_services(work: "Callable[[ProcessContext], Awaitable[None]]") -> None:
    """Open the database and the blob store of the server's settings, and run `work`.

    An error is one line on stderr. The exit status is 2 if a setting is malformed, otherwise 1.
    """
    settings = load()
    from graphstash_server.clock import system_clock
    from graphstash_server.context import open_services, prepare_database, without_restore
    from graphstash_server.errors import ServerError, StartError
    from graphstash_server.private_files import keep_private

    if not settings.data_dir.is_dir():
        fail(
            f"there is no data directory {settings.data_dir}: set GRAPHSTASH_DATA_DIR as for the "
            "server"
        )
    keep_private(settings)

    async def main() -> None:
        await prepare_database(settings, is_migrating=False)
        # Use no disk tier: blobs that a command reads must not evict those that jobs need.
        durable = settings.model_copy(update={"tier_limit_bytes": 0})
        async with open_services(durable, blob_store=None, clock=system_clock) as context:
            await work(context)

    try:
        with without_restore(settings):
            asyncio.run(main())
    except ServerError as error:
        fail(error.detail)
    except (StartError, OSError) as error:
        fail(reason_of(error))


def reason_of(error: Exception) -> str:
    """Return an error's message. If a file caused it, begin with the file's path."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def load() -> "Settings":
    """Read the server's settings from the environment, and set up logging. Exit if a setting is
    malformed or a package of the server is missing.
    """
    try:
        from graphstash_server import context  # noqa: F401 - imports all packages of a server
        from graphstash_server.errors import StartError
        from graphstash_server.settings import load_settings, warn_of_misspelled
    except ModuleNotFoundError as error:
        fail(
            f"this needs the server's packages ({error.name} is missing): "
            "pip install 'graphstash[server] @ git+<repository>'"
        )
    set_up_logging("WARNING", form="%(levelname)s %(name)s: %(message)s")
    warn_of_misspelled()
    try:
        return load_settings()
    except StartError as error:
        fail(str(error), status=2)


def parse_age(text: str) -> timedelta:
    """Parse an age such as `90d`, `12h`, `30m`, `45s` or `2w`. Exit if the text has another form or
    the age exceeds 1,000 years.
    """
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.replace(".", "", 1).isdecimal():
        fail(f"{text!r} is not a duration: use a number with s, m, h, d or w, e.g. 90d", status=2)
    try:
        age = timedelta(**{_UNITS[unit]: float(number)})
    except OverflowError:
        age = timedelta.max
    if age > _MAX_AGE:
        fail(f"{text!r} is longer than 1,000 years", status=2)
    return age


def parse(read: Callable[[str], T], text: str) -> T:
    """Return an argument of the command line as `read` parses it. Exit if it is malformed."""
    try:
        return read(text)
    except InvalidValueError as error:
        fail(str(error), status=2)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print columns of text. A row is one line and no cell is shortened, so that `grep` works."""
    table = [headings, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


@contextmanager
def progress_bar(what: str, *, is_shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal. Yield a function `(done_bytes, total_bytes)` that advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    is_off = not (is_shown and console.is_terminal)
    with Progress(*columns, console=console, disable=is_off, transient=True) as bars:
        bar = bars.add_task(what, total=None)
        yield lambda done_bytes, total_bytes: bars.update(
            bar, total=total_bytes, advance=done_bytes
        )


def print_result(text: str, record: object, *, as_json: bool) -> None:
    """Print the result of a command: a text for people, or a record as JSON."""
    typer.echo(json.dumps(record, indent=2) if as_json else text)


def fail(message: str, *, status: int = 1) -> NoReturn:
    """Print an error to stderr, and exit."""
    print(error_line(message), file=sys.stderr)  # noqa: T201 - the command's error
    raise SystemExit(status)
