"""Statements on `leases`.

Fencing numbers: the first grant of a key gets the time in milliseconds, every further one at least
one more than the grant before. So the number grows with every grant of the key for as long as the
row is there, and after the row was dropped (a day after the lease ended) for as long as the clocks
of the servers agree to a day.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    CursorResult,
    and_,
    bindparam,
    case,
    delete,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_server.db.queries.upsert import insert_into
from graphstash_server.db.tables import leases
from graphstash_server.keys import StoredKey

__all__ = [
    "LeaseRow",
    "acquire_lease",
    "count_held_leases",
    "drop_ended_leases",
    "end_leases",
    "find_lease",
    "release_lease",
    "renew_lease",
]


class LeaseRow(NamedTuple):
    """The last grant of a key."""

    token: str
    fencing: int
    holder: str
    expires_at: datetime
    released_at: datetime | None

    def is_held(self, now: datetime) -> bool:
        """Whether somebody has the right to compile."""
        return self.released_at is None and self.expires_at > now


async def acquire_lease(
    connection: AsyncConnection,
    key: StoredKey,
    *,
    token: str,
    holder: str,
    now: datetime,
    expires_at: datetime,
) -> int | None:
    """Takes the lease if nobody holds it, in one statement.

    Returns:
        The fencing number; None when somebody else holds the lease.
    """
    statement = insert_into(connection, leases).values(
        **_named(key),
        token=token,
        holder=holder,
        fencing=int(now.timestamp() * 1000),
        expires_at=expires_at,
        released_at=None,
    )
    new = statement.excluded
    statement = statement.on_conflict_do_update(
        index_elements=list(leases.primary_key),
        set_={
            "token": new.token,
            "holder": new.holder,
            "expires_at": new.expires_at,
            "released_at": None,
            "fencing": case(
                (new.fencing > leases.c.fencing, new.fencing), else_=leases.c.fencing + 1
            ),
        },
        where=or_(leases.c.expires_at <= now, leases.c.released_at.is_not(None)),
    )
    return _fencing(await connection.execute(statement.returning(leases.c.fencing)))


async def find_lease(connection: AsyncConnection, key: StoredKey) -> LeaseRow | None:
    """The last grant of a key; None when there was none, or long ago."""
    statement = select(
        leases.c.token,
        leases.c.fencing,
        leases.c.holder,
        leases.c.expires_at,
        leases.c.released_at,
    ).where(_is(key))
    found = (await connection.execute(statement)).first()
    return LeaseRow(*found) if found is not None else None


async def renew_lease(
    connection: AsyncConnection,
    key: StoredKey,
    *,
    token: str,
    holder: str,
    now: datetime,
    expires_at: datetime,
) -> int | None:
    """Moves the end of a held lease; returns its fencing number, or None when it is lost."""
    statement = (
        update(leases)
        .where(_is(key), _is_held_with(token, now))
        .values(expires_at=expires_at, holder=holder)
        .returning(leases.c.fencing)
    )
    return _fencing(await connection.execute(statement))


async def release_lease(
    connection: AsyncConnection, key: StoredKey, *, token: str, now: datetime
) -> bool:
    """Ends a held lease; False when the token does not hold it."""
    statement = update(leases).where(_is(key), _is_held_with(token, now)).values(released_at=now)
    return (await connection.execute(statement)).rowcount == 1


async def end_leases(
    connection: AsyncConnection, keys: Sequence[StoredKey], *, now: datetime
) -> None:
    """Ends whatever leases there are on keys: their artifacts were published."""
    statement = (
        update(leases)
        .where(
            leases.c.namespace == bindparam("key_namespace"),
            leases.c.fingerprint == bindparam("key_fingerprint"),
            leases.c.kind == bindparam("key_kind"),
            leases.c.device_type == bindparam("key_device_type"),
            leases.c.released_at.is_(None),
        )
        .values(released_at=now)
    )
    parameters = [{f"key_{name}": value for name, value in _named(key).items()} for key in keys]
    await connection.execute(statement, parameters)


async def count_held_leases(connection: AsyncConnection, *, now: datetime) -> int:
    """How many leases are held now."""
    statement = (
        select(func.count())
        .select_from(leases)
        .where(leases.c.released_at.is_(None), leases.c.expires_at > now)
    )
    return int(await connection.scalar(statement) or 0)


async def drop_ended_leases(connection: AsyncConnection, *, before: datetime) -> int:
    """Forgets grants that ended before a time; says how many."""
    return (await connection.execute(delete(leases).where(leases.c.expires_at < before))).rowcount


def _named(key: StoredKey) -> dict[str, Any]:
    return {
        "namespace": key.namespace,
        "fingerprint": key.fingerprint,
        "kind": key.kind.value,
        "device_type": key.device_type,
    }


def _is(key: StoredKey) -> ColumnElement[bool]:
    return and_(*(leases.c[name] == value for name, value in _named(key).items()))


def _fencing(result: CursorResult[Any]) -> int | None:
    row = result.first()
    return None if row is None else int(row.fencing)


def _is_held_with(token: str, now: datetime) -> ColumnElement[bool]:
    return and_(leases.c.token == token, leases.c.released_at.is_(None), leases.c.expires_at > now)
