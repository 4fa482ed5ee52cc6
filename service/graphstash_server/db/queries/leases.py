"""Statements on `leases`.

Fencing numbers: the first grant of a key gets the time in milliseconds. A later grant gets the time
or the previous number plus one, whichever is larger. The row is deleted a day after the lease has
expired, or earlier if its caller or namespace has too many rows (`has_room_for_lease`). Then the
number still grows if the servers' clocks differ by less than the time since the previous grant.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

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
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema.protocol import MAX_LEASE_SECONDS
from graphstash_server.db.prepared import Prepared, Source, Transaction
from graphstash_server.db.queries.shared import (
    KNOWN_KINDS,
    insert_into,
    is_key,
    key_parameters,
    key_values,
    stored_key,
    unindexed,
    where_key,
)
from graphstash_server.db.tables import leases
from graphstash_server.keys import StoredKey

__all__ = [
    "LeaseRow",
    "acquire_lease",
    "count_held_leases",
    "drop_ended_leases",
    "end_leases",
    "find_lease",
    "has_room_for_lease",
    "list_held_leases",
    "release_lease",
    "renew_lease",
    "shorten_lease",
]


class LeaseRow(NamedTuple):
    """The last grant of a key."""

    token: str
    fencing: int
    holder: str
    expires_at: datetime
    released_at: datetime | None
    ttl_seconds: float | None

    def is_held(self, now: datetime) -> bool:
        """Return whether a process holds the right to compile."""
        return self.released_at is None and self.expires_at > now

    def latest_end(self, now: datetime) -> datetime:
        """Return the latest possible end. If `expires_at` is later, the clock was set back."""
        return now + timedelta(seconds=self.ttl_seconds or MAX_LEASE_SECONDS)


async def acquire_lease(
    connection: AsyncConnection,
    key: StoredKey,
    *,
    token: str,
    holder: str,
    caller: str,
    now: datetime,
    ttl_seconds: float,
) -> int | None:
    """Take the lease if it is free. Return the fencing number, or None if the lease is held."""
    statement = insert_into(connection, leases).values(
        **key_values(key),
        token=token,
        holder=holder,
        caller=caller,
        fencing=int(now.timestamp() * 1000),
        expires_at=now + timedelta(seconds=ttl_seconds),
        released_at=None,
        ttl_seconds=ttl_seconds,
    )
    new = statement.excluded
    statement = statement.on_conflict_do_update(
        index_elements=list(leases.primary_key),
        set_={
            "token": new.token,
            "holder": new.holder,
            "caller": new.caller,
            "expires_at": new.expires_at,
            "released_at": None,
            "ttl_seconds": new.ttl_seconds,
            "fencing": case(
                (new.fencing > leases.c.fencing, new.fencing), else_=leases.c.fencing + 1
            ),
        },
        where=or_(leases.c.expires_at <= now, leases.c.released_at.is_not(None)),
    )
    return _fencing(await connection.execute(statement.returning(leases.c.fencing)))


async def find_lease(source: Source, key: StoredKey) -> LeaseRow | None:
    """Return the last grant of a key, or None if there was none or it was dropped."""
    found = await _FIND.fetch_one(source, key_parameters(key))
    return LeaseRow(*found) if found is not None else None


_FIND = Prepared(
    lambda _: select(*(leases.c[name] for name in LeaseRow._fields)).where(where_key(leases)),
    finds_one=True,
)


async def renew_lease(
    connection: AsyncConnection,
    key: StoredKey,
    *,
    token: str,
    holder: str,
    now: datetime,
    ttl_seconds: float,
) -> int | None:
    """Extend a held lease. Return its fencing number, or None if the lease is lost."""
    statement = (
        update(leases)
        .where(is_key(leases, key), _is_held_with(token, now))
        .values(
            expires_at=now + timedelta(seconds=ttl_seconds),
            holder=holder,
            ttl_seconds=ttl_seconds,
        )
        .returning(leases.c.fencing)
    )
    return _fencing(await connection.execute(statement))


async def shorten_lease(
    connection: AsyncConnection, key: StoredKey, lease: LeaseRow, *, expires_at: datetime
) -> None:
    """Replace the end of a lease, unless it was granted again or renewed meanwhile."""
    is_same = and_(leases.c.token == lease.token, leases.c.expires_at == lease.expires_at)
    await connection.execute(
        update(leases).where(is_key(leases, key), is_same).values(expires_at=expires_at)
    )


async def release_lease(
    connection: AsyncConnection, key: StoredKey, *, token: str, now: datetime
) -> bool:
    """End a held lease. Return False if the token does not hold it."""
    statement = (
        update(leases).where(is_key(leases, key), _is_held_with(token, now)).values(released_at=now)
    )
    return (await connection.execute(statement)).rowcount == 1


async def end_leases(connection: Transaction, keys: Sequence[StoredKey], *, now: datetime) -> None:
    """End the leases on keys whose artifacts were published."""
    given = [{**key_parameters(key), "now": now} for key in keys]
    await _END.execute_all(connection, given)


_END = Prepared(
    lambda _: (
        update(leases)
        .where(where_key(leases), leases.c.released_at.is_(None))
        .values(released_at=bindparam("now", type_=leases.c.released_at.type))
    )
)


async def count_held_leases(
    connection: AsyncConnection, *, now: datetime, caller: str | None = None
) -> int:
    """Return the number of held leases, of one caller or of all."""
    statement = (
        select(func.count())
        .select_from(leases)
        .where(leases.c.released_at.is_(None), leases.c.expires_at > now)
    )
    if caller is not None:
        statement = statement.where(leases.c.caller == caller)
    return int(await connection.scalar(statement) or 0)


async def list_held_leases(
    connection: AsyncConnection, namespaces: Sequence[str], *, now: datetime, limit: int
) -> list[tuple[StoredKey, str, datetime]]:
    """Return key, holder and end of the held leases of some namespaces, latest end first."""
    statement = (
        select(*leases.primary_key, leases.c.holder, leases.c.expires_at)
        .where(
            leases.c.released_at.is_(None),
            leases.c.expires_at > now,
            unindexed(leases.c.namespace).in_(namespaces),
            leases.c.kind.in_(KNOWN_KINDS),
        )
        .order_by(leases.c.expires_at.desc())
        .limit(limit)
    )
    return [
        (stored_key(found), found.holder, found.expires_at)
        for found in await connection.execute(statement)
    ]


async def has_room_for_lease(
    connection: AsyncConnection,
    of: Literal["caller", "namespace"],
    name: str,
    *,
    now: datetime,
    most: int,
) -> bool:
    """Return whether a caller or namespace may have one more row. If it has `most`, first delete up
    to `most // 2` rows of ended leases, oldest first.
    """
    is_counted = leases.c[of] == name
    count = await connection.scalar(select(func.count()).select_from(leases).where(is_counted))
    if (count or 0) < most:
        return True
    has_ended = or_(leases.c.released_at.is_not(None), leases.c.expires_at <= now)
    key = tuple(leases.primary_key)
    ended = select(*key).where(is_counted, has_ended).order_by(leases.c.expires_at).limit(most // 2)
    statement = delete(leases).where(has_ended, tuple_(*key).in_(ended))
    return (await connection.execute(statement)).rowcount > 0


async def drop_ended_leases(connection: AsyncConnection, *, before: datetime) -> None:
    """Delete the rows of leases that expired before a time."""
    await connection.execute(delete(leases).where(leases.c.expires_at < before))


def _fencing(result: CursorResult[Any]) -> int | None:
    row = result.first()
    return None if row is None else int(row.fencing)


def _is_held_with(token: str, now: datetime) -> ColumnElement[bool]:
    return and_(leases.c.token == token, leases.c.released_at.is_(None), leases.c.expires_at > now)
