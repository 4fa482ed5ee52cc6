"""Zygotes that all workers of pytest-xdist share, and the zygote that forks the workers.

Otherwise each worker imports torch, and starts its own zygote for the server's commands and for
each compiler: 40 s of CPU per worker.

The process that starts the workers owns the zygotes. A zygote starts at its first request.
Workers inherit the sockets for the requests, and receive their descriptors as `workerinput`.
"""

import os
import selectors
import socket
import sys
import threading
from typing import Any

from execnet.gateway_io import popen_bootstrapline

from support import jobs, starts
from support.starts import SharedZygote, Zygote, start_zygote

_COMMANDS = "commands"
_used: list[SharedZygote] = []


class SharedZygotes:
    """The zygotes of one run of the tests.

    Attributes:
        shown: what a worker passes to `use`.
    """

    def __init__(self, *imported: str) -> None:
        """Start the zygote of the workers, which imports these modules."""
        environment = starts.read_at_import(os.environ)
        zygotes = {_COMMANDS: (starts.COMMANDS, environment)} | {
            name: (jobs.imported_by(name), os.environ | jobs.READ_BY_IMPORTS)
            for name in jobs.SHARED
        }
        self._sockets = {}
        self._processes: list[Any] = []
        self._waiting = selectors.DefaultSelector()
        for name, zygote in zygotes.items():
            self._sockets[name], there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._waiting.register(there, selectors.EVENT_READ, (there, *zygote))
        descriptors = {name: each.fileno() for name, each in self._sockets.items()}
        self.shown = {"environment": environment, "descriptors": descriptors}
        self._of_workers = Zygote(sys.executable, *imported, pass_fds=tuple(descriptors.values()))
        starts.fork_command([sys.executable, "-u", "-c", popen_bootstrapline], self._of_workers)
        self._starter = threading.Thread(target=self._start_requested, name="zygotes", daemon=True)
        self._starter.start()

    def close(self) -> None:
        """End the zygotes, after the workers."""
        for each in self._sockets.values():
            each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._starter.join()
        for process in self._processes:
            process.wait(30)
        self._of_workers.close()

    def _start_requested(self) -> None:
        """Start each zygote at its first request, until `close`."""
        while self._waiting.get_map():
            for key, _ in self._waiting.select():
                there, imported, environment = key.data
                self._waiting.unregister(there)
                with there:
                    if there.recv(1, socket.MSG_PEEK):
                        self._processes.append(
                            start_zygote(there, sys.executable, imported, environment=environment)
                        )


def use(shown: dict[str, Any]) -> None:
    """Let this worker's commands and jobs be forked from the shared zygotes."""
    zygotes = {name: SharedZygote(each) for name, each in shown["descriptors"].items()}
    _used.extend(zygotes.values())
    starts.use_shared(zygotes.pop(_COMMANDS), shown["environment"])
    jobs.use_shared(zygotes)


def leave() -> None:
    """Close this worker's descriptors of the shared zygotes."""
    while _used:
        _used.pop().close()
