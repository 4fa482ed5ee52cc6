"""Statements on `namespaces`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import Boolean, Integer, String, delete, select, type_coerce
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.types import TypeEngine

from graphstash_schema import Namespace, NamespaceInfo, NamespacePolicy, WriteMode
from graphstash_server.db.prepared import NOTHING, Prepared, Row, Source
from graphstash_server.db.queries.shared import insert_into
from graphstash_server.db.tables import UtcTime, namespaces

__all__ = [
    "PolicyRow",
    "delete_policy",
    "find_policy",
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
    updated_at: Any

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
_READ_AS: Final[Mapping[type, TypeEngine[Any]]] = {Boolean: Integer(), UtcTime: String()}
_LIST = Prepared(
    lambda _: select(
        *(type_coerce(column, _READ_AS.get(type(column.type), column.type)) for column in _RULES)
    ).order_by(namespaces.c.namespace)
)


async def list_policies(connection: AsyncConnection) -> list[NamespaceInfo]:
    """Return the namespaces that have their own policy, ordered by name."""
    statement = select(*_RULES).order_by(namespaces.c.namespace)
    return [_info(found) for found in await connection.execute(statement)]


async def find_policy(connection: AsyncConnection, namespace: Namespace) -> NamespaceInfo | None:
    """Return the policy of a namespace, or None if it has none."""
    statement = select(*_RULES).where(namespaces.c.namespace == namespace)
    found = (await connection.execute(statement)).first()
    return None if found is None else _info(found)


async def put_policy(
    connection: AsyncConnection, namespace: Namespace, policy: NamespacePolicy, *, now: datetime
) -> None:
    """Set or replace the policy of a namespace."""
    statement = insert_into(connection, namespaces).values(
        namespace=namespace, **policy.model_dump(mode="json"), updated_at=now
    )
    statement = statement.on_conflict_do_update(
        index_elements=[namespaces.c.namespace],
        set_={
            column.name: statement.excluded[column.name]
            for column in namespaces.c
            if not column.primary_key
        },
    )
    await connection.execute(statement)


async def delete_policy(connection: AsyncConnection, namespace: Namespace) -> bool:
    """Remove the policy of a namespace. Return False if it had none."""
    statement = delete(namespaces).where(namespaces.c.namespace == namespace)
    return (await connection.execute(statement)).rowcount == 1


def _info(found: Row) -> NamespaceInfo:
    row = PolicyRow(*found)
    return NamespaceInfo.model_construct(
        namespace=Namespace(row.namespace), policy=row.policy, updated_at=row.updated_at
    )
