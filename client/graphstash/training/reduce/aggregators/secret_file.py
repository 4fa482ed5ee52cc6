"""Reads the secret that workers and aggregators share from a file."""

from pathlib import Path
from typing import Final

from graphstash._trust.private_file import read_private
from graphstash.errors import ConfigError

__all__ = ["read_secret"]

_MIN_BYTES: Final = 32


def read_secret(path: Path) -> bytes:
    """Return the content of a file without white space at its ends.

    Raises:
        ConfigError: other users may read the file, it cannot be read, or it is too short.
    """
    secret = read_private(path, "the aggregators' secret").strip()
    if len(secret) < _MIN_BYTES:
        raise ConfigError(
            f"the aggregators' secret {path} has {len(secret)} bytes without white space at its "
            f"ends: take {_MIN_BYTES} or more, as `openssl rand -hex 32` makes them"
        )
    return secret
