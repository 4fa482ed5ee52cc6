"""Read secret files only if they are private: no other user can access them."""

import os
from pathlib import Path
from typing import Final

from graphstash._regular_file import open_regular
from graphstash.errors import ConfigError

__all__ = ["read_private"]

_MAX_BYTES: Final = 64 * 1024


def read_private(path: Path, what: str) -> bytes:
    """Read up to 64 KiB of a secret file, which messages call `what`.

    Raises:
        ConfigError: the file cannot be read, or its mode lets too many users access it.
    """
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            content = file.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror}") from None
    mode = status.st_mode & 0o777
    # Clusters pass secrets to a container's user in files of root that a group can read.
    if mode & (0o037 if status.st_uid == 0 else 0o077):
        raise ConfigError(
            f"{what} {path}: other users may use it (mode {mode:o}): chmod 600 {path}"
        )
    return content
