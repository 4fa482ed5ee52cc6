"""Statements on `audit`."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple

from sqlalchemy import delete, func, insert, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import AuditAction, AuditEntry, Namespace
from graphstash_server.actor import Actor
from graphstash_server.db.prepared import Prepared, Transaction
from graphstash_server.db.queries.shared import new_values
from graphstash_server.db.tables import audit
from graphstash_server.keys import StoredKey

__all__ = ["AuditRecord", "add_audit", "find_removal", "prune_audit", "read_audit"]

_REMOVALS: Final = (AuditAction.EVICT.value, AuditAction.DELETE.value, AuditAction.WITHHOLD.value)

_RETURNS: Final = (AuditAction.PUT.value, AuditAction.OVERWRITE.value, AuditAction.RELEASE.value)
"""Actions after which a look-up finds the artifact."""


class AuditRecord(NamedTuple):
    """One change for the audit log. `subject` is what was changed, such as an artifact's key or a
    token's ID, in at most 300 characters.
    """

    at: datetime
    actor: Actor
    action: AuditAction
    namespace: Namespace | None
    subject: str
    detail: str = ""

    @classmethod
    def of_artifact(
        cls, at: datetime, actor: Actor, action: AuditAction, key: StoredKey, detail: object
    ) -> "AuditRecord":
        """Return the record of a change to an artifact. `detail` must contain its digest."""
        return cls(at, actor, action, key.namespace, subject=str(key.key), detail=str(detail))


async def add_audit(connection: Transaction, entries: Sequence[AuditRecord]) -> None:
    """Log changes. Call it in the transaction that makes them."""
    if not entries:
        return
    await _ADD.execute_all(
        connection,
        [
            {
                "new_at": entry.at,
                "new_actor": entry.actor.name,
                "new_action": entry.action.value,
                "new_namespace": entry.namespace,
                "new_subject": entry.subject,
                "new_detail": entry.detail,
                "new_request_id": entry.actor.request_id,
                "new_server_request_id": entry.actor.server_request_id,
                "new_address": entry.actor.address,
            }
            for entry in entries
        ],
    )


_ADD = Prepared(
    lambda _: insert(audit).values(
        new_values(audit, (column.name for column in audit.c if not column.primary_key))
    )
)


async def read_audit(
    connection: AsyncConnection,
    *,
    limit: int,
    before: int | None = None,
    namespace: str | None = None,
) -> list[AuditEntry]:
    """Return the newest `limit` entries with an ID below `before`, of one namespace or of all."""
    statement = select(audit).order_by(audit.c.id.desc()).limit(limit)
    if before is not None:
        statement = statement.where(audit.c.id < before)
    if namespace is not None:
        statement = statement.where(audit.c.namespace == namespace)
    return [
        AuditEntry.model_validate(result._asdict())
        for result in await connection.execute(statement)
    ]


async def find_removal(
    connection: AsyncConnection, key: StoredKey, *, since: datetime, looked_at: int
) -> AuditEntry | None:
    """Return the removal that made a run miss an artifact, or None if the log has none.

    Searches the `looked_at` newest entries of the namespace, because no index has the subject. Only
    entries before the first upload or release after `since`, the start of the run, can explain the
    miss. If the last of these is not a removal, the artifact was not missing.
    """
    latest = (
        select(audit)
        .where(audit.c.namespace == key.namespace)
        .order_by(audit.c.id.desc())
        .limit(looked_at)
        .subquery()
    )
    of_key = (
        select(latest)
        .where(latest.c.subject == str(key.key), latest.c.action.in_(_REMOVALS + _RETURNS))
        .cte()
    )
    first_return = (
        select(func.min(of_key.c.id))
        .where(of_key.c.action.in_(_RETURNS), of_key.c.at > since)
        .scalar_subquery()
    )
    statement = (
        select(of_key)
        .where(or_(first_return.is_(None), of_key.c.id < first_return))
        .order_by(of_key.c.id.desc())
        .limit(1)
    )
    found = (await connection.execute(statement)).first()
    if found is None or found.action not in _REMOVALS:
        return None
    return AuditEntry.model_validate(found._asdict())


async def prune_audit(connection: AsyncConnection, *, older_than: datetime, limit: int) -> int:
    """Delete up to `limit` entries written before a time. Return their number.

    Deletes only IDs below that of the oldest entry that stays. An entry that was written while the
    clock was behind has a higher ID.
    """
    kept = select(audit.c.id).where(audit.c.at >= older_than).order_by(audit.c.at).limit(1)
    first_kept = kept.scalar_subquery()
    oldest = (
        select(audit.c.id)
        .where(audit.c.at < older_than, or_(first_kept.is_(None), audit.c.id < first_kept))
        .order_by(audit.c.at)
        .limit(limit)
    )
    return (await connection.execute(delete(audit).where(audit.c.id.in_(oldest)))).rowcount
