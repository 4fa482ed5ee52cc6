"""Output of the command line: how every command prints, formats quantities and fails."""

import json
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from graphstash._compile.stats import format_seconds, plural

__all__ = [
    "Json",
    "NamespaceOption",
    "Url",
    "err",
    "fail",
    "format_bytes",
    "format_seconds",
    "out",
    "plural",
    "print_json",
]

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Url = Annotated[
    str | None,
    typer.Option(
        help="URL of the server, e.g. http://cache.internal:8077 [default: this user's server on "
        "this host]"
    ),
]
NamespaceOption = Annotated[str | None, typer.Option(help="Namespace to read and write")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts")]


def fail(message: str, *, status: int = 1) -> NoReturn:
    """Prints a message on standard error and ends the command with a status."""
    err.print(f"[red]graphstash:[/red] {escape(message)}", soft_wrap=True)
    raise typer.Exit(status)


def print_json(value: object) -> None:
    """Prints a value for scripts."""
    typer.echo(json.dumps(value, indent=2))


def format_bytes(size: float) -> str:
    """A size with its unit: `512 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
