"""Statements on `namespaces`."""

import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple

from sqlalchemy import Boolean, Integer, delete, select, type_coerce
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Namespace, NamespaceInfo, NamespacePolicy, WriteMode
from graphstash_server.db.prepared import NOTHING, Prepared, Row, Source
from graphstash_server.db.queries.shared import upsert
from graphstash_server.db.tables import identifiers, namespaces

__all__ = [
    "PolicyRow",
    "delete_policy",
    "find_policy",
    "find_policy_mark",
    "list_policies",
    "list_rules",
    "put_policy",
]


class PolicyRow(NamedTuple):
    """A policy as stored."""

    namespace: str
    mode: str
    trusted: bool
    anonymous_read: bool
    limit_bytes: int | None
    max_artifact_bytes: int | None
    requests_per_second: float | None

    @property
    def policy(self) -> NamespacePolicy:
        """The parsed policy. An unknown mode of a later release becomes read-only."""
        return NamespacePolicy.model_construct(
            mode=WriteMode(self.mode) if self.mode in _MODES else WriteMode.READ_ONLY,
            trusted=bool(self.trusted),
            anonymous_read=bool(self.anonymous_read),
            limit_bytes=self.limit_bytes,
            max_artifact_bytes=self.max_artifact_bytes,
            requests_per_second=self.requests_per_second,
        )


_MODES: Final = frozenset(WriteMode)


async def list_rules(source: Source) -> Sequence[Row]:
    """Return every stored policy, ordered by namespace, in the field order of `PolicyRow`. The rows
    are not converted, because up to ten thousand policies are read every two seconds.
    """
    return await _LIST.fetch(source, NOTHING)


_RULES = tuple(namespaces.c[name] for name in PolicyRow._fields)
_LIST = Prepared(
    lambda _: select(
        *(
            type_coerce(column, Integer) if isinstance(column.type, Boolean) else column
            for column in _RULES
        )
    ).order_by(namespaces.c.namespace)
)


async def list_policies(connection: AsyncConnection) -> list[NamespaceInfo]:
    """Return the namespaces that have their own policy, ordered by name."""
    statement = select(*_RULES, namespaces.c.updated_at).order_by(namespaces.c.namespace)
    return [_info(found) for found in await connection.execute(statement)]


async def find_policy(connection: AsyncConnection, namespace: Namespace) -> NamespaceInfo | None:
    """Return the policy of a namespace, or None if it has none."""
    statement = select(*_RULES, namespaces.c.updated_at).where(namespaces.c.namespace == namespace)
    found = (await connection.execute(statement)).first()
    return None if found is None else _info(found)


async def find_policy_mark(source: Source) -> str | None:
    """Return the random mark of the last change of any policy."""
    found = await _MARK.fetch(source, NOTHING)
    return found[0][0] if found else None


_CHANGED: Final = "policies"
_MARK = Prepared(lambda _: select(identifiers.c.value).where(identifiers.c.name == _CHANGED))


async def put_policy(
    connection: AsyncConnection, namespace: Namespace, policy: NamespacePolicy, *, now: datetime
) -> None:
    """Set or replace the policy of a namespace."""
    await _mark_change(connection)
    values = {"namespace": namespace, **policy.model_dump(mode="json"), "updated_at": now}
    await connection.execute(upsert(connection, namespaces, values))


async def delete_policy(connection: AsyncConnection, namespace: Namespace) -> bool:
    """Remove the policy of a namespace. Return False if it had none."""
    await _mark_change(connection)
    statement = delete(namespaces).where(namespaces.c.namespace == namespace)
    return (await connection.execute(statement)).rowcount == 1


async def _mark_change(connection: AsyncConnection) -> None:
    mark = {"name": _CHANGED, "value": secrets.token_hex(8)}
    await connection.execute(upsert(connection, identifiers, mark))


def _info(found: Row) -> NamespaceInfo:
    *rules, updated_at = found
    row = PolicyRow(*rules)
    return NamespaceInfo.model_construct(
        namespace=Namespace(row.namespace), policy=row.policy, updated_at=updated_at
    )
