"""Another user of this host, who may do what the kernel lets them do and no more."""

import os
import subprocess
import sys
from typing import Self

__all__ = ["STRANGER", "Stranger"]

STRANGER = 65534

_BECOME = f"""
import os, socket, sys, threading
os.setgroups([])
os.setgid({STRANGER})
os.setuid({STRANGER})
os.chdir("/")
"""


class Stranger:
    """Runs a program as that user; a context manager that ends it.

    Args:
        program: Python, which has imported os, socket, sys and threading before it became that
            user; `arguments` are its `sys.argv[1:]`. It prints a line when it is ready.

    Attributes:
        said: that line.
    """

    def __init__(self, program: str, *arguments: object) -> None:
        become_root = () if os.geteuid() == 0 else ("sudo", "--non-interactive")
        self._process = subprocess.Popen(
            [*become_root, sys.executable, "-c", _BECOME + program, *map(str, arguments)],
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
