"""Statements on `artifacts`. Those that choose artifacts to evict are in `queries.eviction`."""

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Double,
    FromClause,
    Select,
    String,
    and_,
    bindparam,
    case,
    delete,
    func,
    literal_column,
    or_,
    select,
    text,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Digest, Namespace
from graphstash_schema.names import LIST_START, ListPosition
from graphstash_server.artifact import Artifact, FoundArtifact
from graphstash_server.db.engine import Database
from graphstash_server.db.prepared import Prepared, Source, Transaction, is_one_of
from graphstash_server.db.queries.costs import METADATA_BYTES
from graphstash_server.db.queries.shared import (
    ARTIFACT_COLUMNS,
    KEY_COLUMNS,
    KEYED_ARTIFACT_COLUMNS,
    KNOWN_KINDS,
    QUEUED_UNTIL,
    are_keys,
    artifact_of,
    insert_in,
    is_key,
    key_parameters,
    key_values,
    keys_parameters,
    new_values,
    prefixed,
    stored_key,
    where_key,
)
from graphstash_server.db.tables import artifacts, withdrawal_heads
from graphstash_server.eviction_order import aged, density
from graphstash_server.keys import StoredKey

__all__ = [
    "FoundArtifacts",
    "delete_artifacts",
    "delete_rows",
    "find_artifact",
    "find_artifact_now",
    "find_artifacts",
    "find_stored",
    "find_used",
    "insert_artifact",
    "list_artifacts_of",
    "list_digests",
    "list_stored_rows",
    "note_look_up",
    "pin_artifacts",
    "release_artifact",
    "replace_artifact",
    "unpin_artifacts",
    "withhold_artifact",
]

_SELECT = select(*KEYED_ARTIFACT_COLUMNS)
_ENTRY = artifacts.alias("entry")
_IS_SAME_ROW = text(
    " AND ".join(
        ("artifacts.rowid = entry.rowid", *(f"+artifacts.{n} = entry.{n}" for n in KEY_COLUMNS))
    )
)


def _where_indexed(
    dialect: str, columns: Sequence[ColumnElement[Any]], wanted: Callable[[FromClause], Any]
) -> Select[Any]:
    """Select rows by their primary key.

    SQLite reads key columns from the index, the other columns from the row, and does not compare
    the two. In a database file that was copied during a write, an index entry can refer to another
    artifact's row. So the statement compares the row's key with the index. The `+` prevents SQLite
    from using the index for this comparison.
    """
    if dialect != "sqlite":
        return select(*columns).where(wanted(artifacts))
    return select(*columns).select_from(_ENTRY.join(artifacts, _IS_SAME_ROW)).where(wanted(_ENTRY))


_FIND_STORED = Prepared(
    lambda dialect: _where_indexed(dialect, ARTIFACT_COLUMNS, where_key), finds_one=True
)
_FIND_ONE = Prepared(
    lambda dialect: _where_indexed(dialect, ARTIFACT_COLUMNS, where_key).where(
        artifacts.c.withheld_at.is_(None)
    ),
    finds_one=True,
)
_SERVED, _WITHHELD, _LIST_END = 0, 1, 2
"""Kinds of rows of `_FIND_MANY`: served artifact, withheld artifact, end of the withdrawal list."""


def _find_many(dialect: str) -> CompoundSelect[Any]:
    """Find artifacts and the end of the namespace's withdrawal list, in one snapshot."""
    nothing = literal_column("''", String)
    columns = (
        artifacts.c.kind,
        artifacts.c.device_type,
        artifacts.c.fingerprint,
        artifacts.c.sha256,
        artifacts.c.size_bytes,
        artifacts.c.compile_seconds,
        case((artifacts.c.looked_up_until >= bindparam("until"), 1), else_=0),
        case((artifacts.c.withheld_at.is_(None), _SERVED), else_=_WITHHELD),
    )
    return union_all(
        _where_indexed(
            dialect,
            columns,
            lambda indexed: and_(
                indexed.c.namespace == bindparam("of_namespace"),
                is_one_of(indexed.c.fingerprint, "fingerprints", dialect),
            ),
        ),
        select(
            *(nothing, nothing, nothing),
            withdrawal_heads.c.mark,
            withdrawal_heads.c.number,
            literal_column("0.0", Double),
            literal_column("0"),
            literal_column(str(_LIST_END)),
        ).where(withdrawal_heads.c.namespace == bindparam("of_namespace")),
    )


