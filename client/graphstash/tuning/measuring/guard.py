"""Guard a measuring process, and end every process that a trial starts.

    python -I -S guard.py LIFELINE PARENT COMMAND...

The guard imports only the standard library, and nothing of the target. It ends, with all its
descendants, when the command ends, when its parent (process PARENT) ends, or when the other end of
LIFELINE (a socket's file descriptor) closes. Processes that a trial detached become children of the
guard when their own parent ends (PR_SET_CHILD_SUBREAPER), and end with it.

The guard forwards only the beginning of its descendants' standard error, because a kernel may write
a line in each of a million calls.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

__all__ = ["main"]

_PR_SET_CHILD_SUBREAPER: Final = 36

_FORWARDED_BYTES: Final = 64 * 1024
"""Bytes of standard error after which forwarding stops; also the size of a read."""

_FORWARD_SECONDS: Final = 1.0
"""Seconds to wait for the forwarding after all processes have ended."""


def main(arguments: list[str]) -> None:
    """Run the command, and send its exit status over the lifeline if that is still open."""
    lifeline = socket.socket(fileno=int(arguments[0]))
    parent = int(arguments[1])
    os.set_inheritable(lifeline.fileno(), False)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    stderr, stderr_end = os.pipe()
    worker = subprocess.Popen(
        arguments[2:], close_fds=False, start_new_session=True, stderr=stderr_end
    )
    os.close(stderr_end)
    forwarder = threading.Thread(target=_forward, args=(stderr,), daemon=True)
    forwarder.start()
    watcher = threading.Thread(target=_watch, args=(lifeline, parent, worker), daemon=True)
    watcher.start()
    status = worker.wait()
    _end_descendants()
    forwarder.join(_FORWARD_SECONDS)
    with contextlib.suppress(OSError):
        lifeline.send(str(status).encode())


def _forward(stderr: int) -> None:
    """Forward the beginning, and read the rest so that no writer blocks."""
    left = _FORWARDED_BYTES
    while text := os.read(stderr, _FORWARDED_BYTES):
        if left > 0:
            left -= len(text)
            rest = b"" if left > 0 else b"\n[what else a measuring process writes is left out]\n"
            with contextlib.suppress(OSError):  # standard error is closed
                os.write(2, text + rest)


def _watch(lifeline: socket.socket, parent: int, worker: "subprocess.Popen[bytes]") -> None:
    """Kill the worker when the guard's parent has ended or the lifeline is closed.

    A forked child of the parent may keep the lifeline open, so check both.
    """
    lifeline.settimeout(1.0)
    while os.getppid() == parent:
        try:
            lifeline.recv(1)
            break
        except TimeoutError:
            continue
        except OSError:
            break
    worker.kill()


def _end_descendants() -> None:
    """Kill children until none is left. The children of a killed process become the guard's."""
    while True:
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    children = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            with contextlib.suppress(OSError):  # the process has ended
                # PID (NAME) STATE PPID ...; a name may hold anything
                fields = (directory / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == os.getpid():
                    children.append(int(directory.name))
    return children


if __name__ == "__main__":
    main(sys.argv[1:])
