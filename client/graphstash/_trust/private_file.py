"""Files that hold a secret: read only if nobody else may use them."""

import os
from pathlib import Path
from typing import Final

from graphstash.errors import ConfigError

__all__ = ["read_private"]

_MAX_BYTES: Final = 64 * 1024


def read_private(path: Path, what: str) -> bytes:
    """What a file has, up to 64 KiB; `what` it is to users.

    Raises:
        ConfigError: others may read it, too; or it cannot be read.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror}") from None
    mode = status.st_mode & 0o777
    # Root's file that one group reads is how a cluster hands a secret to a container's user.
    if mode & (0o037 if status.st_uid == 0 else 0o077):
        raise ConfigError(
            f"{what} {path}: others may use it, too (mode {mode:o}): chmod 600 {path}"
        )
    return content
