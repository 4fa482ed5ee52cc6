"""Delay forks while another thread does work that a fork would break in the child, and keep a child
from sharing its parent's file locks.

A fork copies every lock as it is, and only the thread that forks. If it interrupts another thread's
import, the child can never import that module. If it interrupts OpenSSL or pydantic, a lock inside
them stays held in the child. The child would wait for a thread that does not exist there. The
cache's background threads do such work in jobs that fork, so forks wait until these threads are
idle or wait for the network, with a time limit.

Nothing here takes a lock, which a fork or a signal handler could find held. Each thread writes only
its own entries, and Python's dictionaries are atomic.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from graphstash._interrupts import raise_after

__all__ = ["close_unshared", "forkable", "open_unshared", "unforked"]

_WAIT_SECONDS: Final = 2.0
"""Maximum seconds that a fork waits, once for each block. The work may itself wait for the forking
thread."""

_POLL_SECONDS: Final = 0.001

_depths: dict[int, int] = {}
"""By thread: the number of `unforked` blocks that it is in."""

_slow: set[int] = set()
"""Threads whose block a fork has waited for in vain."""

_forking: dict[int, float] = {}
"""By thread that forks: until when it waits at most."""

_unshared: set[int] = set()
"""Descriptors that a child replaces: it could release its parent's lock, or hold the lock after its
parent's death."""

_interrupts: dict[int, BaseException] = {}
"""By thread that forks: what a signal handler raised meanwhile."""


@contextmanager
def unforked() -> Iterator[None]:
    """Delay forks in other threads until the block ends."""
    depth = _depths.get(threading.get_ident(), 0)
    try:
        _enter(depth + 1)
        yield
    finally:
        _leave(depth)


@contextmanager
def forkable() -> Iterator[None]:
    """Allow forks in a block that only waits, whether it is inside `unforked` or not."""
    depth = _depths.get(threading.get_ident(), 0)
    if not depth:
        yield
        return
    try:
        _leave(0)
        yield
    finally:
        _enter(depth)


def open_unshared(path: str | Path) -> int:
    """Open a file to lock, and create it if it is absent. No forked child shares the lock.

    Raises:
        OSError: the file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with unforked():
        descriptor = os.open(path, flags, 0o600)
        _unshared.add(descriptor)
    return descriptor


def close_unshared(descriptor: int) -> None:
    """Close a file that `open_unshared` has opened."""
    _unshared.discard(descriptor)  # first, because another thread may get the number
    os.close(descriptor)


def _enter(depth: int) -> None:
    """Begin a block, after the forks of other threads if this thread is in none."""
    this = threading.get_ident()
    if this not in _depths:
        _slow.discard(this)
        until = monotonic() + _WAIT_SECONDS
        while True:
            # First the entry, then the look: a fork does it the other way round, so that one of
            # both sees the other.
            _depths[this] = depth
            now = monotonic()
            if now > until or not any(
                now < end for thread, end in [*_forking.items()] if thread != this
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
    """Wait for the blocks of the other threads, and let no thread begin one."""
    this = threading.get_ident()
    until = _forking[this] = monotonic() + _WAIT_SECONDS
    is_done = False
    while not is_done:
        try:
            while busy := {*_depths} - _slow - {this}:
                if monotonic() > until:
                    _slow.update(busy)
                sleep(_POLL_SECONDS)
            is_done = True
        except BaseException as interrupt:  # noqa: BLE001 - of a signal handler; Python drops it
            _interrupts[this] = interrupt


def _after_in_parent() -> None:
    this = threading.get_ident()
    _forking.pop(this, None)
    if (interrupt := _interrupts.pop(this, None)) is not None:
        raise_after(sys._getframe(), interrupt)  # noqa: SLF001 - documented


def _after_in_child() -> None:
    this = threading.get_ident()
    depth = _depths.get(this, 0)
    for entries in (_depths, _slow, _forking, _interrupts):
        entries.clear()
    _leave(depth)
    if _unshared:
        empty = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in _unshared:
            os.dup2(empty, descriptor, inheritable=False)
        os.close(empty)


os.register_at_fork(
    before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
