"""Temporary directories that a killed process leaves: a later process removes them.

A process locks its directory through a descriptor that it keeps open. Children that inherit the
descriptor hold the lock as well.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Final

__all__ = ["hold", "remove_abandoned"]

_ABANDONED_SECONDS: Final = 24 * 3600.0
"""Minimum age of an abandoned directory. A new directory is not locked yet."""


def hold(descriptor: int) -> None:
    """Lock a directory until its descriptor is closed."""
    with suppress(OSError):  # a file system without locks, so `remove_abandoned` fails as well
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def remove_abandoned(prefix: str) -> None:
    """Remove this user's temporary directories with a prefix that no process holds."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            _remove_unless_held(path)


def _remove_unless_held(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and time() - status.st_mtime > _ABANDONED_SECONDS:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    finally:
        os.close(descriptor)
