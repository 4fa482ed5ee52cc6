"""Command line. Lists all commands, and imports only the command that runs.

The server's package adds its commands through the entry-point group `graphstash.commands`, so that
the client never imports the server. An error prints one line, `graphstash: error: ...`, and exits
with a status of `ExitStatus`.
"""

import os
import sys
from collections.abc import Container
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from io import TextIOWrapper
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

import graphstash
from graphstash._cli.pipe import piped
from graphstash.errors import CacheError, ConfigError
from graphstash_schema import InvalidValueError
from graphstash_schema.exit_status import MEANINGS, ExitStatus, error_line
from graphstash_schema.misspelling import warning_of

__all__ = ["complete_app", "main"]

_COMMANDS: Final = {
    "Jobs": {
        "init": "Store the server's address and a token for all jobs of this user.",
        "run": "Run a command with the cache in every Python process that it starts.",
        "prefetch": "Download the artifacts that earlier runs of a job used.",
        "publish": "Publish what jobs on this host compiled while the server was down, or before "
        "there was one.",
        "top": "Show what the jobs of this host and of the team are doing now, until Ctrl-C.",
        "explain": "Explain why a run compiled: which flag, version, shape or line differs from "
        "stored artifacts.",
        "summary": "Print what the last run on this host hit and compiled, in Markdown.",
        "prewarm": "Compile a JAX train step ahead of time, on a host without the device.",
        "farm": "Compile JAX train steps for TPU topologies ahead of time, on the CPU hosts of a "
        "Ray cluster.",
        "doctor": "Check settings, server, TLS, token, clock, local disk, signatures and "
        "compilers.",
        "login": "Exchange the JWT of a CI job or a pod for a token that lasts as long as the job.",
        "forget": "Remove an artifact from this host's disk: all copies, of every namespace and "
        "server.",
    },
    "The server and its artifacts": {
        "status": "Show whether the server answers, what it holds, and this host's local tier.",
        "ls": "List the artifacts of a namespace.",
        "show": "Show everything about one artifact: parts, label, signature, hits.",
        "report": "Print what the cache saved in a month, in Markdown.",
        "export": "Write artifacts of a namespace to one file, for hosts without a network to the "
        "server.",
        "import": "Publish the artifacts of a bundle to a server, or to this host.",
        "tune": "Find, show and export the team's schedules of kernels.",
        "serve": "Run the cache server. It needs no configuration.",
    },
    "Administration": {
        "keys": "Manage signing keys and the list of trusted keys.",
        "audit": "Show the audit log, newest first.",
        "backup": "Back up the database and all blobs, while servers run.",
        "clock": "Show whether the servers delete by age, or accept a clock that jumped.",
        "fsck": "Check the database, and that artifacts and blobs match.",
        "gc": "Collect garbage: enforce limits and retention, delete marked blobs and orphans.",
        "migrate": "Upgrade the database to the revision of this release.",
        "namespace": "Manage namespace policies: who may write, how much, and whether artifacts "
        "may be replaced.",
        "pin": "Protect the artifacts of a job from eviction.",
        "quarantine": "Review artifacts that were reported as wrong. They are withheld until you "
        "decide.",
        "restore": "Restore a backup into the database and the blob store of the server's "
        "settings.",
        "token": "Create, list and revoke tokens.",
        "unpin": "Allow eviction of a job's artifacts again.",
    },
}
"""By heading of the list, the first sentence of each command's own help."""

_LISTED: Final = {
    name: (panel, summary)
    for panel, commands in _COMMANDS.items()
    for name, summary in commands.items()
}

_OWN: Final = (
    *("init:init", "run:run", "prefetch:prefetch", "publish:publish", "top:top"),
    *("explain:explain", "summary:summary", "prewarm:prewarm", "farm:farm"),
    *("doctor.command:doctor", "login:login", "artifacts:forget", "status:status"),
    *("artifacts:ls", "artifacts:show", "report:report", "bundles:export", "bundles:import_"),
    *("tune:tune", "keys:keys"),
)
"""`module:name` of this package's commands. Entry points name those of the server's package."""

