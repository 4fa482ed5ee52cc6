"""Run programs and commands to their end, most in processes of their own."""

import io
import os
import pty
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest

from graphstash.__main__ import main


def captured(
    command: Iterable[object], *, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command and capture its output as text. `options` are passed to `subprocess.run`."""
    words = [str(word) for word in command]
    return subprocess.run(words, check=check, capture_output=True, text=True, **options)


def python(
    program: str,
    *arguments: object,
    check: bool = False,
    interpreter: Path | None = None,
    **variables: object,
) -> subprocess.CompletedProcess[str]:
    """Run the text of a program with these environment variables.

    By default, the Python of the tests runs the program.
    """
    words = ["-c", textwrap.dedent(program), *arguments]
    return _run(words, variables, check=check, interpreter=interpreter)


@contextmanager
def started(
    program: str, *arguments: object, **variables: object
) -> Iterator[subprocess.Popen[str]]:
    """Start the text of a program, with pipes for input and output. Kill it after the block."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        env=os.environ | {name: str(value) for name, value in variables.items()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def graphstash(
    *arguments: object, check: bool = False, **variables: object
) -> subprocess.CompletedProcess[str]:
    return _run(["-m", "graphstash", *arguments], variables, check=check)


def graphstash_unread(*arguments: object, **variables: object) -> tuple[int, str]:
    """Run a command whose output has no reader. Return its status and its errors."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "graphstash", *map(str, arguments)],
            env=os.environ | {name: str(value) for name, value in variables.items()},
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
    finally:
        os.close(writing)
    return done.returncode, done.stderr


def graphstash_on_terminal(
    *arguments: object, is_output_shown: bool = False, **variables: object
) -> tuple[int, str]:
    """Run a command whose errors go to a terminal. Return its status and the terminal's text."""
    reading, writing = pty.openpty()
    with open(reading, "rb", buffering=0) as screen:  # noqa: PTH123 - of a descriptor
        with os.fdopen(writing) as terminal:
            process = subprocess.Popen(
                [sys.executable, "-m", "graphstash", *map(str, arguments)],
                env=os.environ | {name: str(value) for name, value in variables.items()},
                stdout=terminal if is_output_shown else subprocess.DEVNULL,
                stderr=terminal,
            )
        shown = b""
        with suppress(OSError):  # a terminal without writers
            while more := screen.read(4096):
                shown += more
    return process.wait(timeout=120), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


def graphstash_here(
    *arguments: object, check: bool = False, **variables: object
) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which saves its imports. `run` would replace this process."""
    output, trouble = io.StringIO(), io.StringIO()
    status: object = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(trouble):
        patch.setattr(sys, "argv", ["graphstash", *map(str, arguments)])
        for name, value in variables.items():
            patch.setenv(name, str(value))
        try:
            main()
        except SystemExit as error:
            status = error.code
    if not isinstance(status, int):
        raise TypeError(f"the command ended with {status!r} and not with a status")
    if check and status:
        raise RuntimeError(f"graphstash {arguments} ended with {status}: {trouble.getvalue()}")
    words = [*map(str, arguments)]
    return subprocess.CompletedProcess(words, status, output.getvalue(), trouble.getvalue())


def is_running(pid: int | str) -> bool:
    """Return whether a process is running. A zombie has ended, so it is not running."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _run(
    words: list[object],
    variables: dict[str, object],
    *,
    check: bool,
    interpreter: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    environment.pop("XLA_FLAGS", None)  # torch_xla sets it in the tests' own process
    environment |= {name: str(value) for name, value in variables.items()}
    command = [interpreter or sys.executable, *words]
    return captured(command, check=check, env=environment, timeout=120)
