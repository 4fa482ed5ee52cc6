"""run_server: the application on uvicorn, one process, with an end that waits for nobody long."""

import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from graphstash_server.app import create_app
from graphstash_server.settings import Settings

__all__ = ["GraphstashServer", "make_server", "run_server"]


class GraphstashServer(uvicorn.Server):
    """Says when it is ready, and answers waiting requests before it stops."""

    def __init__(self, config: uvicorn.Config, *, when_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._when_ready = when_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts listening."""
        await super().startup(sockets)
        if self.started:
            self._when_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends every wait for a lease first: it could last a minute."""
        self.config.app.state.context.stop_waiting()  # type: ignore[union-attr]
        await super().shutdown(sockets)


def make_server(settings: Settings, *, when_ready: Callable[[], None]) -> GraphstashServer:
    """A server that is not running yet."""
    config = uvicorn.Config(
        create_app(settings),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning" if settings.log_level == "info" else settings.log_level,
        access_log=settings.access_log,
        server_header=False,
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )
    return GraphstashServer(config, when_ready=when_ready)


def run_server(
    settings: Settings, listener: socket.socket, *, when_ready: Callable[[], None]
) -> bool:
    """Serves until a signal; False when it could not start."""
    server = make_server(settings, when_ready=when_ready)
    signal.signal(signal.SIGTERM, _stop)
    try:
        server.run(sockets=[listener])
    except SystemExit:
        return False  # uvicorn's way of saying so; it logged the reason
    except KeyboardInterrupt:
        return True  # a signal asked for the end: uvicorn raises it again when everything is done
    return server.started


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """Being told to stop is no failure: the exit code stays 0, as after Ctrl-C."""
    raise KeyboardInterrupt
