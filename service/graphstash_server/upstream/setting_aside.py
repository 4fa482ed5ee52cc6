"""SetAside: copies that the upstream lacks after a gap in its list of withdrawals.

The upstream may have withdrawn such a copy, or lost it when it was restored from a backup. So the
region neither serves nor deletes the copy. It withholds the copy with the reason `unconfirmed`,
like a reported artifact, until one of these happens:

- The upstream has the same bytes again: the region serves the copy.
- The upstream's list names the copy, or an administrator decides.
- A job or the upstream brings an artifact for the key, which replaces the copy in its commit
  (`services.artifacts.uploads`).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from graphstash_schema import Digest, ReportReason
from graphstash_server.actor import Actor
from graphstash_server.artifact import Artifact
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.artifacts import withhold_artifact
from graphstash_server.db.queries.reports import add_report, find_unconfirmed
from graphstash_server.keys import StoredKey
from graphstash_server.services.artifacts.quarantine import QuarantineService
from graphstash_server.services.artifacts.service import ArtifactService

__all__ = ["UPSTREAM", "SetAside"]

UPSTREAM: Final = Actor("upstream")
"""The upstream in the audit log."""


@dataclass(kw_only=True, eq=False)
class SetAside:
    """Set copies aside, and serve them again. Safe for concurrent calls."""

    database: Database
    artifacts: ArtifactService
    quarantine: QuarantineService
    clock: Clock

    async def add(self, copy: Artifact) -> None:
        """Set a copy aside, unless it is withheld or changed meanwhile."""
        now = self.clock()
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
