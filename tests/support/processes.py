"""Programs and commands that a test runs to their end, in processes of their own."""

import os
import subprocess
import sys
import textwrap

__all__ = ["graphstash", "python"]


def python(
    program: str, *arguments: object, check: bool = False, **variables: object
) -> subprocess.CompletedProcess[str]:
    """Runs the text of a program; `variables` are added to the environment."""
    return _run(["-c", textwrap.dedent(program), *arguments], variables, check=check)


def graphstash(
    *arguments: object, check: bool = False, **variables: object
) -> subprocess.CompletedProcess[str]:
    return _run(["-m", "graphstash", *arguments], variables, check=check)


def _run(
    words: list[object], variables: dict[str, object], *, check: bool
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        check=check,
        timeout=120,
    )
