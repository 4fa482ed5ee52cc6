"""Statements on `reports`."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import and_, delete, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Digest, Namespace, ReportReason
from graphstash_server.artifact import Artifact
from graphstash_server.db.prepared import Prepared, Source, Transaction
from graphstash_server.db.queries.shared import (
    KEY_COLUMNS,
    KEYED_ARTIFACT_COLUMNS,
    KNOWN_KINDS,
    are_keys,
    described_of,
    is_key,
    key_values,
    keys_parameters,
    same_key,
    stored_key,
    upsert,
)
from graphstash_server.db.tables import artifacts, reports
from graphstash_server.keys import StoredKey

__all__ = [
    "ReportRow",
    "add_report",
    "count_withheld",
    "drop_reports",
    "find_reporter",
    "find_unconfirmed",
    "list_reports",
    "list_unconfirmed",
]


class ReportRow(NamedTuple):
    """A withheld artifact and the report that withholds it."""

    artifact: Artifact
    reason: ReportReason
    reported_by: str
    reported_at: datetime


async def add_report(
    connection: AsyncConnection,
    key: StoredKey,
    digest: Digest,
    *,
    reason: ReportReason,
    reported_by: str,
    now: datetime,
) -> None:
    """Store the report on an artifact. It replaces an earlier one, of any blob."""
    values = {
        **key_values(key),
        "sha256": digest.sha256,
        "reason": reason.value,
        "reported_by": reported_by,
        "reported_at": now,
    }
    await connection.execute(upsert(connection, reports, values))


async def find_reporter(connection: AsyncConnection, key: StoredKey, digest: Digest) -> str | None:
    """Return the party that last reported this blob of the artifact, or None."""
    reporter: str | None = await connection.scalar(
        select(reports.c.reported_by).where(is_key(reports, key), reports.c.sha256 == digest.sha256)
    )
    return reporter


async def find_unconfirmed(source: Source, keys: Sequence[StoredKey]) -> set[StoredKey]:
    """Return those keys of one namespace that a region has reported as unconfirmed."""
    found = await _UNCONFIRMED.fetch(source, keys_parameters(keys))
    wanted = {key.columns: key for key in keys}
    return {wanted[columns] for each in found if (columns := tuple(each)) in wanted}


_UNCONFIRMED = Prepared(
    lambda dialect: select(*(reports.c[name] for name in KEY_COLUMNS)).where(
        are_keys(reports, dialect), reports.c.reason == ReportReason.UNCONFIRMED.value
    )
)


async def list_unconfirmed(
    connection: AsyncConnection, *, before: datetime, after: StoredKey | None, limit: int
) -> list[StoredKey]:
    """Return a page of the keys that a region reported as unconfirmed before a time, in order."""
    columns = [reports.c[name] for name in KEY_COLUMNS]
    statement = select(*columns).where(
        reports.c.reason == ReportReason.UNCONFIRMED.value,
        reports.c.reported_at < before,
        reports.c.kind.in_(KNOWN_KINDS),
    )
    if after is not None:
        statement = statement.where(tuple_(*columns) > after.columns)
    found = await connection.execute(statement.order_by(*columns).limit(limit))
    return [stored_key(each) for each in found]


async def drop_reports(connection: Transaction, keys: Sequence[StoredKey]) -> None:
    """Delete the reports on artifacts of one namespace: an administrator released them, or they
    were deleted or replaced.
    """
    await _DROP.execute(connection, keys_parameters(keys))


_DROP = Prepared(lambda dialect: delete(reports).where(are_keys(reports, dialect)))


async def list_reports(
    connection: AsyncConnection, *, namespace: Namespace | None, limit: int
) -> Sequence[ReportRow]:
    """Return at most `limit` withheld artifacts of one namespace or all, newest report first: the
    report that withholds an artifact is its last one.
    """
    chosen = (
        select(*KEYED_ARTIFACT_COLUMNS)
        .where(artifacts.c.withheld_at.is_not(None), artifacts.c.kind.in_(KNOWN_KINDS))
        .order_by(artifacts.c.withheld_at.desc(), *_KEY)
        .limit(limit)
    )
    if namespace is not None:
        chosen = chosen.where(artifacts.c.namespace == namespace)
    withheld = chosen.subquery()
    is_same = and_(same_key(reports, withheld), reports.c.sha256 == withheld.c.sha256)
    # Instead of a join, for which PostgreSQL may read all reports.
    reported = (
        select(reports.c[name]).where(is_same).scalar_subquery().label(name)
        for name in ("reason", "reported_by", "reported_at")
    )
    statement = select(withheld, *reported).order_by(
        withheld.c.withheld_at.desc(), *(withheld.c[name] for name in KEY_COLUMNS)
    )
    found = await connection.execute(statement)
    return [_row(each) for each in found if each.reason is not None]


_KEY = tuple(artifacts.c[name] for name in KEY_COLUMNS)


async def count_withheld(connection: AsyncConnection) -> dict[str, int]:
    """Return the number of withheld artifacts by namespace, without zeros."""
    statement = (
        select(artifacts.c.namespace, func.count())
        .where(artifacts.c.withheld_at.is_not(None))
        .group_by(artifacts.c.namespace)
    )
    return {found[0]: int(found[1]) for found in await connection.execute(statement)}


def _row(found: Any) -> ReportRow:
    """Build a row. A reason from a later release becomes CORRUPT."""
    is_known = found.reason in set(ReportReason)
    return ReportRow(
        described_of(found).artifact,
        ReportReason(found.reason) if is_known else ReportReason.CORRUPT,
        found.reported_by,
        found.reported_at,
    )
