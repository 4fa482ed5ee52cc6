"""Statements on `withdrawals` and `withdrawal_heads`."""

import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple

from sqlalchemy import Executable, bindparam, delete, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import ArtifactKey, Digest, Namespace
from graphstash_schema.names import LIST_START, ListPosition
from graphstash_schema.withdrawals import WithdrawalCause
from graphstash_server.db.prepared import Prepared, Transaction
from graphstash_server.db.queries.shared import (
    insert_in,
    key_values,
    new_values,
    prefixed,
)
from graphstash_server.db.tables import withdrawal_heads, withdrawals
from graphstash_server.keys import StoredKey

__all__ = [
    "GAP",
    "WithdrawalRow",
    "add_gap",
    "add_withdrawals",
    "is_listed_as_withheld",
    "list_ends",
    "list_heads",
    "list_withdrawals",
    "prune_withdrawals",
    "withdrawal_head",
]

_MARK_BYTES: Final = 8

GAP: Final = "gap"
"""Cause of a row that no list shows: the list does not continue across it."""


class WithdrawalRow(NamedTuple):
    """A withdrawal as stored. `kind` is text because a later release may have stored its own."""

    number: int
    mark: str
    fingerprint: str
    kind: str
    device_type: str
    sha256: str
    cause: str
    withdrawn_at: datetime

    @property
    def position(self) -> ListPosition:
        """Position in the list after this withdrawal."""
        return ListPosition(f"{self.number}-{self.mark}")


_COLUMNS = tuple(withdrawals.c[name] for name in WithdrawalRow._fields)


def _advance(dialect: str) -> Executable:
    statement = insert_in(dialect, withdrawal_heads).values(
        namespace=bindparam("of_namespace"),
        number=bindparam("count"),
        mark=bindparam("last_mark"),
    )
    return statement.on_conflict_do_update(
        index_elements=[withdrawal_heads.c.namespace],
        set_={
            "number": withdrawal_heads.c.number + bindparam("count"),
            "mark": statement.excluded.mark,
        },
    ).returning(withdrawal_heads.c.number)


_ADVANCE = Prepared(_advance)
_ADD = Prepared(
    lambda _: insert(withdrawals).values(
        new_values(withdrawals, (column.name for column in withdrawals.c))
    )
)


async def add_withdrawals(
    connection: Transaction,
    withdrawn: Sequence[tuple[StoredKey, Digest]],
    *,
    cause: WithdrawalCause,
    now: datetime,
) -> None:
    """Append withdrawals of artifacts of one namespace to its list.

    Call it last in the transaction. It locks the head of the list until the commit, so that numbers
    become visible in ascending order. A lock taken after this one could deadlock.
    """
    await _append(connection, withdrawn, cause=cause.value, now=now)


async def add_gap(connection: Transaction, namespace: Namespace, *, now: datetime) -> None:
    """Let a namespace's list continue at no earlier position, after withdrawals that this server
    cannot name. Call it as `add_withdrawals`.
    """
    nothing = StoredKey.of(namespace, ArtifactKey.parse("plugin", "cpu", "0" * 64))
    await _append(connection, [(nothing, Digest("0" * 64, 0))], cause=GAP, now=now)


async def _append(
    connection: Transaction,
    withdrawn: Sequence[tuple[StoredKey, Digest]],
    *,
    cause: str,
    now: datetime,
) -> None:
    if not withdrawn:
        return
    marks = [secrets.token_hex(_MARK_BYTES) for _ in withdrawn]
    ((last,),) = await _ADVANCE.fetch(
        connection,
        {
            "of_namespace": withdrawn[0][0].namespace,
            "count": len(withdrawn),
            "last_mark": marks[-1],
        },
    )
    await _ADD.execute_all(
        connection,
        [
            prefixed(
                "new_",
                {
                    **key_values(key),
                    "number": number,
                    "mark": mark,
                    "sha256": digest.sha256,
                    "cause": cause,
                    "withdrawn_at": now,
                },
            )
            for number, mark, (key, digest) in zip(
                range(last - len(withdrawn) + 1, last + 1), marks, withdrawn, strict=True
            )
        ],
    )


async def is_listed_as_withheld(
    connection: AsyncConnection, key: StoredKey, digest: Digest
) -> bool:
    """Return whether an artifact was ever withheld. An administrator may have released it since."""
    statement = select(withdrawals.c.number).where(
        withdrawals.c.namespace == key.namespace,
        withdrawals.c.sha256 == digest.sha256,
        text("cause = 'withheld'"),  # a parameter would not match the condition of the index
        withdrawals.c.fingerprint == key.key.fingerprint,
        withdrawals.c.kind == key.key.kind,
        withdrawals.c.device_type == key.key.device_type,
    )
    return (await connection.execute(statement.limit(1))).first() is not None


async def withdrawal_head(connection: AsyncConnection, namespace: Namespace) -> ListPosition:
    """Return the position after the last withdrawal of a namespace."""
    statement = select(withdrawal_heads.c.number, withdrawal_heads.c.mark).where(
        withdrawal_heads.c.namespace == namespace
    )
    found = (await connection.execute(statement)).first()
    return LIST_START if found is None else ListPosition(f"{found.number}-{found.mark}")


async def list_withdrawals(
    connection: AsyncConnection, namespace: Namespace, *, start: int, end: int, limit: int
) -> Sequence[WithdrawalRow]:
    """Return at most `limit` withdrawals, from number `start` to `end` inclusive, in order."""
    statement = (
        select(*_COLUMNS)
        .where(
            withdrawals.c.namespace == namespace,
            withdrawals.c.number >= start,
            withdrawals.c.number <= end,
        )
        .order_by(withdrawals.c.number)
        .limit(limit)
    )
    return [WithdrawalRow(*found) for found in await connection.execute(statement)]


async def list_heads(connection: AsyncConnection) -> dict[Namespace, int]:
    """Return the number of the last withdrawal of each namespace, even if it was pruned."""
    statement = select(withdrawal_heads.c.namespace, withdrawal_heads.c.number)
    return {Namespace(found[0]): found[1] for found in await connection.execute(statement)}


async def list_ends(connection: AsyncConnection) -> dict[Namespace, ListPosition]:
    """Return the position after the last withdrawal of each namespace."""
    found = await connection.execute(select(withdrawal_heads))
    return {Namespace(row.namespace): ListPosition(f"{row.number}-{row.mark}") for row in found}


async def prune_withdrawals(
    connection: AsyncConnection, namespace: Namespace, *, before: int
) -> None:
    """Delete the withdrawals with a number below `before`."""
    await connection.execute(
        delete(withdrawals).where(
            withdrawals.c.namespace == namespace, withdrawals.c.number < before
        )
    )
