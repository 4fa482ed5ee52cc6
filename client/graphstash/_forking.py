"""Delay forks while another thread does work that a fork would break in the child.

A fork copies every lock as it is, and only the thread that forks. If it interrupts another thread's
import, the child can never import that module. If it interrupts OpenSSL or pydantic, a lock inside
them stays held in the child. The child would wait for a thread that does not exist there. The
cache's background threads do such work in jobs that fork, so forks wait until these threads are
idle or wait for the network, with a time limit.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final

__all__ = ["forkable", "unforked"]

_WAIT_SECONDS: Final = 2.0
"""Maximum seconds that a fork waits, once for each block. The work may itself wait for the forking
thread."""


class _Work:
    """The threads whose work forks wait for, and the threads that are about to fork."""

    def __init__(self, depth: int = 0) -> None:
        # Reentrant, because a signal handler may fork or work in a thread that is in here.
        self._changed = threading.Condition(threading.RLock())
        self._depths = {threading.get_ident(): depth} if depth else {}  # by thread
        self._slow: set[int] = set()  # threads that a fork has waited for in vain
        self._forking: list[int] = []

    @property
    def depth(self) -> int:
        """How many blocks this thread is in."""
        return self._depths.get(threading.get_ident(), 0)

    def begin(self, depth: int) -> None:
        """Begin work in this thread, after the forks that other threads have begun."""
        this = threading.get_ident()
        until = monotonic() + _WAIT_SECONDS
        with self._changed:
            while this not in self._depths and any(other != this for other in self._forking):
                if not self._changed.wait(until - monotonic()):
                    break
            self._depths[this] = self._depths.get(this, 0) + depth

    def end(self, depth: int) -> None:
        this = threading.get_ident()
        with self._changed:
            self._depths[this] -= depth
            if not self._depths[this]:
                del self._depths[this]
                self._slow.discard(this)
                self._changed.notify_all()

    def begin_fork(self) -> None:
        """Wait for the work of the other threads, and let no thread begin work."""
        this = threading.get_ident()
        until = monotonic() + _WAIT_SECONDS
        self._changed.acquire()
        self._forking.append(this)
        try:
            while self._depths.keys() - self._slow - {this}:
                if not self._changed.wait(until - monotonic()):
                    self._slow |= self._depths.keys() - {this}
        except BaseException:
            self.end_fork()
            raise

    def end_fork(self) -> None:
        if (this := threading.get_ident()) in self._forking:
            self._forking.remove(this)
            self._changed.notify_all()
            self._changed.release()


_work = _Work()


@contextmanager
def unforked() -> Iterator[None]:
    """Delay forks in other threads until the block ends."""
    _work.begin(1)
    try:
        yield
    finally:
        _work.end(1)


@contextmanager
def forkable() -> Iterator[None]:
    """Allow forks in a block that only waits, whether it is inside `unforked` or not."""
    depth = _work.depth
    if not depth:
        yield
        return
    _work.end(depth)
    try:
        yield
    finally:
        _work.begin(depth)


def _before() -> None:
    _work.begin_fork()


def _after_in_parent() -> None:
    _work.end_fork()


def _after_in_child() -> None:
    global _work  # noqa: PLW0603 - other threads, which are not here, are in the old one
    _work = _Work(_work.depth)


os.register_at_fork(
    before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
