"""What tells that a file of keys or a token has changed."""

import os
from pathlib import Path

__all__ = ["file_stamp"]


def file_stamp(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or written; empty if it cannot be read."""
    try:
        status = os.stat(path)  # noqa: PTH116 - on the way of every hit
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size
