"""How a run ends before its time: one process decides, and `graphstash run` ends the others.

`graphstash run` usually becomes the command that it starts. Where a job may be ended, it stays and
waits for the command: a status that a process deep in the job leaves in a file is the one that it
exits with, whatever torchrun or a shell in between makes of it. Should it be killed, so is the
command, as where it is the command. Only light modules are imported.
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

__all__ = ["is_first", "leave", "may_end", "supervise", "wait_for_end"]

_FILE_VARIABLE: Final = "_GRAPHSTASH_END"
"""Names the file that gets the status, in the environment of all processes of a run."""

_SWITCHES: Final = ("GRAPHSTASH_FAIL_ON_MISS", "GRAPHSTASH_MAX_COMPILE_SECONDS")
_OFF: Final = ("", "0", "0.0", "false", "no", "off", "f", "n")

_POLL_SECONDS: Final = 0.2
_GRACE_SECONDS: Final = 5.0
"""What processes get to end by themselves."""

_PATIENCE_SECONDS: Final = 120.0
"""What the process that ends a run may take to publish and to say why."""

_PASSED_ON: Final = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)

_PR_SET_PDEATHSIG: Final = 1
"""Of prctl(2): the signal that a process gets when its parent ends."""

_SI_KERNEL: Final = 0x80
"""Of a signal that a terminal sends: the command has got it, too."""


def may_end(environ: Mapping[str, str]) -> bool:
    """Whether one of the settings that end a job is in use."""
    return any(environ.get(name, "").strip().lower() not in _OFF for name in _SWITCHES)


def is_first(status: int) -> bool:
    """Whether no other process of this run ends it already; the others wait for their end."""
    path = os.environ.get(_FILE_VARIABLE)
    if path:
        try:
            with Path(f"{path}.claim").open("x", encoding="ascii") as file:
                file.write(str(status))
        except FileExistsError:
            return False
        except OSError:  # another host's, or gone: this process ends alone
            return True
    return True


def leave(status: int) -> NoReturn:
    """Ends this process from any of its threads, and the run if this was the first."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    if path := os.environ.get(_FILE_VARIABLE):
        with suppress(OSError):
            Path(f"{path}.claim").replace(path)
    os._exit(status)


def wait_for_end(status: int) -> NoReturn:
    """Waits until the process that was first has ended the run."""
    time.sleep(_PATIENCE_SECONDS)
    os._exit(status)


def supervise(program: str, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Runs a command and exits as it does, or with the status that one of its processes left.

    Raises:
        OSError: it cannot be started.
    """
    # Signals wait until they are asked for; the command gets the mask that there was.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    with tempfile.TemporaryDirectory(prefix="graphstash-run-") as folder:
        end = Path(folder) / "status"
        environ = {**environment, _FILE_VARIABLE: str(end)}
        child = _start(program, command, environ, signal_mask=before)
        status = _wait(child.pid, end)
        if end.exists():
            _end_all(environ[RUN_VARIABLE])
            status = int(end.read_text("ascii")) << 8
    if os.WIFSIGNALED(status):  # as if this had been the command
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
    """Starts a command that does not outlive this process.

    Keep the result until the command was waited for: it takes an ended child's status with it.

    Raises:
        OSError: it cannot be started.
    """
    this, prctl = os.getpid(), getattr(ctypes.CDLL(None), "prctl", None)

    def bind() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        if prctl is not None:  # Linux
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != this:  # killed before that
                os._exit(128 + signal.SIGKILL)

    return subprocess.Popen(
        command,
        executable=program,
        env=environ,
        close_fds=False,  # what it inherits is its own
        preexec_fn=bind,  # noqa: PLW1509 - there are no other threads
    )


def _wait(child: int, end: Path) -> int:
    """Until the command has ended, or somebody has ended the run; the status as `waitpid` has it.

    The file is looked at now and then: a process that ends the run may be anybody's child.
    """
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done or end.exists():
            return status
        got = signal.sigtimedwait({*_PASSED_ON, signal.SIGCHLD}, _POLL_SECONDS)
        if got is not None and got.si_signo in _PASSED_ON and got.si_code != _SI_KERNEL:
            with suppress(ProcessLookupError):
                os.kill(child, got.si_signo)


def _end_all(run: str) -> None:
    """Ends every process of the run on this host, wherever launchers have put it."""
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
    """Those of this user that have the run in their environment and still run."""
    mark = f"{RUN_VARIABLE}={run}".encode()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            process = int(entry.name)
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                yield process
