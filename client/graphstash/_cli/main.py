"""The command line: `graphstash run`, `status`, `prefetch`, and the commands of other packages.

The server adds its commands by the entry-point group `graphstash.commands`, so that the client
never imports the server.
"""

from functools import cache
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from graphstash._artifacts.stash import Stash
from graphstash._cli.doctor.command import doctor
from graphstash._cli.explain import explain
from graphstash._cli.keys import keys
from graphstash._cli.launcher import CannotRunError, Launch
from graphstash._cli.login import login
from graphstash._cli.output import (
    Json,
    NamespaceOption,
    Url,
    err,
    fail,
    format_bytes,
    format_seconds,
    out,
    plural,
    print_json,
)
from graphstash._cli.prewarm import prewarm
from graphstash.config import NO_SERVER, ClientConfig
from graphstash.errors import CacheError, ConfigError, RefusedError, VerificationError
from graphstash_schema import ManifestName, NamespaceStats, ServerStats
from graphstash_schema.names import printable

__all__ = ["app", "complete_app", "main"]

app = typer.Typer(
    name="graphstash",
    help="A shared compilation cache for machine-learning training.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # paragraphs are filled, and [default: 1] is no markup
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Reads the command line, and runs the command."""
    complete_app()()


@cache
def complete_app() -> typer.Typer:
    """The commands of this package and of others."""
    for command in entry_points(group="graphstash.commands"):
        loaded = command.load()
        if isinstance(loaded, typer.Typer):  # a group of commands
            app.add_typer(loaded, name=command.name)
        else:
            app.command(command.name)(loaded)
    return app


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"graphstash {version('graphstash')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version"),
    ] = False,
) -> None:
    pass


@app.command(
    # The first word that is not an option begins the command; the rest belongs to the command.
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
    options_metavar="[OPTIONS] [--] COMMAND [ARGS]...",
)
def run(
    context: typer.Context,
    url: Url = None,
    namespace: NamespaceOption = None,
    job: Annotated[
        str | None,
        typer.Option(help="Name under which this job's artifacts are remembered and prefetched"),
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Directory of the local tier")] = None,
    stats_file: Annotated[
        Path | None, typer.Option(help="File that gets one JSON line per process")
    ] = None,
    read_only: Annotated[
        bool | None, typer.Option("--read-only/--read-write", help="Download only; publish nothing")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No summary line at the end")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say at the end why graphs were compiled")
    ] = False,
    fail_on_miss: Annotated[
        bool,
        typer.Option(
            "--fail-on-miss",
            help="End the job before it compiles anything: exit status 86, or 75 when the cache "
            "could not help",
        ),
    ] = False,
    max_compile_seconds: Annotated[
        float | None,
        typer.Option(help="End the job with exit status 86 when it has compiled for so long"),
    ] = None,
) -> None:
    """Run a command with the cache in every Python process that it starts.

    The script needs no change; torchrun, subprocesses and shells in between are fine. The command
    runs even if the cache fails, unless --fail-on-miss asks otherwise. Example:

        graphstash run -- python train.py
    """
    command = context.args
    if not command:
        fail(
            "nothing to run: write the command after `--`, e.g. graphstash run -- python train.py",
            status=2,
        )
    given = {
        "url": url,
        "namespace": namespace,
        "job": job,
        "cache_dir": cache_dir,
        "stats_file": stats_file,
        "read_only": read_only,
        "summary": False if quiet else None,
        "explain": explain or None,
        "fail_on_miss": fail_on_miss or None,
        "max_compile_seconds": max_compile_seconds,
    }
    try:
        # Without the environment: what is wrong there is for the job to say, which runs anyway.
        config = ClientConfig.load({}, **given)
    except ConfigError as error:
        fail(str(error), status=2)
    settings = {
        name: str(getattr(config, name)) for name, value in given.items() if value is not None
    }
    if not settings.get("url", NO_SERVER):
        settings["url"] = NO_SERVER
    try:
        Launch(command, settings).start()
    except CannotRunError as error:
        fail(str(error), status=error.status)


@app.command()
def status(url: Url = None, namespace: NamespaceOption = None, as_json: Json = False) -> None:
    """Show whether the server answers, what it holds, and this host's local tier."""
    config = _config(url=url, namespace=namespace)
    with _stash(config) as stash:
        try:
            server = stash.server.server_stats()
        except CacheError as error:
            if as_json:
                print_json({"url": config.url, "reachable": False, "error": str(error)})
            elif not config.url:
                err.print(f"[red]no server[/red]: {escape(error.detail)}", soft_wrap=True)
            else:
                is_refused = isinstance(error, RefusedError)
                failure = "the server refuses" if is_refused else "the server does not answer"
                err.print(
                    f"[red]{failure}[/red]: {escape(str(error))}\n"
                    "Jobs run without the cache. "
                    "[bold]graphstash doctor[/bold] suggests a fix.",
                    soft_wrap=True,
                )
            raise typer.Exit(1) from None
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
    out.print(f"local tier: {format_bytes(size)} in {escape(directory)}", soft_wrap=True)


@app.command()
def prefetch(
    job: Annotated[str, typer.Argument(help="The job's name, as given to `graphstash run --job`")],
    url: Url = None,
    namespace: NamespaceOption = None,
) -> None:
    """Download the artifacts that earlier runs of a job used."""
    config = _config(url=url, namespace=namespace, job=job)
    with _stash(config) as stash:
        try:
            manifest = stash.server.manifest(ManifestName(job))
            if manifest is None:
                fail(
                    f"no artifacts are remembered for job {job!r} in namespace {config.namespace!r}"
                )
            fetched = missing = refused = size = 0
            with _progress() as progress:
                for entry in progress.track(manifest.entries, description="artifacts"):
                    try:
                        artifact = stash.ensure_local(entry.key)
                    except VerificationError as error:  # the others may be sound
                        err.print(f"[red]rejected:[/red] {escape(str(error))}", soft_wrap=True)
                        refused += 1
                        continue
                    fetched += artifact is not None and artifact.source == "remote"
                    missing += artifact is None
                    size += artifact.size_bytes if artifact else 0
        except CacheError as error:
            fail(str(error))
    here = len(manifest.entries) - fetched - missing - refused
    out.print(
        f"{fetched} fetched ({format_bytes(size)}), {here} already here, "
        f"{missing} no longer on the server" + (f", {refused} rejected" if refused else "")
    )


app.command()(explain)
app.command()(prewarm)
app.add_typer(keys, name="keys")
app.command()(login)
app.command()(doctor)


def _config(**settings: Any) -> ClientConfig:
    try:
        return ClientConfig.load(**settings)
    except ConfigError as error:
        fail(str(error), status=2)


def _stash(config: ClientConfig) -> Stash:
    try:
        return Stash(config)
    except ConfigError as error:  # a file that a setting names
        fail(str(error), status=2)


def _show_server(config: ClientConfig, server: ServerStats) -> None:
    out.print(
        f"[green]{escape(config.url)}[/green]  "
        f"graphstash {escape(printable(server.version, most=40))}, "
        f"up {format_seconds(server.uptime_seconds)}, {plural(server.leases_held, 'lease')} held, "
        f"{server.waiters} waiting"
    )
    table = Table()
    table.add_column("namespace")
    for heading in ("artifacts", "size", "hits", "misses", "hit rate", "served", "compiling saved"):
        table.add_column(heading, justify="right")
    for row in server.namespaces:
        table.add_row(*_cells(row))
    if server.namespaces:
        out.print(table)
    else:
        out.print("nothing stored yet")


def _cells(row: NamespaceStats) -> tuple[str, ...]:
    asked = row.hits + row.misses
    return (
        escape(printable(row.namespace, most=64)),
        f"{row.artifacts}",
        format_bytes(row.size_bytes),
        f"{row.hits}",
        f"{row.misses}",
        f"{row.hits / asked:.0%}" if asked else "-",
        format_bytes(row.served_bytes),
        format_seconds(row.saved_seconds),
    )


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=err
    )
