"""OwnSocket: a Unix socket that only the user who runs the server can reach.

The directory admits no other user (`graphstash_schema.own_files`). If a user runs several servers,
the first keeps the socket until its last process ends.
"""

import fcntl
import os
import socket
from pathlib import Path

from graphstash_schema.own_files import make_own_directory

__all__ = ["OwnSocket"]


class OwnSocket:
    """A bound Unix socket, `listener`, on which the server has yet to listen. Raises OSError if
    another server has the socket, or another user owns the directory.
    """

    def __init__(self, path: Path) -> None:
        self._directory = make_own_directory(path.parent)
        # This path leads to the verified directory, and fits into the 107 bytes of an address.
        self._path = Path(f"/proc/self/fd/{self._directory}/{path.name}")
        try:
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._path.unlink(missing_ok=True)  # left over by a killed server
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.listener.bind(str(self._path))
        except BlockingIOError:
            os.close(self._directory)
            raise BlockingIOError(f"another server of this user listens on {path}") from None
        except OSError:
            os.close(self._directory)
            raise

    def close(self) -> None:
        """Remove the socket. Call it in the process that created it, after the server has ended."""
        self.listener.close()
        self._path.unlink(missing_ok=True)
        os.close(self._directory)
