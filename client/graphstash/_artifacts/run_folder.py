"""Folder of a run, `<local tier>/records/<run>`, kept at least while a process of the run lives.

Every process holds the folder. While no process of a run lives, another job may remove its folder.
"""

import fcntl
import os
import shutil
import weakref
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Final

from graphstash import _held_folder
from graphstash._forking import close_unshared, is_of, open_unshared
from graphstash._held_folder import UNLOCKED_SECONDS

__all__ = ["Claim", "SharedLines", "claim", "remove_unless_held"]

_MAX_READ_BYTES: Final = 4 * 1024**2
"""Maximum bytes that a process reads at a time of a file that its run shares."""

_SAFE_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Open no link, and do not wait for the other end of a pipe."""


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
        self._opened: tuple[int, os.stat_result | None] = (-1, None)
        self._read_bytes = 0

    def append(self, text: str) -> bool:
        """Append whole lines. Return False if the disk did not take all of them."""
        if self._path is None:
            return True
        content = text.encode()
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            descriptor = os.open(self._path, flags | _SAFE_FLAGS, 0o600)
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
            descriptor, file = self._opened
            try:
                status = os.fstat(descriptor)
            except OSError:
                file = None
            if file is None or not os.path.samestat(status, file):
                # For the first time, or because other code closed all files of this process.
                descriptor, status = self._open(self._path)
            size = status.st_size
            if size <= start:
                return []
            added = os.pread(descriptor, min(size - start, _MAX_READ_BYTES), start)
        except OSError:
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self._read_bytes = start + len(whole)
        return list(filter(None, whole.decode("ascii", "replace").split("\n")))

    def _open(self, path: Path) -> tuple[int, os.stat_result]:
        descriptor = os.open(path, os.O_RDONLY | _SAFE_FLAGS)
        self._opened = opened = descriptor, os.fstat(descriptor)
        closing = weakref.finalize(self, _close, *opened)
        closing.atexit = False  # the kernel closes it at process exit
        return opened


def _close(descriptor: int, file: os.stat_result) -> None:
    if is_of(descriptor, file):  # other code may have closed it, and reused its number
        os.close(descriptor)


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


def remove_unless_held(folder: Path) -> None:
    """Remove a folder unless a process holds it. If its lock fails or is absent, remove the folder
    a week after its last change.
    """
    try:
        _held_folder.remove_unless_held(folder)
    except BlockingIOError:
        pass
    except OSError:  # no support for locks, or no free descriptor here or in the run
        if _is_old(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_old(folder: Path) -> bool:
    try:
        changed_at = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return False
    return time() - changed_at > UNLOCKED_SECONDS
