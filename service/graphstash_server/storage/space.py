"""SpaceGuard: makes sure that an upload fits before its first byte is read."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphstash_server.errors import NoSpaceError

__all__ = ["SpaceGuard", "no_space_refused"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Disk full, quota reached, and the process's limit on file sizes reached."""


@contextmanager
def no_space_refused() -> Iterator[None]:
    """Turns the operating system's ways of saying "full" into `NoSpaceError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise NoSpaceError(
            f"the disk has no room ({error.strerror}): nothing was stored; free some space or "
            "delete artifacts, and send it again"
        ) from error


class SpaceGuard:
    """Counts the bytes that were promised to uploads and are not allocated yet.

    Other processes' promises are not seen; the head-room is there for them.
    """

    def __init__(self, directory: Path, *, min_free_bytes: int) -> None:
        self._directory = directory
        self._min_free_bytes = min_free_bytes
        # Guards _promised_bytes; held for arithmetic and one statvfs, never while writing.
        self._lock = threading.Lock()
        self._promised_bytes = 0

    def reserve(self, size_bytes: int) -> None:
        """Promises bytes to one upload; `release` takes the promise back.

        Raises:
            NoSpaceError: when the head-room would not stay free.
        """
        with self._lock:
            disk = os.statvfs(self._directory)
            room = disk.f_bavail * disk.f_frsize - self._promised_bytes - self._min_free_bytes
            if size_bytes > room:
                raise NoSpaceError(
                    f"the artifact has {size_bytes} bytes and the store has room for "
                    f"{max(room, 0)}, leaving {self._min_free_bytes} free: nothing was stored; "
                    "free some space or delete artifacts",
                    limit=max(room, 0),
                    missing_bytes=size_bytes - room,
                )
            self._promised_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Takes a promise back: the bytes are allocated, or the upload ended."""
        with self._lock:
            self._promised_bytes -= size_bytes
