"""Wait for a file lock that another starting process holds."""

import fcntl
import logging
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from graphstash_server.errors import StartError

__all__ = ["wait_for_lock"]

_LOGGER = logging.getLogger(__name__)

_WAIT_SECONDS: Final = 600
"""A migration of a large database may take minutes. A suspended process would hold its lock for
ever."""

_POLL_SECONDS: Final = 0.05


def wait_for_lock(file: int, operation: int, *, path: Path) -> None:
    """Take a lock (flock) on an open file. Blocks.

    Raises:
        StartError: another process has held the lock for ten minutes.
    """
    until, is_reported = monotonic() + _WAIT_SECONDS, False
    while True:
        try:
            fcntl.flock(file, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if not is_reported:
                _LOGGER.warning("another process starts or migrates: waiting for %s", path)
                is_reported = True
            if monotonic() > until:
                raise StartError(
                    f"another process has held {path} for {_WAIT_SECONDS} s: end the process that "
                    "starts or migrates with this data directory, which may be suspended, and "
                    "start again"
                ) from None
            sleep(_POLL_SECONDS)
        else:
            return
