"""Folders that other processes may remove only while no process holds them.

A holder has a shared lock on a regular file in the folder: on NFS, the lock of a directory would be
unknown to other hosts. The kernel releases the lock when the process ends for any reason. Process
ids would not work: containers and hosts that share a disk number processes independently. Children
that inherit the descriptor hold the lock as well.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from time import sleep, time
from typing import Final

from graphstash._forking import forkable

__all__ = ["UNLOCKED_SECONDS", "hold", "remove_abandoned", "remove_unless_held"]

_LOCK: Final = "lock"

_TRIES: Final = 5
_RETRY_SECONDS: Final = 0.02
"""Seconds between two tries: a process that removes a folder holds the lock only briefly."""

_ABANDONED_SECONDS: Final = 24 * 3600.0
"""Minimum age of an abandoned directory, because some file systems lock only for one host."""

UNLOCKED_SECONDS: Final = 7 * 24 * 3600.0
"""Minimum age of an abandoned folder without a lock. Its process was killed before it made the
lock, or another process was killed while it removed the folder."""


def hold(folder: Path) -> int | None:
    """Create a folder if it is absent, and keep other processes from removing it.

    Return the descriptor to close at the end, or None if the folder cannot be held.
    """
    for _ in range(_TRIES):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = _open(folder, os.O_CREAT)
        except FileNotFoundError:  # another process removed the folder meanwhile
            continue
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BlockingIOError:
            with forkable():
                sleep(_RETRY_SECONDS)
        except OSError:  # the file system does not support locks
            return descriptor
        os.close(descriptor)
    return None


def remove_unless_held(folder: Path) -> None:
    """Remove a folder.

    Raises:
        BlockingIOError: a process holds the folder.
        OSError: the lock is absent or fails.
    """
    descriptor = _open(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def remove_abandoned(prefix: str) -> None:
    """Remove this user's temporary directories with a prefix that killed processes held."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            status = path.lstat()
            age = time() - status.st_mtime
            is_ours = status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode)
            if not is_ours or age <= _ABANDONED_SECONDS:
                continue
            try:
                remove_unless_held(path)
            except FileNotFoundError:  # it has no lock
                if age > UNLOCKED_SECONDS:
                    shutil.rmtree(path)


def _open(folder: Path, more: int = 0) -> int:
    return os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | more, 0o600)
