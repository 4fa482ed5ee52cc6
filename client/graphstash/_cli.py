"""The command line: `graphstash run`, `status`, `prefetch`, and what other packages add.

The server's `serve` comes in by the entry-point group `graphstash.commands`, so that the client
never imports the server.
"""

import json
import os
import shutil
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import SecretStr
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from graphstash._cli_keys import keys
from graphstash._config import ENVIRONMENT_PREFIX, ClientConfig
from graphstash._doctor.command import doctor
from graphstash._entry_points import AUTOLOAD
from graphstash._errors import CacheError, ConfigError, VerificationError
from graphstash._prewarm import prewarm
from graphstash._stash import Stash
from graphstash.hooks import HOOKS
from graphstash_schema import ManifestName, NamespaceStats, ServerStats

__all__ = ["app", "main"]

app = typer.Typer(
    name="graphstash",
    help="A shared compilation cache for machine-learning training.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

_out = Console()
_err = Console(stderr=True, highlight=False)

_AUTOLOAD = Path(__file__).parent / "_autoload"

Url = Annotated[str | None, typer.Option(help="Server, e.g. http://cache.internal:8077")]
NamespaceOption = Annotated[str | None, typer.Option(help="Namespace to read and write")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts")]


def main() -> None:
    """Entry point of the `graphstash` script."""
    for command in entry_points(group="graphstash.commands"):
        loaded = command.load()
        if isinstance(loaded, typer.Typer):  # a group of commands
            app.add_typer(loaded, name=command.name)
        else:
            app.command(command.name)(loaded)
    app()


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
    # The first word that is no option of ours begins the command; the rest is the command's.
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
        bool | None, typer.Option("--read-only/--read-write", help="Fetch, never publish")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No summary line at the end")
    ] = False,
) -> None:
    """Run a command with the cache in every Python process that it starts.

    The script needs no change; torchrun, subprocesses and shells in between are fine. Whatever
    happens to the cache, the command runs. Example:

        graphstash run -- python train.py
    """
    command = context.args
    if not command:
        _fail(
            "nothing to run: write the command after `--`, e.g. graphstash run -- python train.py"
        )
    config = _config(
        url=url,
        namespace=namespace,
        job=job,
        cache_dir=cache_dir,
        stats_file=stats_file,
        read_only=read_only,
        summary=False if quiet else None,
    )
    if unknown := set(config.hooks) - set(HOOKS):
        _fail(
            f"GRAPHSTASH_HOOKS: no hook {', '.join(sorted(unknown))}; "
            f"there are: {', '.join(sorted(HOOKS))}",
            status=2,
        )
    program = shutil.which(command[0])
    if program is None:
        _fail(f"{command[0]}: not found on PATH", status=127)
    environment = os.environ | _variables(config) | {"PYTHONPATH": _python_path(), AUTOLOAD: "1"}
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        # The command takes this process's place: signals and the exit status need no forwarding.
        os.execve(program, command, environment)  # noqa: S606 - running it is the job
    except OSError as error:
        _fail(f"{program}: {error.strerror}", status=126)


@app.command()
def status(url: Url = None, namespace: NamespaceOption = None, as_json: Json = False) -> None:
    """Show whether the server answers, what it holds, and this host's local tier."""
    config = _config(url=url, namespace=namespace)
    with _stash(config) as stash:
        try:
            server = stash.server_stats()
        except CacheError as error:
            if as_json:
                _print_json({"url": config.url, "reachable": False, "error": str(error)})
            else:
                _err.print(
                    f"[red]no answer[/red]: {escape(str(error))}\n"
                    "Jobs run as if there was no cache. "
                    "[bold]graphstash doctor[/bold] says what to do.",
                    soft_wrap=True,
                )
            raise typer.Exit(1) from None
        directory, size = str(stash.local.root), stash.local.size_bytes()
    if as_json:
        _print_json(
            {
                "url": config.url,
                "reachable": True,
                "server": server.model_dump(mode="json"),
                "local": {"directory": directory, "size_bytes": size},
            }
        )
        return
    _show_server(config, server)
    _out.print(f"local tier: {_bytes(size)} in {escape(directory)}", soft_wrap=True)


