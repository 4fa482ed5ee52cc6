"""Token buckets that all workers of a server share: they limit how much each name may take.

A file lock guards the shared memory, because the kernel releases the lock of a process that is
killed. The lock is held for microseconds and without a system call that may wait. A worker that is
frozen meanwhile must not stop the others, so they go on without limits if the lock stays held.
"""

import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Final

__all__ = ["Buckets"]

_MAX_BUCKETS: Final = 4096
"""Maximum number of buckets. Dropping the least recently used one forgets at most what it gave
out."""

_LOCK_SECONDS: Final = 0.002
"""How long a worker tries the lock. Its event loop stands still meanwhile."""

_NAME_BYTES: Final = 16
_REST, _SINCE, _COUNT = (each * _MAX_BUCKETS for each in (_NAME_BYTES, 24, 32))
"""Offsets in the memory: hashes of the names, what is left, since when, the number of buckets."""


class Buckets:
    """One bucket per name. Its capacity and fill rate come with each call.

    Create it before the workers are forked.
    """

    def __init__(self, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._file = os.memfd_create("graphstash-buckets")
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, _COUNT + 8)
        self._names = mmap.mmap(self._file, _COUNT + 8)
        memory = memoryview(self._names)
        self._rest = memory[_REST:_SINCE].cast("d")
        self._since = memory[_SINCE:_COUNT].cast("d")
        self._count = memory[_COUNT:].cast("q")

    def __len__(self) -> int:
        return self._count[0]

    def take(self, name: str, wanted: int, *, most: float, per_second: float) -> tuple[int, float]:
        """Take up to `wanted` whole units from a bucket of size `most`, filled at `per_second`.

        Returns:
            How many units were taken, and how much is left. All of `wanted` if another worker is
            frozen while it holds the lock.
        """
        if not self._is_locked():
            return wanted, 0.0
        try:
            now = self._seconds()
            bucket = self._bucket(name, most=most, now=now)
            rest = min(self._rest[bucket] + (now - self._since[bucket]) * per_second, most)
            taken = min(wanted, int(rest))
            self._since[bucket] = now  # first: a worker killed here has given out too little
            self._rest[bucket] = rest - taken
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return taken, rest - taken

    def _is_locked(self) -> bool:
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            with suppress(BlockingIOError, PermissionError):  # POSIX allows both errors
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if time.monotonic() > until:
                return False
            os.sched_yield()

    def _bucket(self, name: str, *, most: float, now: float) -> int:
        """Return the number of a name's bucket, which is a new full one for a new name."""
        hashed, count = blake2b(name.encode(), digest_size=_NAME_BYTES).digest(), len(self)
        found = self._names.find(hashed, 0, count * _NAME_BYTES)
        if found >= 0:
            return found // _NAME_BYTES
        is_full = count == _MAX_BUCKETS
        new = min(range(count), key=self._since.__getitem__) if is_full else count
        self._since[new], self._rest[new] = now, most
        self._names[new * _NAME_BYTES : (new + 1) * _NAME_BYTES] = hashed
        self._count[0] = max(count, new + 1)
        return new
