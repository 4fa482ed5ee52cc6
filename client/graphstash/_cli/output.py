"""Shared helpers of all commands: read settings, print, format quantities, and fail.

`say` and `print_table` print plain text, so untrusted text cannot contain markup. Callers pass
names, labels and metadata through `shown` first.
"""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeAlias

import typer
from rich.console import Console
from rich.text import Text

from graphstash._compile.stats import format_seconds
from graphstash.config import ENVIRONMENT_PREFIX, ClientConfig
from graphstash.errors import BusyError, CacheError, ConfigError, TransportError
from graphstash_schema.display import format_bytes, plural
from graphstash_schema.exit_status import ExitStatus, error_line
from graphstash_schema.names import printable
from graphstash_schema.settings import annotated_option

__all__ = [
    "CacheDir",
    "Json",
    "NamespaceOption",
    "Url",
    "blamed",
    "byte_progress",
    "count_progress",
    "err",
    "fail",
    "fail_for",
    "format_age",
    "format_bytes",
    "format_seconds",
    "load_config",
    "out",
    "plural",
    "print_json",
    "print_table",
    "say",
    "shown",
]

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    Url: TypeAlias = str | None
    NamespaceOption: TypeAlias = str | None
    CacheDir: TypeAlias = Path | None
else:
    Url = annotated_option(ClientConfig, "url")
    NamespaceOption = annotated_option(ClientConfig, "namespace")
    CacheDir = annotated_option(ClientConfig, "cache_dir")
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]

_MIN_COLUMN: Final = 8
_GAP: Final = "  "


def load_config(**options: Any) -> ClientConfig:
    """Load the settings from options, the environment and the user's config file.

    End the command if one is invalid. A problem of the file is only a warning.
    """
    try:
        config = ClientConfig.load(**options)
    except ConfigError as error:
        fail(blamed(error, options), status=ExitStatus.USAGE)
    if config.file_problem:
        from graphstash._process.notices import log_once

        log_once([config.file_problem])
    return config


def blamed(error: ConfigError, options: dict[str, Any]) -> str:
    """Return the error's text. It names given options instead of their environment variables."""
    text = str(error)
    for name, option in ClientConfig.options().items():
        if options.get(name) is not None:
            variable = ENVIRONMENT_PREFIX + name.upper()
            text = text.replace(f"{variable}=", f"{option.spelled(name)}=")
    return text


def fail(message: str, *, status: ExitStatus = ExitStatus.FAILED) -> NoReturn:
    """Print an error to standard error and end the command."""
    err.print(Text(error_line(message)), soft_wrap=True)
    raise typer.Exit(int(status))


def fail_for(error: CacheError) -> NoReturn:
    """End the command with an error of the cache."""
    has_advice = isinstance(error, BusyError | TransportError)
    fail(error.detail + ("; `graphstash doctor` finds the cause" if has_advice else ""))


def say(text: str, *, style: str = "") -> None:
    """Print plain text without wrapping it."""
    out.print(Text(text, style=style), soft_wrap=True)


def shown(text: str, *, most: int = 200) -> str:
    """Return untrusted text on one line, safe for a terminal, cut after `most` characters."""
    return printable(text, most=most)


def print_json(value: object) -> None:
    """Print a value as JSON, for scripts."""
    typer.echo(json.dumps(value, indent=2))


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    flexible: int,
    below: Sequence[str] = (),
) -> None:
    """Print a table as text. A heading that starts with `>` aligns its column to the right.

    Cells never wrap, so `grep` finds whole words. If a terminal is too narrow, only the column
    with the number `flexible` is shortened. `below` has a second line for each row.
    """
    table = [[each.removeprefix(">") for each in headings], *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if out.is_terminal:
        spare = sum(widths) + len(_GAP) * (len(widths) - 1) - out.width
        widths[flexible] = max(_MIN_COLUMN, widths[flexible] - max(0, spare))
    for number, row in enumerate(table):
        cells = []
        for heading, cell, width in zip(headings, row, widths, strict=True):
            fitting = cell if len(cell) <= width else f"{cell[: width - 1]}…"
            is_number = heading.startswith(">")
            cells.append(fitting.rjust(width) if is_number else fitting.ljust(width))
        say(_GAP.join(cells).rstrip(), style="" if number else "bold")
        if number and below:
            say(below[number - 1], style="dim")


def byte_progress() -> "Progress":
    """Return a progress bar in bytes on standard error. It is hidden without a terminal."""
    from rich.progress import DownloadColumn

    return _progress(DownloadColumn(binary_units=True))


def count_progress() -> "Progress":
    """Return a progress bar in items on standard error. It is hidden without a terminal."""
    from rich.progress import MofNCompleteColumn

    return _progress(MofNCompleteColumn())


def _progress(amount: "ProgressColumn") -> "Progress":
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        amount,
        TimeRemainingColumn(),
        console=err,
        disable=not err.is_terminal,
        transient=True,
        expand=True,
    )


def format_age(then: datetime) -> str:
    """Return the time since `then` in its largest unit: `45 s`, `12 min`, `3 h`, `9 d`."""
    seconds = max(0.0, (datetime.now(UTC) - then).total_seconds())
    for unit, size, most in (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48)):
        if seconds < size * most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
