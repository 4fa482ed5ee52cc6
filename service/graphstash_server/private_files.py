"""Keep everything that the server creates on disk private to its user."""

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import make_url

if TYPE_CHECKING:
    from graphstash_server.settings import DatabaseSettings

__all__ = ["keep_private"]

_LOGGER = logging.getLogger(__name__)

_OWN: Final = ("blobs", "spool", "tier", "*.lock")
"""Names that the server creates in its data directory, besides an SQLite database."""

_OF_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_WRITTEN_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


def keep_private(settings: "DatabaseSettings") -> None:
    """Create the data directory, and make everything that this process creates private.

    Revoke other users' access to files that an earlier release left open, and to the data directory
    if it contains nothing else. Warn if they may write to it.

    Raises:
        OSError: the data directory cannot be created.
    """
    os.umask(_OF_OTHERS)
    data_dir = settings.data_dir
    data_dir.mkdir(parents=True, exist_ok=True)
    own = {found for pattern in _OWN for found in data_dir.glob(pattern)}
    own.update(_database_files(settings.database_url))
    for path in own:
        _close(path)
    if own.issuperset(data_dir.iterdir()):
        _close(data_dir)
    if data_dir.stat().st_mode & _WRITTEN_BY_OTHERS:
        _LOGGER.warning(
            "other users of this host may write to the data directory %s, and so replace the "
            "database: chmod go-w it, or choose another one",
            data_dir,
        )


def _database_files(url: str) -> Iterator[Path]:
    """Yield the paths of an SQLite database, its logs and its index."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        for suffix in ("", "-wal", "-shm", "-journal"):
            yield Path(parsed.database + suffix)


def _close(path: Path) -> None:
    """Revoke the rights of other users if this user owns the file."""
    try:
        found = path.lstat()
        is_own = found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode)
        if is_own and found.st_mode & _OF_OTHERS:
            path.chmod(stat.S_IMODE(found.st_mode) & ~_OF_OTHERS)
    except FileNotFoundError:
        return  # SQLite removes its log when it closes a database
    except OSError as error:  # a file system without modes
        _LOGGER.warning("cannot close %s to other users of this host: %s", path, error.strerror)