_FIND_MANY = Prepared(_find_many)

_NEW_COLUMNS = (
    "sha256",
    "size_bytes",
    "metadata_header",
    "compile_seconds",
    "toolchain",
    "density",
    "eviction_rank",
    "created_at",
    "last_used_at",
    "hits",
)
_INSERT = Prepared(
    lambda dialect: (
        insert_in(dialect, artifacts)
        .values(new_values(artifacts, (*KEY_COLUMNS, *_NEW_COLUMNS)))
        .on_conflict_do_nothing()
    )
)
_REPLACE = Prepared(
    lambda _: (
        update(artifacts)
        .where(
            where_key(artifacts),
            artifacts.c.sha256 == bindparam("old_sha256"),
            artifacts.c.created_at == bindparam("old_created_at"),
            artifacts.c.withheld_at.is_not_distinct_from(
                bindparam("old_withheld_at", type_=artifacts.c.withheld_at.type)
            ),
        )
        .values(new_values(artifacts, _NEW_COLUMNS) | {"withheld_at": None})
    )
)


class FoundArtifacts(NamedTuple):
    """The result of a look-up, with every withdrawal up to `newest_withdrawal`. `unprotected` are
    those of the served `artifacts` that no earlier look-up protects for long enough.
    """

    artifacts: dict[StoredKey, FoundArtifact]
    unprotected: list[StoredKey]
    withheld: dict[StoredKey, FoundArtifact]
    newest_withdrawal: ListPosition = LIST_START


async def find_artifact(source: Source, key: StoredKey) -> Artifact | None:
    """Return an artifact, or None if it is absent or withheld."""
    found = await _FIND_ONE.fetch_one(source, key_parameters(key))
    return artifact_of(found, key) if found is not None else None


def find_artifact_now(database: Database, key: StoredKey) -> Sequence[Artifact] | None:
    """Return what `find_artifact` would return, as a list of at most one, without waiting. Return
    None if that requires a wait, see `Database.fetch_now`.
    """
    found = database.fetch_now(_FIND_ONE, key_parameters(key))
    return None if found is None else [artifact_of(row, key) for row in found]


async def find_stored(source: Source, key: StoredKey) -> Artifact | None:
    """Return an artifact, even if it is withheld, or None if it is absent."""
    found = await _FIND_STORED.fetch_one(source, key_parameters(key))
    return artifact_of(found, key) if found is not None else None


async def find_artifacts(
    source: Source, namespace: Namespace, keys: Collection[StoredKey], *, until: datetime
) -> FoundArtifacts:
    """Look up artifacts of one namespace in one statement. `until` is the time until which an
    artifact must be protected from eviction, or it counts as unprotected.
    """
    wanted = {(key.kind._value_, key.device_type, key.fingerprint): key for key in keys}
    rows = await _FIND_MANY.fetch(
        source,
        {
            "of_namespace": namespace,
            "fingerprints": [fingerprint for _, _, fingerprint in wanted],
            "until": until,
        },
    )
    found = FoundArtifacts({}, [], {})
    newest = LIST_START
    for kind, device_type, fingerprint, *stored, is_protected, state in rows:
        if state == _LIST_END:
            mark, number, _ = stored
            newest = ListPosition(f"{number}-{mark}")
        key = wanted.get((kind, device_type, fingerprint))
        if key is None:
            continue
        group = found.withheld if state == _WITHHELD else found.artifacts
        group[key] = FoundArtifact(*stored)
        if not (is_protected or state == _WITHHELD):
            found.unprotected.append(key)
    return found._replace(newest_withdrawal=newest)