_EXITS: Final = "Exit status:\n\n" + "\n".join(
    f"- {status.value}: {meaning}" for status, meaning in MEANINGS.items()
)

_ALL_WORDS_AFTER_COMMAND: Final[dict[str, Any]] = {
    # The first word that is not an option, and all later words, are the user's command.
    "context_settings": {"allow_extra_args": True, "allow_interspersed_args": False},
    "options_metavar": "[OPTIONS] [--] COMMAND [ARGS]...",
}

_ClickError: Final[type[Exception]] = next(
    each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException"
)
"""Exception for an invalid command line. Found through Typer, which may vendor its own click."""


def main() -> None:
    """Parse the command line and run the command."""
    if isinstance(sys.stderr, TextIOWrapper):
        sys.stderr.reconfigure(errors="replace")  # a terminal may lack a character, such as µ
    with piped():
        status = _run()
    sys.exit(status if isinstance(status, int) else ExitStatus.OK)


def _run() -> Any:
    is_completing = "_GRAPHSTASH_COMPLETE" in os.environ  # by the shell's completion script
    app = complete_app() if is_completing else _app_with(sys.argv[1:])
    try:
        return app(prog_name="graphstash", standalone_mode=False)
    except _ClickError as error:
        _print_error(error)
        return ExitStatus.USAGE
    except typer.Abort:
        return ExitStatus.INTERRUPTED


def _print_error(error: Any) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "graphstash"
    message = error.format_message().rstrip(".").replace("Value error, ", "")
    if (errors := getattr(error.__cause__, "errors", None)) is not None:  # pydantic's
        message = message.replace("Input should", f"{errors()[0]['input']!r} should")
        message = message.partition(", unable to parse")[0]
    message += " See" if message.endswith("?") else "; see"
    print(error_line(f"{message} `{command} --help`"), file=sys.stderr)  # noqa: T201 - a command's error


class _Commands(TyperGroup):
    """Ends a command with one line if it raises an error of the settings, arguments or cache."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ConfigError, InvalidValueError) as error:
            from graphstash._cli.output import fail

            fail(str(error), status=ExitStatus.USAGE)
        except CacheError as error:
            from graphstash._cli.output import fail_for

            fail_for(error)


@cache
def complete_app() -> typer.Typer:
    """Return the app with all commands imported."""
    return _app_with(_LISTED)


def _app_with(words: Container[str]) -> typer.Typer:
    """Return an app that imports only the commands among `words`, and lists all."""
    app = typer.Typer(
        name="graphstash",
        cls=_Commands,
        help="A shared compilation cache for machine-learning training.",
        epilog=_EXITS,
        no_args_is_help=True,
        # Markdown fills paragraphs, and does not treat [default: 1] as markup.
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    group = "graphstash.commands"
    own = [
        EntryPoint(home.partition(":")[2].rstrip("_"), f"graphstash._cli.{home}", group)
        for home in _OWN
    ]
    for command in [*own, *entry_points(group=group)]:
        panel, summary = _LISTED.get(command.name, (None, None))
        is_needed = summary is None or command.name in words
        loaded = command.load() if is_needed else _only_listed
        if isinstance(loaded, typer.Typer):  # a group of commands
            app.add_typer(
                loaded, name=command.name, short_help=summary or "", rich_help_panel=panel
            )
        else:
            form = _ALL_WORDS_AFTER_COMMAND if command.name == "run" else {}
            app.command(command.name, short_help=summary, rich_help_panel=panel, **form)(loaded)
    return app


def _only_listed() -> None:
    pass


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"graphstash {graphstash.__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    # `doctor` and `run` report unknown variables themselves.
    if context.invoked_subcommand in {"doctor", "run"}:
        return
    from graphstash._process.notices import log_once, unknown_variables

    if warning := warning_of(unknown_variables(os.environ)):
        log_once([warning])
