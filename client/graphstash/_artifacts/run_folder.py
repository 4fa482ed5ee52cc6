"""The folder of a run, `<local tier>/records/<run>`, which stays while a process of the run lives.

Every process holds a lock there until it ends, however it ends: the kernel lets go of it. A number
of a process would say less, because containers and hosts that share a disk count each for itself.
Between two processes of a run nobody holds its folder.
"""

import fcntl
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from time import sleep
from typing import Final

__all__ = ["hold", "remove_unless_held"]

_LOCK: Final = "lock"

_TRIES: Final = 5
_RETRY_SECONDS: Final = 0.02
"""Whoever removes a folder holds its lock for a moment."""


def hold(folder: Path) -> int | None:
    """Makes a folder when it is absent, and keeps others from removing it.

    Returns:
        The descriptor to close in the end; None where nothing can be held.
    """
    for _ in range(_TRIES):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = _open(folder, os.O_CREAT)
        except FileNotFoundError:  # removed in between
            continue
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BlockingIOError:
            sleep(_RETRY_SECONDS)
        except OSError:  # the file system knows no locks
            return descriptor
        os.close(descriptor)
    return None


def remove_unless_held(folder: Path) -> None:
    """Removes a folder, unless some process still holds it."""
    with ExitStack() as stack:
        try:
            descriptor = _open(folder)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:  # there is no lock, or the file system knows none
            pass
        shutil.rmtree(folder, ignore_errors=True)


def _open(folder: Path, more: int = 0) -> int:
    return os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | more, 0o600)
