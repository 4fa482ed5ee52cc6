"""Token buckets by name, which all workers of a server share.

A file lock guards the shared memory, because the kernel releases the lock of a killed process. A
worker holds it for microseconds. If a worker is frozen meanwhile, the others continue without
limits.
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
"""Maximum number of buckets. If the least recently used one is dropped, its name starts with a full
bucket again."""

_LOCK_SECONDS: Final = 0.002
"""How long a worker tries to lock, which blocks its event loop."""

_NAME_BYTES: Final = 16
_REST, _SINCE, _COUNT = (each * _MAX_BUCKETS for each in (_NAME_BYTES, 24, 32))
"""Offsets after the hashes of names: units left, time of the last change, number of buckets."""


class Buckets:
    """One bucket per name. Create this before the workers are forked."""

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
            Units taken, and units left. If the lock stays held: `wanted`, and 0.
        """
        if not self._is_locked():
            return wanted, 0.0
        try:
            now = self._seconds()
            bucket = self._bucket(name, most=most, now=now)
            rest = min(self._rest[bucket] + (now - self._since[bucket]) * per_second, most)
            taken = min(wanted, int(rest))
            self._since[bucket] = now  # first, so that a worker killed here grants less, not more
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
        """Return the number of a name's bucket. A new bucket is full."""
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
