"""Start a measuring process, exchange messages with it, and kill it.

The process is spawned, never forked, so it inherits no threads or devices of this process.
"""

import contextlib
import json
import multiprocessing.spawn
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from graphstash.tuning.measuring import guard, worker
from graphstash.tuning.measuring.measurement import Method
from graphstash.tuning.measuring.worker import LAST, MAX_MESSAGE_BYTES, MORE

__all__ = ["EndedError", "KilledError", "MeasuringProcess"]

_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from graphstash.tuning.measuring.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)

_ENVIRONMENT: Final = {"GRAPHSTASH_ENABLED": "false"}
"""Keeps a trial's compilations out of the cache and its statistics."""

_SEND_SECONDS: Final = 5.0
"""Seconds that the process, which waits for requests, may take to read each packet of one."""

_END_SECONDS: Final = 5.0
"""Seconds that the guard may take to end all its processes or to report the exit status."""


class EndedError(Exception):
    """A measuring process has ended, or a message lacks the token of its request."""


class KilledError(EndedError):
    """A measuring process was killed with its guard. A crash of a trial leaves the guard alive."""


class MeasuringProcess:
    """A measuring process of a pickled target, and the guard around it.

    Raises:
        RuntimeError: this is a measuring process that still imports the main module, which lacks
            `if __name__ == "__main__":`.
        OSError: the system cannot start a process.

    Attributes:
        channel: socket that is readable when `receive` returns a message or raises.
        lifeline: socket that is readable when the process has ended.
    """

    def __init__(self, target: bytes, method: Method) -> None:
        if worker.is_starting:
            raise RuntimeError(
                "a measuring process imports the main module of the program that started it: put "
                'what this program does under `if __name__ == "__main__":`'
            )
        self._token = secrets.token_hex(8)
        preparation = multiprocessing.spawn.get_preparation_data("graphstash-measuring")
        preparation.pop("authkey", None)  # only for multiprocessing's own pipes
        payload = {
            "token": self._token,
            "preparation": preparation,
            "method": method,
            "target": target,
        }
        self.channel, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lifeline, lifeline = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.setblocking(False)
        with channel, lifeline, os.fdopen(os.memfd_create("graphstash-target"), "wb") as file:
            file.write(pickle.dumps(payload))
            file.flush()
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            descriptors = (channel.fileno(), file.fileno())
            path = json.dumps([os.fsdecode(each) for each in sys.path])
            # -P: until `_PROGRAM` sets sys.path, Python must not import from the working directory.
            command = [sys.executable, "-P", "-c", _PROGRAM, *map(str, descriptors), path]
            about = [str(lifeline.fileno()), str(os.getpid())]
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(guard.__file__)), *about, *command],
                stdin=subprocess.DEVNULL,
                env=os.environ | _ENVIRONMENT,
                pass_fds=(lifeline.fileno(), *descriptors),
                start_new_session=True,  # Ctrl-C in the terminal must not reach it
            )

    def build(self, configurations: Sequence[Mapping[str, Any]]) -> None:
        """Tell the process to build kernels. It then sends "built" and waits for `run`."""
        self._token = secrets.token_hex(8)
        self._send({"token": self._token, "configurations": [*map(dict, configurations)]})

    def run(self) -> None:
        """Tell the process to check and measure the kernels that it has built."""
        self._send({"token": self._token})

    def receive(self) -> dict[str, Any] | None:
        """Return the next message that `worker` sent, or None if there is none yet.

        Raises:
            EndedError: the process has ended, or the message lacks the token.
            KilledError: the process has ended without a report of its guard.
        """
        has_ended = self._has_ended()  # if so, its last message has arrived
        try:
            packet = self.channel.recv(MAX_MESSAGE_BYTES + 1)
        except BlockingIOError:
            if has_ended:
                raise self._make_ended_error() from None
            return None
        except OSError as error:
            raise EndedError(str(error)) from error
        if not packet:
            raise self._make_ended_error()
        try:
            message = json.loads(packet)
            is_from_worker = message["token"] == self._token
        except (ValueError, TypeError, KeyError, RecursionError):
            is_from_worker = False
        if not is_from_worker:
            raise EndedError(f"something else wrote into its socket: {packet[:100]!r}")
        assert isinstance(message, dict)  # noqa: S101 - its "token" was looked up
        return message

    def end(self) -> None:
        """Kill the process and its descendants. Wait up to `_END_SECONDS` until they have ended."""
        self.lifeline.close()
        self.channel.close()
        try:
            self._guard.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # SIGKILL does not end a process inside a driver
            self._guard.kill()
            self._guard.wait()

    def _send(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        size = MAX_MESSAGE_BYTES - 1
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        self.channel.settimeout(_SEND_SECONDS)
        with contextlib.suppress(OSError):  # if the process has ended, `receive` raises
            for part in parts[:-1]:
                self.channel.send(MORE + part)
            self.channel.send(LAST + parts[-1])
        self.channel.setblocking(False)

    def _has_ended(self) -> bool:
        try:
            self.lifeline.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def _make_ended_error(self) -> EndedError:
        self.lifeline.settimeout(_END_SECONDS)
        status = b""
        with contextlib.suppress(OSError):
            status = self.lifeline.recv(100)
        try:
            number = int(status)
        except ValueError:
            return KilledError("its process was killed with its guard")
        if number >= 0:
            return EndedError(f"its process ended with status {number}")
        return EndedError(f"its process was ended by {signal.Signals(-number).name}")
