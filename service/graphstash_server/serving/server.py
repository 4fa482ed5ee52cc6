"""run_server: run the application on uvicorn in one process, with a bounded graceful shutdown.

`run_worker` does the same in a forked process (see `workers`).

At the shutdown, the server accepts the connections that the kernel has established, stops
listening, and answers requests that wait for leases. Then it waits for the first requests of new
connections, and for transfers, `shutdown_seconds` in total. It cancels the remaining requests,
which are answered with 503. Finally, it closes the context, which writes the last counters.

Every response during the shutdown closes its connection, so that a client under load reconnects
elsewhere and the server cuts off no request.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from graphstash_schema import ErrorCode
from graphstash_server.api.connection import Connection, connections, owner_connections
from graphstash_server.app import ServerApp, create_app
from graphstash_server.errors import StartError
from graphstash_server.fast.answers import FastPath
from graphstash_server.fast.connection import FastConnection
from graphstash_server.logs import WithoutQuery
from graphstash_server.services.counters import Counters
from graphstash_server.serving.open_files import max_handshakes
from graphstash_server.serving.sockets import (
    allow_listening,
    count_unaccepted,
    ignore_new_connections,
)
from graphstash_server.serving.telemetry import find_tracing
from graphstash_server.serving.tls import Handshakes, tls_context
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
a new TLS connection costs 23 times as much as a request. If all connections are taken, the server
closes idle ones sooner."""

_BACKLOG = 65_535
"""Connections that the kernel keeps until the server accepts them, at most `net.core.somaxconn`.
Further clients time out."""

_FIRST_REQUEST_SECONDS = 5.0
"""Seconds that a new connection may delay the shutdown. Its client is about to send a request. That
takes a while on a loaded host, and would fail on a closed connection."""

_POLL_SECONDS = 0.02

_ORPHAN_STATUS = 1

PARENT_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
"""Signals that the parent of workers handles, and blocks while it forks a worker."""


