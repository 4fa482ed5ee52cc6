"""What a fork must not cut in two.

A module that another thread imports at the moment of a fork can never be imported in the child, and
a lock that it holds inside OpenSSL is never released there: the child would wait for a thread that
it does not have. The cache's own threads do such work in the background of a job that forks, so
forks wait for it, though not for long.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["unforked"]

_WAIT_SECONDS: Final = 2.0
"""What a fork waits at most: the work may itself wait for the thread that forks."""

_lock = threading.RLock()


class _Thread(threading.local):
    is_held = False
    """Whether this thread holds the lock because it forks."""


_thread = _Thread()


@contextmanager
def unforked() -> Iterator[None]:
    """Lets forks of other threads wait for the end of the block."""
    with _lock:
        yield


def _before() -> None:
    _thread.is_held = _lock.acquire(timeout=_WAIT_SECONDS)


def _after_in_parent() -> None:
    if _thread.is_held:
        _lock.release()


def _after_in_child() -> None:
    global _lock  # noqa: PLW0603 - a thread that is not here may hold it
    _lock = threading.RLock()


os.register_at_fork(
    before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
