"""End a run early: one process decides, and `graphstash run` ends the others.

`graphstash run` usually replaces itself with the command (exec). If a setting may end the job, it
stays as the parent and waits for the command. Any process of the run can then write an exit status
to a file. `graphstash run` exits with that status, even if torchrun or a shell in between returns
another. If `graphstash run` is killed, the kernel kills the command. Imports only light modules.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from graphstash._process.run_name import RUN_VARIABLE

__all__ = ["claim_end", "end_run", "supervise"]

_FILE_VARIABLE: Final = "_GRAPHSTASH_END"
"""Variable with the path of the run's status file, set in all its processes."""

_POLL_SECONDS: Final = 0.2
_GRACE_SECONDS: Final = 5.0
"""Seconds between SIGTERM and SIGKILL."""

_PATIENCE_SECONDS: Final = 120.0
"""Seconds that other processes wait while the first one publishes, logs and ends the run."""

_FORWARDED: Final = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)

_PR_SET_PDEATHSIG: Final = 1
"""Option of prctl(2): the signal that a process gets when its parent ends."""

_SI_KERNEL: Final = 0x80
"""`si_code` of a terminal's signal, such as Ctrl-C. The command also receives it."""


def claim_end(status: int) -> None:
    """Claim the end of the run. If another process was first, wait until `graphstash run` ends this
    one, and exit with `status` after a time limit.
    """
    if path := os.environ.get(_FILE_VARIABLE):
        try:
            with Path(f"{path}.claim").open("x", encoding="ascii") as file:
                file.write(str(status))
        except FileExistsError:
            time.sleep(_PATIENCE_SECONDS)
            os._exit(status)
        except OSError:  # a file on another host, or removed: end this process only
            pass


def end_run(status: int) -> NoReturn:
    """End the run and exit, from any thread. Call `claim_end` before."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    if path := os.environ.get(_FILE_VARIABLE):
        with suppress(OSError):
            Path(f"{path}.claim").replace(path)
    os._exit(status)


def supervise(program: str, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a command, and exit with its status or the status in the status file.

    Raises:
        OSError: the command cannot be started.
    """
    # Block signals until `_wait` collects them. The command gets the original mask.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    with tempfile.TemporaryDirectory(prefix="graphstash-run-") as folder:
        end = Path(folder) / "status"
        environ = {**environment, _FILE_VARIABLE: str(end)}
        child = _start(program, command, environ, signal_mask=before)
        status = _wait(child.pid, end)
        if end.exists():
            _end_all(environ[RUN_VARIABLE])
            status = int(end.read_text("ascii")) << 8
    if os.WIFSIGNALED(status):  # die from the same signal as the command
        number = os.WTERMSIG(status)
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _start(
    program: str,
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    signal_mask: Iterable[int],
) -> "subprocess.Popen[bytes]":
    """Start a command that cannot outlive this process.

    Keep the returned object until `_wait` returns, because its destructor reaps the child.

    Raises:
        OSError: the command cannot be started.
    """
    this, prctl = os.getpid(), getattr(ctypes.CDLL(None), "prctl", None)

    def bind() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        if prctl is not None:  # Linux
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != this:  # this process died before prctl took effect
                os._exit(128 + signal.SIGKILL)

    return subprocess.Popen(
        command,
        executable=program,
        env=environ,
        close_fds=False,  # the command inherits our descriptors, as with exec
        preexec_fn=bind,  # noqa: PLW1509 - there are no other threads
    )


def _wait(child: int, end: Path) -> int:
    """Forward signals until the command exits or the status file appears. Return the wait status.

    Poll for the file, because any descendant may write it.
    """
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done or end.exists():
            return status
        got = signal.sigtimedwait({*_FORWARDED, signal.SIGCHLD}, _POLL_SECONDS)
        if got is not None and got.si_signo in _FORWARDED and got.si_code != _SI_KERNEL:
            with suppress(ProcessLookupError):
                os.kill(child, got.si_signo)


def _end_all(run: str) -> None:
    """Send SIGTERM, then SIGKILL, to every process of the run on this host, in any session."""
    for number, patience in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, 1.0)):
        until = time.monotonic() + patience
        sent: set[int] = set()
        while (found := set(_processes_of(run))) and time.monotonic() < until:
            for process in found - sent:
                with suppress(OSError):
                    os.kill(process, number)
            sent |= found
            with suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            time.sleep(_POLL_SECONDS / 4)


def _processes_of(run: str) -> Iterator[int]:
    """Yield the ids of running processes whose environment names the run."""
    mark = f"{RUN_VARIABLE}={run}".encode()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            process = int(entry.name)
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                yield process
