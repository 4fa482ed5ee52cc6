"""AuditService: reads the audit log, and forgets what is too old.

It is written by whoever makes the change, in the same transaction (`queries.audit.add_audit`).
"""

from datetime import datetime
from typing import Final

from graphstash_schema import AuditLog, Namespace
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.audit import prune_audit, read_audit

__all__ = ["MAX_AUDIT_ENTRIES", "AuditService"]

MAX_AUDIT_ENTRIES: Final = 1000
"""Most entries of a page."""

_PRUNED_AT_ONCE = 1000
"""A transaction over a year's log would stop every writer of an SQLite database."""


class AuditService:
    """Safe for concurrent calls."""

    def __init__(self, *, database: Database) -> None:
        self._database = database

    async def read(
        self, *, limit: int, before: int | None = None, namespace: Namespace | None = None
    ) -> AuditLog:
        """A page of the log, newest first.

        Args:
            limit: most entries of the page, 1 to `MAX_AUDIT_ENTRIES`.
            before: `next_before` of the page before; None for the first.
            namespace: only what happened in it; None for everything.

        Raises:
            ServerError: 503.
        """
        async with self._database.reading() as connection:
            entries = await read_audit(
                connection, limit=limit + 1, before=before, namespace=namespace
            )
        page = tuple(entries[:limit])
        return AuditLog(entries=page, next_before=page[-1].id if len(entries) > limit else None)

    async def prune(self, *, older_than: datetime) -> int:
        """Forgets what was written before a time; says how many entries.

        Raises:
            ServerError: 503.
        """
        pruned = 0
        while True:
            async with self._database.writing() as connection:
                count = await prune_audit(connection, older_than=older_than, limit=_PRUNED_AT_ONCE)
            pruned += count
            if count < _PRUNED_AT_ONCE:
                return pruned
