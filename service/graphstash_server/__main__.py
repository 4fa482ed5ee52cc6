"""Command line of the server: `graphstash serve`, or `python -m graphstash_server`.

Slow imports are inside the functions: the client's command line imports this module to list the
command.
"""

import errno
import ipaddress
import logging
import shlex
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from graphstash_schema.settings import with_options
from graphstash_server.commands.running import fail
from graphstash_server.errors import StartError
from graphstash_server.logs import set_up_logging
from graphstash_server.serving.open_files import within_open_files
from graphstash_server.settings import (
    Settings,
    is_loopback,
    load_settings,
    user_data_dir,
    warn_of_misspelled,
)

__all__ = ["main", "serve"]

_WITH_SOCKET = (
    "jobs of this user on this host find it by themselves: graphstash run -- python train.py\n"
    "other users need GRAPHSTASH_URL={url} and a token as GRAPHSTASH_TOKEN: "
    "{where}graphstash token create --grant write:default --description NAME"
)
_WITHOUT_SOCKET = (
    "jobs need GRAPHSTASH_URL={url} and a token as GRAPHSTASH_TOKEN: "
    "{where}graphstash token create --grant write:default --description NAME"
)
_OPEN = (
    "no authentication, which is for tests: anyone who reaches this address can run code in every "
    "job that reads the cache\n"
    "in the shell of the jobs: export GRAPHSTASH_URL={url}"
)


@with_options(Settings)
def serve(
    *,
    port_file: Annotated[
        Path | None, typer.Option(help="File that gets the port when the server is ready.")
    ] = None,
    **options: Any,
) -> None:
    """Run the cache server. It needs no configuration.

    Jobs of the same user on this host find it without settings and need no token. Ctrl-C stops it.

    Each option except --port-file can also be set by an environment variable, such as
    GRAPHSTASH_DATA_DIR.

    With more than one worker, SIGHUP replaces them one after another and no request fails. It
    renews processes, not code: a new version needs a restart of the server.
    """
    try:
        from graphstash_server.serving.telemetry import find_tracing
        from graphstash_server.serving.tls import tls_context

        settings = load_settings(**options)
        _check_reach(settings)
    except ModuleNotFoundError as error:
        fail(
            f"`serve` needs the server's packages ({error.name} is missing): "
            "pip install 'graphstash[server] @ git+<repository>'",
        )
    except StartError as error:
        fail(str(error), status=2)
    try:
        _set_up_logging(settings)
        warn_of_misspelled()
        # Each worker loads both. Checking them here reports an error once.
        tls_context(settings)
        find_tracing(settings)
        listener = _listen(settings)
        _make_data_dir(settings)
        settings = within_open_files(settings)
    except StartError as error:
        fail(str(error))
    _run(settings, listener, port_file)


def main() -> None:
    """Run `python -m graphstash_server`."""
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    app.command()(serve)
    app()


def _where(settings: Settings) -> str:
    """Return the variables that commands in another shell need to find the data, without the
    password of the database.
    """
    from sqlalchemy.engine import make_url

    directory = settings.data_dir.absolute()
    variables = {}
    if directory != user_data_dir().absolute():
        variables["DATA_DIR"] = str(directory)
    if not settings.has_default_database:
        variables["DATABASE_URL"] = make_url(settings.database_url).render_as_string()
    return "".join(f"GRAPHSTASH_{name}={shlex.quote(text)} " for name, text in variables.items())


def _run(settings: Settings, listener: socket.socket, port_file: Path | None) -> None:
    from graphstash_server.serving.server import run_server
    from graphstash_server.serving.sockets import OwnSocket
    from graphstash_server.serving.workers import run_workers

    own = None
    reach = _WITHOUT_SOCKET if not settings.is_open else _OPEN
    if settings.own_socket is not None:
        try:
            own = OwnSocket(settings.own_socket)
            reach = _WITH_SOCKET
        except OSError as error:
            reach = f"jobs of this user do not find it by themselves: {error}\n{_WITHOUT_SOCKET}"
    url = _url(settings, listener)
    elsewhere = _url(settings, listener, address=_name_for_others(listener))

    def announce() -> None:
        lines = (
            f"data directory: {settings.data_dir.absolute()}",
            f"listening on {url}",
            reach.format(url=elsewhere, where=_where(settings)),
            "Ctrl-C stops the server",
        )
        print("\n".join(lines), flush=True)  # at once, for readers that wait for the URL
        if port_file is not None:  # last, so that the output is complete when the file exists
            partial = port_file.with_name(port_file.name + ".partial")
            partial.write_text(f"{listener.getsockname()[1]}\n")
            partial.rename(port_file)

    run = run_server if settings.workers == 1 else run_workers
    try:
        is_fine = run(settings, [listener, *([own.listener] if own else [])], when_ready=announce)
    except StartError as error:
        fail(str(error))
    finally:
        if own is not None:
            own.close()
    if not is_fine:
        fail("the server did not start; the reason is above")


def _set_up_logging(settings: Settings) -> None:
    process = "" if settings.workers == 1 else " [%(process)d]"
    form = f"%(asctime)s{process} %(levelname)s %(name)s: %(message)s"
    set_up_logging(settings.log_level.upper(), form=form if settings.log_format == "text" else None)
    logging.getLogger("alembic").setLevel("WARNING")


def _check_reach(settings: Settings) -> None:
    """Refuse to serve other hosts without authentication, unless `insecure` is set."""
    if not settings.is_open or settings.insecure or is_loopback(settings.host):
        return
    raise StartError(
        f"--host={settings.host} can be reached from other hosts, and there is no authentication: "
        "anyone who can reach the port can run code in every job that reads the cache. Use "
        "--auth=tokens, a loopback address, or --insecure on a network that you trust"
    )


def _listen(settings: Settings) -> socket.socket:
    """Take the port first, but leave it closed until the server can answer (`serving.sockets`)."""
    from graphstash_server.serving.sockets import take_port

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        take_port(listener, address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        is_taken = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
        remedy = "another --port (0 takes a free one)" if is_taken else "a --host of this machine"
        raise StartError(
            f"cannot listen on {settings.host} port {settings.port}: {reason}; choose {remedy}"
        ) from error
    listener.set_inheritable(False)
    return listener


def _make_data_dir(settings: Settings) -> None:
    from graphstash_server.private_files import keep_private

    try:
        keep_private(settings)
        probe = settings.data_dir / "server.lock"
        probe.touch(exist_ok=True)
    except OSError as error:
        raise StartError(
            f"cannot write to the data directory {settings.data_dir}: {error.strerror}; choose "
            "another one with --data-dir"
        ) from error


def _name_for_others(listener: socket.socket) -> str | None:
    """Return this host's name if the server listens on every address, which no URL can name."""
    address = listener.getsockname()[0]
    return socket.gethostname() if ipaddress.ip_address(address).is_unspecified else None


def _url(settings: Settings, listener: socket.socket, *, address: str | None = None) -> str:
    bound, port = listener.getsockname()[:2]
    if address is None:
        address = f"[{bound}]" if listener.family == socket.AF_INET6 else bound
    return f"{'http' if settings.tls_cert_file is None else 'https'}://{address}:{port}"


if __name__ == "__main__":
    main()
