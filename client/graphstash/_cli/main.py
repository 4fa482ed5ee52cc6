"""Command line: `graphstash run`, `status`, and the commands of other modules and packages.

The server adds its commands through the entry-point group `graphstash.commands`, so that the client
never imports the server. Every error ends as one line, `graphstash: error: ...`, with a status of
`ExitStatus`.
"""

import sys
from functools import cache
from importlib.metadata import entry_points, version
from io import TextIOWrapper
from typing import Annotated, Any, Final, NoReturn

import typer

from graphstash._cli.artifacts import forget, ls, show
from graphstash._cli.bundles import export, import_
from graphstash._cli.doctor.command import doctor
from graphstash._cli.explain import explain
from graphstash._cli.keys import keys
from graphstash._cli.launcher import CannotRunError, Launch, as_variables
from graphstash._cli.login import login
from graphstash._cli.output import (
    Json,
    NamespaceOption,
    Url,
    blamed,
    fail,
    format_bytes,
    format_seconds,
    load_config,
    open_stash,
    plural,
    print_json,
    print_table,
    say,
    shown,
)
from graphstash._cli.prefetch import prefetch
from graphstash._cli.prewarm import prewarm
from graphstash._cli.report import report
from graphstash._cli.tune import tune
from graphstash.config import ClientConfig
from graphstash.errors import CacheError, ConfigError, RefusedError
from graphstash_schema import NamespaceStats, ServerStats
from graphstash_schema.exit_status import MEANINGS, ExitStatus, error_line
from graphstash_schema.settings import with_options

__all__ = ["app", "complete_app", "main"]

_JOBS: Final = "Jobs"
_SERVER: Final = "The server and its artifacts"
_ADMINISTRATION: Final = "Administration"

_PANELS: Final = {
    **dict.fromkeys(("serve",), _SERVER),
    **dict.fromkeys(("token", "namespace", "quarantine", "audit"), _ADMINISTRATION),
    **dict.fromkeys(
        ("gc", "fsck", "pin", "unpin", "migrate", "backup", "restore", "clock"), _ADMINISTRATION
    ),
}
"""Help panels for the commands of the server's package."""

_EXITS: Final = "Exit status:\n\n" + "\n".join(
    f"- {status.value}: {meaning}" for status, meaning in MEANINGS.items()
)

app = typer.Typer(
    name="graphstash",
    help="A shared compilation cache for machine-learning training.",
    epilog=_EXITS,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # it fills paragraphs, and does not treat [default: 1] as markup
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


_ClickError: Final[type[Exception]] = next(
    each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException"
)
"""Exception for an invalid command line. Typer may vendor its own click."""


def main() -> None:
    """Parse the command line and run the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal may lack a character, such as µ
            stream.reconfigure(errors="replace")
    try:
        status = complete_app()(prog_name="graphstash", standalone_mode=False)
    except _ClickError as error:
        _tell(error)
        status = ExitStatus.USAGE
    except typer.Abort:
        status = ExitStatus.INTERRUPTED
    sys.exit(status if isinstance(status, int) else ExitStatus.OK)


def _tell(error: Any) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "graphstash"
    message = error.format_message().rstrip(".").replace("Value error, ", "")
    print(error_line(f"{message}; see `{command} --help`"), file=sys.stderr)  # noqa: T201 - a command's error


@cache
def complete_app() -> typer.Typer:
    """Return the app with the commands of this package and of other packages."""
    for command in entry_points(group="graphstash.commands"):
        loaded = command.load()
        if isinstance(loaded, typer.Typer):  # a group of commands
            app.add_typer(loaded, name=command.name, rich_help_panel=_PANELS.get(command.name))
        else:
            app.command(command.name, rich_help_panel=_PANELS.get(command.name))(loaded)
    return app


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"graphstash {version('graphstash')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command(
    # The first word that is not an option starts the command. All later words belong to it.
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
    options_metavar="[OPTIONS] [--] COMMAND [ARGS]...",
    rich_help_panel=_JOBS,
)
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


@app.command(rich_help_panel=_SERVER)
def status(url: Url = None, namespace: NamespaceOption = None, as_json: Json = False) -> None:
    """Show whether the server answers, what it holds, and this host's local tier.

    "Saved" is the total compile time of the artifacts that were hits.
    """
    config = load_config(url=url, namespace=namespace)
    with open_stash(config) as stash:
        try:
            server = stash.server.server_stats()
        except CacheError as error:
            if as_json:
                print_json({"url": config.url, "reachable": False, "error": str(error)})
                raise typer.Exit(ExitStatus.FAILED) from None
            _tell_unreachable(config, error)
        directory, size = str(stash.local.root), stash.local.size_bytes()
    if as_json:
        print_json(
            {
                "url": config.url,
                "reachable": True,
                "server": server.model_dump(mode="json"),
                "local": {"directory": directory, "size_bytes": size},
            }
        )
        return
    _show_server(config, server)
    say(f"local tier: {format_bytes(size)} in {directory}")


def _tell_unreachable(config: ClientConfig, error: CacheError) -> NoReturn:
    if not config.url:
        fail(f"no server: {error.detail}")
    is_refused = isinstance(error, RefusedError)
    failure = "the server refuses" if is_refused else "the server does not answer"
    fail(
        f"{failure}: {error.detail}. Jobs run without the cache; `graphstash doctor` suggests a fix"
    )


app.command(rich_help_panel=_JOBS)(prefetch)
app.command(rich_help_panel=_JOBS)(explain)
app.command(rich_help_panel=_JOBS)(prewarm)
app.command(rich_help_panel=_JOBS)(doctor)
app.command(rich_help_panel=_JOBS)(login)
app.command(rich_help_panel=_JOBS)(forget)
app.command(rich_help_panel=_SERVER)(ls)
app.command(rich_help_panel=_SERVER)(show)
app.command(rich_help_panel=_SERVER)(report)
app.command(rich_help_panel=_SERVER)(export)
app.command("import", rich_help_panel=_SERVER)(import_)
app.add_typer(tune, name="tune", rich_help_panel=_SERVER)
app.add_typer(keys, name="keys", rich_help_panel=_ADMINISTRATION)


def _show_server(config: ClientConfig, server: ServerStats) -> None:
    say(
        f"{config.url}: graphstash {shown(server.version, most=40)}, "
        f"up {format_seconds(server.uptime_seconds)}, {plural(server.leases_held, 'lease')} held, "
        f"{server.waiters} waiting"
    )
    if not server.namespaces:
        say("nothing stored yet")
        return
    headings = ("namespace", ">artifacts", ">size", ">hits", ">hit rate", ">served", ">saved")
    print_table(headings, map(_cells, server.namespaces), flexible=0)


def _cells(row: NamespaceStats) -> tuple[str, ...]:
    asked = row.hits + row.misses
    return (
        shown(row.namespace, most=64),
        f"{row.artifacts}",
        format_bytes(row.size_bytes),
        f"{row.hits}",
        f"{row.hits / asked:.0%}" if asked else "-",
        format_bytes(row.served_bytes),
        format_seconds(row.saved_seconds),
    )