async def list_stored_rows(
    connection: AsyncConnection, namespace: Namespace, *, after: StoredKey | None, limit: int
) -> list[Artifact]:
    """Return a page of a namespace's artifacts in key order, including withheld ones."""
    columns = [artifacts.c[name] for name in KEY_COLUMNS[1:]]
    statement = _SELECT.where(artifacts.c.namespace == namespace, artifacts.c.kind.in_(KNOWN_KINDS))
    if after is not None:
        statement = statement.where(tuple_(*columns) > after.columns[1:])
    return await _rows_of(connection, statement.order_by(*columns).limit(limit))


async def list_digests(
    connection: AsyncConnection, *, after_sha256: str, until_sha256: str | None, limit: int
) -> list[Digest]:
    """Return a page of the artifacts' digests, ordered by SHA-256. The page begins after
    `after_sha256` (empty for the first page) and ends at `until_sha256`, inclusive.
    """
    wanted: ColumnElement[bool] = artifacts.c.sha256 > after_sha256
    if until_sha256 is not None:
        wanted = and_(wanted, artifacts.c.sha256 <= until_sha256)
    statement = (
        select(artifacts.c.sha256, func.min(artifacts.c.size_bytes))  # all have the same size
        .where(wanted)
        .group_by(artifacts.c.sha256)
        .order_by(artifacts.c.sha256)
        .limit(limit)
    )
    return [Digest(*found) for found in await connection.execute(statement)]


async def list_artifacts_of(
    connection: AsyncConnection, digests: Sequence[Digest]
) -> list[Artifact]:
    """Return the artifacts of all namespaces that have one of these blobs."""
    statement = _SELECT.where(
        artifacts.c.sha256.in_([digest.sha256 for digest in digests]),
        artifacts.c.kind.in_(KNOWN_KINDS),
    )
    return await _rows_of(connection, statement)


async def _rows_of(connection: AsyncConnection, statement: Select[Any]) -> list[Artifact]:
    return [
        artifact_of(found[len(KEY_COLUMNS) :], stored_key(found))
        for found in await connection.execute(statement)
    ]


async def insert_artifact(connection: Transaction, new: Artifact) -> bool:
    """Add an artifact. Return False if the key already has one."""
    given = prefixed("new_", key_values(new.key) | _values(new))
    return await _INSERT.execute(connection, given) == 1


async def replace_artifact(connection: Transaction, new: Artifact, *, replaces: Artifact) -> bool:
    """Replace an artifact, but keep its pin. Return False if the stored artifact is not `replaces`,
    or was withheld or released since.
    """
    given = {
        **key_parameters(new.key),
        **prefixed("new_", _values(new)),
        "old_sha256": replaces.digest.sha256,
        "old_created_at": replaces.created_at,
        "old_withheld_at": replaces.withheld_at,
    }
    return await _REPLACE.execute(connection, given) == 1


async def delete_artifacts(
    connection: AsyncConnection, rows: Sequence[Artifact]
) -> tuple[list[Artifact], int]:
    """Remove artifacts of one namespace that have not been replaced, withheld or released since
    they were read.

    Returns:
        The removed artifacts, and the bytes that their metadata counted against limits.
    """
    given = keys_parameters([row.key for row in rows])
    found = {tuple(each) for each in await _LOCK_ROWS.fetch(connection, given)}
    unchanged = [row for row in rows if (*row.key.columns[1:], *row.identity) in found]
    return unchanged, await delete_rows(connection, [row.key for row in unchanged])


_IDENTITY = ("sha256", "size_bytes", "created_at", "withheld_at")
"""Columns of `Artifact.identity`."""

_LOCK_ROWS = Prepared(
    lambda dialect: (
        select(*(artifacts.c[name] for name in (*KEY_COLUMNS[1:], *_IDENTITY)))
        .where(are_keys(artifacts, dialect))
        .order_by(*artifacts.primary_key)
        .with_for_update()
    )
)


async def delete_rows(connection: AsyncConnection, keys: Sequence[StoredKey]) -> int:
    """Remove rows of one namespace that the transaction has locked. Return the bytes that their
    metadata counted against limits.
    """
    if not keys:
        return 0
    removed = await _DELETE_ROWS.fetch(connection, keys_parameters(keys))
    return sum(metadata_bytes for (metadata_bytes,) in removed)


