"""The Python half of the gate: two threads which answer the stub over a socket pair.

A request is one datagram, the sequence number and the path. A reply is the sequence number and one
byte: `w` (still at work, wait on) or `d` (done, look again). The caller gives up after a while
without any reply. Replies need a running interpreter, so where Python threads cannot run because
the lock's owner waits for the very mutex the caller holds, no reply comes and nothing is stuck.
"""

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

from graphstash.hooks.torch_xla.stub import PATH_LIMIT, Block

__all__ = ["Answering"]

_log = logging.getLogger("graphstash")

_SEQUENCE: Final = struct.Struct("=I")
_REPLY: Final = struct.Struct("=Ic")
# How long `stop` waits for a thread or a caller; both leave at once unless an answer is running.
_LEAVE_SECONDS: Final = 1.0


class Answering:
    """Calls `answer(path)` for every request of the stub that owns `block`.

    Requests are answered in order, one at a time, also those the caller has given up meanwhile.
    `stop` ends both threads; they are daemons, so a process that ends without it is not held up.

    Attributes:
        answer: What to call; may be replaced while no request is open.
    """

    def __init__(
        self, block: Block, answer: Callable[[str], None], *, heartbeat_seconds: float
    ) -> None:
        """Starts the threads and enables the stub.

        Raises:
            OSError: no socket to be had.
            RuntimeError: no thread to be had.
        """
        self.answer = answer
        self._block = block
        self._heartbeat_seconds = heartbeat_seconds
        self._owner = os.getpid()
        self._working: int | None = None  # sequence number; written by the answering thread alone
        self._work = threading.Event()  # set while there is work, and for ever once all has ended
        self._ended = threading.Event()
        self._near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._far_fd = far.detach()
        self._threads = (
            threading.Thread(target=self._run, name="graphstash-gate", daemon=True),
            threading.Thread(target=self._beat, name="graphstash-gate-heartbeat", daemon=True),
        )
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            _shut_down(self._near)
            os.close(self._far_fd)
            raise
        block.busy = 0  # a forked child may have inherited the 1 of a thread it does not have
        block.socket = self._far_fd
        block.owner = self._owner
        block.enabled = 1

    def stop(self) -> None:
        """Lets a waiting caller go and ends the threads; an answer under way is left to finish."""
        self._block.enabled = 0
        if self._owner != os.getpid():
            self._abandon()
            return
        # Closing alone would not end the pair while a forked child has copies of both ends.
        _shut_down(self._near)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_LEAVE_SECONDS)
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self._block.busy and time.monotonic() < deadline:
            time.sleep(0.001)
        # A number that a caller still uses must not come to mean another file: rather leave it.
        if not self._block.busy:
            os.close(self._far_fd)

    def _abandon(self) -> None:
        # In a forked child: the threads are the parent's, and so is the connection. Only our
        # copies of its ends go.
        self._near.close()
        os.close(self._far_fd)

    def _run(self) -> None:
        """The answering thread; ended by `stop`, which shuts the connection down."""
        try:
            # Requests that are still in the queue when `stop` is called are dropped.
            while (request := self._near.recv(_SEQUENCE.size + PATH_LIMIT)) and self._block.enabled:
                (sequence,) = _SEQUENCE.unpack_from(request)
                self._working = sequence
                self._work.set()
                try:
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

    def _beat(self) -> None:
        """The heartbeat thread; ends after the answering thread."""
        while not self._ended.is_set():
            self._work.wait()
            self._ended.wait(self._heartbeat_seconds)
            sequence = self._working
            if sequence is not None:
                self._reply(sequence, b"w")

    def _reply(self, sequence: int, verdict: bytes) -> None:
        # Nobody reads while no caller waits: replies would only fill the socket.
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
