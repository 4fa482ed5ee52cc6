"""QuarantineService: withholds what was reported as wrong, until an admin decides.

A withheld artifact is absent to everybody who reads: no GET, lookup or lease finds it. Its key
takes no other artifact, its blob stays as evidence, counts as stored and is not evicted. An admin
releases it, or deletes it as any other.

Who may only read is counted and changes nothing: otherwise every reader could take the cache away
from all others. Nor does a report that a signature is missing, or of a key that the reporter does
not know: that says which keys the reporter trusts, and others trust others. A server that served
the artifact a moment ago may go on for two seconds (`services.recent`), and a link to S3 that was
given out before lasts for the rest of its 15 minutes.
"""

import logging
from datetime import datetime
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import (
    ArtifactMetadata,
    AuditAction,
    InvalidValueError,
    Namespace,
    ReportReason,
    ReportRequest,
    ReportResponse,
    Withheld,
    WithheldList,
)
from graphstash_server.actor import Actor
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.notifications import notify
from graphstash_server.db.queries.artifacts import ArtifactRow, find_stored
from graphstash_server.db.queries.audit import AuditRecord, add_audit
from graphstash_server.db.queries.keeping import release_artifact, withhold_artifact
from graphstash_server.db.queries.reports import (
    ReportRow,
    add_report,
    drop_report,
    list_reports,
)
from graphstash_server.keys import StoredKey
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.artifacts import ArtifactService
from graphstash_server.services.waiting import Waiters, Wake

__all__ = ["QuarantineService"]

_LOGGER = logging.getLogger(__name__)

_MOST: Final = 1000
"""Artifacts of one list."""


class QuarantineService:
    """Used from the event loop only."""

    def __init__(
        self,
        *,
        database: Database,
        artifacts: ArtifactService,
        accounting: Accounting,
        waiters: Waiters,
        clock: Clock,
    ) -> None:
        self._database = database
        self._artifacts = artifacts
        self._accounting = accounting
        self._waiters = waiters
        self._clock = clock

    async def report(
        self, key: StoredKey, report: ReportRequest, *, actor: Actor, may_withhold: bool
    ) -> ReportResponse:
        """Takes a report; it withholds the artifact if that still has the reported blob.

        Args:
            key: of the artifact.
            report: what was found.
            actor: who reports.
            may_withhold: whether the word of whoever reports is enough.

        Raises:
            ServerError: 503.
        """
        now = self._clock()
        async with self._database.writing() as connection:
            stored = await find_stored(connection, key)
            if stored is None or str(stored.digest) != report.digest:
                return ReportResponse(found=False, withheld=False)
            is_withheld = stored.withheld_at is not None
            if may_withhold and report.reason.is_about_artifact and not is_withheld:
                is_withheld = await withhold_artifact(connection, key, stored.digest, now=now)
                if is_withheld:
                    await _write_down(
                        connection, stored, reason=report.reason, actor=actor, now=now
                    )
                else:  # between the two statements somebody withheld, replaced or deleted it
                    last = await find_stored(connection, key)
                    if last is None or last.digest != stored.digest:
                        return ReportResponse(found=False, withheld=False)
                    is_withheld = last.withheld_at is not None
        self._accounting.count_reported()
        if is_withheld:
            self._artifacts.forget(key)
        # Whoever may only read could fill the log.
        _LOGGER.log(
            logging.WARNING if is_withheld else logging.DEBUG,
            "%s in %s was reported as %s by %s: %s",
            key.key,
            key.namespace,
            report.reason,
            actor.name,
            "withheld" if is_withheld else "served on",
        )
        return ReportResponse(found=True, withheld=is_withheld)

    async def release(self, key: StoredKey, *, actor: Actor) -> bool:
        """Serves an artifact again, and wakes who waits for it; False when it was not withheld.

        Raises:
            ServerError: 503.
        """
        async with self._database.writing() as connection:
            digest = await release_artifact(connection, key)
            if digest is None:
                return False
            news = Wake.ready(key, digest)
            await drop_report(connection, key)
            await notify(connection, [news.payload])
            record = AuditRecord.of_artifact(self._clock(), actor, AuditAction.RELEASE, key, digest)
            await add_audit(connection, [record])
        self._waiters.wake(news)
        return True

    async def delete(self, key: StoredKey, *, actor: Actor) -> bool:
        """Deletes a withheld artifact; False when it is not withheld.

        Raises:
            ServerError: 503.
        """
        async with self._database.reading() as connection:
            stored = await find_stored(connection, key)
        if stored is None or stored.withheld_at is None:
            return False
        return await self._artifacts.delete(key, actor=actor)

    async def list_withheld(self, namespace: Namespace | None = None) -> WithheldList:
        """What is withheld, the newest first, of one namespace or of all; at most 1,000.

        Raises:
            ServerError: 503.
        """
        async with self._database.reading() as connection:
            rows = await list_reports(connection, namespace=namespace, limit=_MOST)
        return WithheldList(artifacts=tuple(_withheld(row) for row in rows))


async def _write_down(
    connection: AsyncConnection,
    stored: ArtifactRow,
    *,
    reason: ReportReason,
    actor: Actor,
    now: datetime,
) -> None:
    """Why an artifact is withheld, and who did that."""
    await add_report(
        connection, stored.key, stored.digest, reason=reason, reported_by=actor.name, now=now
    )
    record = AuditRecord.of_artifact(
        now, actor, AuditAction.WITHHOLD, stored.key, f"{reason} {stored.digest}"
    )
    await add_audit(connection, [record])


def _withheld(row: ReportRow) -> Withheld:
    return Withheld(
        namespace=row.key.namespace,
        key=row.key.key,
        digest=str(row.digest),
        size_bytes=row.digest.size_bytes,
        producer=_producer(row.metadata_header),
        reason=row.reason,
        reported_by=row.reported_by,
        reported_at=row.reported_at,
    )


def _producer(metadata_header: str) -> str:
    """As the publisher said; empty when nothing can be read."""
    try:
        return ArtifactMetadata.from_header(metadata_header).producer if metadata_header else ""
    except InvalidValueError:
        return ""
