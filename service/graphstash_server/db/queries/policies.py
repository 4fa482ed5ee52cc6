"""Statements on `namespaces`."""

from datetime import datetime
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Namespace, NamespaceInfo, NamespacePolicy, WriteMode
from graphstash_server.db.queries.shared import insert_into
from graphstash_server.db.tables import namespaces

__all__ = ["delete_policy", "find_policy", "list_policies", "put_policy"]


async def list_policies(connection: AsyncConnection) -> list[NamespaceInfo]:
    """Every namespace that has a policy of its own, by name."""
    statement = select(namespaces).order_by(namespaces.c.namespace)
    return [_info(found) for found in await connection.execute(statement)]


async def find_policy(connection: AsyncConnection, namespace: Namespace) -> NamespaceInfo | None:
    """The policy of one namespace; None when it has none of its own."""
    statement = select(namespaces).where(namespaces.c.namespace == namespace)
    found = (await connection.execute(statement)).first()
    return None if found is None else _info(found)


async def put_policy(
    connection: AsyncConnection, namespace: Namespace, policy: NamespacePolicy, *, now: datetime
) -> None:
    """Sets the policy of a namespace, in place of the one that it had."""
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
    """Removes the policy of a namespace; False when it had none."""
    statement = delete(namespaces).where(namespaces.c.namespace == namespace)
    return (await connection.execute(statement)).rowcount == 1


def _info(found: Any) -> NamespaceInfo:
    """A mode that only a later release knows is read as read-only."""
    known = found.mode in set(WriteMode)
    policy = NamespacePolicy.model_construct(
        mode=WriteMode(found.mode) if known else WriteMode.READ_ONLY,
        trusted=found.trusted,
        anonymous_read=found.anonymous_read,
        limit_bytes=found.limit_bytes,
        max_artifact_bytes=found.max_artifact_bytes,
        requests_per_second=found.requests_per_second,
    )
    return NamespaceInfo.model_construct(
        namespace=Namespace(found.namespace), policy=policy, updated_at=found.updated_at
    )
