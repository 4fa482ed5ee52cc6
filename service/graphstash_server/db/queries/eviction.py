"""Statements that choose artifacts to evict, and evict them. A choice for a limit reads a page in
the order of an index, so its cost does not grow with the number of artifacts.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Select,
    and_,
    bindparam,
    func,
    not_,
    or_,
    select,
    true,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Digest
from graphstash_server.db.prepared import NOTHING, Prepared, is_one_of
from graphstash_server.db.queries.artifacts import delete_rows
from graphstash_server.db.queries.costs import METADATA_BYTES
from graphstash_server.db.queries.deletions import add_deletions
from graphstash_server.db.queries.locks import share_blobs
from graphstash_server.db.queries.shared import (
    KNOWN_KINDS,
    are_keys,
    prefixed,
    stored_key,
    unindexed,
)
from graphstash_server.db.queries.usage import UsageChange, add_usage
from graphstash_server.db.tables import artifacts, usage
from graphstash_server.eviction_order import aged
from graphstash_server.keys import StoredKey

__all__ = [
    "Candidate",
    "Toolchain",
    "evict_artifacts",
    "kept_bytes",
    "list_least_valuable",
    "list_of_toolchain",
    "list_toolchains",
    "list_unused",
    "renew_uses",
]


class Candidate(NamedTuple):
    """An artifact that may be evicted. `cost_bytes` is its share of a limit."""

    key: StoredKey
    digest: Digest
    cost_bytes: int
    compile_seconds: float
    toolchain: str
    last_used_at: datetime
    eviction_rank: float


class Toolchain(NamedTuple):
    """A compiler version that artifacts of a namespace and kind have, and their last use."""

    namespace: str
    kind: str
    toolchain: str
    last_used_at: datetime


_KEY = tuple(artifacts.primary_key)
_COLUMNS = (
    *_KEY,
    artifacts.c.sha256,
    artifacts.c.size_bytes,
    (artifacts.c.size_bytes + METADATA_BYTES).label("cost_bytes"),
    artifacts.c.compile_seconds,
    artifacts.c.toolchain,
    artifacts.c.last_used_at,
    artifacts.c.eviction_rank,
)


async def list_least_valuable(
    connection: AsyncConnection,
    *,
    namespace: str | None,
    now: datetime,
    limit: int,
    after: Candidate | None = None,
    spares_looked_up: bool = True,
) -> list[Candidate]:
    """Return a page of artifacts that are neither pinned nor withheld, least valuable first.

    `after` is the last artifact of the previous page. `spares_looked_up` leaves out artifacts that
    a look-up found recently. If it is False, only these are returned.
    """
    statement = _evictable(now, spares_looked_up=spares_looked_up)
    statement = statement.order_by(artifacts.c.eviction_rank, *_KEY).limit(limit)
    index = "ix_artifacts_rank"
    if namespace is not None:
        statement = statement.where(artifacts.c.namespace == namespace)
        index = "ix_artifacts_namespace_rank"
    statement = _in_order_of(statement, index)
    if after is not None:
        statement = statement.where(
            # Implied by the next condition, but databases use the index only for this one.
            artifacts.c.eviction_rank >= after.eviction_rank,
            tuple_(artifacts.c.eviction_rank, *_KEY) > (after.eviction_rank, *after.key.columns),
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
    """Return a page of evictable artifacts that were last used before a time, oldest use first."""
    statement = _evictable(now).where(artifacts.c.last_used_at < before)
    if namespace is not None:
        statement = statement.where(unindexed(artifacts.c.namespace) == namespace)
    if after is not None:
        statement = statement.where(*_is_used_after(after))
    statement = statement.order_by(artifacts.c.last_used_at, *_KEY).limit(limit)
    return await _candidates(connection, statement)


async def list_toolchains(connection: AsyncConnection) -> list[Toolchain]:
    """Return all toolchains by namespace, kind, and latest use first. One statement finds each, at
    the end of its part of an index.
    """
    found: list[Toolchain] = []
    row = await _LAST_TOOLCHAIN.fetch_one(connection, NOTHING)
    while row is not None:
        toolchain, namespace, kind, last_used_at = row
        found.append(Toolchain(namespace, kind, toolchain, last_used_at))
        # With the time, because SQLite would read all rows that are equal in the other columns.
        before = prefixed("before_", found[-1]._replace(last_used_at=_FIRST_TIME)._asdict())
        row = await _TOOLCHAIN_BEFORE.fetch_one(connection, before)
    found.sort(key=lambda each: each.last_used_at, reverse=True)
    return sorted(found, key=lambda each: (each.namespace, each.kind))


_FIRST_TIME = datetime.min.replace(tzinfo=UTC)
_BY_TOOLCHAIN = tuple(
    artifacts.c[name] for name in ("toolchain", "namespace", "kind", "last_used_at")
)
_LATEST_FIRST = select(*_BY_TOOLCHAIN).order_by(*(each.desc() for each in _BY_TOOLCHAIN)).limit(1)
_LAST_TOOLCHAIN = Prepared(lambda _: _LATEST_FIRST)
_TOOLCHAIN_BEFORE = Prepared(
    lambda _: _LATEST_FIRST.where(
        tuple_(*_BY_TOOLCHAIN)
        < tuple_(*(bindparam(f"before_{each.name}", type_=each.type) for each in _BY_TOOLCHAIN))
    )
)


async def list_of_toolchain(
    connection: AsyncConnection,
    wanted: Toolchain,
    *,
    now: datetime,
    limit: int,
    after: Candidate | None = None,
) -> list[Candidate]:
    """Return a page of evictable artifacts of a toolchain, oldest use first."""
    if wanted.kind not in KNOWN_KINDS:
        return []
    statement = select(*_COLUMNS).where(
        _is_evictable(now),
        artifacts.c.namespace == wanted.namespace,
        artifacts.c.kind == wanted.kind,
        artifacts.c.toolchain == wanted.toolchain,
    )
    if after is not None:
        statement = statement.where(*_is_used_after(after))
    statement = statement.order_by(artifacts.c.last_used_at, *_KEY).limit(limit)
    statement = _in_order_of(statement, "ix_artifacts_toolchain_namespace_kind_last_used_at")
    return await _candidates(connection, statement)


def _in_order_of(statement: Select[Any], index: str) -> Select[Any]:
    """Make SQLite use an index. With statistics, it prefers to read and sort all rows, because it
    does not regard the LIMIT.
    """
    return statement.with_hint(artifacts, f"INDEXED BY {index}", "sqlite")


def _is_used_after(place: Candidate) -> tuple[ColumnElement[bool], ...]:
    """Match artifacts after a place in the order of last use."""
    return (
        artifacts.c.last_used_at >= place.last_used_at,  # implied by the next one; for the index
        tuple_(artifacts.c.last_used_at, *_KEY) > (place.last_used_at, *place.key.columns),
    )


async def renew_uses(
    connection: AsyncConnection, *, since: datetime, until: datetime, limit: int
) -> int:
    """Set the last use of up to `limit` artifacts from within `[since, until)` to `until`. Return
    how many were found: if fewer than `limit`, none is left.
    """
    used = artifacts.c.last_used_at
    chosen = select(*_KEY).where(used >= since, used < until).limit(limit)
    keys = sorted(tuple(row) for row in await connection.execute(chosen))
    are_these = are_keys(artifacts, connection.dialect.name)
    for namespace, group in groupby(keys, key=itemgetter(0)):
        names = [name for _, *name in group]
        given = {
            "of_namespace": namespace,
            "fingerprints": [fingerprint for fingerprint, _, _ in names],
            "names": [" ".join(name) for name in names],
        }
        locked = select(*_KEY).where(are_these).order_by(*_KEY).with_for_update()
        await connection.execute(locked, given)
        statement = (
            update(artifacts)
            .where(are_these, (used < until).is_(true()))  # so that no index of `used` is read
            .values(last_used_at=until, eviction_rank=artifacts.c.density + aged(until))
        )
        await connection.execute(statement, given)
    return len(keys)


async def kept_bytes(connection: AsyncConnection, *, namespace: str | None, now: datetime) -> int:
    """Return the bytes that count against a limit but cannot be evicted, in one namespace or all:
    pinned and withheld artifacts, and manifests.
    """
    is_pinned = artifacts.c.pinned_until > now
    is_withheld_only = and_(
        artifacts.c.withheld_at.is_not(None),
        or_(artifacts.c.pinned_until.is_(None), artifacts.c.pinned_until <= now),
    )
    cost = func.sum(artifacts.c.size_bytes + METADATA_BYTES)
    total = 0
    for table, statement in (
        (artifacts, select(cost).where(is_pinned)),  # apart, as each condition has its own index
        (artifacts, select(cost).where(is_withheld_only)),
        (usage, select(func.sum(usage.c.manifest_bytes))),
    ):
        is_of_it = table.c.namespace == namespace if namespace is not None else true()
        total += int(await connection.scalar(statement.where(is_of_it)) or 0)
    return total


async def evict_artifacts(
    connection: AsyncConnection,
    chosen: Sequence[Candidate],
    *,
    now: datetime,
    spares_looked_up: bool = True,
) -> list[Candidate]:
    """Remove artifacts of one namespace, and mark their blobs for deletion.

    Locks the rows in key order. Keeps artifacts that were replaced, used, pinned or withheld after
    the choice.

    Returns:
        The removed artifacts.
    """
    if not chosen:
        return []
    namespace = chosen[0].key.namespace
    await share_blobs(connection, [candidate.digest for candidate in chosen])
    parameters = {
        "of_namespace": namespace,
        "fingerprints": [candidate.key.fingerprint for candidate in chosen],
    }
    locked = await _LOCK[spares_looked_up].fetch(connection, {**parameters, "now": now})
    unchanged = {tuple(row) for row in locked}
    evicted = [candidate for candidate in chosen if _version(candidate) in unchanged]
    if not evicted:
        return []
    metadata_bytes = await delete_rows(connection, [candidate.key for candidate in evicted])
    size_bytes = sum(candidate.digest.size_bytes for candidate in evicted)
    change = UsageChange(
        artifacts=-len(evicted),
        size_bytes=-size_bytes,
        metadata_bytes=-metadata_bytes,
        evictions=len(evicted),
        evicted_bytes=size_bytes,
    )
    await add_usage(connection, namespace, change)
    await add_deletions(connection, [candidate.digest for candidate in evicted])
    return evicted


def _version(candidate: Candidate) -> tuple[str, str, str, str, float]:
    """Return the values that differ if the artifact was replaced or used since the choice."""
    _, *name = candidate.key.columns
    return (name[0], name[1], name[2], candidate.digest.sha256, candidate.eviction_rank)


def _lock(dialect: str, *, spares_looked_up: bool) -> Select[Any]:
    now = bindparam("now", type_=artifacts.c.pinned_until.type)
    return (
        select(*_KEY[1:], artifacts.c.sha256, artifacts.c.eviction_rank)
        .where(
            artifacts.c.namespace == bindparam("of_namespace"),
            is_one_of(artifacts.c.fingerprint, "fingerprints", dialect),
            _is_evictable(now, spares_looked_up=spares_looked_up),
        )
        .order_by(*_KEY)
        .with_for_update()
    )


_LOCK = {
    True: Prepared(lambda dialect: _lock(dialect, spares_looked_up=True)),
    False: Prepared(lambda dialect: _lock(dialect, spares_looked_up=False)),
}


def _is_evictable(
    now: datetime | BindParameter[Any], *, spares_looked_up: bool = True
) -> ColumnElement[bool]:
    """Exclude pinned artifacts, and withheld artifacts, about which an administrator decides."""
    looked_up_until = artifacts.c.looked_up_until
    is_looked_up = and_(looked_up_until.is_not(None), looked_up_until > now)
    return and_(
        or_(artifacts.c.pinned_until.is_(None), artifacts.c.pinned_until <= now),
        artifacts.c.withheld_at.is_(None),
        not_(is_looked_up) if spares_looked_up else is_looked_up,
    )


def _evictable(now: datetime, *, spares_looked_up: bool = True) -> Select[Any]:
    is_evictable = _is_evictable(now, spares_looked_up=spares_looked_up)
    return select(*_COLUMNS).where(is_evictable, artifacts.c.kind.in_(KNOWN_KINDS))


async def _candidates(connection: AsyncConnection, statement: Select[Any]) -> list[Candidate]:
    return [
        Candidate(
            stored_key(found),
            Digest(found.sha256, found.size_bytes),
            found.cost_bytes,
            found.compile_seconds,
            found.toolchain,
            found.last_used_at,
            found.eviction_rank,
        )
        for found in await connection.execute(statement)
    ]
