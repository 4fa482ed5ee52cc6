"""A disk that is really full: a small file system."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self

_PIECE_BYTES = 64 * 1024

# Without permission to mount, the server reads the figures of a small disk, but writes to a large
# one. Its database therefore never fails there.
_TOLD = """
import os, sys
from pathlib import Path
directory, size_bytes = Path({directory!r}), {size_bytes}
statvfs = os.statvfs

class Small:
    f_frsize = 1
    def __init__(self):
        used = 0
        for path in directory.rglob("*"):
            try:
                used += path.stat().st_size
            except FileNotFoundError:
                pass
        self.f_bavail = max(size_bytes - used, 0)

os.statvfs = lambda path: Small()
from graphstash_server.__main__ import main
main()
"""


class SmallDisk:
    """A small disk; a context manager.

    Attributes:
        directory: a directory on the disk.
        is_real: whether the kernel limits the disk.
    """

    def __init__(self, directory: Path, *, size_bytes: int) -> None:
        self.directory = directory
        self.is_real = False
        self._size_bytes = size_bytes
        self._filler = directory / "filler"

    def __enter__(self) -> Self:
        self.directory.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={self._size_bytes}", "tmpfs"]
        with suppress(FileNotFoundError):
            done = subprocess.run([*mount, self.directory], capture_output=True, check=False)
            self.is_real = done.returncode == 0
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_real:
            subprocess.run(["umount", "--lazy", self.directory], check=True)

    @property
    def command(self) -> tuple[str, ...]:
        if self.is_real:
            return (sys.executable, "-m", "graphstash_server")
        program = _TOLD.format(directory=str(self.directory), size_bytes=self._size_bytes)
        return (sys.executable, "-c", program)

    @property
    def used_bytes(self) -> int:
        files = [path for path in self.directory.rglob("*") if path.is_file()]
        return sum(path.stat().st_size for path in files)

    def fill(self, *, left_bytes: int = 0) -> None:
        """Fill the disk from outside the server, except for `left_bytes`."""
        if not self.is_real:
            size_bytes = max(self._size_bytes - self.used_bytes - left_bytes, 0)
            self._filler.touch()
            os.truncate(self._filler, size_bytes)
            return
        with suppress(OSError), self._filler.open("ab", buffering=0) as filler:
            while filler.write(bytes(_PIECE_BYTES)):
                pass
        if left_bytes:
            os.truncate(self._filler, self._filler.stat().st_size - left_bytes)

    def drain(self) -> None:
        """Remove the filling."""
        self._filler.unlink()
