"""OwnSocket: a Unix socket that only the user who runs the server can reach.

Every connection comes from the owner of the server, because the directory admits no other user
(`graphstash_schema.own_files`). If one user runs several servers, the first one keeps the socket
while one of its processes lives.
"""

import fcntl
import os
import socket
from pathlib import Path

from graphstash_schema.own_files import make_own_directory

__all__ = ["OwnSocket"]


class OwnSocket:
    """A Unix socket, `listener`, which refuses connections until the server listens.

    Raises:
        OSError: on construction, if another server has the socket, or another user owns the
            directory.
    """

    def __init__(self, path: Path) -> None:
        self._directory = make_own_directory(path.parent)
        # The path goes through the verified directory's descriptor, and fits into the 107 bytes of
        # an address.
        self._place = Path(f"/proc/self/fd/{self._directory}/{path.name}")
        try:
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._place.unlink(missing_ok=True)  # left over by a killed server
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.listener.bind(str(self._place))
        except BlockingIOError:
            os.close(self._directory)
            raise BlockingIOError(f"another server of this user listens on {path}") from None
        except OSError:
            os.close(self._directory)
            raise

    def close(self) -> None:
        """Remove the socket. The process that created it calls this once the server has ended."""
        self.listener.close()
        self._place.unlink(missing_ok=True)
        os.close(self._directory)
