"""Locks by name, held to the end of the transaction. On SQLite every transaction has them all."""

import hashlib
from collections.abc import Sequence

from sqlalchemy import ARRAY, BigInteger, bindparam, func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Digest

__all__ = ["lock_blob", "lock_name", "share_blobs"]

_ONE = text("SELECT pg_advisory_xact_lock(:number)").bindparams(
    bindparam("number", type_=BigInteger)
)
_NUMBERS = func.unnest(bindparam("numbers", type_=ARRAY(BigInteger))).column_valued("number")
_SHARED = select(func.pg_advisory_xact_lock_shared(_NUMBERS))


async def lock_blob(connection: AsyncConnection, digest: Digest) -> None:
    """Keeps every other transaction from relying on a blob: it may be deleted."""
    if _is_needed(connection):
        await connection.execute(_ONE, {"number": _number(digest.sha256)})


async def share_blobs(connection: AsyncConnection, digests: Sequence[Digest]) -> None:
    """Keeps blobs from being deleted; others may do the same."""
    if _is_needed(connection):
        # In one order for all, or two transactions could wait for each other.
        numbers = sorted({_number(digest.sha256) for digest in digests})
        await connection.execute(_SHARED, {"numbers": numbers})


async def lock_name(connection: AsyncConnection, name: str) -> None:
    """Lets one transaction at a time do something."""
    if _is_needed(connection):
        await connection.execute(
            _ONE, {"number": _number(hashlib.sha256(name.encode()).hexdigest())}
        )


def _is_needed(connection: AsyncConnection) -> bool:
    return connection.dialect.name == "postgresql"


def _number(sha256: str) -> int:
    """Two names that meet in one number wait for each other, no more."""
    return int.from_bytes(bytes.fromhex(sha256[:16]), "big", signed=True)
