"""Delay forks while another thread does work that a fork would break in the child.

If a fork interrupts another thread's import, the child can never import that module. If a fork
interrupts OpenSSL, a lock inside OpenSSL stays held in the child. The child would wait for a thread
that does not exist there. The cache's background threads do such work in jobs that fork, so forks
wait for them, with a time limit.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["unforked"]

_WAIT_SECONDS: Final = 2.0
"""Maximum seconds that a fork waits. The work may itself wait for the forking thread."""

_lock = threading.RLock()


class _Thread(threading.local):
    is_held = False
    """Whether this thread holds the lock for a fork."""


_thread = _Thread()


@contextmanager
def unforked() -> Iterator[None]:
    """Delay forks in other threads until the block ends."""
    with _lock:
        yield


def _before() -> None:
    _thread.is_held = _lock.acquire(timeout=_WAIT_SECONDS)


def _after_in_parent() -> None:
    if _thread.is_held:
        _lock.release()


def _after_in_child() -> None:
    global _lock  # noqa: PLW0603 - a thread that does not exist here may hold it
    _lock = threading.RLock()


os.register_at_fork(
    before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
