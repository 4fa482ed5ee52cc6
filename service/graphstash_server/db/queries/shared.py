"""What the statements of several tables share: keys of artifacts, and insert-or-update."""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from sqlalchemy import ColumnElement, Table, and_, bindparam
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import ArtifactKind
from graphstash_server.keys import StoredKey

__all__ = [
    "KNOWN_KINDS",
    "Upsert",
    "in_parts",
    "insert_into",
    "is_key",
    "key_parameters",
    "key_values",
    "stored_key",
    "where_key",
]

_KEYS_PER_STATEMENT = 500
"""Below every database's limit on parameters (SQLite had 999 until 3.32)."""

KNOWN_KINDS: Final = [kind.value for kind in ArtifactKind]
"""Artifacts of other kinds are left to servers of a later release, which know them."""


def key_values(key: StoredKey) -> dict[str, str]:
    """The columns of a key."""
    return {
        "namespace": key.namespace,
        "fingerprint": key.fingerprint,
        "kind": key.kind.value,
        "device_type": key.device_type,
    }


def key_parameters(key: StoredKey) -> dict[str, Any]:
    """The parameters of `where_key`."""
    return {f"key_{name}": value for name, value in key_values(key).items()}


def where_key(table: Table) -> ColumnElement[bool]:
    """The row that `key_parameters` name: for statements that are built once, or run for many."""
    names = ("namespace", "fingerprint", "kind", "device_type")
    return and_(*(table.c[name] == bindparam(f"key_{name}") for name in names))


def stored_key(row: Any) -> StoredKey:
    """The key of a row that has its columns."""
    return StoredKey.parse(
        namespace=row.namespace,
        kind=row.kind,
        device_type=row.device_type,
        fingerprint=row.fingerprint,
    )


def is_key(table: Table, key: StoredKey) -> ColumnElement[bool]:
    """The row of a key in a table that has its columns."""
    return and_(*(table.c[name] == value for name, value in key_values(key).items()))


def in_parts(fingerprints: Sequence[str]) -> list[Sequence[str]]:
    """As many at a time as one statement takes."""
    return [
        fingerprints[start : start + _KEYS_PER_STATEMENT]
        for start in range(0, len(fingerprints), _KEYS_PER_STATEMENT)
    ]


Upsert: TypeAlias = sqlite.Insert | postgresql.Insert


def insert_into(connection: AsyncConnection, table: Table) -> Upsert:
    """An INSERT that knows ON CONFLICT, in the dialect of the connection."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)
