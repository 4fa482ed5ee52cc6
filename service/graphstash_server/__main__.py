"""The command line of the server: `graphstash serve`, or `python -m graphstash_server`.

Everything heavy is imported when the command runs: the client's command line loads this module only
to list the command.
"""

import ipaddress
import logging
import resource
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from graphstash_server.errors import StartError

if TYPE_CHECKING:
    from graphstash_server.settings import Settings

__all__ = ["main", "serve"]

_BAD_VALUE = 2
_CANNOT_START = 1


def serve(
    *,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on", show_default="127.0.0.1")
    ] = None,
    port: Annotated[
        str | None, typer.Option(help="TCP port; 0 takes a free one", show_default="8077")
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            help="Processes that serve the port, 1 to 64; SIGHUP renews them one by one",
            show_default="1",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Directory of the database and the blobs.")
    ] = None,
    max_artifact_bytes: Annotated[
        str | None, typer.Option(help="Largest artifact taken, e.g. 4GiB", show_default="4GiB")
    ] = None,
    store_limit_bytes: Annotated[
        str | None,
        typer.Option(help="Most bytes of all artifacts, e.g. 200GiB", show_default="none"),
    ] = None,
    min_free_bytes: Annotated[
        str | None, typer.Option(help="Room that stays free on the disk", show_default="256MiB")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error", show_default="info")
    ] = None,
    port_file: Annotated[
        Path | None, typer.Option(help="Write the port into this file when the server is ready.")
    ] = None,
    auth: Annotated[
        str | None,
        typer.Option(
            help="Whom to serve: none asks nobody, tokens lets in whoever shows a token of "
            "`graphstash token create`",
            show_default="none",
        ),
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="Listen beyond loopback without authentication."),
    ] = None,
    access_log: Annotated[
        bool | None,
        typer.Option("--access-log/--no-access-log", help="Log every request", show_default="no"),
    ] = None,
) -> None:
    """Run the cache server; it needs no configuration.

    Every option can also be set by an environment variable, e.g. GRAPHSTASH_DATA_DIR.

    With more than one worker, SIGHUP replaces them one after another and no request fails. It
    renews processes, not code: a new version needs a restart of the server.
    """
    try:
        from graphstash_server.settings import load_settings
        from graphstash_server.tls import tls_context
    except ModuleNotFoundError as error:
        _fail(
            f"`serve` needs the server's packages ({error.name} is missing): "
            "pip install 'graphstash[server]'",
            _CANNOT_START,
        )
    try:
        settings = load_settings(
            host=host,
            port=port,
            workers=workers,
            data_dir=data_dir,
            max_artifact_bytes=max_artifact_bytes,
            store_limit_bytes=store_limit_bytes,
            min_free_bytes=min_free_bytes,
            log_level=log_level,
            auth=auth,
            insecure=insecure,
            access_log=access_log,
        )
        _check_reach(settings)
    except StartError as error:
        _fail(str(error), _BAD_VALUE)
    try:
        tls_context(settings)  # the workers load it; what is wrong with it is said here, once
        listener = _listen(settings)
        _make_data_dir(settings)
        _allow_files(settings)
    except StartError as error:
        _fail(str(error), _CANNOT_START)
    _run(settings, listener, port_file)


def main() -> None:
    """Entry of `python -m graphstash_server`."""
    typer.run(serve)


def _run(settings: "Settings", listener: socket.socket, port_file: Path | None) -> None:
    from graphstash_server.server import run_server
    from graphstash_server.workers import run_workers

    url = _url(settings, listener)

    def announce() -> None:
        print(f"graphstash keeps its data in {settings.data_dir.absolute()}")  # noqa: T201
        print(f"graphstash listens on {url}")  # noqa: T201
        print(f"export GRAPHSTASH_URL={url}", flush=True)  # noqa: T201
        if port_file is not None:
            partial = port_file.with_name(port_file.name + ".partial")
            partial.write_text(f"{listener.getsockname()[1]}\n")
            partial.rename(port_file)

    is_one = settings.workers == 1
    process = "" if is_one else " [%(process)d]"
    logging.basicConfig(
        level=settings.log_level.upper(),
        format=f"%(asctime)s{process} %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("alembic").setLevel("WARNING")
    run = run_server if is_one else run_workers
    if not run(settings, listener, when_ready=announce):
        _fail("the server did not start; the reason is above", _CANNOT_START)


def _check_reach(settings: "Settings") -> None:
    """Refuses to listen where others can reach the cache."""
    if settings.auth != "none" or settings.insecure or _is_loopback(settings.host):
        return
    raise StartError(
        f"--host={settings.host} can be reached from other hosts, and there is no authentication: "
        "anyone who can reach the port can run code in every job that reads the cache. Use "
        "--auth=tokens, a loopback address, or --insecure if the network lets in nobody else"
    )


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter for what cannot be a name at all
        return False
    return all(
        ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found
    )


def _listen(settings: "Settings") -> socket.socket:
    """Opens the port; before anything else is touched."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StartError(
            f"cannot listen on {settings.host} port {settings.port}: {reason}; take another --port "
            "(0 takes a free one)"
        ) from error
    listener.set_inheritable(False)
    return listener


def _make_data_dir(settings: "Settings") -> None:
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        probe = settings.data_dir / "server.lock"
        probe.touch(exist_ok=True)
    except OSError as error:
        raise StartError(
            f"cannot write to the data directory {settings.data_dir}: {error.strerror}; name "
            "another one with --data-dir"
        ) from error


def _url(settings: "Settings", listener: socket.socket) -> str:
    address, port = listener.getsockname()[:2]
    if listener.family == socket.AF_INET6:
        address = f"[{address}]"
    return f"{'http' if settings.tls_cert_file is None else 'https'}://{address}:{port}"


def _allow_files(settings: "Settings") -> None:
    """Raises this process's limit of open files, which is often 1,024, as far as it is allowed.

    A connection needs one, and another one while a blob is sent.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * settings.max_connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_OTHER_FILES = 512


def _fail(message: str, status: int) -> NoReturn:
    print(f"graphstash: {message}", file=sys.stderr)  # noqa: T201
    raise SystemExit(status)


if __name__ == "__main__":
    main()