@app.command()
def prefetch(
    job: Annotated[str, typer.Argument(help="The job's name, as given to `graphstash run --job`")],
    url: Url = None,
    namespace: NamespaceOption = None,
) -> None:
    """Bring everything that a job used before to this host's disk."""
    config = _config(url=url, namespace=namespace, job=job)
    with _stash(config) as stash:
        try:
            manifest = stash.manifest(ManifestName(job))
            if manifest is None:
                _fail(f"no run of {job!r} is remembered in namespace {config.namespace!r}")
            fetched = missing = refused = size = 0
            with _progress() as progress:
                for entry in progress.track(manifest.entries, description="artifacts"):
                    try:
                        artifact = stash.ensure_local(entry.key)
                    except VerificationError as error:  # the others may be sound
                        _err.print(f"[red]not used:[/red] {escape(str(error))}", soft_wrap=True)
                        refused += 1
                        continue
                    fetched += artifact is not None and artifact.source == "remote"
                    missing += artifact is None
                    size += artifact.size_bytes if artifact else 0
        except CacheError as error:
            _fail(str(error))
    here = len(manifest.entries) - fetched - missing - refused
    _out.print(
        f"{fetched} fetched ({_bytes(size)}), {here} already here, {missing} gone from the server"
        + (f", {refused} not used" if refused else "")
    )


app.command()(prewarm)
app.add_typer(keys, name="keys")
app.command()(doctor)


def _config(**settings: Any) -> ClientConfig:
    try:
        return ClientConfig.load(**settings)
    except ConfigError as error:
        _fail(str(error), status=2)


def _stash(config: ClientConfig) -> Stash:
    try:
        return Stash(config)
    except ConfigError as error:  # a file that a setting names
        _fail(str(error), status=2)


def _variables(config: ClientConfig) -> dict[str, str]:
    """The settings as a child process reads them; defaults need no variable."""
    variables = {}
    for name in config.model_fields_set:
        value = getattr(config, name)
        if value is not None and not isinstance(value, SecretStr):  # is in the environment
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            variables[ENVIRONMENT_PREFIX + name.upper()] = text
    return variables


def _python_path() -> str:
    rest = os.environ.get("PYTHONPATH", "")
    entries = [entry for entry in rest.split(os.pathsep) if entry and entry != str(_AUTOLOAD)]
    return os.pathsep.join([str(_AUTOLOAD), *entries])


def _show_server(config: ClientConfig, server: ServerStats) -> None:
    _out.print(
        f"[green]{escape(config.url)}[/green]  graphstash {server.version}, "
        f"up {server.uptime_seconds:.0f} s, {server.leases_held} leases held, "
        f"{server.waiters} waiting"
    )
    table = Table()
    table.add_column("namespace")
    for heading in ("artifacts", "size", "hits", "misses", "hit rate", "served", "saved"):
        table.add_column(heading, justify="right")
    for row in server.namespaces:
        table.add_row(*_cells(row))
    if server.namespaces:
        _out.print(table)
    else:
        _out.print("nothing stored yet")


def _cells(row: NamespaceStats) -> tuple[str, ...]:
    asked = row.hits + row.misses
    return (
        row.namespace,
        f"{row.artifacts}",
        _bytes(row.size_bytes),
        f"{row.hits}",
        f"{row.misses}",
        f"{row.hits / asked:.0%}" if asked else "-",
        _bytes(row.served_bytes),
        f"{row.saved_seconds / 60:.1f} min",
    )


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=_err
    )


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def _fail(message: str, *, status: int = 1) -> NoReturn:
    _err.print(f"[red]graphstash:[/red] {escape(message)}", soft_wrap=True)
    raise typer.Exit(status)
