"""Delay forks during work that would leave locks held in the child, and unshare file locks.

A child has a copy of every lock, but only the thread that forked. If another thread holds the lock
of an import, of OpenSSL or of pydantic, the child waits for it forever. The cache's background
threads take such locks in jobs that fork. So forks wait, with a time limit, until these threads are
idle or wait for the network. On a busy host, an import may exceed the limit: a fork waits longer
while the threads use CPU time.

This module takes no lock, because a fork or a signal handler could find it held. Instead, each
change is one atomic operation of a dictionary or set.
"""

import os
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from graphstash._interrupts import raise_after

__all__ = ["close_unshared", "forkable", "is_of", "open_unshared", "unforked"]

_WAIT_SECONDS: Final = 2.0
"""Maximum seconds that a fork waits for threads that use no CPU time. Later forks ignore a block
that outlasted a wait, because the block may itself wait for the thread that forks."""

_MAX_WAIT_SECONDS: Final = 30.0
"""Maximum seconds that a fork waits for threads that use CPU time."""

_POLL_SECONDS: Final = 0.001

_depths: dict[int, int] = {}
"""By thread: its number of nested `unforked` blocks."""

_tasks: dict[int, int] = {}
"""By thread that has been in a block: the kernel's ID of the thread."""

_slow: set[int] = set()
"""Threads in a block that outlasted the wait of a fork."""

_forking: dict[int, float] = {}
"""By thread that forks: deadline of its wait, in seconds of `time.monotonic`."""

_unshared: dict[int, os.stat_result] = {}
"""Status of each lockable file, by descriptor. A child replaces the file by /dev/null, or else it
could release its parent's lock, or hold the lock after its parent's death."""

_interrupts: dict[int, BaseException] = {}
"""By thread that forks: exception that a signal handler raised during the wait."""


class unforked:  # noqa: N801 - used like a function; a generator takes three times the CPU time
    """Delay forks in other threads until the block ends."""

    __slots__ = ("_depth",)

    def __enter__(self) -> None:
        self._depth = _depths.get(threading.get_ident(), 0)
        try:
            _enter(self._depth + 1)
        except BaseException:
            _leave(self._depth)
            raise

    def __exit__(self, *_: object) -> None:
        _leave(self._depth)


class forkable:  # noqa: N801 - as above
    """Allow forks in a block that only waits, also inside `unforked`."""

    __slots__ = ("_depth",)

    def __enter__(self) -> None:
        self._depth = _depths.get(threading.get_ident(), 0)
        if self._depth:
            _leave(0)

    def __exit__(self, *_: object) -> None:
        if self._depth:
            _enter(self._depth)


def open_unshared(path: str | Path, *, directory: int | None = None) -> int:
    """Open or create a file to lock. Forked children do not share the lock. `directory` is the
    descriptor of the directory that a relative path starts from.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with unforked():
        descriptor = os.open(path, flags, 0o600, dir_fd=directory)
        _unshared[descriptor] = os.fstat(descriptor)
    return descriptor


def close_unshared(descriptor: int) -> None:
    """Close a file that `open_unshared` has opened."""
    _unshared.pop(descriptor, None)  # first, because another thread may get the number
    os.close(descriptor)


def _enter(depth: int) -> None:
    """Begin a block. If this thread is in no block yet, wait for forks of other threads first."""
    this = threading.get_ident()
    if this not in _depths:
        _slow.discard(this)
        _tasks[this] = threading.get_native_id()
        until = monotonic() + _WAIT_SECONDS
        while True:
            # Announce the block, then look for forks. A fork announces itself, then looks for
            # blocks. So at least one of them detects the other.
            _depths[this] = depth
            now = monotonic()
            if (
                not _forking
                or now > until
                or not any(now < end for thread, end in [*_forking.items()] if thread != this)
            ):
                return
            del _depths[this]
            sleep(_POLL_SECONDS)
    _depths[this] = depth


def _leave(depth: int) -> None:
    if depth:
        _depths[threading.get_ident()] = depth
    else:
        _depths.pop(threading.get_ident(), None)


def _before() -> None:
    """Wait for the blocks of other threads. They begin none meanwhile."""
    this = threading.get_ident()
    began = monotonic()
    until = _forking[this] = began + _WAIT_SECONDS
    used: int | None = None
    is_done = False
    while not is_done:
        try:
            while busy := {*_depths} - _slow - {this}:
                if used is None:
                    used = _cpu_ticks(busy)
                if (now := monotonic()) > until:
                    before, used = used, _cpu_ticks(busy)
                    if used == before or now > began + _MAX_WAIT_SECONDS:
                        _slow.update(busy)
                    until = _forking[this] = now + _WAIT_SECONDS
                sleep(_POLL_SECONDS)
            is_done = True
        except BaseException as interrupt:  # noqa: BLE001 - a signal handler's; Python drops it
            _interrupts[this] = interrupt


def _cpu_ticks(threads: Iterable[int]) -> int:
    """Return the CPU time that threads have used, or 0 where the kernel does not say."""
    total = 0
    for thread in threads:
        with suppress(OSError, ValueError, IndexError):
            # ID (NAME), and numbers from the third field on. The fields 14 and 15 are the times.
            file = os.open(f"/proc/self/task/{_tasks.get(thread)}/stat", os.O_RDONLY | os.O_CLOEXEC)
            try:
                fields = os.read(file, 4096).rpartition(b")")[2].split()
            finally:
                os.close(file)
            total += int(fields[11]) + int(fields[12])
    return total


def _after_in_parent() -> None:
    this = threading.get_ident()
    _forking.pop(this, None)
    if (interrupt := _interrupts.pop(this, None)) is not None:
        raise_after(sys._getframe(), interrupt)  # noqa: SLF001 - documented


def _after_in_child() -> None:
    this = threading.get_ident()
    depth = _depths.get(this, 0)
    for entries in (_depths, _tasks, _slow, _forking, _interrupts):
        entries.clear()
    _leave(depth)
    with suppress(OSError):  # nothing can be opened; the locks stay shared
        _replace([descriptor for descriptor, file in _unshared.items() if is_of(descriptor, file)])
    _unshared.clear()  # other code may close the descriptors, and reuse their numbers


def is_of(descriptor: int, file: os.stat_result) -> bool:
    """Return whether a descriptor is still of this file. Other code may close or reuse it."""
    try:
        return os.path.samestat(os.fstat(descriptor), file)
    except OSError:
        return False


def _replace(descriptors: list[int]) -> None:
    """Replace open files by /dev/null. If it cannot be opened, close only the first file."""
    if not descriptors:
        return
    os.close(descriptors[0])  # frees a number in case the process may open no more files
    empty = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in descriptors:
        if descriptor != empty:
            os.dup2(empty, descriptor, inheritable=False)
    if empty not in descriptors:
        os.close(empty)


os.register_at_fork(
    before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
