"""run_server: the application on uvicorn, in one process, with a bounded graceful shutdown.

`run_worker` is the same in a forked process (see `workers`).

Shutdown goes in this order: the server accepts no more connections; it answers waits for leases,
then new connections without a request yet; transfers continue for at most `shutdown_seconds`; then
the context closes, which writes the last counters. Every answer meanwhile closes its connection, so
that a client under load connects elsewhere instead of being cut off.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from graphstash_server.app import ServerApp, create_app
from graphstash_server.connection import Connection, connections, owner_connections
from graphstash_server.counters import Counters
from graphstash_server.errors import StartError
from graphstash_server.fast.answers import FastPath
from graphstash_server.fast.connection import FastConnection
from graphstash_server.logs import WithoutQuery
from graphstash_server.settings import Settings
from graphstash_server.telemetry import find_tracing
from graphstash_server.tls import tls_context

if TYPE_CHECKING:
    from graphstash_server.tracing import Tracing

__all__ = ["PARENT_SIGNALS", "GraphstashServer", "make_server", "run_server", "run_worker"]

_LOGGER = logging.getLogger(__name__)

_FIRST_REQUEST_SECONDS = 5.0
"""How long a connection without a request may delay the shutdown. Its client has connected and is
about to send one: on a loaded host that takes a while, and closing would fail the request."""

_LOOK_SECONDS = 0.02

_ABANDONED = 1

PARENT_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
"""What the parent of workers listens to; a worker that is just forked has them blocked."""


def _spare_collector() -> None:
    """Leaves out of every garbage collection what is there when the server starts, and collects
    less often.

    Measured with look-ups of 1,000 keys: 12.8 ms of CPU each as Python begins, 9.4 with what is
    there frozen. A threshold of 5,000 takes another tenth off a miss or a small PUT, and a higher
    one no more.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 50)


class GraphstashServer(uvicorn.Server):
    """Reports when it is ready, and shuts down without failing requests."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        when_ready: Callable[[], None],
        stop_waiting: Callable[[], None],
        lifeline: int | None = None,
    ) -> None:
        """Prepares a server.

        Args:
            config: of uvicorn.
            when_ready: called once the server serves.
            stop_waiting: called before the shutdown; answers every wait for a lease.
            lifeline: the reading end of a pipe to which nothing is written. The server shuts down
                when the last process with the writing end is gone.
        """
        super().__init__(config)
        self._when_ready = when_ready
        self._stop_waiting = stop_waiting
        self._lifeline = lifeline

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts listening; who comes by a Unix socket is the owner (`own_socket`)."""
        if self._lifeline is not None:
            loop = asyncio.get_running_loop()
            loop.add_reader(self._lifeline, self._end_alone, loop, self._lifeline)
        listeners = sockets or []
        await super().startup([each for each in listeners if each.family != socket.AF_UNIX])
        for listener in listeners:
            if listener.family == socket.AF_UNIX:
                await self._listen_to_owner(listener)
        if self.started:
            _spare_collector()
            self._when_ready()

    async def _listen_to_owner(self, listener: socket.socket) -> None:
        config = self.config
        kind = owner_connections(cast("type[Connection]", config.http_protocol_class))
        # `create_unix_server` would remove the socket when the first of several workers ends.
        server = await asyncio.get_running_loop().create_server(
            lambda: kind(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            ),
            sock=listener,
        )
        self.servers.append(server)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends every wait for a lease first: it could last a minute."""
        for server in self.servers:
            server.close()
        self.server_state.default_headers = [
            *self.server_state.default_headers,
            (b"connection", b"close"),
        ]
        self._stop_waiting()
        await self._answer_newcomers()
        await super().shutdown(sockets)

    async def _answer_newcomers(self) -> None:
        """Waits until every connection has made a request; uvicorn closes those that have not."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        longest = self.config.timeout_graceful_shutdown or 0
        deadline = began + min(_FIRST_REQUEST_SECONDS, longest)
        await asyncio.sleep(_LOOK_SECONDS)  # what was accepted last is not in the set yet
        while loop.time() < deadline and not self.force_exit:
            if not any(map(_is_new, self.server_state.connections)):
                break
            await asyncio.sleep(_LOOK_SECONDS)
        self.config.timeout_graceful_shutdown = max(0, round(began + longest - loop.time()))

    def _end_alone(self, loop: asyncio.AbstractEventLoop, lifeline: int) -> None:
        loop.remove_reader(lifeline)
        _LOGGER.warning("worker %d exits: its parent process is gone", os.getpid())
        if not self.started:
            os._exit(_ABANDONED)  # it has served no request, and its start might hang
        self.should_exit = True


