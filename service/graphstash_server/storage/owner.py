"""ServerLock: tells whether other servers use the same data directory."""

import fcntl
import os
from pathlib import Path

__all__ = ["ServerLock"]


class ServerLock:
    """Every server holds the lock of its data directory, shared, for as long as it runs.

    The kernel lets go of it when the process dies, however it dies.
    """

    def __init__(self, path: Path) -> None:
        """Takes the lock; waits while another server is just starting. Blocks.

        Raises:
            OSError: when the file cannot be made.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.was_alone = True
        except BlockingIOError:
            self.was_alone = False

    def share(self) -> None:
        """Lets other servers in. Until then one that starts waits, so call it soon. Blocks."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Lets go."""
        os.close(self._fd)
