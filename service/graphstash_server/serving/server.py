"""run_server: run the application on uvicorn in one process, with a bounded graceful shutdown.

`run_worker` does the same in a forked process (see `workers`).

The shutdown has five steps. The server stops accepting connections. It answers requests that wait
for leases. It waits for new connections to send their first request. Transfers continue for at most
`shutdown_seconds`. The context closes, which writes the last counters. Every response during the
shutdown closes its connection, so that a client under load reconnects elsewhere and no request is
cut off.
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

from graphstash_server.api.connection import Connection, connections, owner_connections
from graphstash_server.app import ServerApp, create_app
from graphstash_server.errors import StartError
from graphstash_server.fast.answers import FastPath
from graphstash_server.fast.connection import FastConnection
from graphstash_server.logs import WithoutQuery
from graphstash_server.services.counters import Counters
from graphstash_server.serving.ports import allow_listening
from graphstash_server.serving.telemetry import find_tracing
from graphstash_server.serving.tls import tls_context
from graphstash_server.settings import Settings

if TYPE_CHECKING:
    from graphstash_server.tracing import Tracing

__all__ = [
    "KEEP_ALIVE_SECONDS",
    "PARENT_SIGNALS",
    "GraphstashServer",
    "make_server",
    "run_server",
    "run_worker",
]

_LOGGER = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS: Final = 120
"""Seconds until an idle connection is closed. A job keeps its connection while it compiles, because
a new one with TLS costs 23 times as much as a request. When connections run out, idle ones yield.
"""

_FIRST_REQUEST_SECONDS = 5.0
"""Seconds that a connection without a request may delay the shutdown. Its client has connected and
is about to send a request, which takes a while on a loaded host. Closing would fail that request.
"""

_LOOK_SECONDS = 0.02

_ABANDONED = 1

PARENT_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
"""Signals that the parent of workers handles. A freshly forked worker has them blocked."""


def _freeze_garbage() -> None:
    """Exclude the objects of the start from garbage collection, and collect less often.

    Measured with look-ups of 1,000 keys: 12.8 ms of CPU each with Python's defaults, 9.4 ms with
    the frozen objects. A threshold of 5,000 saves another tenth on a miss or a small PUT. A higher
    threshold saves no more.
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
        """Prepare a server.

        It calls `when_ready` once it serves, and `stop_waiting` before the shutdown to answer every
        request that waits for a lease. `lifeline` is the read end of a pipe that is never written
        to. The server shuts down when the last process with the write end is gone.
        """
        super().__init__(config)
        self._when_ready = when_ready
        self._stop_waiting = stop_waiting
        self._lifeline = lifeline

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then listen: a connection is refused until it can be answered.

        Connections over a Unix socket come from the owner (`own_socket`).
        """
        if self._lifeline is not None:
            loop = asyncio.get_running_loop()
            loop.add_reader(self._lifeline, self._end_alone, loop, self._lifeline)
        await super().startup([])
        for listener in sockets or []:
            await self._listen(listener)
        if self.started:
            _freeze_garbage()
            self._when_ready()

    async def _listen(self, listener: socket.socket) -> None:
        config = self.config
        kind = cast("type[Connection]", config.http_protocol_class)
        is_owners = listener.family == socket.AF_UNIX
        if is_owners:
            kind = owner_connections(kind)
        else:
            allow_listening(listener)
        # `create_unix_server` would remove the socket when the first of several workers ends.
        server = await asyncio.get_running_loop().create_server(
            lambda: kind(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            ),
            sock=listener,
            ssl=None if is_owners else config.ssl,
            backlog=config.backlog,
        )
        self.servers.append(server)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End every wait for a lease first, because it could last a minute."""
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
        """Wait until every connection has sent a request. uvicorn would close the others."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        longest = self.config.timeout_graceful_shutdown or 0
        deadline = began + min(_FIRST_REQUEST_SECONDS, longest)
        await asyncio.sleep(_LOOK_SECONDS)  # the connection accepted last is not in the set yet
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
    """Shortens the traceback that uvicorn logs for a failed start to its last line."""

    def filter(self, record: logging.LogRecord) -> bool:
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
    """Create a server that is not running yet.

    Raises:
        StartError: the TLS files cannot be used.
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
        proxy_headers=False,  # no code depends on the caller's address
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )
    config.load()
    config.ssl = tls
    log = logging.getLogger("uvicorn.error")
    if not any(isinstance(each, _OneLine) for each in log.filters):
        log.addFilter(_OneLine())
        logging.getLogger("uvicorn.access").addFilter(WithoutQuery())
    if settings.access_log:  # log accesses at any log level
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
    """Serve until a signal. Return False if the server could not start.

    Raises:
        StartError: the TLS files cannot be used, or tracing lacks packages or refuses its settings.
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
        return False  # uvicorn logs why the start failed and exits
    except KeyboardInterrupt:
        return True  # a signal asked for the end; uvicorn raises it again after the shutdown
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
    """Serve in a freshly forked process, and exit. The worker writes a byte to the pipe `say` once
    it serves. `GraphstashServer` describes `lifeline`.
    """

    def tell() -> None:
        with suppress(BrokenPipeError):  # the parent is gone, which the lifeline also reports
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
    """Return whether a connection has not sent a request yet."""
    return isinstance(connection, HttpToolsProtocol) and connection.cycle is None


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """Stop without an error: on request, the exit code stays 0, as after Ctrl-C."""
    raise KeyboardInterrupt