class _OneLine(logging.Filter):
    """Shortens the traceback that uvicorn logs of a failed start to its last line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Shortens what ends with a `StartError`."""
        last = record.getMessage().rstrip().rpartition("\n")[2]
        mark, _, reason = last.partition(f"{StartError.__name__}: ")
        if reason and mark.endswith("errors."):
            record.msg, record.args = reason, None
        return True


def make_server(
    settings: Settings,
    *,
    when_ready: Callable[[], None],
    lifeline: int | None = None,
    counters: Counters | None = None,
    tracing: "Tracing | None" = None,
) -> GraphstashServer:
    """A server that is not running yet.

    Raises:
        StartError: when the files of TLS cannot be used.
    """
    tls = tls_context(settings)
    app = create_app(settings, counters=counters, tracing=tracing)
    kind, fast = _fast_path(app, tracing)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=connections(
            settings,
            count_refusal=app.count_refusal,
            kind=kind,
            fast=fast,
        ),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning" if settings.log_level == "info" else settings.log_level,
        access_log=settings.access_log,
        server_header=False,
        proxy_headers=False,  # nothing here depends on the address of the caller
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )
    config.load()
    config.ssl = tls
    log = logging.getLogger("uvicorn.error")
    if not any(isinstance(each, _OneLine) for each in log.filters):
        log.addFilter(_OneLine())
        logging.getLogger("uvicorn.access").addFilter(WithoutQuery())
    if settings.access_log:  # whoever asked for it gets it, whatever else is logged
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    return GraphstashServer(
        config, when_ready=when_ready, stop_waiting=app.stop_waiting, lifeline=lifeline
    )


def _fast_path(app: ServerApp, tracing: "Tracing | None") -> tuple[type[FastConnection], FastPath]:
    if tracing is None:
        return FastConnection, FastPath(lambda: app.context)
    from graphstash_server.fast.traced import TracedFastConnection, TracedFastPath

    return TracedFastConnection, TracedFastPath(lambda: app.context, tracing=tracing)


def run_server(
    settings: Settings,
    listeners: list[socket.socket],
    *,
    when_ready: Callable[[], None],
    lifeline: int | None = None,
    counters: Counters | None = None,
) -> bool:
    """Serves until a signal; False when it could not start.

    Raises:
        StartError: when the files of TLS cannot be used, or what makes traces is missing or refuses
            its settings.
    """
    tracing_class = find_tracing(settings)
    tracing = None if tracing_class is None else tracing_class()
    server = make_server(
        settings, when_ready=when_ready, lifeline=lifeline, counters=counters, tracing=tracing
    )
    signal.signal(signal.SIGTERM, _stop)
    try:
        server.run(sockets=listeners)
    except SystemExit:
        return False  # uvicorn's way of saying so; it logged the reason
    except KeyboardInterrupt:
        return True  # a signal asked for the end: uvicorn raises it again when everything is done
    finally:
        if tracing is not None:
            tracing.close()
    return server.started


def run_worker(
    settings: Settings,
    listeners: list[socket.socket],
    *,
    say: int,
    lifeline: int,
    counters: Counters,
) -> NoReturn:
    """Serves in a process that was just forked, and exits.

    A byte is written to the pipe `say` when the worker serves; `lifeline` is described in
    `GraphstashServer`.
    """

    def tell() -> None:
        with suppress(BrokenPipeError):  # the parent is gone: the lifeline tells, too
            os.write(say, b"1")
        os.close(say)

    is_fine = False
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal sends it to the whole group
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENT_SIGNALS)
        is_fine = run_server(
            settings, listeners, when_ready=tell, lifeline=lifeline, counters=counters
        )
    except StartError as error:
        _LOGGER.error("%s", error)  # noqa: TRY400 - the settings are wrong, not the code
    except Exception:
        _LOGGER.exception("worker %d failed", os.getpid())
    finally:
        os._exit(0 if is_fine else 1)


def _is_new(connection: object) -> bool:
    """Whether nothing has been asked on a connection yet."""
    return isinstance(connection, HttpToolsProtocol) and connection.cycle is None


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """Stopping on request is not a failure: the exit code stays 0, as after Ctrl-C."""
    raise KeyboardInterrupt
