"""SetAside: copies that the upstream lacks after a gap in its list of withdrawals.

The upstream may have withdrawn such a copy, or lost it when it was restored from a backup. So the
region neither serves nor deletes the copy. It withholds the copy with the reason `unconfirmed`,
like a reported artifact, until one of these happens:

- The upstream has the same bytes again: the region serves the copy.
- The upstream's list names the copy, or an administrator decides.
- A job or the upstream brings an artifact for the key, which replaces the copy in its commit
  (`services.artifacts.uploads`).
- The upstream still lacks the bytes when the region asks again, `KEPT_FOR` later: the region evicts
  the copy, unless it is pinned.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Final

from graphstash_schema import Digest, Namespace, ReportReason
from graphstash_server.actor import Actor
from graphstash_server.artifact import Artifact
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.artifacts import withhold_artifact
from graphstash_server.db.queries.reports import add_report, find_unconfirmed, list_unconfirmed
from graphstash_server.keys import StoredKey
from graphstash_server.services.artifacts.quarantine import QuarantineService
from graphstash_server.services.artifacts.service import ArtifactService
from graphstash_server.services.plausible_clock import PlausibleClock
from graphstash_server.upstream.client import UpstreamClient, UpstreamError

__all__ = ["KEPT_FOR", "UPSTREAM", "SetAside"]

KEPT_FOR: Final = timedelta(days=7)
"""Age at which the region evicts a copy that the upstream still lacks."""

_PAGE: Final = 200

UPSTREAM: Final = Actor("upstream")
"""The upstream in the audit log."""


@dataclass(kw_only=True, eq=False)
class SetAside:
    """Set copies aside, and serve them again. Safe for concurrent calls."""

    database: Database
    artifacts: ArtifactService
    quarantine: QuarantineService
    client: UpstreamClient
    plausible_clock: PlausibleClock

    async def add(self, copy: Artifact) -> None:
        """Set a copy aside, unless it is withheld or changed meanwhile."""
        now = self.plausible_clock()
        async with self.database.writing() as connection:
            if await withhold_artifact(connection, copy.key, copy.digest, now=now):
                await add_report(
                    connection,
                    copy.key,
                    copy.digest,
                    reason=ReportReason.UNCONFIRMED,
                    reported_by=UPSTREAM.name,
                    now=now,
                )
        self.artifacts.forget(copy.key)

    async def find(self, keys: Collection[StoredKey]) -> set[StoredKey]:
        """Return those keys of one namespace whose artifacts are set aside."""
        return await find_unconfirmed(self.database, sorted(keys)) if keys else set()

    async def confirm(self, key: StoredKey, digest: Digest) -> None:
        """Serve the copy of a key again if it is set aside and has these bytes."""
        copy = await self.artifacts.find_row(key)
        if copy is None or copy.withheld_at is None or copy.digest != digest:
            return
        if await self.find([key]):
            await self.quarantine.release(key, actor=UPSTREAM)

    async def evict_old(self) -> None:
        """Ask the upstream again about the copies that were set aside `KEPT_FOR` ago. Evict those
        that it lacks, and serve the others. Keep those about which the upstream does not answer.
        """
        before = self.plausible_clock.ago(KEPT_FOR)
        after: StoredKey | None = None
        while True:
            async with self.database.reading() as connection:
                page = await list_unconfirmed(connection, before=before, after=after, limit=_PAGE)
            for namespace, keys in groupby(page, key=lambda key: key.namespace):
                with suppress(UpstreamError):
                    await self._decide(namespace, list(keys))
            if len(page) < _PAGE:
                return
            after = page[-1]

    async def _decide(self, namespace: Namespace, keys: Sequence[StoredKey]) -> None:
        answer = await self.client.look_up(namespace, keys, is_comparison=True)
        found = {(each.key, each.digest) for each in answer.found}
        now = self.plausible_clock()
        lacked = []
        for copy in [await self.artifacts.find_row(key) for key in keys]:
            if copy is None or copy.withheld_at is None:
                continue
            if (copy.key.key, str(copy.digest)) in found:
                await self.confirm(copy.key, copy.digest)
            elif copy.pinned_until is None or copy.pinned_until <= now:
                lacked.append(copy)
        await self.artifacts.evict(lacked, actor=UPSTREAM, reason="lacked by the upstream")
