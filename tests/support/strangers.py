"""Another user of this host, who may do what the kernel lets them do and no more."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Self

__all__ = ["STRANGER", "Stranger", "give"]

STRANGER = 65534

_BECOME = f"""
import os, socket, sys, threading
os.setgroups([])
os.setgid({STRANGER})
os.setuid({STRANGER})
os.chdir("/")
"""


def give(path: Path) -> None:
    """Makes that user the owner of a file or a directory. Whoever is not root needs sudo."""
    # The path may lead through a descriptor of this process.
    real = path.parent.resolve() / path.name
    subprocess.run([*_as_root(), "chown", f"{STRANGER}:{STRANGER}", real], check=True)


def _as_root() -> list[str]:
    return [] if os.geteuid() == 0 else ["sudo", "--non-interactive"]


class Stranger:
    """Runs a program as that user; a context manager that ends it.

    Args:
        program: Python, which has imported os, socket, sys and threading before it became that
            user; `arguments` are its `sys.argv[1:]`. It prints a line when it is ready.

    Attributes:
        said: that line.
    """

    def __init__(self, program: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [*_as_root(), sys.executable, "-c", _BECOME + program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._is_over = False
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline().strip()
        assert self.said, "the stranger's program failed"

    def finish(self) -> str:
        """Ends the program's input and gives what it printed since."""
        if not self._is_over:
            self._is_over = True
            self._told, _ = self._process.communicate(timeout=60)
        return self._told

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
