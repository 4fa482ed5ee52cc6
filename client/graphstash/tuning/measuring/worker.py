"""The program of a measuring process.

It answers requests of `process.MeasuringProcess` over a separate socket, so a trial's prints cannot
corrupt messages; its standard output is discarded. Messages are JSON, because the search must never
unpickle data of a trial. `<` marks messages from this process, `>` messages to it. The search sends
a new random token with each start and each request to build, and expects it in the replies. So it
detects that a trial writes to the socket.

    < {"token", "step": "ready"} or {"token", "step": "unable", "reason"}
    > {"token", "configurations": [...]}          build these
    < {"token", "step": "build" or "run"}          before each step that has a deadline
    < {"token", "step": "built"}
    > {"token"}                                    run them; no other process runs kernels now
    < {"token", "step": "result", "samples", "failure", "reason"}    one per kernel, in order
    < {"token", "step": "measured"}
"""

import contextlib
import ctypes
import json
import multiprocessing.spawn
import os
import pickle
import resource
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any, Final

from graphstash.tuning.measuring.measurement import Method
from graphstash.tuning.measuring.sampling import BuiltKernel, ending_forks, take_samples
from graphstash.tuning.measuring.target import Kernel, Target

__all__ = ["LAST", "MAX_MESSAGE_BYTES", "MORE", "is_starting", "main"]

MAX_MESSAGE_BYTES: Final = 64 * 1024
"""Maximum size of a packet. A socket refuses packets larger than its send buffer, which by default
has room for three of this size."""

MORE: Final = b"+"
LAST: Final = b"."
"""First byte of each packet of a request. `MORE`: further packets follow. `LAST`: none follows."""

_MAX_REASON: Final = 500

_PR_SET_PDEATHSIG: Final = 1
"""Option of prctl(2): the signal that this process gets when its parent ends. The parent, `guard`,
also ends all processes that a trial has started."""

is_starting = False
"""Whether this measuring process is importing the main module of the user's program."""


def main(channel_number: int, payload_number: int) -> None:
    """Serve requests until the other end closes."""
    global is_starting  # noqa: PLW0603 - a state of this process
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with open(payload_number, "rb") as file:
        payload = pickle.load(file)  # noqa: S301 - written by the process that started this one
    channel = _Channel(socket.socket(fileno=channel_number), payload["token"])
    method: Method = payload["method"]
    try:
        if method.memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (method.memory_bytes, method.memory_bytes))
        with ending_forks():
            is_starting = True
            multiprocessing.spawn.prepare(payload["preparation"])
            is_starting = False
            target: Target = pickle.loads(payload["target"])  # noqa: S301 - as above
            target.prepare()
    except BaseException as error:  # noqa: BLE001 - user code: report it, and end this process
        channel.send("unable", reason=_shorten(f"{type(error).__name__}: {error}"))
        return
    channel.send("ready")
    directory = Path.cwd()
    while (request := channel.receive()) is not None:
        _measure(target, request["configurations"], method, channel, directory=directory)


def _measure(
    target: Target,
    configurations: list[dict[str, Any]],
    method: Method,
    channel: "_Channel",
    *,
    directory: Path,
) -> None:
    def build(configuration: dict[str, Any]) -> Kernel:
        with contextlib.suppress(OSError):  # the directory was removed
            os.chdir(directory)  # an earlier trial may have changed it
        return target.build(configuration)

    trials = []
    for configuration in configurations:
        channel.send("build")
        built = BuiltKernel()
        built.kernel = built.attempt("compile", partial(build, configuration))  # type: ignore[assignment] # checked below
        if built.failure is None and not callable(built.kernel):
            built.fail("compile", f"build returned {built.kernel!r}, which cannot be called")
        trials.append(built)
    channel.send("built")
    if channel.receive() is None:
        return
    take_samples(target, trials, method, partial(channel.send, "run"))
    for trial in trials:
        channel.send("result", **_result_fields(trial))
    channel.send("measured")


def _result_fields(trial: BuiltKernel) -> dict[str, Any]:
    return {
        "samples": [] if trial.failure else trial.samples,
        "failure": trial.failure,
        "reason": _shorten(trial.reason),
    }


def _shorten(reason: str) -> str:
    """Shorten to one line, because a compiler's message may be very long."""
    return " ".join(reason[: 10 * _MAX_REASON].split())[:_MAX_REASON]


class _Channel:
    def __init__(self, channel: socket.socket, token: str) -> None:
        self._channel = channel
        self._token = token

    def send(self, step: str, **fields: Any) -> None:
        self._channel.send(json.dumps({"token": self._token, "step": step} | fields).encode())

    def receive(self) -> dict[str, Any] | None:
        """Return the next request, or None if the other end has closed."""
        message, mark = b"", MORE
        while mark == MORE:
            packet = self._channel.recv(MAX_MESSAGE_BYTES)
            if not packet:
                return None
            mark, message = packet[:1], message + packet[1:]
        request: dict[str, Any] = json.loads(message)
        self._token = request["token"]
        return request
