"""Keys of artifacts, rows of artifacts, and INSERT with ON CONFLICT, for several query modules."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from sqlalchemy import (
    ARRAY,
    BindParameter,
    ColumnElement,
    FromClause,
    Table,
    TableValuedAlias,
    and_,
    bindparam,
    column,
    func,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.types import TypeEngine

from graphstash_schema import ArtifactKind, Digest
from graphstash_server.artifact import Artifact, DescribedArtifact
from graphstash_server.db.prepared import is_one_of
from graphstash_server.db.tables import artifacts
from graphstash_server.keys import StoredKey

__all__ = [
    "ARTIFACT_COLUMNS",
    "KEYED_ARTIFACT_COLUMNS",
    "KEY_COLUMNS",
    "KNOWN_KINDS",
    "QUEUED_UNTIL",
    "Upsert",
    "are_keys",
    "array_values",
    "artifact_of",
    "described_of",
    "given_rows",
    "insert_in",
    "insert_into",
    "is_key",
    "key_parameters",
    "key_values",
    "keys_parameters",
    "new_values",
    "prefixed",
    "same_key",
    "stored_key",
    "unindexed",
    "upsert",
    "where_key",
]

KNOWN_KINDS: Final = [kind.value for kind in ArtifactKind]
"""Kinds of this release. Artifacts of other kinds are left to servers of a later release."""

KEY_COLUMNS: Final = ("namespace", "fingerprint", "kind", "device_type")
"""Columns of every primary key, in order."""

QUEUED_UNTIL: Final = datetime(9000, 1, 1, tzinfo=UTC)
"""End of the pin of an artifact that a region still has to send to its upstream. It tells this pin
from a pin of an operator."""

_KEY_PARAMETERS: Final = tuple(f"key_{name}" for name in KEY_COLUMNS)

ARTIFACT_COLUMNS: Final = tuple(
    artifacts.c[name] for name in ("sha256", "size_bytes", *Artifact._fields[2:])
)
"""The fields of `Artifact` after its key. The digest takes two columns."""

KEYED_ARTIFACT_COLUMNS: Final = (*(artifacts.c[name] for name in KEY_COLUMNS), *ARTIFACT_COLUMNS)
"""The first columns of a row for `described_of`."""


def artifact_of(stored: Sequence[Any], key: StoredKey) -> Artifact:
    """Build an artifact from its key and `ARTIFACT_COLUMNS`."""
    sha256, size_bytes, *others = stored
    return Artifact(key, Digest(sha256, size_bytes), *others)


def described_of(found: Any) -> DescribedArtifact:
    """Build an artifact from a row of `KEYED_ARTIFACT_COLUMNS` and, if it was selected, its
    description: `label`, `program` (JSON) and `environment` (JSON).
    """
    stored = found[len(KEY_COLUMNS) : len(KEYED_ARTIFACT_COLUMNS)]
    described = found._mapping  # noqa: SLF001 - the public name of SQLAlchemy's rows
    program, environment = (
        None if text is None else json.loads(text)
        for text in (described.get("program"), described.get("environment"))
    )
    return DescribedArtifact(
        artifact_of(stored, stored_key(found)), described.get("label") or "", program, environment
    )


def key_values(key: StoredKey) -> dict[str, str]:
    """Return a key by column."""
    return dict(zip(KEY_COLUMNS, key.columns, strict=True))


def key_parameters(key: StoredKey) -> dict[str, Any]:
    """Return the parameters of `where_key`."""
    return dict(zip(_KEY_PARAMETERS, key.columns, strict=True))


def where_key(table: FromClause) -> ColumnElement[bool]:
    """Match the row of a key, which `key_parameters` passes to each execution."""
    return and_(*(table.c[name] == bindparam(f"key_{name}") for name in KEY_COLUMNS))


def same_key(one: FromClause, other: FromClause) -> ColumnElement[bool]:
    """Match the rows of two tables that have the same key."""
    return and_(*(one.c[name] == other.c[name] for name in KEY_COLUMNS))


def are_keys(table: FromClause, dialect: str) -> ColumnElement[bool]:
    """Match the rows of the keys in `keys_parameters`. The condition can use the primary key."""
    name = table.c.fingerprint + " " + table.c.kind + " " + table.c.device_type
    return and_(
        table.c.namespace == bindparam("of_namespace"),
        is_one_of(table.c.fingerprint, "fingerprints", dialect),  # for the index
        is_one_of(name, "names", dialect),
    )


def keys_parameters(keys: Sequence[StoredKey]) -> dict[str, Any]:
    """Return the parameters of `are_keys` for keys of one namespace."""
    return {
        "of_namespace": keys[0].namespace,
        "fingerprints": [key.fingerprint for key in keys],
        "names": [" ".join(key.columns[1:]) for key in keys],
    }


def new_values(table: Table, names: Iterable[str]) -> dict[str, BindParameter[Any]]:
    """Return the values of a statement: parameter `new_<name>` for each column."""
    return {name: bindparam(f"new_{name}", type_=table.c[name].type) for name in names}


def prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Prefix parameter names, because SQLAlchemy reserves column names in VALUES and SET."""
    return {f"{prefix}{name}": value for name, value in values.items()}


def stored_key(row: Any) -> StoredKey:
    """Return the key in a row."""
    return StoredKey.parse(
        namespace=row.namespace,
        kind=row.kind,
        device_type=row.device_type,
        fingerprint=row.fingerprint,
    )


def is_key(table: Table, key: StoredKey) -> ColumnElement[bool]:
    """Match the row of a key."""
    return and_(*(table.c[name] == value for name, value in key_values(key).items()))


def unindexed(column: ColumnElement[str]) -> ColumnElement[str]:
    """Return a text column as an expression without an index. Otherwise SQLite, without statistics,
    prefers an index for `=` to the index for ORDER BY, and sorts all rows of a large namespace.
    """
    return column + ""


def array_values(
    name: str, rows: Sequence[Sequence[Any]], columns: Sequence[str]
) -> dict[str, Sequence[Any]]:
    """Return the parameters of `given_rows`."""
    values = zip(*rows, strict=True) if rows else [()] * len(columns)
    return {f"{name}_{each}": value for each, value in zip(columns, values, strict=True)}


def given_rows(name: str, table: Table, columns: Sequence[str]) -> TableValuedAlias:
    """Return rows that a statement gets as one array per column, numbered from 1: PostgreSQL."""
    types: dict[str, TypeEngine[Any]] = {each: table.c[each].type for each in columns}
    arrays = (bindparam(f"{name}_{each}", type_=ARRAY(type_)) for each, type_ in types.items())
    return (
        func.unnest(*arrays)
        .table_valued(
            *(column(each, type_) for each, type_ in types.items()),
            with_ordinality="number",
            name=name,
        )
        .render_derived(name=name)
    )


Upsert: TypeAlias = sqlite.Insert | postgresql.Insert


def insert_into(connection: AsyncConnection, table: Table) -> Upsert:
    """Return an INSERT that supports ON CONFLICT, in the connection's dialect."""
    return insert_in(connection.dialect.name, table)


def insert_in(dialect: str, table: Table) -> Upsert:
    """Like `insert_into`, by the name of the dialect."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


def upsert(connection: AsyncConnection, table: Table, values: Mapping[str, Any]) -> Upsert:
    """Insert a row, or replace these values in the row with the same primary key."""
    statement = insert_into(connection, table).values(values)
    return statement.on_conflict_do_update(
        index_elements=list(table.primary_key),
        set_={name: statement.excluded[name] for name in values if not table.c[name].primary_key},
    )