_DELETE_ROWS = Prepared(
    lambda dialect: delete(artifacts).where(are_keys(artifacts, dialect)).returning(METADATA_BYTES)
)


async def find_used(connection: AsyncConnection, digests: Sequence[Digest]) -> set[str]:
    """Return the SHA-256s of those blobs that artifacts of any namespace use."""
    blobs = [digest.sha256 for digest in digests]
    statement = select(artifacts.c.sha256).where(artifacts.c.sha256.in_(blobs)).distinct()
    return set((await connection.scalars(statement)).all())


def _values(new: Artifact) -> dict[str, Any]:
    """Return the values of `_NEW_COLUMNS`."""
    worth = density(compile_seconds=new.compile_seconds, size_bytes=new.digest.size_bytes)
    values = {
        "sha256": new.digest.sha256,
        "size_bytes": new.digest.size_bytes,
        "density": worth,
        "eviction_rank": worth + aged(new.last_used_at),
    }
    return values | {name: getattr(new, name) for name in _NEW_COLUMNS if name not in values}


async def pin_artifacts(
    connection: AsyncConnection, keys: Sequence[StoredKey], *, until: datetime
) -> None:
    """Protect artifacts of one namespace from eviction until a time or longer."""
    await _protect(connection, keys, "pinned_until", until)


async def note_look_up(
    connection: AsyncConnection, keys: Sequence[StoredKey], *, until: datetime
) -> None:
    """Protect artifacts like `pin_artifacts`, but let uploads that need room evict them."""
    await _protect(connection, keys, "looked_up_until", until)


async def _protect(
    connection: AsyncConnection, keys: Sequence[StoredKey], name: str, until: datetime
) -> None:
    column = artifacts.c[name]
    await _set_of(connection, keys, name, until, or_(column.is_(None), column < until))


async def unpin_artifacts(connection: AsyncConnection, keys: Sequence[StoredKey]) -> None:
    """Remove the pins of artifacts of one namespace. Artifacts that a region still has to send to
    its upstream stay pinned.
    """
    pinned = artifacts.c.pinned_until != QUEUED_UNTIL
    await _set_of(connection, keys, "pinned_until", None, pinned)


async def _set_of(
    connection: AsyncConnection,
    keys: Sequence[StoredKey],
    name: str,
    value: datetime | None,
    condition: ColumnElement[bool],
) -> None:
    """Set a column of those artifacts of one namespace that meet a condition.

    Lock the rows in key order first, as every transaction must. An UPDATE locks its rows in any
    order, so two of them could deadlock. SQLite locks the whole database instead of rows.
    """
    if not keys:
        return
    given = keys_parameters(keys)
    chosen = and_(are_keys(artifacts, connection.dialect.name), condition)
    if connection.dialect.name == "postgresql":
        locked = select(artifacts.c.fingerprint).where(chosen).order_by(*artifacts.primary_key)
        await connection.execute(locked.with_for_update(), given)
    await connection.execute(update(artifacts).where(chosen).values({name: value}), given)


async def withhold_artifact(
    connection: AsyncConnection, key: StoredKey, digest: Digest, *, now: datetime
) -> bool:
    """Withhold an artifact. Return False if it has another blob or is already withheld."""
    statement = (
        update(artifacts)
        .where(
            is_key(artifacts, key),
            artifacts.c.sha256 == digest.sha256,
            artifacts.c.withheld_at.is_(None),
        )
        .values(withheld_at=now)
    )
    return (await connection.execute(statement)).rowcount == 1


async def release_artifact(connection: AsyncConnection, key: StoredKey) -> Digest | None:
    """Release a withheld artifact and return its digest, or None if it was not withheld."""
    statement = (
        update(artifacts)
        .where(is_key(artifacts, key), artifacts.c.withheld_at.is_not(None))
        .values(withheld_at=None)
        .returning(artifacts.c.sha256, artifacts.c.size_bytes)
    )
    found = (await connection.execute(statement)).first()
    return Digest(found.sha256, found.size_bytes) if found is not None else None
