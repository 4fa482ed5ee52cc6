"""OwnSocket: where jobs of the user who runs the server find it, and nobody else does.

Whoever connects here is the owner of the server, because nobody else gets through the directory
(`graphstash_schema.own_files`). Of several servers of one user, the first keeps the place as long
as one of its processes lives.
"""

import fcntl
import os
import socket
from pathlib import Path
from typing import Final

from graphstash_schema.own_files import make_own_directory

__all__ = ["OwnSocket"]

_BACKLOG: Final = 2048


class OwnSocket:
    """A listening socket.

    Attributes:
        listener: for the server.

    Raises:
        OSError: on construction, when another server has the place, or it is not this user's.
    """

    def __init__(self, path: Path) -> None:
        self._directory = make_own_directory(path.parent)
        # By the directory that was checked, which also keeps within the 107 bytes of an address.
        self._place = Path(f"/proc/self/fd/{self._directory}/{path.name}")
        try:
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._place.unlink(missing_ok=True)  # what a killed server has left
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.listener.bind(str(self._place))
            self.listener.listen(_BACKLOG)
        except BlockingIOError:
            os.close(self._directory)
            raise BlockingIOError(f"another server of this user listens on {path}") from None
        except OSError:
            os.close(self._directory)
            raise

    def close(self) -> None:
        """Removes it; for the process that made it, when the server has ended."""
        self.listener.close()
        self._place.unlink(missing_ok=True)
        os.close(self._directory)
