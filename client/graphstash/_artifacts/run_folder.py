"""Folder of a run, `<local tier>/records/<run>`, kept at least while a process of the run lives.

Every process holds a shared lock on a file in the folder. The kernel releases the lock when the
process ends for any reason. Process ids would not work: containers and hosts that share a disk
number processes independently. While no process of a run lives, another job may remove its folder.
"""

import fcntl
import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from time import sleep, time
from typing import Final

from graphstash._forking import close_unshared, forkable, open_unshared

__all__ = ["Claim", "SharedLines", "claim", "hold", "remove_unless_held"]

_LOCK: Final = "lock"

_MAX_READ_BYTES: Final = 4 * 1024**2
"""Maximum bytes that a process reads at a time of a file that its run shares."""

_OLD_SECONDS: Final = 7 * 24 * 3600.0
_TRIES: Final = 5
_RETRY_SECONDS: Final = 0.02
"""Seconds between two tries: a process that removes a folder holds the lock only briefly."""


class Claim:
    """A file that one process of a run at a time holds, until it calls `close` or ends.

    Attributes:
        text: contents of the file, written by this process or an earlier holder.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor
        self.text = (
            "" if descriptor is None else os.pread(descriptor, 4096, 0).decode("ascii", "replace")
        )

    def keep(self, text: str) -> None:
        """Replace the text."""
        self.text = text
        if self._descriptor is not None:
            with suppress(OSError):
                os.pwrite(self._descriptor, text.encode(), 0)
                os.ftruncate(self._descriptor, len(text))

    def close(self) -> None:
        """Release the file."""
        if self._descriptor is not None:
            with suppress(OSError):  # a child that C code forked has a copy
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            close_unshared(self._descriptor)


class SharedLines:
    """A file to which the processes of a run append lines, and which each reads as it grows.

    Args:
        path: path of the file. None if this process shares no run.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._read_bytes = 0

    def append(self, text: str) -> bool:
        """Append whole lines. Return False if the disk did not take all of them."""
        if self._path is None:
            return True
        content = text.encode()
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o600)
            try:
                # One write, so that lines of processes do not interleave.
                return os.write(descriptor, content) == len(content)
            finally:
                os.close(descriptor)
        return False

    def added(self) -> list[str]:
        """Return the whole lines since the last call. Two threads may get the same lines."""
        if self._path is None:
            return []
        start = self._read_bytes
        try:
            if self._path.stat().st_size in (start, 0):
                return []
            with self._path.open("rb") as file:
                file.seek(start)
                added = file.read(_MAX_READ_BYTES)
        except OSError:
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self._read_bytes = start + len(whole)
        return list(filter(None, whole.decode("ascii", "replace").split("\n")))


def claim(path: Path) -> Claim | None:
    """Hold a file of the run, or return None if another process holds it.

    If the file cannot be opened or locked, every process gets a claim.
    """
    try:
        descriptor = open_unshared(path)
    except OSError:
        return Claim()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        close_unshared(descriptor)
        return None
    except OSError:  # the file system does not support locks
        pass
    return Claim(descriptor)


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
    """Remove a folder unless a process holds it. If its lock fails or is absent, remove the folder
    a week after its last change.
    """
    with ExitStack() as stack:
        try:
            descriptor = _open(folder)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:  # no support for locks, or no free descriptor here or in the run
            if not _is_old(folder):
                return
        shutil.rmtree(folder, ignore_errors=True)


def _is_old(folder: Path) -> bool:
    try:
        changed_at = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return False
    return time() - changed_at > _OLD_SECONDS


def _open(folder: Path, more: int = 0) -> int:
    return os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | more, 0o600)
