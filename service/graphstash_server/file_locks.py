"""Locks on files of a data directory, which servers, migrations and restores hold."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from graphstash_server.errors import StartError

__all__ = ["ServerLock", "hold_database", "wait_for_lock"]

_LOGGER = logging.getLogger(__name__)

_WAIT_SECONDS: Final = 600
"""A migration of a large database may take minutes. A suspended process would hold its lock for
ever."""

_POLL_SECONDS: Final = 0.05


def wait_for_lock(file: int, operation: int, *, path: Path) -> None:
    """Take a lock (flock) on an open file. Blocks.

    Raises:
        StartError: another process has held the lock for ten minutes.
    """
    until, is_reported = monotonic() + _WAIT_SECONDS, False
    while True:
        try:
            fcntl.flock(file, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if not is_reported:
                _LOGGER.warning("another process starts or migrates: waiting for %s", path)
                is_reported = True
            if monotonic() > until:
                raise StartError(
                    f"another process has held {path} for {_WAIT_SECONDS} s: end the process that "
                    "starts or migrates with this data directory, which may be suspended, and "
                    "start again"
                ) from None
            sleep(_POLL_SECONDS)
        else:
            return


class ServerLock:
    """Detects whether other servers use the same data directory. Each running server holds a shared
    lock on the file. The kernel releases the lock when the process ends.
    """

    def __init__(self, path: Path) -> None:
        """Try to take the lock exclusively, and set `was_alone` to the success. Does not block.

        Raises:
            OSError: the file cannot be created.
        """
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.was_alone = True
        except BlockingIOError:
            self.was_alone = False

    def share(self) -> None:
        """Change to a shared lock, so that other servers can start. Waits for a starting server.

        Raises:
            StartError: that server does not finish its start within ten minutes.
        """
        wait_for_lock(self._fd, fcntl.LOCK_SH, path=self._path)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._fd)


@contextmanager
def hold_database(data_dir: Path, *, is_exclusive: bool = False) -> Iterator[bool]:
    """Hold the lock of a data directory's database, and yield whether that succeeded. Processes
    that open the database share the lock. A restore, which replaces the file, holds it exclusively.
    """
    fd = os.open(data_dir / "database.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        is_free = True
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if is_exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            is_free = False
        yield is_free
    finally:
        os.close(fd)
