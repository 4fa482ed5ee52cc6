"""GrowingFile: a temporary file that is read while it is written. Every method blocks."""

import fcntl
import os
import tempfile
import threading
from pathlib import Path

from graphstash_schema import Digest, DigestHasher

__all__ = ["GrowingFile"]


class GrowingFile:
    """The file is locked (flock) while it is open: `remove_abandoned` leaves it alone.

    Writing, keeping and closing exclude each other: what was cancelled may still run in a thread.
    """

    def __init__(self, directory: Path) -> None:
        """Prepares it; nothing is made before `open`."""
        self._directory = directory
        self._path: Path | None = None
        self._fd = -1
        self._size_bytes = 0
        self._hasher = DigestHasher()
        self._is_over = False
        self._lock = threading.Lock()  # guards the descriptor and the name

    def open(self) -> None:
        """Makes the file. Should a server that is starting remove it before it is locked, its bytes
        can be read all the same, and `keep` says so.
        """
        with self._lock:
            if self._is_over:
                return
            self._fd, name = tempfile.mkstemp(dir=self._directory)
            self._path = Path(name)
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    def write(self, chunk: bytes) -> None:
        """Appends bytes."""
        with self._lock:
            view = memoryview(chunk)
            while view and self._fd >= 0:
                written = os.pwrite(self._fd, view, self._size_bytes)
                self._hasher.update(view[:written])
                self._size_bytes += written
                view = view[written:]

    def digest(self) -> Digest:
        """Of everything that was written."""
        return self._hasher.digest()

    def read(self, start: int, length: int) -> bytes:
        """Bytes that were written before."""
        return os.pread(self._fd, length, start)

    def keep(self, destination: Path) -> None:
        """Gives the whole file its name.

        It is written to the disk first, so that a power cut cannot leave the name of a file whose
        bytes are missing: a hit is sent without being read. The name itself may be lost, which
        costs a fill.
        """
        with self._lock:
            if self._path is None:
                return
            os.fsync(self._fd)
            destination.parent.mkdir(exist_ok=True)
            self._path.rename(destination)
            self._path = None

    def discard(self) -> None:
        """Removes the name unless the file was kept; its bytes can be read until `close`."""
        with self._lock:
            self._is_over = True
            if self._path is not None:
                self._path.unlink(missing_ok=True)
                self._path = None

    def close(self) -> None:
        """Lets go of the bytes."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
