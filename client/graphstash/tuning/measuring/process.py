"""The search's side of a measuring process: messages, and its end.

The process is spawned, never forked, so it gets no threads or devices of this process.
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

__all__ = ["EndedError", "MeasuringProcess"]

_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from graphstash.tuning.measuring.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)

_ENVIRONMENT: Final = {"GRAPHSTASH_ENABLED": "false"}
"""A trial's compilations are discarded, so they are neither published nor counted."""

_SEND_SECONDS: Final = 5.0
"""Seconds for a waiting process to take each packet of a request."""

_END_SECONDS: Final = 5.0
"""Seconds for the guard to end all its processes, before it is killed."""


class EndedError(Exception):
    """A measuring process has ended, or its messages can no longer be trusted."""


class MeasuringProcess:
    """A measuring process, and the guard around it.

    Args:
        target: the pickled target.
        method: how to measure.

    Raises:
        RuntimeError: a main module without `if __name__ == "__main__":` starts it again in a
            measuring process.
        OSError: no process can be started.

    Attributes:
        channel: readable when `receive` has something.
        lifeline: readable when the process has ended.
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
            # Even before sys.path is set, no file of the working directory may be imported.
            command = [sys.executable, "-P", "-c", _PROGRAM, *map(str, descriptors), path]
            about = [str(lifeline.fileno()), str(os.getpid())]
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(guard.__file__)), *about, *command],
                stdin=subprocess.DEVNULL,
                env=os.environ | _ENVIRONMENT,
                pass_fds=(lifeline.fileno(), *descriptors),
                start_new_session=True,  # out of reach of the terminal's interrupts
            )

    def build(self, configurations: Sequence[Mapping[str, Any]]) -> None:
        """Start building; the process reports "built" at the end, and waits for `run`."""
        self._token = secrets.token_hex(8)
        self._send({"token": self._token, "configurations": [*map(dict, configurations)]})

    def run(self) -> None:
        """Start checking and measuring the built kernels."""
        self._send({"token": self._token})

    def receive(self) -> dict[str, Any] | None:
        """Return the next message of `worker`, or None if there is none yet.

        Raises:
            EndedError: the process has ended, or the message is not the worker's.
        """
        try:
            packet = self.channel.recv(MAX_MESSAGE_BYTES + 1)
        except BlockingIOError:
            if self._has_ended():
                raise EndedError(self._exit_description()) from None
            return None
        except OSError as error:
            raise EndedError(str(error)) from error
        if not packet:
            raise EndedError(self._exit_description())
        try:
            message = json.loads(packet)
            is_its = message["token"] == self._token
        except (ValueError, TypeError, KeyError, RecursionError):
            is_its = False
        if not is_its:
            raise EndedError(f"something else wrote into its socket: {packet[:100]!r}")
        assert isinstance(message, dict)  # noqa: S101 - its "token" was looked up
        return message

    def end(self) -> None:
        """Kill the process and all that it started; return when they have ended."""
        self.lifeline.close()
        self.channel.close()
        try:
            self._guard.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # stuck in a driver, where not even SIGKILL ends it
            self._guard.kill()
            self._guard.wait()

    def _send(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        size = MAX_MESSAGE_BYTES - 1
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        self.channel.settimeout(_SEND_SECONDS)
        with contextlib.suppress(OSError):  # the process has ended: `receive` raises
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

    def _exit_description(self) -> str:
        self.lifeline.settimeout(_END_SECONDS)
        status = b""
        with contextlib.suppress(OSError):
            status = self.lifeline.recv(100)
        try:
            number = int(status)
        except ValueError:
            return "its process was killed with its guard"
        if number >= 0:
            return f"its process ended with status {number}"
        return f"its process was ended by {signal.Signals(-number).name}"
