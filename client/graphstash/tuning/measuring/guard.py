"""Guard a measuring process, and end every process that a trial starts.

    python -I -S guard.py LIFELINE PARENT COMMAND...

The guard imports only the standard library, and nothing of the target. It ends, with all its
descendants, when the command ends, when its parent ends, or when the other end of LIFELINE (a
socket's file descriptor) closes. Processes that a trial detached become children of the guard when
their own parent ends (PR_SET_CHILD_SUBREAPER), and end with it.

The guard forwards only the beginning of their standard error, because a kernel may write a line in
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
"""Option of prctl(2)."""

_MAX_TOLD_BYTES: Final = 64 * 1024
_TELL_SECONDS: Final = 1.0
"""Bytes of standard error to forward, and seconds to do so after all processes have ended."""


def main(arguments: list[str]) -> None:
    """Run the command, and write its exit status into the lifeline if it is still open."""
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
    """Forward the beginning, and read the rest so that no writer blocks."""
    left = _MAX_TOLD_BYTES
    while text := os.read(told, _MAX_TOLD_BYTES):
        if left > 0:
            left -= len(text)
            rest = b"" if left > 0 else b"\n[what else a measuring process writes is left out]\n"
            with contextlib.suppress(OSError):  # standard error is closed
                os.write(2, text + rest)


def _watch(lifeline: socket.socket, parent: int, worker: "subprocess.Popen[bytes]") -> None:
    """Kill the worker once its parent is gone or the lifeline is closed.

    A fork of the parent keeps the lifeline open, so the parent is checked as well.
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
    """Kill children until none is left: orphans of killed processes become children of this one."""
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
