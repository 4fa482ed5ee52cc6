"""Detect changes of key files and token files."""

import os
from pathlib import Path

__all__ = ["file_stamp"]


def file_stamp(path: Path) -> tuple[int, ...]:
    """Return values that change when a file is replaced or written, or () without access to it."""
    try:
        status = os.stat(path)  # noqa: PTH116 - called on every hit, where Path.stat is too slow
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size
