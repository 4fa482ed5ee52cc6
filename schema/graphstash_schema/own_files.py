"""Own files: directories that only this user can use, and the socket by which jobs find a server.

A port of loopback belongs to whoever binds it first; a socket in a directory of mode 0700 can be
bound, and reached, by its owner alone. So a server of the same user is found there without a
secret that a stranger could be shown, and a socket that a dead server left behind answers nobody.
"""

import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

__all__ = ["make_own_directory", "open_own_directory", "own_socket_path"]


def own_socket_path(environ: Mapping[str, str]) -> Path | None:
    """Where the server of this user on this host listens; None for a user without a home.

    Under `$XDG_STATE_HOME`, not `$XDG_RUNTIME_DIR`, which batch jobs do not have and a logout
    empties. Hosts may share a home, so the name of the host is part of the path.
    """
    state = environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        return Path(state).expanduser().absolute() / "graphstash" / socket.gethostname() / "socket"
    except RuntimeError:  # a container's user without a home
        return None


def make_own_directory(path: Path) -> int:
    """Opens a directory of this user, which is made when absent and closed to others.

    Raises:
        OSError: it is a symbolic link or another user's, or cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = open_own_directory(path, open_to_others=0o777)
    try:
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return open_own_directory(path)  # some file systems have modes of their own


def open_own_directory(path: Path, *, open_to_others: int = 0) -> int:
    """Opens a directory of this user; returns its descriptor.

    Args:
        path: of the directory.
        open_to_others: what the group and others may do there, as in chmod(1); nothing by default.

    Raises:
        OSError: it is absent, a symbolic link, another user's, or open to others.
    """
    if path.is_symlink():  # the kernel only says that it is no directory
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
