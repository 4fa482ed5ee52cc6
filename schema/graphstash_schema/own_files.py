"""Private directories of this user, and the socket through which jobs find the user's server.

Any user can bind a free loopback port, and intercept a secret that a job sends there. Only the
owner can bind or reach a socket in a directory of mode 0700, so jobs need no secret.
"""

import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

__all__ = ["make_own_directory", "open_own_directory", "own_socket_path"]


def own_socket_path(environ: Mapping[str, str]) -> Path | None:
    """Return the path of this user's server socket, or None without a home directory.

    The path contains the host name, because hosts may share a home directory. `$XDG_RUNTIME_DIR` is
    unsuitable: batch jobs do not have it, and logout empties it.
    """
    state = environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        return Path(state).expanduser().absolute() / "graphstash" / socket.gethostname() / "socket"
    except RuntimeError:  # a container user without a home directory
        return None


def make_own_directory(path: Path) -> int:
    """Like `open_own_directory`, after creating the directory and setting its mode to 0700."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = open_own_directory(path, open_to_others=0o777)
    try:
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return open_own_directory(path)  # some file systems ignore chmod


def open_own_directory(path: Path, *, open_to_others: int = 0) -> int:
    """Open a directory of this user, and return its descriptor.

    Raises:
        OSError: the directory is absent, a symbolic link or another user's, or its mode grants
            group or others more than `open_to_others`.
    """
    if path.is_symlink():  # the kernel's error would only say "not a directory"
        raise PermissionError(f"{path} is a symbolic link; use {os.path.realpath(path)} itself")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user (uid {status.st_uid})")
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077 & ~open_to_others:
            raise PermissionError(f"{path} is open to other users (mode {mode:o})")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
