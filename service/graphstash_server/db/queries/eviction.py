"""Statements that choose artifacts to remove, and remove them.

Every choice is a page in the order of an index: a million artifacts cost no more than a thousand.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, and_, bindparam, delete, func, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import ArtifactKind, Digest
from graphstash_server.db.queries.deletions import add_deletions
from graphstash_server.db.queries.locks import share_blobs
from graphstash_server.db.queries.usage import UsageChange, add_usage
from graphstash_server.db.tables import artifacts
from graphstash_server.keys import StoredKey

__all__ = [
    "Candidate",
    "Toolchain",
    "evict_artifacts",
    "list_least_valuable",
    "list_of_toolchain",
    "list_toolchains",
    "list_unused",
]


class Candidate(NamedTuple):
    """An artifact that may go."""

    key: StoredKey
    digest: Digest
    compile_seconds: float
    toolchain: str
    last_used_at: datetime
    rank: float


class Toolchain(NamedTuple):
    """The artifacts of one compiler version in one namespace."""

    namespace: str
    kind: str
    toolchain: str
    last_used_at: datetime


_KEY = tuple(artifacts.primary_key)
_COLUMNS = (
    *_KEY,
    artifacts.c.sha256,
    artifacts.c.size_bytes,
    artifacts.c.compile_seconds,
    artifacts.c.toolchain,
    artifacts.c.last_used_at,
    artifacts.c.rank,
)


async def list_least_valuable(
    connection: AsyncConnection,
    *,
    namespace: str | None,
    now: datetime,
    limit: int,
    after: Candidate | None = None,
) -> list[Candidate]:
    """Artifacts that are neither pinned nor withheld, least value first.

    Args:
        connection: where to ask.
        namespace: only of this one.
        now: pins that ended before do not count.
        limit: most artifacts of a page.
        after: the last one of the page before.
    """
    statement = _unpinned(now).order_by(artifacts.c.rank, *_KEY).limit(limit)
    if namespace is not None:
        statement = statement.where(artifacts.c.namespace == namespace)
    if after is not None:
        statement = statement.where(
            artifacts.c.rank >= after.rank,  # for the index; the next line alone is not seen by it
            tuple_(artifacts.c.rank, *_KEY) > (after.rank, *after.key.columns),
        )
    return await _candidates(connection, statement)


async def list_unused(
    connection: AsyncConnection,
    *,
    before: datetime,
    namespace: str | None,
    now: datetime,
    limit: int,
    after: Candidate | None = None,
) -> list[Candidate]:
    """Artifacts that nobody used since a time and that are not pinned, longest unused first."""
    statement = _unpinned(now).where(artifacts.c.last_used_at < before)
    if namespace is not None:
        statement = statement.where(artifacts.c.namespace == namespace)
    if after is not None:
        statement = statement.where(
            tuple_(artifacts.c.last_used_at, *_KEY) > (after.last_used_at, *after.key.columns)
        )
    statement = statement.order_by(artifacts.c.last_used_at, *_KEY).limit(limit)
    return await _candidates(connection, statement)


async def list_toolchains(connection: AsyncConnection) -> list[Toolchain]:
    """Every toolchain of every namespace and kind, the most recently used first. Reads every
    artifact once.
    """
    last_used_at = func.max(artifacts.c.last_used_at).label("last_used_at")
    group = (artifacts.c.namespace, artifacts.c.kind, artifacts.c.toolchain)
    statement = (
        select(*group, last_used_at)
        .group_by(*group)
        .order_by(artifacts.c.namespace, artifacts.c.kind, last_used_at.desc())
    )
    return [Toolchain(*found) for found in await connection.execute(statement)]


async def list_of_toolchain(
    connection: AsyncConnection,
    wanted: Toolchain,
    *,
    now: datetime,
    limit: int,
    after: Candidate | None = None,
) -> list[Candidate]:
    """The artifacts of a toolchain that are not pinned, in the order of their keys."""
    statement = _unpinned(now).where(
        artifacts.c.namespace == wanted.namespace,
        artifacts.c.kind == wanted.kind,
        artifacts.c.toolchain == wanted.toolchain,
    )
    if after is not None:
        statement = statement.where(tuple_(*_KEY) > after.key.columns)
    return await _candidates(connection, statement.order_by(*_KEY).limit(limit))


async def evict_artifacts(
    connection: AsyncConnection, chosen: Sequence[Candidate], *, now: datetime
) -> list[Candidate]:
    """Removes artifacts, counts them and marks their blobs: the first of the three phases.

    Whatever was deleted, or replaced, meanwhile is left as it is; so is what was used meanwhile,
    pinned or withheld.

    Returns:
        Those that were removed.
    """
    statement = delete(artifacts).where(
        *(column == bindparam(f"key_{column.name}") for column in _KEY),
        artifacts.c.sha256 == bindparam("key_sha256"),
        artifacts.c.rank == bindparam("key_rank"),
        _is_loose(now),
    )
    await share_blobs(connection, [candidate.digest for candidate in chosen])
    gone: dict[str, list[Candidate]] = {}
    for candidate in sorted(chosen, key=lambda candidate: candidate.key.columns):
        parameters: dict[str, Any] = {
            f"key_{column.name}": value
            for column, value in zip(_KEY, candidate.key.columns, strict=True)
        }
        parameters |= {"key_sha256": candidate.digest.sha256, "key_rank": candidate.rank}
        if (await connection.execute(statement, parameters)).rowcount:
            gone.setdefault(candidate.key.namespace, []).append(candidate)
    for namespace, removed in sorted(gone.items()):
        size_bytes = sum(candidate.digest.size_bytes for candidate in removed)
        change = UsageChange(
            artifacts=-len(removed),
            size_bytes=-size_bytes,
            evictions=len(removed),
            evicted_bytes=size_bytes,
        )
        await add_usage(connection, namespace, change)
    everything = [candidate for removed in gone.values() for candidate in removed]
    await add_deletions(connection, [candidate.digest for candidate in everything])
    return everything


def _is_loose(now: datetime) -> ColumnElement[bool]:
    """What is withheld stays for the admin who decides about it."""
    is_unpinned = or_(artifacts.c.pinned_until.is_(None), artifacts.c.pinned_until <= now)
    return and_(is_unpinned, artifacts.c.withheld_at.is_(None))


def _unpinned(now: datetime) -> Select[Any]:
    """Artifacts of a kind that only a later release knows are left to its servers."""
    known = [kind.value for kind in ArtifactKind]
    return select(*_COLUMNS).where(_is_loose(now), artifacts.c.kind.in_(known))


async def _candidates(connection: AsyncConnection, statement: Select[Any]) -> list[Candidate]:
    return [
        Candidate(
            StoredKey.parse(
                namespace=found.namespace,
                kind=found.kind,
                device_type=found.device_type,
                fingerprint=found.fingerprint,
            ),
            Digest(found.sha256, found.size_bytes),
            found.compile_seconds,
            found.toolchain,
            found.last_used_at,
            found.rank,
        )
        for found in await connection.execute(statement)
    ]
