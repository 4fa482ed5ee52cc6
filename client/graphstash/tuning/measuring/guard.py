"""Runs around a measuring process: nothing that a trial starts outlives it.

    python -I -S guard.py LIFELINE PARENT COMMAND...

It imports nothing but the standard library, and none of what is tuned. It ends, with all of its
descendants, when the command ends, when its parent ends, or when the other end of the LIFELINE (the
number of a socket) is closed. Processes that a trial detached belong to it, too: they become its
children when their own parent ends (PR_SET_CHILD_SUBREAPER).

What they write to standard error is passed on, but only its beginning: a kernel may write a line in
each of a million calls.
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
"""Of prctl(2)."""

_MAX_TOLD_BYTES: Final = 64 * 1024
_TELL_SECONDS: Final = 1.0
"""What is passed on of standard error, and how long it may take when all have ended."""


def main(arguments: list[str]) -> None:
    """Writes the exit status of the command into the lifeline, if somebody still listens."""
    lifeline = socket.socket(fileno=int(arguments[0]))
    parent = int(arguments[1])
    os.set_inheritable(lifeline.fileno(), False)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    told, telling = os.pipe()
    worker = subprocess.Popen(
        arguments[2:], close_fds=False, start_new_session=True, stderr=telling
    )
    os.close(telling)
    teller = threading.Thread(target=_tell, args=(told,), daemon=True)
    teller.start()
    watcher = threading.Thread(target=_watch, args=(lifeline, parent, worker), daemon=True)
    watcher.start()
    status = worker.wait()
    _end_descendants()
    teller.join(_TELL_SECONDS)
    with contextlib.suppress(OSError):
        lifeline.send(str(status).encode())


def _tell(told: int) -> None:
    """Passes the beginning on, and reads the rest, so that nobody waits to write it."""
    left = _MAX_TOLD_BYTES
    while text := os.read(told, _MAX_TOLD_BYTES):
        if left > 0:
            left -= len(text)
            rest = b"" if left > 0 else b"\n[what else a measuring process writes is left out]\n"
            with contextlib.suppress(OSError):  # nobody reads it any more
                os.write(2, text + rest)


def _watch(lifeline: socket.socket, parent: int, worker: "subprocess.Popen[bytes]") -> None:
    """Kills the worker when nobody waits for it any more.

    A process that the parent forked keeps the lifeline open: so the parent is looked at as well.
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
    """Children of those that are killed become children of this process: until none is left."""
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
            with contextlib.suppress(OSError):  # it has ended
                # PID (NAME) STATE PPID ...; a name may hold anything
                fields = (directory / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == os.getpid():
                    children.append(int(directory.name))
    return children


if __name__ == "__main__":
    main(sys.argv[1:])
