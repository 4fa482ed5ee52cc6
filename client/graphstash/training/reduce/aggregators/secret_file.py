"""Reads the secret that workers and aggregators share from a file."""

from pathlib import Path
from typing import Final

from graphstash._trust.private_file import read_private
from graphstash.errors import ConfigError

__all__ = ["read_secret"]

_MIN_BYTES: Final = 32


def read_secret(path: Path) -> bytes:
    """Return the secret, without white space at its ends.

    Raises:
        ConfigError: the file cannot be read, other users may read it, or the secret is short.
    """
    secret = read_private(path, "the aggregators' secret").strip()
    if len(secret) < _MIN_BYTES:
        raise ConfigError(
            f"the aggregators' secret {path} has {len(secret)} bytes without white space at its "
            f"ends: take {_MIN_BYTES} or more, as `openssl rand -hex 32` makes them"
        )
    return secret
