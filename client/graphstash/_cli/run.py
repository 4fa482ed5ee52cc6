"""`graphstash run`, if the launcher cannot handle the command line: help, and invalid options."""

from typing import Any

import typer

from graphstash._cli.launcher import CannotRunError, Launch, as_variables
from graphstash._cli.output import blamed, fail
from graphstash.config import ClientConfig
from graphstash.errors import ConfigError
from graphstash_schema.exit_status import ExitStatus
from graphstash_schema.settings import with_options

__all__ = ["run"]


@with_options(ClientConfig)
def run(context: typer.Context, **options: Any) -> None:
    """Run a command with the cache in every Python process that it starts.

    The script needs no change. torchrun, subprocesses and shells in between also work. The command
    runs even if the cache fails, unless --fail-on-miss is set. Example:

        graphstash run -- python train.py
    """
    command = context.args
    if not command:
        fail(
            "nothing to run: write the command after `--`, e.g. graphstash run -- python train.py",
            status=ExitStatus.USAGE,
        )
    given = {name: value for name, value in options.items() if value is not None}
    try:
        settings = as_variables(given)
    except ConfigError as error:
        fail(blamed(error, given), status=ExitStatus.USAGE)
    try:
        Launch(command, settings).start()
    except CannotRunError as error:
        fail(str(error), status=ExitStatus(error.status))
