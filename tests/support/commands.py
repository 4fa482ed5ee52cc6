"""Commands of the server, in this process."""

from typing import Any

import typer
from typer.testing import CliRunner


def invoke(command: Any, *arguments: str, status: int = 0) -> str:
    """Run a function, or an application of several commands, and return its output."""
    app = command
    if not isinstance(command, typer.Typer):
        app = typer.Typer()
        app.command()(command)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    return result.output
