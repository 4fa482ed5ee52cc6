"""Coordination of servers that share a database: locks, and periodic chores.

A lock lasts until the end of the transaction. On SQLite these functions take no lock, because only
one write transaction runs at a time.
"""

import hashlib
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, TypeGuard

from sqlalchemy import ARRAY, BigInteger, bindparam, func, or_, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Digest
from graphstash_server.db.prepared import Transaction
from graphstash_server.db.queries.shared import insert_into
from graphstash_server.db.tables import chores

__all__ = [
    "claim_chore",
    "end_pause",
    "find_waiting",
    "lock_blobs",
    "lock_name",
    "pause",
    "share_blobs",
]

_LOCK_ONE = text("SELECT pg_advisory_xact_lock(:number)").bindparams(
    bindparam("number", type_=BigInteger)
)
_NUMBERS = func.unnest(bindparam("numbers", type_=ARRAY(BigInteger))).column_valued("number")
_EXCLUSIVE = select(func.pg_advisory_xact_lock(_NUMBERS))
_SHARED = select(func.pg_advisory_xact_lock_shared(_NUMBERS))


async def lock_blobs(connection: AsyncConnection, digests: Sequence[Digest]) -> None:
    """Lock blobs before their deletion. Waits for the transactions that have shared locks."""
    if _is_postgresql(connection):
        await connection.execute(_EXCLUSIVE, {"numbers": _numbers(digests)})


async def share_blobs(connection: Transaction, digests: Sequence[Digest]) -> None:
    """Take shared locks on blobs, so that no other transaction deletes them."""
    if _is_postgresql(connection):
        await connection.execute(_SHARED, {"numbers": _numbers(digests)})


async def lock_name(connection: Transaction, name: str) -> None:
    """Wait until no other transaction holds the name, and take it."""
    if _is_postgresql(connection):
        await connection.execute(
            _LOCK_ONE, {"number": _number(hashlib.sha256(name.encode()).hexdigest())}
        )


_PAUSE = text("SELECT set_config('idle_in_transaction_session_timeout', :milliseconds, true)")
_END_PAUSE = text("SET LOCAL idle_in_transaction_session_timeout TO DEFAULT")


async def pause(connection: Transaction, *, seconds: float) -> None:
    """Let a transaction idle for some seconds, for example while the server asks the blob store.

    By default, the database ends a transaction that idles for three seconds: its server may be
    frozen while other transactions wait for its locks.
    """
    if _is_postgresql(connection):
        await connection.execute(_PAUSE, {"milliseconds": str(int(seconds * 1000))})


async def end_pause(connection: Transaction) -> None:
    """Restore the default idle limit after `pause`."""
    if _is_postgresql(connection):
        await connection.execute(_END_PAUSE)


class Waiting(NamedTuple):
    """Transactions of any server that wait for a lock.

    Attributes:
        transactions: number of waiting transactions.
        seconds: longest wait.
        idle_seconds: longest idle time of a transaction that others wait for; 0 if none is idle.
    """

    transactions: int
    seconds: float
    idle_seconds: float


_WAITING = text("""
    SELECT count(DISTINCT waiting.pid),
           coalesce(max(extract(epoch FROM clock_timestamp() - waiting.query_start)), 0),
           coalesce(max(extract(epoch FROM clock_timestamp() - holder.state_change))
                    FILTER (WHERE holder.state LIKE 'idle in transaction%'), 0)
    FROM pg_stat_activity AS waiting
    CROSS JOIN LATERAL unnest(pg_blocking_pids(waiting.pid)) AS blocking (pid)
    LEFT JOIN pg_stat_activity AS holder ON holder.pid = blocking.pid
    WHERE waiting.datname = current_database() AND waiting.wait_event_type = 'Lock'
""")


async def find_waiting(connection: AsyncConnection) -> Waiting | None:
    """Return the current waits for locks, or None if no transaction waits."""
    if not _is_postgresql(connection):
        return None
    count, *seconds = (await connection.execute(_WAITING)).one()
    return Waiting(count, *map(float, seconds)) if count else None


def _is_postgresql(connection: Transaction) -> TypeGuard[AsyncConnection]:
    return connection.dialect.name == "postgresql"


def _numbers(digests: Sequence[Digest]) -> list[int]:
    """Return lock numbers, sorted so that two transactions cannot deadlock."""
    return sorted({_number(digest.sha256) for digest in digests})


def _number(sha256: str) -> int:
    """Return a lock number. After a collision, two names share a lock, which costs only waiting."""
    return int.from_bytes(bytes.fromhex(sha256[:16]), "big", signed=True)


async def claim_chore(
    connection: AsyncConnection,
    name: str,
    *,
    now: datetime,
    every: timedelta,
    held_until: datetime | None = None,
) -> bool:
    """Return whether a chore is due. If so, the caller must do it now, and no other server does
    until `now + every`.

    If the caller dies during the chore, another server does it when the chore is due again. If the
    chore fails, the caller passes the end of its claim as `held_until` to claim it again. A chore
    whose next time is more than two intervals ahead was planned by a wrong clock, and is due.
    """
    statement = insert_into(connection, chores).values(name=name, next_at=now + every)
    next_at = chores.c.next_at
    statement = statement.on_conflict_do_update(
        index_elements=[chores.c.name],
        set_={"next_at": statement.excluded.next_at},
        where=or_(next_at <= now, next_at > now + 2 * every, next_at == held_until),
    )
    return (await connection.execute(statement)).rowcount == 1
