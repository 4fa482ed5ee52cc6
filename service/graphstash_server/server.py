"""run_server: the application on uvicorn, one process, with an end that waits for nobody long.

`run_worker` is the same in a forked process (see `workers`).

The end, in this order: nothing more is accepted; waits for a lease are answered; whoever had just
connected gets an answer; transfers under way go on for at most `shutdown_seconds`; then the context
closes, which writes the last counters. Every answer on the way closes its connection, so that a
client under load goes elsewhere instead of being cut off.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Final, NoReturn

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from graphstash_server.app import create_app
from graphstash_server.connection import ConnectionLimits, connections
from graphstash_server.errors import StartError
from graphstash_server.settings import Settings
from graphstash_server.tls import tls_context

__all__ = ["PARENT_SIGNALS", "GraphstashServer", "make_server", "run_server", "run_worker"]

_LOGGER = logging.getLogger(__name__)

_FIRST_REQUEST_SECONDS = 5.0
"""How long a connection without a request may keep the server from ending. Its client has reached
us and is about to ask: on a loaded host that takes a while, and closing would fail the request."""

_LOOK_SECONDS = 0.02

_ABANDONED = 1

PARENT_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
"""What the parent of workers listens to; a worker that is just forked has them blocked."""


class GraphstashServer(uvicorn.Server):
    """Says when it is ready, and ends without failing anybody."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        when_ready: Callable[[], None],
        lifeline: int | None = None,
    ) -> None:
        """Prepares it.

        Args:
            config: of uvicorn.
            when_ready: called once it serves.
            lifeline: the reading end of a pipe that nothing is written to. When the last process
                that holds the writing end is gone, the server ends gracefully.
        """
        super().__init__(config)
        self._when_ready = when_ready
        self._lifeline = lifeline

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts listening."""
        if self._lifeline is not None:
            loop = asyncio.get_running_loop()
            loop.add_reader(self._lifeline, self._end_alone, loop, self._lifeline)
        await super().startup(sockets)
        if self.started:
            self._when_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends every wait for a lease first: it could last a minute."""
        for server in self.servers:
            server.close()
        self.server_state.default_headers = [
            *self.server_state.default_headers,
            (b"connection", b"close"),
        ]
        self.config.app.state.context.stop_waiting()  # type: ignore[union-attr]
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
        _LOGGER.warning("worker %d ends: its parent is gone", os.getpid())
        if not self.started:
            os._exit(_ABANDONED)  # it has served nobody, and its start might hang
        self.should_exit = True


class _OneLine(logging.Filter):
    """uvicorn logs the traceback of a failed start. What is meant for whoever started the server is
    its last line.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Shortens what ends with a `StartError`."""
        last = record.getMessage().rstrip().rpartition("\n")[2]
        mark, _, reason = last.partition(f"{StartError.__name__}: ")
        if reason and mark.endswith("errors."):
            record.msg, record.args = reason, None
        return True


def make_server(
    settings: Settings, *, when_ready: Callable[[], None], lifeline: int | None = None
) -> GraphstashServer:
    """A server that is not running yet.

    Raises:
        StartError: when the files of TLS cannot be used.
    """
    tls = tls_context(settings)
    limits = ConnectionLimits(
        header_seconds=settings.header_seconds, max_connections=settings.max_connections
    )
    config = uvicorn.Config(
        create_app(settings),
        loop="uvloop",
        http=connections(limits),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning" if settings.log_level == "info" else settings.log_level,
        access_log=settings.access_log,
        server_header=False,
        proxy_headers=False,  # nobody's word about who is behind a connection is needed
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )
    config.load()
    config.ssl = tls
    log = logging.getLogger("uvicorn.error")
    if not any(isinstance(each, _OneLine) for each in log.filters):
        log.addFilter(_OneLine())
    return GraphstashServer(config, when_ready=when_ready, lifeline=lifeline)


def run_server(
    settings: Settings,
    listener: socket.socket,
    *,
    when_ready: Callable[[], None],
    lifeline: int | None = None,
) -> bool:
    """Serves until a signal; False when it could not start."""
    server = make_server(settings, when_ready=when_ready, lifeline=lifeline)
    signal.signal(signal.SIGTERM, _stop)
    try:
        server.run(sockets=[listener])
    except SystemExit:
        return False  # uvicorn's way of saying so; it logged the reason
    except KeyboardInterrupt:
        return True  # a signal asked for the end: uvicorn raises it again when everything is done
    return server.started


def run_worker(settings: Settings, listener: socket.socket, *, say: int, lifeline: int) -> NoReturn:
    """Serves in a process that was just forked, and ends it.

    Args:
        settings: of this server.
        listener: inherited, as the pipes are.
        say: the writing end of a pipe; gets a byte when the worker serves.
        lifeline: see `GraphstashServer`.
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
        is_fine = run_server(settings, listener, when_ready=tell, lifeline=lifeline)
    except Exception:
        _LOGGER.exception("worker %d failed", os.getpid())
    finally:
        os._exit(0 if is_fine else 1)


def _is_new(connection: object) -> bool:
    """Whether nothing has been asked on a connection yet."""
    return isinstance(connection, HttpToolsProtocol) and connection.cycle is None


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """Being told to stop is no failure: the exit code stays 0, as after Ctrl-C."""
    raise KeyboardInterrupt
