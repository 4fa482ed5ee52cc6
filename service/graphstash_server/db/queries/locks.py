"""What servers that share a database agree on: locks by name, and who does a periodic chore.

A lock is held to the end of the transaction. On SQLite every transaction has them all.
"""

import hashlib
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, TypeGuard

from sqlalchemy import ARRAY, BigInteger, bindparam, func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Digest
from graphstash_server.db.prepared import Connection
from graphstash_server.db.queries.shared import insert_into
from graphstash_server.db.tables import chores

__all__ = [
    "claim_chore",
    "end_pause",
    "find_waiting",
    "lock_blob",
    "lock_name",
    "pause",
    "share_blobs",
]

_ONE = text("SELECT pg_advisory_xact_lock(:number)").bindparams(
    bindparam("number", type_=BigInteger)
)
_NUMBERS = func.unnest(bindparam("numbers", type_=ARRAY(BigInteger))).column_valued("number")
_SHARED = select(func.pg_advisory_xact_lock_shared(_NUMBERS))


async def lock_blob(connection: AsyncConnection, digest: Digest) -> None:
    """Locks a blob exclusively: it may be deleted, so no other transaction may rely on it."""
    if _is_needed(connection):
        await connection.execute(_ONE, {"number": _number(digest.sha256)})


async def share_blobs(connection: Connection, digests: Sequence[Digest]) -> None:
    """Locks blobs, shared with other transactions, so that none is deleted."""
    if _is_needed(connection):
        # In one order for all, or two transactions could wait for each other.
        numbers = sorted({_number(digest.sha256) for digest in digests})
        await connection.execute(_SHARED, {"numbers": numbers})


async def lock_name(connection: Connection, name: str) -> None:
    """Locks a name: one transaction at a time has it."""
    if _is_needed(connection):
        await connection.execute(
            _ONE, {"number": _number(hashlib.sha256(name.encode()).hexdigest())}
        )


_PAUSE = text("SELECT set_config('idle_in_transaction_session_timeout', :milliseconds, true)")
_USUAL = text("SET LOCAL idle_in_transaction_session_timeout TO DEFAULT")


async def pause(connection: Connection, *, seconds: float) -> None:
    """Before something outside the database is asked in the middle of a transaction. A transaction
    that does nothing is ended after a few seconds: its server may be frozen, and others wait.
    """
    if _is_needed(connection):
        await connection.execute(_PAUSE, {"milliseconds": str(int(seconds * 1000))})


async def end_pause(connection: Connection) -> None:
    """After it."""
    if _is_needed(connection):
        await connection.execute(_USUAL)


class Waiting(NamedTuple):
    """Transactions of any server that wait for a lock.

    Attributes:
        transactions: how many.
        seconds: for how long the first of them has waited.
        idle_seconds: for how long the transaction before them has done nothing; 0 if it works.
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
    """What waits now; None when nothing does."""
    if not _is_needed(connection):
        return None
    count, *seconds = (await connection.execute(_WAITING)).one()
    return Waiting(count, *map(float, seconds)) if count else None


def _is_needed(connection: Connection) -> TypeGuard[AsyncConnection]:
    return connection.dialect.name == "postgresql"


def _number(sha256: str) -> int:
    """Two names with the same number wait for each other, which does no harm."""
    return int.from_bytes(bytes.fromhex(sha256[:16]), "big", signed=True)


async def claim_chore(
    connection: AsyncConnection, name: str, *, now: datetime, every: timedelta
) -> bool:
    """Whether a chore is due and this caller has to do it, in one statement.

    When a server dies during a chore, another one does it when it is due again.
    """
    statement = insert_into(connection, chores).values(name=name, next_at=now + every)
    statement = statement.on_conflict_do_update(
        index_elements=[chores.c.name],
        set_={"next_at": statement.excluded.next_at},
        where=chores.c.next_at <= now,
    )
    return (await connection.execute(statement)).rowcount == 1
