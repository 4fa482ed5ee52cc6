"""Keys of artifacts as statements use them."""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Table, and_, bindparam

from graphstash_server.db.tables import artifacts
from graphstash_server.keys import StoredKey

__all__ = ["WHERE_KEY", "in_parts", "is_key", "key_parameters", "key_values"]

_KEYS_PER_STATEMENT = 500
"""Below every database's limit on parameters (SQLite had 999 until 3.32)."""

WHERE_KEY: Final = and_(
    artifacts.c.namespace == bindparam("key_namespace"),
    artifacts.c.fingerprint == bindparam("key_fingerprint"),
    artifacts.c.kind == bindparam("key_kind"),
    artifacts.c.device_type == bindparam("key_device_type"),
)
"""The artifact that `key_parameters` name: for statements that are built once."""


def key_values(key: StoredKey) -> dict[str, str]:
    """The columns of a key."""
    return {
        "namespace": key.namespace,
        "fingerprint": key.fingerprint,
        "kind": key.kind.value,
        "device_type": key.device_type,
    }


def key_parameters(key: StoredKey) -> dict[str, Any]:
    """The parameters of `WHERE_KEY`."""
    return {f"key_{name}": value for name, value in key_values(key).items()}


def is_key(table: Table, key: StoredKey) -> ColumnElement[bool]:
    """The row of a key in a table that has its columns."""
    return and_(*(table.c[name] == value for name, value in key_values(key).items()))


def in_parts(fingerprints: Sequence[str]) -> list[Sequence[str]]:
    """As many at a time as one statement takes."""
    return [
        fingerprints[start : start + _KEYS_PER_STATEMENT]
        for start in range(0, len(fingerprints), _KEYS_PER_STATEMENT)
    ]
