"""TierBudget: keeps a directory of blobs below a size; the least recently used ones go."""

import fcntl
import os
import threading
from pathlib import Path

__all__ = ["TierBudget"]

_AFTER = 0.9
"""Share of the limit that stays: the next fill does not evict again."""

_SCAN_SHARE = 16
"""The directory is looked through after one part in so many of the limit was filled: other
processes fill it, too.
"""


class TierBudget:
    """Blocks; safe for many threads, and for many processes that share the directory.

    A file that is open while it is removed stays readable.
    """

    def __init__(self, directory: Path, *, limit_bytes: int) -> None:
        """Keeps the files of `directory`/sha256 below a limit."""
        self._blobs = directory / "sha256"
        self._lock_path = directory / "evict.lock"
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()  # guards the fields below
        self._filled_bytes = 0
        self._used_bytes: int | None = None

    def added(self, size_bytes: int) -> None:
        """Counts a new blob, and evicts when it is time to."""
        with self._lock:
            self._filled_bytes += size_bytes
            used = None if self._used_bytes is None else self._used_bytes + self._filled_bytes
            is_small = self._filled_bytes * _SCAN_SHARE < self._limit_bytes
            if used is not None and used <= self._limit_bytes and is_small:
                return
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._used_bytes = self._shrink()
                self._filled_bytes = 0
            except BlockingIOError:
                return  # another process is at it
            finally:
                os.close(fd)

    def _shrink(self) -> int:
        """Removes the oldest files when there are too many; returns the bytes that are left."""
        files = []
        for shard in os.scandir(self._blobs):
            with os.scandir(shard) as entries:
                for entry in entries:
                    try:
                        status = entry.stat()
                    except FileNotFoundError:
                        continue
                    files.append((status.st_mtime_ns, status.st_size, entry.path))
        used = sum(size for _, size, _ in files)
        if used > self._limit_bytes:
            for _, size, path in sorted(files):
                if used <= self._limit_bytes * _AFTER:
                    break
                Path(path).unlink(missing_ok=True)
                used -= size
        return used
