"""AuditService: reads the audit log, and deletes old entries.

The transaction that makes a change adds the entry (`queries.audit.add_audit`).
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from graphstash_schema import AuditLog, Namespace
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.audit import prune_audit, read_audit

__all__ = ["MAX_AUDIT_ENTRIES", "AuditService"]

MAX_AUDIT_ENTRIES: Final = 1000
"""Maximum entries of a page."""

_PRUNED_AT_ONCE = 1000
"""Entries deleted per transaction. Deleting a year's log at once would block SQLite's writers."""


@dataclass(kw_only=True, eq=False)
class AuditService:
    """Safe for concurrent calls."""

    database: Database

    async def read(
        self, *, limit: int, before: int | None = None, namespace: Namespace | None = None
    ) -> AuditLog:
        """Return a page of 1 to `MAX_AUDIT_ENTRIES` entries, newest first, of one namespace or all.
        `before` is `next_before` of the previous page.
        """
        async with self.database.reading() as connection:
            entries = await read_audit(
                connection, limit=limit + 1, before=before, namespace=namespace
            )
        page = tuple(entries[:limit])
        return AuditLog(entries=page, next_before=page[-1].id if len(entries) > limit else None)

    async def prune(self, *, older_than: datetime) -> int:
        """Delete the entries written before a time. Return their number."""
        pruned = 0
        while True:
            async with self.database.writing() as connection:
                count = await prune_audit(connection, older_than=older_than, limit=_PRUNED_AT_ONCE)
            pruned += count
            if count < _PRUNED_AT_ONCE:
                return pruned
