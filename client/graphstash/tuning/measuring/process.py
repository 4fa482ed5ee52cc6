"""A measuring process as the search sees it: messages, and its end.

It is started anew (spawn), never forked: threads and devices of this process stay here.
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
"""What a trial compiles is thrown away, so it is neither published nor counted."""

_SEND_SECONDS: Final = 5.0
"""What a process that waits for a request gets to take each packet of it."""

_END_SECONDS: Final = 5.0
"""What the guard gets to end all that it guards, before it is left alone."""


class EndedError(Exception):
    """A measuring process has ended, or nothing that it sends can be trusted any more."""


class MeasuringProcess:
    """One process that measures, and the guard around it.

    Args:
        target: what it measures, pickled.
        method: how.

    Raises:
        RuntimeError: when a main module without `if __name__ == "__main__":` starts it, again, in
            a measuring process.
        OSError: when no process can be started here.

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
        preparation.pop("authkey", None)  # it is for multiprocessing's own pipes
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
            # Not even before it has this path may a file of the working directory be imported.
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
        """Lets it build; it says "built" at the end and waits for `run`."""
        self._token = secrets.token_hex(8)
        self._send({"token": self._token, "configurations": [*map(dict, configurations)]})

    def run(self) -> None:
        """Lets it check and measure what it has built."""
        self._send({"token": self._token})

    def receive(self) -> dict[str, Any] | None:
        """The next message of `worker`; None where there is none now.

        Raises:
            EndedError: there will be none, or it is not one of the worker's.
        """
        try:
            packet = self.channel.recv(MAX_MESSAGE_BYTES + 1)
        except BlockingIOError:
            if self._has_ended():
                raise EndedError(self._how_it_ended()) from None
            return None
        except OSError as error:
            raise EndedError(str(error)) from error
        if not packet:
            raise EndedError(self._how_it_ended())
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
        """Kills it and all that it started; returns when they have ended."""
        self.lifeline.close()
        self.channel.close()
        try:
            self._guard.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # a process that not even SIGKILL ends, in a driver
            self._guard.kill()
            self._guard.wait()

    def _send(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        size = MAX_MESSAGE_BYTES - 1
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        self.channel.settimeout(_SEND_SECONDS)
        with contextlib.suppress(OSError):  # it has ended: `receive` says so
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

    def _how_it_ended(self) -> str:
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
