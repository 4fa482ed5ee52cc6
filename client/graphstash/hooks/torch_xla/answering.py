"""The Python half of the gate: a thread that answers the stub, and a thread that sends heartbeats.

Both use a socket pair. A request is one datagram with a sequence number and a path. A reply is the
sequence number and one byte: `w` (still working, keep waiting) or `d` (done, look again). If no
reply arrives within the stub's timeout, the caller continues. This prevents a deadlock: the thread
with the interpreter lock may wait for the mutex that the caller holds, and no Python thread can
reply.
"""

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

from graphstash._forking import unforked
from graphstash.hooks.torch_xla.stub import PATH_LIMIT, Block

__all__ = ["Responder"]

_log = logging.getLogger("graphstash")

_SEQUENCE: Final = struct.Struct("=I")
_REPLY: Final = struct.Struct("=Ic")
# Seconds that `stop` waits for each thread and for a caller: only a running answer takes that long.
_LEAVE_SECONDS: Final = 1.0


class Responder:
    """Calls `answer(path)` for every request of the stub with this `block`.

    Requests are answered in order, one at a time, even if the caller has given up. The threads are
    daemons, so they do not delay the exit of the process.

    Attributes:
        answer: Function to call. It may be replaced while no request is open.
    """

    def __init__(
        self, block: Block, answer: Callable[[str], None], *, heartbeat_seconds: float
    ) -> None:
        """Start the threads and enable the stub.

        Raises:
            OSError: The process can open no further sockets.
            RuntimeError: The process can start no further threads.
        """
        self.answer = answer
        self._block = block
        self._heartbeat_seconds = heartbeat_seconds
        self._owner = os.getpid()
        self._working: int | None = None  # sequence number; written by `_run` only
        self._work = threading.Event()  # set during an answer, and for good once `_run` has ended
        self._ended = threading.Event()
        self._near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._far_fd = far.detach()
        self._threads = (
            threading.Thread(target=self._run, name="graphstash-gate", daemon=True),
            threading.Thread(
                target=self._send_heartbeats, name="graphstash-gate-heartbeat", daemon=True
            ),
        )
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            _shut_down(self._near)
            os.close(self._far_fd)
            raise
        block.busy = 0  # in a forked child, the 1 may belong to a thread of the parent
        block.socket = self._far_fd
        block.owner = self._owner
        block.enabled = 1

    def stop(self) -> None:
        """Release a waiting caller and end the threads. A running answer may outlast this call."""
        self._block.enabled = 0
        if self._owner != os.getpid():
            self._close_copies()
            return
        # Forked children may hold copies of both ends, which stay connected after a mere `close`.
        _shut_down(self._near)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_LEAVE_SECONDS)
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self._block.busy and time.monotonic() < deadline:
            time.sleep(0.001)
        # Leak the descriptor if a caller may still use its number, which another file could get.
        if not self._block.busy:
            os.close(self._far_fd)

    def _close_copies(self) -> None:
        # Close the child's copies of both ends. A shutdown would break the parent's connection.
        self._near.close()
        os.close(self._far_fd)

    def _run(self) -> None:
        """Answer requests until `stop` shuts the connection down."""
        try:
            # After `stop`, drop the requests that are still queued.
            while (request := self._near.recv(_SEQUENCE.size + PATH_LIMIT)) and self._block.enabled:
                (sequence,) = _SEQUENCE.unpack_from(request)
                self._working = sequence
                self._work.set()
                try:
                    with unforked():
                        self.answer(os.fsdecode(request[_SEQUENCE.size :]))
                except Exception:  # noqa: BLE001 - a thread's outermost frame
                    _log.exception("answering a cache look-up failed; torch_xla compiles by itself")
                finally:
                    self._work.clear()
                    self._working = None
                    self._reply(sequence, b"d")
        except OSError:
            _log.exception("the gate's connection broke; torch_xla compiles by itself")
        finally:
            self._block.enabled = 0
            self._ended.set()
            self._work.set()
            self._near.close()

    def _send_heartbeats(self) -> None:
        """Send heartbeats during each answer, until `_run` has ended."""
        while not self._ended.is_set():
            self._work.wait()
            self._ended.wait(self._heartbeat_seconds)
            sequence = self._working
            if sequence is not None:
                self._reply(sequence, b"w")

    def _reply(self, sequence: int, verdict: bytes) -> None:
        # Only a waiting caller reads the socket. Without one, replies would fill it.
        if not self._block.busy or self._ended.is_set():
            return
        try:
            self._near.send(
                _REPLY.pack(sequence, verdict), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            )
        except OSError as error:
            _log.debug("a reply to the gate was lost: %s", error)


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        _log.debug("the gate's connection was closed before: %s", error)
