"""Folder of a run, `<local tier>/records/<run>`, which exists while a process of the run lives.

Every process holds a file lock in the folder, which the kernel releases when the process ends for
any reason. Process ids would not work, because containers and hosts that share a disk number
processes independently. If a run has no live process for a moment, its folder is not held.
"""

import fcntl
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from time import sleep
from typing import Final

from graphstash._forking import forkable

__all__ = ["hold", "remove_unless_held"]

_LOCK: Final = "lock"

_TRIES: Final = 5
_RETRY_SECONDS: Final = 0.02
"""Seconds to retry: a process that removes a folder holds the lock only briefly."""


def hold(folder: Path) -> int | None:
    """Create a folder if it is absent, and keep other processes from removing it.

    Returns:
        The descriptor to close at the end, or None if the folder cannot be held.
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
    """Remove a folder unless a process holds it."""
    with ExitStack() as stack:
        try:
            descriptor = _open(folder)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:  # no lock file, or no support for locks
            pass
        shutil.rmtree(folder, ignore_errors=True)


def _open(folder: Path, more: int = 0) -> int:
    return os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | more, 0o600)
