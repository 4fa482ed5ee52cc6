"""QuarantineService: withholds artifacts that were reported as wrong until they are reviewed.

A withheld artifact is absent for every reader: no GET, lookup or lease finds it. Its key accepts no
other artifact; its blob stays as evidence, counts as stored and is not evicted. An administrator
releases it, or deletes it like any other.

A report alone proves nothing, or a single writer could disable the cache for all others. It
withholds an artifact when one of these holds:

    the server finds by itself that the blob is no envelope, or the envelope of another key
    two parties who may write reported the same blob (see `Principal.party`)
    an administrator of the namespace reported it, who may delete it as well

A blob that does not have its digest any more is dropped instead: see `ArtifactService.verify`. The
report of a caller who may only read is counted and changes nothing, and so does the report that a
signature is missing or its key unknown: that depends on the keys that the reporter trusts. Another
server may serve the artifact for two more seconds (`RecentRows`), and an earlier link to S3 stays
valid for the rest of its 15 minutes.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Final

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
from graphstash_schema.envelope import MAX_ENVELOPE_HEAD_BYTES, names_key, read_envelope_head
from graphstash_server.actor import Actor
from graphstash_server.artifact import Artifact
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.notifications import notify
from graphstash_server.db.queries.artifacts import (
    find_stored,
    release_artifact,
    withhold_artifact,
)
from graphstash_server.db.queries.audit import AuditRecord, add_audit
from graphstash_server.db.queries.locks import lock_name
from graphstash_server.db.queries.reports import (
    ReportRow,
    add_report,
    drop_report,
    find_reporter,
    list_reports,
)
from graphstash_server.keys import StoredKey
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.artifacts.service import ArtifactService
from graphstash_server.services.wait_queue import Notification, WaitQueue

__all__ = ["QuarantineService"]

_LOGGER = logging.getLogger(__name__)

_MOST: Final = 1000
"""Artifacts of one list."""

_NOTHING: Final = ReportResponse(found=False, withheld=False)


@dataclass(kw_only=True, eq=False)
class QuarantineService:
    """Withholds, releases and lists artifacts."""

    database: Database
    artifacts: ArtifactService
    accounting: Accounting
    wait_queue: WaitQueue
    clock: Clock

    async def report(
        self,
        key: StoredKey,
        report: ReportRequest,
        *,
        actor: Actor,
        party: str,
        may_withhold: bool,
        may_decide: bool = False,
    ) -> ReportResponse:
        """Handles a report of the blob that is stored under a key.

        Args:
            key: of the artifact.
            report: what was found.
            actor: who reports.
            party: who that is where callers are counted, see `Principal.party`.
            may_withhold: whether the caller may write.
            may_decide: whether the caller may delete, so that nobody else has to agree.
        """
        stored = await find_stored(self.database, key)
        if stored is None or str(stored.digest) != report.digest:
            return _NOTHING
        counts = may_withhold and report.reason.is_about_artifact
        is_new = False
        if counts and stored.withheld_at is None:
            if (await self.artifacts.verify(key)).healed:
                return ReportResponse(found=True, withheld=False)
            is_agreed = may_decide or await self._is_foreign(stored)
            found, is_new = await self._vote(
                stored, report.reason, actor, party=party, is_agreed=is_agreed
            )
            if found is None:
                return _NOTHING
            stored = found
        is_withheld = stored.withheld_at is not None
        self.accounting.count_reported()
        if is_withheld:
            self.artifacts.forget(key)
        # Neither a caller who may only read nor one who repeats a report may fill the log.
        _LOGGER.log(
            logging.WARNING if is_new else logging.DEBUG,
            "%s in %s was reported as %s by %s: %s",
            key.key,
            key.namespace,
            report.reason,
            actor.name,
            "withheld" if is_withheld else "served until somebody else reports it, too",
        )
        return ReportResponse(found=True, withheld=is_withheld)

    async def _is_foreign(self, stored: Artifact) -> bool:
        """Whether the blob is no envelope, or the envelope of another key. Two reads have to say
        so, because bytes are also damaged on their way from the store.
        """
        for _ in range(2):
            start = await self.artifacts.read_start(stored, most_bytes=MAX_ENVELOPE_HEAD_BYTES)
            with suppress(ValueError):
                if names_key(read_envelope_head(BytesIO(start).read), stored.key.key):
                    return False
        return True

    async def _vote(
        self,
        stored: Artifact,
        reason: ReportReason,
        actor: Actor,
        *,
        party: str,
        is_agreed: bool,
    ) -> tuple[Artifact | None, bool]:
        """Withholds an artifact if that is agreed, or if another writer reported the same blob;
        else it stores the report, so that the next one agrees.

        Returns:
            The artifact as it is then, None when it was replaced or deleted; and whether the report
            was new.
        """
        key, now = stored.key, self.clock()
        async with self.database.writing() as connection:
            await lock_name(connection, f"report {key.namespace}/{key.key}")
            last = await find_stored(connection, key)
            if last is None or last.digest != stored.digest:
                return None, False
            if last.withheld_at is not None:
                return last, False
            earlier = await find_reporter(connection, key, stored.digest)
            if not is_agreed and earlier == party:
                return last, False
            await add_report(
                connection, key, stored.digest, reason=reason, reported_by=party, now=now
            )
            if not is_agreed and earlier is None:
                return last, True
            if not await withhold_artifact(connection, key, stored.digest, now=now):
                return None, False  # it was replaced or deleted between two statements
            also = f", as {earlier} had reported" if not is_agreed else ""
            detail = f"{reason} {stored.digest}{also}"
            record = AuditRecord.of_artifact(now, actor, AuditAction.WITHHOLD, key, detail)
            await add_audit(connection, [record])
            return await find_stored(connection, key), True

    async def release(self, key: StoredKey, *, actor: Actor) -> bool:
        """Serves an artifact again and wakes its waiters; False when it was not withheld."""
        async with self.database.writing() as connection:
            digest = await release_artifact(connection, key)
            if digest is None:
                return False
            news = Notification.ready(key, digest)
            await drop_report(connection, key)
            await notify(connection, [news.payload])
            record = AuditRecord.of_artifact(self.clock(), actor, AuditAction.RELEASE, key, digest)
            await add_audit(connection, [record])
        self.wait_queue.wake(news)
        return True

    async def delete(self, key: StoredKey, *, actor: Actor) -> bool:
        """Deletes a withheld artifact; False when it is not withheld."""
        stored = await find_stored(self.database, key)
        if stored is None or stored.withheld_at is None:
            return False
        return await self.artifacts.delete(key, actor=actor)

    async def list_withheld(self, namespace: Namespace | None = None) -> WithheldList:
        """Withheld artifacts, newest report first, of one namespace or of all; at most 1,000."""
        async with self.database.reading() as connection:
            rows = await list_reports(connection, namespace=namespace, limit=_MOST)
        return WithheldList(artifacts=tuple(_withheld(row) for row in rows))


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
    """The producer in the metadata; empty when it cannot be read."""
    try:
        return ArtifactMetadata.from_header(metadata_header).producer if metadata_header else ""
    except InvalidValueError:
        return ""
