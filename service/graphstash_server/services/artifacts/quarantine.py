"""QuarantineService: withholds artifacts that were reported as wrong until they are reviewed.

A withheld artifact is absent for GET and for leases, and a lookup lists it as withdrawn. Its key
accepts no other artifact. Its blob stays as evidence, counts as stored and is not evicted. An
administrator releases the artifact, or deletes it like any other artifact.

A report alone proves nothing. If it did, a single writer could disable the cache for all other
callers. A report withholds an artifact if one of these holds:

- The server itself finds that the blob is not an envelope, or is the envelope of another key.
- Two parties with write access reported the same blob (see `Principal.party`).
- The reporter is an administrator of the namespace, who may delete the artifact anyway.

If a blob no longer matches its digest, its artifact is dropped instead (see
`ArtifactService.verify`). A report from a caller with read access only is counted and changes
nothing. The same holds for a report that a signature is missing or its key unknown, because that
depends on the keys that the reporter trusts.

Other worker processes may serve the artifact for two more seconds (`RecentRows`). An earlier link
to S3 stays valid for the rest of its 15 minutes.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Final

from graphstash_schema import (
    AuditAction,
    Namespace,
    ReportReason,
    ReportRequest,
    ReportResponse,
    Withheld,
    WithheldList,
)
from graphstash_schema.envelope import MAX_ENVELOPE_HEAD_BYTES, names_key, read_envelope_head
from graphstash_schema.withdrawals import WithdrawalCause
from graphstash_server.actor import Actor
from graphstash_server.artifact import Artifact, DescribedArtifact
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
    drop_reports,
    find_reporter,
    list_reports,
)
from graphstash_server.db.queries.withdrawals import add_withdrawals
from graphstash_server.keys import StoredKey
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.artifacts.service import ArtifactService
from graphstash_server.services.wait_queue import Notification, WaitQueue

__all__ = ["QuarantineService"]

_LOGGER = logging.getLogger(__name__)

_MAX_LISTED: Final = 1000

_NOT_FOUND: Final = ReportResponse(found=False, withheld=False)


@dataclass(kw_only=True, eq=False)
class QuarantineService:
    """Withhold, release and list artifacts."""

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
        """Handle a report about the blob that is stored under a key.

        Args:
            key: key of the artifact.
            report: digest of the blob, and the reason.
            actor: caller that reports.
            party: identity under which reports are counted, see `Principal.party`.
            may_withhold: whether the caller has write access.
            may_decide: whether the caller may delete the artifact. Its report alone suffices.
        """
        stored = await find_stored(self.database, key)
        if stored is None or str(stored.digest) != report.digest:
            return _NOT_FOUND
        may_change = may_withhold and report.reason.is_about_artifact
        is_new = False
        if may_change and stored.withheld_at is None:
            if (await self.artifacts.verify(key)).healed:
                return ReportResponse(found=True, withheld=False)
            is_decisive = may_decide or await self._is_foreign(stored)
            found, is_new = await self._vote(
                stored, report.reason, actor, party=party, is_decisive=is_decisive
            )
            if found is None:
                return _NOT_FOUND
            stored = found
        is_withheld = stored.withheld_at is not None
        self.accounting.count_reported()
        if is_withheld:
            self.artifacts.forget(key)
        # Callers with read access only, and repeated reports, must not fill the log.
        _LOGGER.log(
            logging.WARNING if is_new else logging.DEBUG,
            "%s in %s was reported as %s by %s: %s",
            key.key,
            key.namespace,
            report.reason,
            actor.name,
            "withheld" if is_withheld else "served until a second writer reports it",
        )
        return ReportResponse(found=True, withheld=is_withheld)

    async def _is_foreign(self, stored: Artifact) -> bool:
        """Return whether two reads agree that the blob is not an envelope of this key. A single
        read may be damaged on its way from the store.
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
        is_decisive: bool,
    ) -> tuple[Artifact | None, bool]:
        """Withhold an artifact if the report is decisive or another party reported the same blob.
        Otherwise store the report, so that a report by another party withholds the artifact.

        Returns:
            The artifact (None if replaced or deleted meanwhile), and whether the report was new.
        """
        key, now = stored.key, self.clock()
        async with self.database.writing() as connection:
            await lock_name(connection, f"report {key.namespace}/{key.key}")
            current = await find_stored(connection, key)
            if current is None or current.digest != stored.digest:
                return None, False
            if current.withheld_at is not None:
                return current, False
            earlier = await find_reporter(connection, key, stored.digest)
            if not is_decisive and earlier == party:
                return current, False
            await add_report(
                connection, key, stored.digest, reason=reason, reported_by=party, now=now
            )
            if not is_decisive and earlier is None:
                return current, True
            if not await withhold_artifact(connection, key, stored.digest, now=now):
                return None, False  # the artifact was replaced or deleted between two statements
            agreement = f", as {earlier} had reported" if not is_decisive else ""
            detail = f"{reason} {stored.digest}{agreement}"
            record = AuditRecord.of_artifact(now, actor, AuditAction.WITHHOLD, key, detail)
            await add_audit(connection, [record])
            await add_withdrawals(
                connection, [(key, stored.digest)], cause=WithdrawalCause.WITHHELD, now=now
            )
            return await find_stored(connection, key), True

    async def release(self, key: StoredKey, *, actor: Actor) -> bool:
        """Serve an artifact again and wake its waiters. Return False if it was not withheld."""
        async with self.database.writing() as connection:
            digest = await release_artifact(connection, key)
            if digest is None:
                return False
            notification = Notification.ready(key, digest)
            await drop_reports(connection, [key])
            await notify(connection, [notification.payload])
            record = AuditRecord.of_artifact(self.clock(), actor, AuditAction.RELEASE, key, digest)
            await add_audit(connection, [record])
        self.wait_queue.wake(notification)
        return True

    async def delete(self, key: StoredKey, *, actor: Actor) -> bool:
        """Delete a withheld artifact. Return False if it is not withheld."""
        stored = await find_stored(self.database, key)
        if stored is None or stored.withheld_at is None:
            return False
        return await self.artifacts.delete(key, actor=actor)

    async def list_withheld(self, namespace: Namespace | None = None) -> WithheldList:
        """Return at most 1,000 withheld artifacts of one namespace or all, newest report first."""
        async with self.database.reading() as connection:
            rows = await list_reports(connection, namespace=namespace, limit=_MAX_LISTED)
        return WithheldList(artifacts=tuple(_withheld(row) for row in rows))


def _withheld(row: ReportRow) -> Withheld:
    artifact = row.artifact
    return Withheld(
        namespace=artifact.key.namespace,
        key=artifact.key.key,
        digest=str(artifact.digest),
        size_bytes=artifact.digest.size_bytes,
        producer=DescribedArtifact(artifact).producer,
        reason=row.reason,
        reported_by=row.reported_by,
        reported_at=row.reported_at,
    )