def _freeze_garbage() -> None:
    """Exclude all existing objects from garbage collection, and collect less often.

    A look-up of 1,000 keys takes 12.8 ms of CPU with Python's defaults, and 9.4 ms with frozen
    objects. With a threshold of 5,000, a miss or a small PUT takes another tenth less, with a
    higher one no less.
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
        """Prepare a server that calls `when_ready` once it accepts connections, and `stop_waiting`
        at the shutdown, to answer requests that wait for leases. `lifeline` is the read end of a
        pipe: the server shuts down when the last process with the write end has ended.
        """
        super().__init__(config)
        self._when_ready = when_ready
        self._stop_waiting = stop_waiting
        self._lifeline = lifeline
        self._is_last = lifeline is None  # no other process accepts from the listeners

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then listen. Until then, the kernel refuses connections."""
        if self._lifeline is not None:
            loop = asyncio.get_running_loop()
            loop.add_reader(self._lifeline, self._end_orphan, loop, self._lifeline)
        await super().startup([])
        for listener in sockets or []:
            await self._listen(listener)
        if self.started:
            _freeze_garbage()
            self._when_ready()

    async def _listen(self, listener: socket.socket) -> None:
        config = self.config
        kind = cast("type[Connection]", config.http_protocol_class)
        is_owners = listener.family == socket.AF_UNIX  # see `serving.sockets`
        if is_owners:
            kind = owner_connections(kind)
        else:
            allow_listening(listener)

        def connect() -> asyncio.Protocol:
            return kind(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        make: Callable[[], asyncio.Protocol] = connect
        if config.ssl is not None and not is_owners:
            handshakes = Handshakes(
                config.ssl,
                connect,
                seconds=min(60, kind.limits.header_seconds),
                most=max_handshakes(kind.limits),
                count_refusal=partial(kind.count_refusal, ErrorCode.TOO_MANY_CONNECTIONS),
            )
            make = handshakes.accept
        # `create_unix_server` would remove the socket file when the first of several workers ends.
        server = await asyncio.get_running_loop().create_server(
            make, sock=listener, backlog=config.backlog
        )
        self.servers.append(server)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, answer requests that wait for leases, and let uvicorn finish the rest."""
        self.server_state.default_headers = [
            *self.server_state.default_headers,
            (b"connection", b"close"),
        ]
        await self._accept_established(sockets or [])
        for server in self.servers:
            server.close()
        self._stop_waiting()
        await self._answer_newcomers()
        await super().shutdown(sockets)

    async def _accept_established(self, listeners: list[socket.socket]) -> None:
        """Wait until the event loop has accepted what the kernel has established."""
        if self._is_last:  # otherwise, the parent decides for all workers
            for listener in listeners:
                ignore_new_connections(listener)
        deadline = asyncio.get_running_loop().time() + _FIRST_REQUEST_SECONDS
        await asyncio.sleep(_POLL_SECONDS)  # handshakes may be under way
        while any(map(count_unaccepted, listeners)):
            if asyncio.get_running_loop().time() > deadline or self.force_exit:
                break  # the process may have no free descriptor
            await asyncio.sleep(_POLL_SECONDS)

    async def _answer_newcomers(self) -> None:
        """Wait for the first requests of new connections, which uvicorn would close."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        longest = self.config.timeout_graceful_shutdown or 0
        deadline = began + min(_FIRST_REQUEST_SECONDS, longest)
        await asyncio.sleep(_POLL_SECONDS)  # until uvicorn has added the newest connection
        while loop.time() < deadline and not self.force_exit:
            if not any(map(_is_new, self.server_state.connections)):
                break
            await asyncio.sleep(_POLL_SECONDS)
        self.config.timeout_graceful_shutdown = max(0, round(began + longest - loop.time()))

    def _end_orphan(self, loop: asyncio.AbstractEventLoop, lifeline: int) -> None:
        loop.remove_reader(lifeline)
        _LOGGER.warning("worker %d exits: its parent process is gone", os.getpid())
        if not self.started:
            os._exit(_ORPHAN_STATUS)  # nothing to drain, and the start may hang
        self._is_last = True  # the other workers end with this one
        self.should_exit = True


class _ShortErrors(logging.Filter):
    """Replaces the traceback that uvicorn logs for a `StartError` by its message. Drops the
    traceback of a request that the shutdown cancelled: `RequestFrame` answers that request. Drops
    the traceback of an application that a second interrupt ended.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
            return False
        last = record.getMessage().rstrip().rpartition("\n")[2]
        if last == "asyncio.exceptions.CancelledError":
            return False
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
    """Create a server, which does not run yet. Raises `StartError` if a TLS file is unusable."""
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
        proxy_headers=False,  # /metrics and the audit log need the address of the peer
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )
    config.load()
    config.ssl = tls
    log = logging.getLogger("uvicorn.error")
    if not any(isinstance(each, _ShortErrors) for each in log.filters):
        log.addFilter(_ShortErrors())
        logging.getLogger("uvicorn.access").addFilter(WithoutQuery())
    if settings.access_log:  # log accesses at any log level
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    server = GraphstashServer(
        config, when_ready=when_ready, stop_waiting=app.stop_waiting, lifeline=lifeline
    )
    app.requests = server.server_state.tasks
    return server


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
    """Serve until a signal arrives. Return False if the server could not start.

    Raises:
        StartError: the TLS files, or the packages or settings of tracing, cannot be used.
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
        return False  # uvicorn has logged why the start failed
    except KeyboardInterrupt:
        return True  # uvicorn raises a signal again after the shutdown
    finally:
        if tracing is not None:
            tracing.close()
    return server.started


def run_worker(
    settings: Settings,
    listeners: list[socket.socket],
    *,
    ready_pipe: int,
    lifeline: int,
    counters: Counters,
) -> NoReturn:
    """Serve in a forked process, and exit. The worker writes a byte to `ready_pipe` when ready."""

    def report_ready() -> None:
        with suppress(BrokenPipeError):  # the parent has ended, as the lifeline reports
            os.write(ready_pipe, b"1")
        os.close(ready_pipe)

    is_successful = False
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal sends it to all workers
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENT_SIGNALS)
        is_successful = run_server(
            settings, listeners, when_ready=report_ready, lifeline=lifeline, counters=counters
        )
    except StartError as error:
        _LOGGER.error("%s", error)  # noqa: TRY400 - wrong settings, so no traceback
    except Exception:
        _LOGGER.exception("worker %d failed", os.getpid())
    finally:
        os._exit(0 if is_successful else 1)


def _is_new(connection: object) -> bool:
    """Return whether no request has arrived on a connection yet."""
    return isinstance(connection, HttpToolsProtocol) and connection.cycle is None


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """Handle SIGTERM like Ctrl-C, so that the exit code is 0."""
    raise KeyboardInterrupt
