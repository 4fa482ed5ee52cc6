"""Programs and commands that a test runs to their end, in processes of their own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

__all__ = ["graphstash", "python"]


def python(
    program: str,
    *arguments: object,
    check: bool = False,
    interpreter: Path | None = None,
    **variables: object,
) -> subprocess.CompletedProcess[str]:
    """Runs the text of a program; `variables` are added to the environment.

    By default with the Python that runs the tests.
    """
    words = ["-c", textwrap.dedent(program), *arguments]
    return _run(words, variables, check=check, interpreter=interpreter)


def graphstash(
    *arguments: object, check: bool = False, **variables: object
) -> subprocess.CompletedProcess[str]:
    return _run(["-m", "graphstash", *arguments], variables, check=check)


def _run(
    words: list[object],
    variables: dict[str, object],
    *,
    check: bool,
    interpreter: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    environment.pop("XLA_FLAGS", None)  # torch_xla sets it in the tests' own process
    return subprocess.run(
        [str(interpreter or sys.executable), *map(str, words)],
        env=environment | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        check=check,
        timeout=120,
    )
