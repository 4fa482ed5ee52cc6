"""WithdrawalService: reads the lists of withdrawals, and drops their oldest entries.

The transaction that withdraws an artifact adds the entry (`queries.withdrawals.add_withdrawals`).
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from graphstash_schema import Namespace
from graphstash_schema.withdrawals import Withdrawal, WithdrawalList, WithdrawalQuery
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.withdrawals import (
    GAP,
    WithdrawalRow,
    list_heads,
    list_withdrawals,
    prune_withdrawals,
    withdrawal_head,
)
from graphstash_server.services.plausible_clock import PlausibleClock

__all__ = ["KEPT_FOR", "MAX_KEPT", "WithdrawalService"]

KEPT_FOR: Final = timedelta(days=90)

MAX_KEPT: Final = 100_000
"""Entries of one namespace that the hourly round keeps: about 30 MB."""

_PRUNED_AT_ONCE: Final = 1000


@dataclass(kw_only=True, eq=False)
class WithdrawalService:
    """Safe for concurrent calls and several servers."""

    database: Database
    clock: PlausibleClock

    async def read(self, namespace: Namespace, query: WithdrawalQuery) -> WithdrawalList:
        """Return the page after a position. If no entry has that position, or a gap follows,
        entries may be missing: the list is empty and not complete. Pruning removes the lowest
        numbers first.
        """
        after = query.after
        async with self.database.reading() as connection:
            newest = await withdrawal_head(connection, namespace)
            if after == newest:
                return WithdrawalList(
                    is_complete=True, withdrawals=(), position=newest, newest=newest
                )
            rows = await list_withdrawals(
                connection,
                namespace,
                start=max(1, after.number),
                end=newest.number,
                limit=query.limit + 1,
            )
        if after.number:
            is_complete = bool(rows) and rows[0].position == after
            rows = rows[1:]
        else:
            is_complete = bool(rows) and rows[0].number == 1
        if not is_complete or any(row.cause == GAP for row in rows):
            return WithdrawalList(is_complete=False, withdrawals=(), position=newest, newest=newest)
        page = rows[: query.limit]
        return WithdrawalList(
            is_complete=True,
            withdrawals=tuple(map(_entry, page)),
            position=page[-1].position if page else after,
            newest=newest,
        )

    async def prune(self) -> None:
        """Drop the entries of each namespace that are too old or too many, except the last of them:
        a host that has read up to that entry still finds all later entries.
        """
        async with self.database.reading() as connection:
            heads = await list_heads(connection)
        for namespace, last in heads.items():
            while await self._prune_page(namespace, last):
                pass

    async def _prune_page(self, namespace: Namespace, last: int) -> bool:
        """Drop up to `_PRUNED_AT_ONCE` entries. Return whether more may be due."""
        oldest = self.clock.ago(KEPT_FOR)
        async with self.database.writing() as connection:
            rows = await list_withdrawals(
                connection, namespace, start=1, end=last, limit=_PRUNED_AT_ONCE + 1
            )
            due = 0
            for row in rows:
                if row.withdrawn_at >= oldest and row.number > last - MAX_KEPT:
                    break
                due += 1
            if due > 1:
                await prune_withdrawals(connection, namespace, before=rows[due - 1].number)
        return due > _PRUNED_AT_ONCE


def _entry(row: WithdrawalRow) -> Withdrawal:
    return Withdrawal(
        number=row.number,
        key=f"{row.kind}/{row.device_type}/{row.fingerprint}",
        digest=f"sha256:{row.sha256}",
        cause=row.cause,
        withdrawn_at=row.withdrawn_at,
    )
